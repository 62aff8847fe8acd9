"""docs/fused-kda.md leads to the code: each line of its tables stands in the function that it names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "kimik3_cli" / "engine" / "kda" / "fused"
FILES = ("device_functions.py", "prefill_kernels.py", "decode_kernel.py")
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \| (`[^|]+`) \|$", re.MULTILINE)


def functions() -> dict[str, str]:
    """Name -> source of every function on the device."""
    found = {}
    for name in FILES:
        source = (KERNELS / name).read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = ast.get_source_segment(source, node) or ""
    return found


SOURCES = functions()
ROWS = [
    (function, line)
    for function, lines in ROW.findall((ROOT / "docs" / "fused-kda.md").read_text(encoding="utf-8"))
    for line in re.findall(r"`([^`]+)`", lines)
]


@pytest.mark.parametrize(("function", "line"), ROWS)
def test_the_code_has_the_line(function: str, line: str) -> None:
    assert line in SOURCES[function]


def test_the_page_leads_to_every_function() -> None:
    assert {function for function, _ in ROWS} == {name for name in SOURCES if name not in ("_log1p", "_expm1")}
