"""Triton kernels compiled for GPUs that are not here, and what can be read from the result."""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from badam_kernels.backends import _triton_kernels
from badam_kernels.backends.triton import TILES
from badam_kernels.formats import PARAM_DTYPES, WEIGHT_CODECS
from badam_kernels.rules import RULES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
_POINTERS = {"hyper": "*fp64", "table": "*i64", "steps": "*i64", "chunks": "*i32"}
"""Types of the pointer arguments; all others are fp32."""


@dataclass(frozen=True)
class Variant:
    """One specialisation of the update kernel."""

    rule: str
    codec: int
    grad: int

    def __str__(self) -> str:
        codec = WEIGHT_CODECS[self.codec]
        return f"{self.rule}-{codec.name}-{codec.primary}-{PARAM_DTYPES[self.grad]}".replace("torch.", "")

    @property
    def streams(self) -> dict[str, dict[int, int]]:
        """How many tensors a row reads and writes, by bytes per element."""
        codec = WEIGHT_CODECS[self.codec]
        auxiliary = [codec.auxiliary_bytes] if codec.auxiliary else []
        written = [codec.primary.itemsize, *auxiliary, *[4] * len(RULES[self.rule].moments)]
        read = [*written, PARAM_DTYPES[self.grad].itemsize]
        return {kind: {size: sizes.count(size) for size in (2, 4)} for kind, sizes in (("ld", read), ("st", written))}


VARIANTS = [Variant(*codes) for codes in itertools.product(RULES, range(len(WEIGHT_CODECS)), range(len(PARAM_DTYPES)))]


def compile_kernel(kernel, target: GPUTarget, warps: int, absent: tuple[str, ...] = (), **constants):
    """`kernel` for `target`, with 16-byte aligned pointers; arguments named in `absent` are None."""
    constants |= dict.fromkeys(absent)
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("rows", "count"):
            signature[name] = "i32"
        else:
            signature[name] = _POINTERS.get(name, "*fp32")
            attributes[(i,)] = [["tt.divisibility", 16]]
    by_index = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": warps, "enable_fp_fusion": True}
    return triton.compile(ASTSource(kernel, signature, by_index, attributes), target=target, options=options)


def compile_update(variant: Variant, target: GPUTarget, kernels=_triton_kernels, **changes):
    """The update kernel as the backend launches it on `target`; `changes` are to BLOCK and warps."""
    rule, moments = kernels.RULES[variant.rule]
    decode, encode, param, auxiliary = kernels.CODECS[variant.codec]
    tile = TILES[target.backend]
    constants = {
        "RULE": rule, "MOMENTS": moments, "DECODE": decode, "ENCODE": encode, "PARAM_TYPE": param, "AUXILIARY_TYPE": auxiliary,
        "GRAD_TYPE": kernels.GRADS[variant.grad], "BLOCK": tile.update,
    } | changes  # fmt: skip
    return compile_kernel(kernels.update, target, tile.warps, **constants)


def mutated_kernels(directory: pathlib.Path, old: str, new: str):
    """The module of the kernels with `old`, which must occur, replaced by `new`."""
    source = pathlib.Path(_triton_kernels.__file__).read_text()
    assert old in source
    name = f"mutant_{abs(hash((old, new)))}"
    path = directory / f"{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks functions up in their module
    spec.loader.exec_module(module)
    return module


# --- PTX ------------------------------------------------------------------------------------------------------------


def accesses(ptx: str, kind: str) -> dict[str, int]:
    """Instructions "ld" or "st" on global memory, counted by their shape: "v4.b32", "b16", ..."""
    shapes = re.findall(rf"\b{kind}\.global(?:\.L1::\w+|\.L2::\w+|\.nc|\.relaxed|\.gpu)*\.((?:v\d\.)?b\d+)", ptx)
    return {shape: shapes.count(shape) for shape in set(shapes)}


def narrow_address_arithmetic(ptx: str) -> list[str]:
    """Instructions of 32-bit arithmetic on chunk numbers or loaded values that end in the address of an element.

    Thread numbers may be 32-bit: they count inside one program. So may the index into `chunks`, which counts programs.
    """
    definitions: dict[str, list[tuple[str, list[str]]]] = {}
    addresses: set[str] = set()
    for line in ptx.splitlines():
        match = re.match(r"\s*(?:@!?%p\d+ )?([a-z][\w.:]*)\s+(.*);", line)
        if not match:
            continue
        opcode, operands = match.groups()
        registers = re.findall(r"%[a-z]+[\w.]*", operands)
        if re.match(r"(ld|st)\.global", opcode):
            addresses.update(re.findall(r"\[\s*(%\w+)", operands))
        if opcode.startswith(("st.", "bra", "bar")) or not registers:
            continue
        targets = re.findall(r"%\w+", operands.split("}")[0]) if operands.startswith("{") else registers[:1]
        for target in targets:
            definitions.setdefault(target, []).append((opcode, [r for r in registers if r not in targets]))
    return sorted(_narrow(definitions, addresses))


def _narrow(definitions: dict, addresses: set[str]) -> set[str]:
    depends = _closure(definitions, lambda opcode, sources: opcode.startswith("ld.global") or any("ctaid" in s for s in sources))
    found, seen, stack = set(), set(), list(addresses)
    while stack:
        register = stack.pop()
        if register in seen:
            continue
        seen.add(register)
        for opcode, sources in definitions.get(register, []):
            arithmetic = re.match(r"(add|sub|mul|mad|shl|or|neg|min|max)\b(?!.*wide).*\.[subf]32$", opcode)
            if arithmetic and any(s in depends for s in sources):
                found.add(f"{opcode} {register} <- {', '.join(sources)}")
            if not opcode.startswith("ld.global"):
                stack.extend(sources)
    return found


def _closure(definitions: dict, starts) -> set[str]:
    """Registers whose value depends on an instruction for which `starts` holds."""
    depends: set[str] = set()
    while True:
        more = {
            register
            for register, ways in definitions.items()
            for opcode, sources in ways
            if starts(opcode, sources) or any(s in depends for s in sources)
        }
        if more <= depends:
            return depends
        depends |= more


# --- SASS -----------------------------------------------------------------------------------------------------------


def resources(compiled, directory: pathlib.Path) -> dict[str, int]:
    """Registers, stack, shared and local bytes that ptxas gave the kernel."""
    path = directory / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    text = subprocess.run([_TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def sass(compiled, directory: pathlib.Path) -> str:
    path = directory / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    return subprocess.run([_TOOLS / "cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout


def occupancy(registers: int, warps: int) -> float:
    """Share of the 64 warps of an sm_80, sm_90 or sm_100 multiprocessor (65,536 registers, given out 256 a warp) in use."""
    per_warp = -(-registers * 32 // 256) * 256
    return min(64, 65536 // (per_warp * warps) * warps) / 64
