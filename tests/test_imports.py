"""Imports inside the package point one way; anything else, and any cycle, fails here."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kimik3_cli

ROOT = Path(kimik3_cli.__file__).parent
# Room -> the rooms that it may import beside itself. Every room may import errors and the version.
MAY_IMPORT = {
    "__main__": {"cli"},
    "cli": {"render", "requests", "results", "engine"},
    "render": {"results"},
    "requests": set(),
    "results": set(),
    "errors": set(),
    "engine.config": set(),
    "engine.native": set(),
    "engine.kda": {"engine.native"},
    "engine.allocator": set(),
    "engine.limits": {"engine.config"},
    "engine.memory": {"engine.config", "results"},
    "engine.cache": {"engine.config"},
    "engine.device": {"engine.kda", "engine.native"},
    "engine.sampling": {"requests"},
    "engine.tokenizer": {"requests"},
    "engine.model": {"engine.config", "engine.cache", "engine.kda", "engine.native"},
    "engine.generation": {
        "requests",
        "engine.limits",
        "engine.cache",
        "engine.device",
        "engine.sampling",
        "engine.model",
    },
    "engine.replacing": set(),
    "engine.checkpoint": {
        "results",
        "engine.config",
        "engine.device",
        "engine.limits",
        "engine.memory",
        "engine.model",
        "engine.replacing",
    },
    "engine.service": {"requests", "results", "engine"},
    "engine.convert": {"requests", "results", "engine.config", "engine.checkpoint", "engine.replacing"},
    "engine.benchmark": {"requests", "results", "engine"},
}
# Third-party package -> the only modules that may import it.
ONLY_IN = {
    "typer": ("cli",),
    "rich": ("cli", "render"),
    "transformers": ("engine.tokenizer",),
    "triton": ("engine.kda.fused",),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports anywhere in it, leaving out what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imported(node)


def own_imports(module: str) -> set[str]:
    """The package's modules that `module` imports."""
    names = (name.removeprefix("kimik3_cli.") for name in imported(MODULES[module]) if name.startswith("kimik3_cli."))
    return {name if name in MODULES else name.rpartition(".")[0] for name in names}


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


@pytest.mark.parametrize("module", [name for name in MODULES if name not in ("", "engine")])
def test_arrows(module: str) -> None:
    (room,) = (room for room in MAY_IMPORT if within(module, room))
    allowed = {room, "errors"} | MAY_IMPORT[room]
    wrong = [name for name in own_imports(module) if name and not any(within(name, each) for each in allowed)]
    assert not wrong


def test_packages_only_name_what_they_hold() -> None:
    """The package and its engine resolve their public names on demand, so they import none of their own modules."""
    assert not own_imports("") | own_imports("engine")


def test_no_cycles() -> None:
    list(TopologicalSorter({module: own_imports(module) - {""} for module in MODULES}).static_order())


@pytest.mark.parametrize(("package", "rooms"), ONLY_IN.items())
def test_third_party_packages_stay_in_their_rooms(package: str, rooms: tuple[str, ...]) -> None:
    users = [module for module, tree in MODULES.items() if any(within(name, package) for name in imported(tree))]
    assert [user for user in users if not any(within(user, room) for room in rooms)] == []
