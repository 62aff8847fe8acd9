"""Compiles every form of the fused kernels ahead of time, without a GPU, and writes what each of them uses.

    python docs/fused_resources.py

writes docs/fused-resources.csv (one line a form and target) and the table of it in docs/fused-kda.md. Run it when a
kernel or Triton has changed; it takes a few minutes. With a target and a part, such as `90 0/4`, it compiles that part
of the forms and prints its lines as JSON instead; `aligned` after them leaves out head sizes that 16 does not divide.
TRITON_INTERPRET must not be set: kernels are compiled only without.
"""

import ast
import contextlib
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
FIGURES, PAGE = DOCS / "fused-resources.csv", DOCS / "fused-kda.md"
KERNELS = DOCS.parent / "kimik3_cli" / "engine" / "kda" / "fused"
TARGETS = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one block may use, bytes (CUDA C++ Programming Guide, table of compute capabilities)."""
TABLE = re.compile(r"(?<=<!-- resources -->\n).*?(?=^<!-- end of resources -->$)", re.MULTILINE | re.DOTALL)
PARTS = 4


class Figures(NamedTuple):
    """One compiled form: which it is, and what a block of it uses."""

    kernel: str
    inputs: str  # fp32 or bf16
    sizes_of_16: str  # whether the head size is a multiple of 16: yes or no
    constants: str
    warps: int
    target: int
    registers: int  # a lane
    spill_bytes: int  # a lane, stored to local memory
    shared_bytes: int  # a block

    def constant(self, name: str) -> str:
        """The value of a compile-time constant; empty when the kernel has none of that name."""
        return dict(pair.split("=") for pair in self.constants.split()).get(name, "")


def forms() -> list[Any]:
    """Every specialisation that the launchers can choose."""
    from kimik3_cli.engine.kda.fused.launch import specialisations

    return list(specialisations())


def compiled(form: Any, target: int) -> Figures:
    """Compile one form through Triton, down to machine code, and read what ptxas says of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    triton.knobs.nvidia.dump_ptxas_log = True
    constants, options = dict(form.constants), dict(form.options)
    source = ASTSource(form.kernel, form.signature, constants, form.attributes)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        kernel = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return Figures(
        *described(form),
        options["num_warps"],
        target,
        int(re.findall(r"Used (\d+) registers", log.getvalue())[0]),
        int(re.findall(r"(\d+) bytes spill stores", log.getvalue())[0]),
        kernel.metadata.shared,
    )


def described(form: Any) -> tuple[str, str, str, str]:
    """Which form it is: the first four columns."""
    size = form.kernel.arg_names.index("V" if form.kernel.__name__ == "chunk_walk" else "K")
    return (
        form.kernel.__name__,
        "bf16" if "*bf16" in form.signature.values() else "fp32",
        "yes" if (size,) in form.attributes else "no",
        " ".join(f"{name}={value}" for name, value in form.constants.items()),
    )


def compile_part(target: int, part: int, parts: int) -> list[Figures]:
    """Compile every `parts`-th form in this process."""
    return [compiled(form, target) for form in list(forms())[part::parts]]


def compile_part_elsewhere(target: int, part: int, parts: int) -> list[Figures]:
    """Do that in a new process, in which Triton compiles, with a cache that is gone afterwards."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, str(target), f"{part}/{parts}"]
        done = subprocess.run(
            command, env={**environment, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Figures(*line) for line in json.loads(done.stdout)]


def fingerprint() -> str:
    """A hash of what the compiled forms depend on: the code of kernels and launch choices, and Triton."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    for name in ("device_functions", "prefill_kernels", "decode_kernel", "launch"):
        digest.update(code(ast.parse((KERNELS / f"{name}.py").read_text(encoding="utf-8"))).encode())
    return f"triton {version('triton')}, sources {digest.hexdigest()[:16]}"


def code(tree: ast.AST) -> str:
    """The source without comments, docstrings and layout."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.unparse(tree)


def save(figures: list[Figures]) -> None:
    with FIGURES.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {fingerprint()}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Figures._fields, *sorted(figures)])


def saved() -> tuple[str, list[Figures]]:
    """The fingerprint and the lines of the file."""
    first, _, *lines = FIGURES.read_text(encoding="utf-8").splitlines()
    rows = [(*row[:4], *map(int, row[4:])) for row in csv.reader(lines)]
    return first.removeprefix("# "), [Figures(*row) for row in rows]


def table(figures: list[Figures]) -> str:
    """Markdown: the most that any form of a kernel uses, by size and precision, on each target."""
    groups: dict[tuple[str, int, str], list[Figures]] = {}
    for line in figures:
        groups.setdefault((line.kernel, int(line.constant("KP")), line.constant("PRECISION")), []).append(line)
    heading = ["kernel", "K up to", "precision", "warps", *(f"sm_{target}" for target in TARGETS)]
    rows = [heading, ["---"] * len(heading)]
    for (kernel, size, precision), lines in sorted(groups.items()):
        cells = [worst([line for line in lines if line.target == target]) for target in TARGETS]
        rows.append([f"`{kernel}`", str(size), precision or "-", str(lines[0].warps), *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def worst(lines: list[Figures]) -> str:
    """One cell: registers, spilled bytes, shared memory; the largest of each."""
    registers, spills, shared = (max(column) for column in zip(*(line[-3:] for line in lines), strict=True))
    return f"{registers}, {spills}, {shared / 1024:.1f}"


def page_with(figures: list[Figures]) -> str:
    """The text of fused-kda.md as it should be."""
    return TABLE.sub(lambda _: table(figures), PAGE.read_text(encoding="utf-8"))


def main(words: list[str]) -> None:
    if words:
        part, _, parts = words[1].partition("/")
        print(json.dumps(compile_part(int(words[0]), int(part), int(parts))))
        return
    work = [(target, part, PARTS) for target in TARGETS for part in range(PARTS)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = threads.map(lambda arguments: compile_part_elsewhere(*arguments), work)
        save([line for lines in results for line in lines])
    PAGE.write_text(page_with(saved()[1]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
