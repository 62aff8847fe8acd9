"""Every command and every Python example of the README and of docs/ runs, in a folder as a newcomer would have it.

A `sh` block is run line by line under `bash -e`; a `console` block holds `$ command` lines with what they print. In the
folder lie last.pt (a small checkpoint), broken.pt (one that lost tensors) and tokenizer/ (64 tokens, fitting both).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import mk
from tokenizers_for_tests import save_byte_tokenizer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What sets up the machine or runs this very suite is not run inside it.
NOT_RUN_HERE = ("git clone", "cd kimik3", "make test", "make lint", "make bench", "pip install")


def blocks(page: Path, languages: tuple[str, ...]) -> list[str]:
    return [text for language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def commands(page: Path) -> list[str]:
    """All shell commands of a page, in order; a console block's outputs are left out."""
    lines = []
    for block in blocks(page, ("sh",)):
        lines += block.splitlines()
    for block in blocks(page, ("console",)):
        lines += [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    return [line for line in lines if line.strip() and not line.startswith(("#", *NOT_RUN_HERE))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    mk(tmp_path / "last.pt")
    mk(tmp_path / "broken.pt", edit=lambda made: made["model"].pop("norm.weight"))
    save_byte_tokenizer(tmp_path / "tokenizer", 64)
    return tmp_path


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("jq") is None:
        lines = "--json-lines " if "--stream" in command else ""
        command = re.sub(r"\| jq\b[^|>]*", f"| python -m json.tool {lines}", command)
    command = command.replace("make demo", f"make -C {ROOT} -o .venv/.ready VENV={sys.prefix} demo")
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_runs(page: Path, folder: Path) -> None:
    for command in commands(page):
        expected = 3 if "broken.pt" in command else 0
        done = run(command, folder)
        assert done.returncode == expected, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_example_of_a_page_runs(page: Path, folder: Path) -> None:
    for example in blocks(page, ("python",)):
        done = subprocess.run([sys.executable, "-"], input=example, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{example}\n{done.stderr}"


def test_the_pages_hold_commands_at_all() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 20


def test_every_relative_link_of_a_page_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
