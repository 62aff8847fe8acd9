"""docs/cli.md and docs/schema/ say what the program says."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_stale(reference: ModuleType) -> None:
    """When this fails: python docs/reference.py."""
    for path, text in reference.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale; run python docs/reference.py"


def test_every_page_is_in_the_reference(reference: ModuleType) -> None:
    commands = re.findall(r"^│ ([a-z][a-z-]+) ", reference.help_page("--help"), re.MULTILINE)
    pages = [match[1] for match in reference.BLOCK.finditer((DOCS / "cli.md").read_text(encoding="utf-8"))]
    assert pages == ["--help", *(f"{command} --help" for command in commands)]


@pytest.mark.parametrize("name", ["generate", "stream", "logits", "inspect", "bench", "convert"])
def test_schemas_are_closed_and_describe_every_object(name: str) -> None:
    schema = json.loads((DOCS / "schema" / f"{name}.json").read_text(encoding="utf-8"))
    for part in (schema, *schema.get("$defs", {}).values()):
        assert part["additionalProperties"] is False
        assert part["description"]
