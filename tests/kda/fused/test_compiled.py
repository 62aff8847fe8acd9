"""The fused kernels compile for every target without a GPU, within its limits; docs/fused-kda.md says what they use.

What Triton's interpreter runs cannot be compiled, so all of this happens in processes without TRITON_INTERPRET.
"""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
DOCS = TESTS.parent / "docs"
PARTS = 4


def load_resources() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fused_resources", DOCS / "fused_resources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


resources = load_resources()


@pytest.fixture(scope="module")
def saved() -> tuple[str, dict[tuple[Any, ...], Any]]:
    """The fingerprint of docs/fused-resources.csv, and its lines by the form and target that they are about."""
    fingerprint, figures = resources.saved()
    return fingerprint, {line[:6]: line for line in figures}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", resources.TARGETS)
def test_forms_compile_within_the_limits(target: int, part: int, saved: tuple[str, dict[tuple[Any, ...], Any]]) -> None:
    fingerprint, known = saved
    compiled = resources.compile_part_elsewhere(target, part, PARTS)
    assert compiled
    for line in compiled:
        assert line.shared_bytes <= resources.SHARED_LIMIT[target], line
        assert line.registers <= 255, line
        if int(line.constant("KP")) == 128 and line.sizes_of_16 == "yes":
            assert line.spill_bytes == 0, line
        if f"triton {version('triton')}" in fingerprint:
            assert known[line[:6]] == line, "docs/fused-resources.csv is stale; run python docs/fused_resources.py"


def test_the_file_is_of_these_sources_and_has_every_form_for_every_target(
    saved: tuple[str, dict[tuple[Any, ...], Any]],
) -> None:
    """When this fails: python docs/fused_resources.py."""
    fingerprint, known = saved
    assert fingerprint == resources.fingerprint() or f"triton {version('triton')}" not in fingerprint
    forms = {(*resources.described(form), form.options["num_warps"]) for form in resources.forms()}
    assert set(known) == {(*form, target) for form in forms for target in resources.TARGETS}
    assert len(known) == 3 * len(resources.forms())
    for line in known.values():
        assert line.shared_bytes <= resources.SHARED_LIMIT[line.target], line
        assert line.spill_bytes == 0 or int(line.constant("KP")) != 128 or line.sizes_of_16 == "no", line


def test_the_page_has_the_table_of_the_file() -> None:
    """When this fails: python docs/fused_resources.py."""
    _, figures = resources.saved()
    assert resources.PAGE.read_text(encoding="utf-8") == resources.page_with(figures)
    assert resources.table(figures) in resources.PAGE.read_text(encoding="utf-8")


def test_the_listed_forms_are_those_that_launches_ask_for() -> None:
    """Every head size, dtype, gate form and precision, through the part of Triton's JIT that chooses the form."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    program = TESTS / "kda" / "fused" / "jit_launches.py"
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.pop("launches") > 5000
    assert result == {"listed_twice": 0, "only_listed": [], "only_launched": []}
