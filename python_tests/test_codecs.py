"""Codecs hold the exact fp32 weight, round as IEEE does, and believe the parameter where it was edited."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import oracle
import patterns
import pytest
import torch
from cases import CODECS, codec_id
from hypothesis import given
from hypothesis import strategies as st

from badam_kernels import formats
from badam_kernels.formats import AUTO, FORMATS, FP32, MASTER, MASTER_BF16, MASTER_FP16, SPLIT, SPLIT_BF16

per_codec = pytest.mark.parametrize("codec", CODECS, ids=codec_id)
per_16_bit_codec = pytest.mark.parametrize("codec", [c for c in CODECS if c.auxiliary], ids=codec_id)
any_fp32 = st.integers(-(2**31), 2**31 - 1).map(lambda bits: torch.tensor([bits], dtype=torch.int32).view(torch.float32))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def encode(codec, x):
    """(primary, auxiliary) as the codec under test writes them over poisoned memory."""
    primary = torch.empty(len(x), dtype=codec.primary)
    auxiliary = torch.empty(len(x), dtype=codec.auxiliary) if codec.auxiliary else None
    codec.encode_(x, primary, auxiliary)
    return primary, auxiliary


def wide() -> torch.Tensor:
    """Every sign x exponent x 8 high mantissas x 257 low halves, and everything in `patterns`; NaN and infinity too."""
    high = torch.arange(0, 2**16, 16).unsqueeze(1) << 16
    low = torch.cat([torch.arange(0, 2**16, 509), torch.arange(0x7FC0, 0x8040)])
    grid = (high + low).flatten()
    grid = torch.where(grid >= 2**31, grid - 2**32, grid).to(torch.int32).view(torch.float32)
    return torch.cat([grid, patterns.bf16_ties(), patterns.all_low_halves(), patterns.fp16_ties()])


def all_16_bit(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(2**16).to(torch.int16).view(dtype)


@pytest.fixture(scope="module")
def numbers():
    x = wide()
    return x[~x.isnan()]


@per_codec
def test_decode_returns_every_encoded_number_bit_for_bit(codec, numbers):
    assert torch.equal(bits(codec.decode(*encode(codec, numbers))), bits(numbers))


def test_no_fp32_pattern_of_all_breaks_the_compiled_codecs(tmp_path):
    """Split: all 2**32 decode to themselves, or NaN to NaN. Rounding never decreases, so its ties, which
    `test_storage_is_bitwise_the_encoding_of_the_weight` has all of, fix every value between them.
    """
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source = Path(__file__).with_name("exhaustive_codecs.cpp")
    program = tmp_path / "exhaustive_codecs"
    include = source.parent.parent / "csrc"
    subprocess.run([compiler, "-std=c++17", "-O3", f"-I{include}", source, "-o", program], check=True)
    report = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    assert report == ["split loses 0", "bf16 rounding is out of order at 0", "fp16 rounding is out of order at 0"]


@given(any_fp32)
def test_decode_returns_any_encoded_number_bit_for_bit(x):
    for codec in CODECS:
        decoded = codec.decode(*encode(codec, x))
        assert decoded.isnan() if x.isnan() else torch.equal(bits(decoded), bits(x))


@per_codec
def test_nan_stays_nan(codec):
    x = wide()
    x = torch.cat([x[x.isnan()], torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F80FFFF], dtype=torch.int32).view(torch.float32)])
    primary, auxiliary = encode(codec, x)
    assert primary.isnan().all()
    assert codec.decode(primary, auxiliary).isnan().all()


@per_codec
def test_storage_is_what_fp64_arithmetic_says(codec, numbers):
    """Nearest-even for master, ties away from zero for split, with the difference of the bit patterns beside it."""
    for got, expected in zip(encode(codec, numbers), oracle.encode(codec, numbers), strict=True):
        assert got is expected is None or torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_to_nearest_even(dtype, numbers):
    rounded = bits(formats.round_to(numbers, dtype))
    assert torch.equal(rounded, bits(oracle.round_to(numbers, dtype)))
    assert torch.equal(rounded, bits(numbers.to(dtype)))
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            assert np.array_equal(rounded.numpy(), numbers.numpy().astype(np.float16).view(np.int16))


def test_fp16_rounding_at_the_edges_of_its_range():
    largest, least = 65504.0, 2.0**-24
    x = torch.tensor([65519.99609375, 65520.0, 1e38, least / 2, least / 2 * (1 + 2**-23), least * 1.5, -least / 2])
    expected = torch.tensor([largest, torch.inf, torch.inf, 0.0, least, 2 * least, -0.0])
    rounded = formats.round_to_fp16(x).float()
    assert torch.equal(rounded, expected)
    assert torch.equal(rounded.signbit(), expected.signbit())


def test_nearest_even_would_lose_split_residuals():
    """Why split rounds half up: at a tie the even neighbour may leave a residual of +0x8000, which int16 cannot hold."""
    tie = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32)
    even = bits(formats.round_to_bf16(tie)).int()
    assert int(bits(tie)) - (int(even) << 16) == 0x8000 > torch.iinfo(torch.int16).max
    assert torch.equal(SPLIT_BF16.decode(*encode(SPLIT_BF16, tie)), tie)


@per_16_bit_codec
def test_an_auxiliary_of_zeros_decodes_to_the_parameter(codec):
    primary = all_16_bit(codec.primary)
    decoded = codec.decode(primary, torch.zeros(len(primary), dtype=codec.auxiliary))
    nan = primary.isnan()
    assert torch.equal(bits(decoded)[~nan], bits(primary.float())[~nan])
    assert decoded[nan].isnan().all()


def stale(codec, n: int, seed: int) -> torch.Tensor:
    """Auxiliaries that belong to other weights: any bits at all, the extremes among them."""
    generator = torch.Generator().manual_seed(seed)
    if codec.auxiliary == torch.int16:
        auxiliary = torch.randint(-(2**15), 2**15, (n,), generator=generator).to(torch.int16)
        extremes = torch.tensor([-(2**15), -(2**15) + 1, -1, 0, 1, 2**15 - 1], dtype=torch.int16)
    else:
        auxiliary = torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32).view(torch.float32)
        extremes = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45])
    places = torch.randperm(n, generator=generator)[: n // 4]
    auxiliary[places] = extremes[torch.arange(len(places)) % len(extremes)]
    return auxiliary


@per_16_bit_codec
@pytest.mark.parametrize("seed", range(8))
def test_an_edited_parameter_wins_over_any_stale_auxiliary(codec, seed):
    """For every finite parameter: what is decoded encodes to exactly that parameter, and lies within half its spacing.

    An infinite one decodes to a number that encodes to it, or, under a stale split residual, to NaN; a NaN to NaN.
    """
    primary = all_16_bit(codec.primary)
    decoded = codec.decode(primary, stale(codec, len(primary), seed))
    again, _ = encode(codec, decoded)
    finite = primary.isfinite()
    assert torch.equal(bits(again)[finite], bits(primary)[finite])
    assert decoded[primary.isnan()].isnan().all()
    infinite = primary.isinf()
    assert torch.equal(again[infinite & ~decoded.isnan()], primary[infinite & ~decoded.isnan()])
    assert codec is SPLIT_BF16 or not decoded[infinite].isnan().any()

    exact = primary.double()[finite]
    half = torch.from_numpy(oracle.spacing(exact.numpy(), codec.primary)) / 2
    assert ((decoded.double()[finite] - exact).abs() <= half).all()


@given(any_fp32, any_fp32)
def test_a_residual_follows_only_the_parameter_it_was_written_with(x, other):
    """A parameter overwritten with its own value keeps the master; with any other finite value, it is the value that counts."""
    for codec in (SPLIT_BF16, MASTER_BF16, MASTER_FP16):
        primary, auxiliary = encode(codec, x)
        if not x.isnan():
            assert torch.equal(bits(codec.decode(primary.clone(), auxiliary)), bits(x))
        edited = other.to(codec.primary)
        if edited.isfinite():
            assert torch.equal(bits(encode(codec, codec.decode(edited, auxiliary))[0]), bits(edited))


@pytest.mark.parametrize(
    "format, dtype, resident, idle, moved",
    [
        (MASTER, torch.bfloat16, 12, 4, 30),
        (MASTER, torch.float16, 12, 4, 30),
        (MASTER, torch.float32, 8, 0, 28),
        (SPLIT, torch.bfloat16, 10, 2, 26),
        (SPLIT, torch.float32, 8, 0, 28),
        (AUTO, torch.bfloat16, 10, 2, 26),
        (AUTO, torch.float16, 12, 4, 30),
    ],
    ids=str,
)
def test_bytes_per_element(format, dtype, resident, idle, moved):
    """Beside 16-bit weight and gradient: fp32 moments 8, and 2 (split) or 4 (master). Master also reads the live weight."""
    assert format.resident_bytes(dtype) == resident
    assert format.idle_bytes(dtype) == idle
    assert format.idle_bytes(dtype, run_moments=2) == idle + 8
    assert format.moved_bytes(dtype) == moved
    assert format.moved_bytes(dtype, torch.float32, moments=1) == moved - dtype.itemsize + 4 - 8


def test_the_tables_of_codecs_are_complete():
    used = {codec for format in FORMATS.values() for codec in (*format.weight.values(), format.moment)}
    assert used == set(formats.WEIGHT_CODECS)
    assert all(codec.primary == dtype for format in FORMATS.values() for dtype, codec in format.weight.items())
    assert all(format.codec(torch.float32) is FP32 for format in FORMATS.values())


def test_auto_is_the_smallest_format_for_each_dtype():
    for dtype in formats.PARAM_DTYPES:
        held = [format.weight[dtype] for format in (MASTER, SPLIT) if dtype in format.weight]
        assert AUTO.codec(dtype) is min(held, key=lambda codec: codec.auxiliary_bytes)


def test_a_format_that_cannot_hold_a_dtype_says_what_to_do():
    with pytest.raises(ValueError, match=r"'split' holds parameters of torch.float32, torch.bfloat16; got torch.float16.*'auto'"):
        SPLIT.codec(torch.float16)
    with pytest.raises(ValueError, match=r"one of 'master', 'split', 'auto'; got 'bf16'"):
        formats.resolve("bf16")
    assert formats.resolve("split") is SPLIT is formats.resolve(SPLIT)
