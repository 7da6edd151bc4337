"""What Triton makes of the kernels for GPUs that are not here: every variant compiles, and moves its bytes as it should."""

import re

import pytest

pytest.importorskip("triton", "3.3", reason="compiles ahead of time as Triton 3.3 and later do")

import ahead_of_time as aot
from ahead_of_time import TARGETS, VARIANTS, Variant

from badam_kernels.backends import _triton_kernels as kernels
from badam_kernels.backends.triton import TILES
from badam_kernels.formats import FP32, MASTER_BF16, MASTER_FP16, SPLIT_BF16, WEIGHT_CODECS
from badam_kernels.rules import RULES

NVIDIA = [name for name, target in TARGETS.items() if target.backend == "cuda"]
MAIN = [
    Variant("adamw", WEIGHT_CODECS.index(codec), grad)
    for codec, grad in ((SPLIT_BF16, 1), (MASTER_BF16, 1), (MASTER_FP16, 2), (FP32, 0), (SPLIT_BF16, 0))
]
"""The kernels of mixed-precision training, whose resources are checked too."""
LEAST_OCCUPANCY = 0.62
"""Ten programs of four warps per multiprocessor keep some 60 KiB of loads in flight, twice what 700 ns of latency ask for."""


def check_ptx(ptx: str, variant: Variant) -> None:
    """The body moves every stream as vectors, straight between memory and registers; the rest, once, by elements."""
    for kind, streams in variant.streams.items():
        found = aot.accesses(ptx, kind)
        assert found.get("v4.b32", 0) == streams[4], f"{kind} of fp32 by 16 bytes: {found}"
        assert found.get("v2.b32", 0) + found.get("b64.v1", 0) == streams[2], f"{kind} of 16-bit numbers by 8 bytes: {found}"
        assert found.get("b16", 0) == streams[2], f"{kind} of 16-bit numbers one by one, in the rest only: {found}"
    assert not re.search(r"\b(ld|st)\.shared|\bbar\.|\bshfl\.", ptx), "streams are exchanged between threads"
    approximate = re.findall(r"\b(?:div\.(?:full|approx)|sqrt\.approx|rsqrt|rcp|ex2|lg2)[\w.]*", ptx)
    assert not approximate, f"approximate instructions: {approximate}"
    narrow = aot.narrow_address_arithmetic(ptx)
    assert not narrow, f"32-bit arithmetic on element offsets: {narrow}"


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_variant_moves_its_streams_as_vectors(variant, target):
    check_ptx(aot.compile_update(variant, TARGETS[target]).asm["ptx"], variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_variant_compiles_for_amd_without_spills(variant):
    assembly = aot.compile_update(variant, TARGETS["gfx942"]).asm["amdgcn"]
    assert "global_load_dwordx4" in assembly and "global_store_dwordx4" in assembly
    for name in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size", "group_segment_fixed_size"):
        assert re.search(rf"\.{name}:\s+(\d+)", assembly)[1] == "0", name
    assert not re.search(r"\bs_barrier\b|\bds_(read|write)", assembly)


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("variant", MAIN, ids=str)
def test_the_main_kernels_spill_nothing_and_fill_the_machine(variant, target, tmp_path):
    compiled = aot.compile_update(variant, TARGETS[target])
    used = aot.resources(compiled, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert aot.occupancy(used["REG"], TILES["cuda"].warps) >= LEAST_OCCUPANCY, used
    code = aot.sass(compiled, tmp_path)
    assert re.search(r"\bLDG\.E\.128", code) and re.search(r"\bSTG\.E\.128", code)
    assert not re.search(r"\b(LDL|STL|LDS|STS|BAR)\b", code)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("partials", [(), ("partials",)], ids=["norm", "no_norm"])
@pytest.mark.parametrize("tensors", [(), ("scale", "found_inf")], ids=["scaler", "no_scaler"])
def test_the_finishing_kernel_compiles(target, partials, tensors):
    for rule in RULES.values():
        constants = {"ADAPTIVE": rule.adaptive, "DECOUPLED": rule.decoupled, "BLOCK": TILES["cuda"].finish}
        compiled = aot.compile_kernel(kernels.finish, TARGETS[target], 4, absent=partials + tensors, **constants)
        ptx = compiled.asm.get("ptx", "")
        assert not re.search(r"\b(?:div|sqrt)\.(?:full|approx)[\w.]*f32|\batom\.", ptx)


@pytest.mark.parametrize("target", NVIDIA)
def test_the_norm_kernel_reads_vectors_without_atomics(target):
    tile = TILES["cuda"]
    ptx = aot.compile_kernel(kernels.norm, TARGETS[target], tile.warps, CHUNK=tile.chunk, BLOCK=tile.norm).asm["ptx"]
    found = aot.accesses(ptx, "ld")
    assert found["v4.b32"] >= 4, found  # two for fp32, one each for bf16 and fp16
    assert not re.search(r"\batom\.|\bred\.global", ptx)
    assert not aot.narrow_address_arithmetic(ptx)


MUTANTS = {
    "pointer hint dropped": ("pointer = tl.multiple_of(pointer, 16)", "pointer = pointer"),
    "bound of any size": ("bound = tl.load(row + BOUND) * 16\n        stop", "bound = tl.load(row + BOUND)\n        stop"),
    "int32 offsets": ("(chunk - tl.load(row + FIRST)) * BLOCK", "(chunk - tl.load(row + FIRST).to(tl.int32)) * BLOCK"),
    "approximate division": ("tl.div_rn(m, root)", "m / root"),
    "approximate root": ("tl.sqrt_rn(v)", "tl.sqrt(v)"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_kernel_fails_the_check(mutant, tmp_path):
    module = aot.mutated_kernels(tmp_path, *MUTANTS[mutant])
    with pytest.raises(AssertionError):
        check_ptx(aot.compile_update(MAIN[0], TARGETS["sm_90"], module).asm["ptx"], MAIN[0])


def test_eight_elements_per_thread_fail_the_check():
    """Triton then sends the fp32 streams through shared memory."""
    with pytest.raises(AssertionError, match="exchanged|16 bytes"):
        check_ptx(aot.compile_update(MAIN[0], TARGETS["sm_90"], BLOCK=2 * TILES["cuda"].update).asm["ptx"], MAIN[0])
