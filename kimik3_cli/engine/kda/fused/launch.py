"""Launch choices of the fused kernels: block sizes and warps by head size, and the list of all that can be compiled.

A kernel is compiled once for each `Specialisation`: the dtype of its inputs, compile-time constants, whether the head
size is a multiple of 16, warps. All of that is chosen here and nowhere else.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

SMALLEST_HEAD, LARGEST_HEAD = 16, 256
CHUNK = 16
"""Tokens a chunk: the smallest matrix side of the tensor cores, and few enough to solve row by row in registers."""
Precision = Literal["ieee", "tf32", "tf32x3"]
INPUT_PRECISION: Precision = "tf32x3"
"""How products of float32 matrices use the tensor cores unless a caller says otherwise.

tf32x3 adds three products of the operands' upper and lower halves and is as exact as float32; tf32 keeps 10 bits of
each operand; ieee computes in float32 without tensor cores.
"""
ALIGNMENT = 16
"""Every tensor starts at a multiple of this many bytes, so that the compiler may load in vectors."""


class Launch(NamedTuple):
    """What a kernel is launched with beside its tensors and sizes."""

    constants: Mapping[str, int | bool | str]
    num_warps: int
    num_stages: int

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a launch."""
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Specialisation(NamedTuple):
    """One compiled form of a kernel, as `triton.compiler.ASTSource` and `triton.compile` take it."""

    kernel: Any
    signature: dict[str, str]
    constants: Mapping[str, int | bool | str]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]


def padded(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()


def local_launch(key_size: int, bounded: bool) -> Launch:
    """Choose for `chunk_local`: one warp holds [C,128] in 64 registers a lane, and then no sum crosses warps."""
    key_pad = padded(key_size)
    return Launch({"BOUNDED": bounded, "C": CHUNK, "KP": key_pad}, num_warps=max(1, key_pad // 128), num_stages=1)


def walk_launch(key_size: int, precision: Precision) -> Launch:
    """Choose for `chunk_walk`: few value channels a program, so that few heads still fill a chip.

    Up to K = 128 these are the largest blocks that leave state and operands in registers; beyond, all but tf32 spill.
    """
    key_pad = padded(key_size)
    value_block = 32 if key_pad <= 128 and precision != "ieee" else 16
    num_warps = 8 if precision == "ieee" else 4
    constants = {"C": CHUNK, "KP": key_pad, "BV": value_block, "PRECISION": precision}
    return Launch(constants, num_warps, num_stages=2)


def decode_launch(size: int, bounded: bool) -> Launch:
    """Choose for `decode_token`: as much of a state at once as 16 warps hold in 32 registers a lane."""
    size_pad = padded(size)
    value_block = min(size_pad, 16 * 32 * 32 // size_pad)
    num_warps = max(1, size_pad * value_block // (32 * 32))
    constants = {"BOUNDED": bounded, "KP": size_pad, "BV": value_block, "R": 4}
    return Launch(constants, num_warps, num_stages=1)


def specialisations() -> Iterator[Specialisation]:
    """Yield every specialisation that the launchers can choose."""
    from kimik3_cli.engine.kda.fused.decode_kernel import decode_token
    from kimik3_cli.engine.kda.fused.prefill_kernels import chunk_local, chunk_walk

    for size in _representative_sizes():
        for dtype in ("fp32", "bf16"):
            for bounded in (True, False):
                yield _specialisation(chunk_local, local_launch(size, bounded), "q k z beta_logits", dtype, {"K": size})
                decoded = "qkv z beta_logits gate"
                yield _specialisation(decode_token, decode_launch(size, bounded), decoded, dtype, {"K": size})
    # the walk's key size only matters as a power of two, its value size only as a multiple of 16
    for key_size in (16, 32, 64, 128, 256):
        for value_size in (LARGEST_HEAD, LARGEST_HEAD - 1):
            for dtype in ("fp32", "bf16"):
                for precision in get_args(Precision):
                    launch = walk_launch(key_size, precision)
                    yield _specialisation(chunk_walk, launch, "v", dtype, {"V": value_size})


def _representative_sizes() -> list[int]:
    """One head size for each power of two and each answer to whether it is a multiple of 16."""
    sizes = range(SMALLEST_HEAD, LARGEST_HEAD + 1)
    return list({(padded(size), size % 16 == 0): size for size in sizes}.values())


def _specialisation(kernel: Any, launch: Launch, activations: str, dtype: str, sizes: dict[str, int]) -> Specialisation:
    """Describe a kernel whose tensors named in `activations` have `dtype` and whose other tensors are float32.

    Args:
        kernel: the jitted function; names that begin in lower case and are no count or factor are its tensors.
        launch: its compile-time constants and options.
        activations: names of parameters.
        dtype: "fp32" or "bf16".
        sizes: the value of each parameter whose divisibility by 16 the compiler looks at.
    """
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, name in enumerate(kernel.arg_names):
        if name in launch.constants:
            signature[name] = "constexpr"
        elif name in FACTORS:
            signature[name] = "fp32"
        elif name.isupper() or name in COUNTS:
            signature[name] = "i32"
        else:
            signature[name] = f"*{dtype}" if name in activations.split() else "*fp32"
        if signature[name].startswith("*") or sizes.get(name, 1) % 16 == 0:
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return Specialisation(kernel, signature, launch.constants, attributes, options)


COUNTS = frozenset({"q_heads", "k_heads", "z_heads", "v_heads", "c"})
FACTORS = frozenset({"lower_bound", "q_scale", "out_floor"})
