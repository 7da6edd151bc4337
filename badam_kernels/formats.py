"""Codecs and formats: how one fp32 quantity lives in memory.

A *codec* stores one fp32 number as a primary value and, for some codecs, an auxiliary value. For a weight the primary is
the model's own parameter, and the auxiliary is what this package adds to keep the exact fp32 master beside it. Two rules
hold for every weight codec, and everything else (idle blocks, resume, edits from outside) follows from them:

1. ``decode(encode(x)) == x`` for every fp32 ``x`` that is not NaN, bit for bit.
2. The live parameter is the truth, the auxiliary only refines it: where the two disagree (the weight was edited from
   outside), ``decode`` believes the parameter. An auxiliary of zeros is the valid empty state, so nothing needs set-up.

All rounding to 16 bits is integer arithmetic, so every backend stores the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AUTO", "FORMATS", "FP32", "MASTER", "PARAM_DTYPES", "SPLIT", "WEIGHT_CODECS", "Codec", "Format", "resolve"]

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a parameter or a gradient may have."""


@dataclass(frozen=True)
class Codec:
    """One fp32 quantity in memory.

    name              the word used in tables, state dicts and the C++ and Triton twins
    primary           dtype of the primary value; for a weight, the parameter's
    auxiliary         dtype of the auxiliary value, or None
    decode            (primary, auxiliary) -> fp32 tensor, new
    encode_           (fp32 tensor, primary, auxiliary) -> None, writes both in place
    """

    name: str
    primary: torch.dtype
    auxiliary: torch.dtype | None
    decode: Callable[[Tensor, Tensor | None], Tensor]
    encode_: Callable[[Tensor, Tensor, Tensor | None], None]

    @property
    def auxiliary_bytes(self) -> int:
        """Bytes per element held beside the primary."""
        return self.auxiliary.itemsize if self.auxiliary else 0

    @property
    def moved_bytes(self) -> int:
        """Bytes per element that one update reads and writes: primary and auxiliary, both ways."""
        return 2 * (self.primary.itemsize + self.auxiliary_bytes)


# --- rounding to 16 bits, in integers -------------------------------------------------------------------------------


def _bits(x: Tensor) -> Tensor:
    """The bit patterns of fp32 `x` as int64 in [0, 2**32)."""
    return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _floats(bits: Tensor) -> Tensor:
    """The fp32 numbers whose bit patterns are the low 32 bits of int64 `bits`."""
    return bits.to(torch.int32).view(torch.float32)


def round_to_bf16(x: Tensor) -> Tensor:
    """fp32 to bf16, to nearest, ties to even; NaN becomes the quiet NaN of its sign."""
    bits = _bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = torch.where(torch.isnan(x), ((bits >> 16) & 0x8000) | 0x7FC0, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)


def round_to_fp16(x: Tensor) -> Tensor:
    """fp32 to fp16, to nearest, ties to even, with subnormals and overflow to infinity; NaN becomes the quiet NaN."""
    bits = _bits(x)
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # A subnormal result counts units of 2**-24: the significand, shifted right until its last bit weighs that much.
    shift = (126 - (magnitude >> 23)).clamp(14, 25)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    subnormal = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    rounded = torch.where(magnitude < 0x38800000, subnormal, normal).clamp(max=0x7C00)
    rounded = torch.where(magnitude > 0x7F800000, 0x7E00, rounded)
    return (sign | rounded).to(torch.int16).view(torch.float16)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 `x` to `dtype`, to nearest, ties to even."""
    if dtype == torch.float32:
        return x
    return round_to_bf16(x) if dtype == torch.bfloat16 else round_to_fp16(x)


# --- the codecs -----------------------------------------------------------------------------------------------------


def _decode_plain(primary: Tensor, auxiliary: None) -> Tensor:
    return primary.clone()


def _encode_plain_(x: Tensor, primary: Tensor, auxiliary: None) -> None:
    primary.copy_(x)


def _decode_master(primary: Tensor, auxiliary: Tensor) -> Tensor:
    """The fp32 master, unless the parameter is no longer its rounding: then the parameter was edited, and wins."""
    agrees = round_to(auxiliary, primary.dtype).view(torch.int16) == primary.view(torch.int16)
    return torch.where(agrees, auxiliary, primary.float())


def _encode_master_(x: Tensor, primary: Tensor, auxiliary: Tensor) -> None:
    auxiliary.copy_(x)
    primary.copy_(round_to(x, primary.dtype))


def _decode_split(primary: Tensor, auxiliary: Tensor) -> Tensor:
    """``(hi << 16) + lo``. A negative residual under a zero is never written; it is stale, and reads as none."""
    hi = primary.view(torch.int16).to(torch.int64) & 0xFFFF
    lo = auxiliary.to(torch.int64)
    lo = torch.where((hi & 0x7FFF == 0) & (lo < 0), 0, lo)
    return _floats((hi << 16) + lo)


def _encode_split_(x: Tensor, primary: Tensor, auxiliary: Tensor) -> None:
    """``hi = (bits + 0x8000) >> 16``, half up, so that the residual always fits in int16: nearest-even ties collide."""
    bits = _bits(x)
    hi = (bits + 0x8000) >> 16
    nan = torch.isnan(x)
    hi = torch.where(nan, ((bits >> 16) & 0x8000) | 0x7FC0, hi)
    auxiliary.copy_(torch.where(nan, 0, bits - (hi << 16)))
    primary.copy_(hi.to(torch.int16).view(torch.bfloat16))


FP32 = Codec("fp32", torch.float32, None, _decode_plain, _encode_plain_)
"""A moment, or a weight that is its own master."""
SPLIT_BF16 = Codec("split", torch.bfloat16, torch.int16, _decode_split, _encode_split_)
"""A bf16 weight, with the low 16 bits of its fp32 master."""


MASTER_BF16 = Codec("master", torch.bfloat16, torch.float32, _decode_master, _encode_master_)
MASTER_FP16 = Codec("master", torch.float16, torch.float32, _decode_master, _encode_master_)
"""A 16-bit weight, with its whole fp32 master."""


@dataclass(frozen=True)
class Format:
    """One codec per slot: the weight's by parameter dtype, and the moments'.

    A parameter in fp32 is its own master: no format adds an auxiliary to it.
    """

    name: str
    weight: Mapping[torch.dtype, Codec]
    moment: Codec = FP32

    def __repr__(self) -> str:
        return f"Format({self.name!r})"

    def __hash__(self) -> int:
        return hash(self.name)

    def codec(self, dtype: torch.dtype) -> Codec:
        """The weight codec for parameters of `dtype`. Raises ValueError if this format cannot hold them."""
        codec = self.weight.get(dtype)
        if codec is None:
            held = ", ".join(str(d) for d in self.weight)
            raise ValueError(
                f"format {self.name!r} holds parameters of {held}; got {dtype}. Use format='auto', which picks by dtype."
            )
        return codec

    def resident_bytes(self, dtype: torch.dtype, moments: int = 2) -> int:
        """Bytes per element that an active block of `dtype` weights holds beside weight and gradient."""
        return self.codec(dtype).auxiliary_bytes + moments * self.moment.primary.itemsize

    def idle_bytes(self, dtype: torch.dtype, run_moments: int = 0) -> int:
        """Bytes per element that the store keeps for an idle block of `dtype` weights."""
        return self.codec(dtype).auxiliary_bytes + run_moments * self.moment.primary.itemsize

    def moved_bytes(self, dtype: torch.dtype, grad_dtype: torch.dtype | None = None, moments: int = 2) -> int:
        """Bytes per element that one step reads and writes: weight, auxiliary and moments both ways, gradient once."""
        return self.codec(dtype).moved_bytes + moments * self.moment.moved_bytes + (grad_dtype or dtype).itemsize


MASTER = Format(
    "master", {torch.float32: FP32, torch.bfloat16: MASTER_BF16, torch.float16: MASTER_FP16}
)
"""An fp32 master beside every 16-bit weight."""
SPLIT = Format("split", {torch.float32: FP32, torch.bfloat16: SPLIT_BF16})
"""The low 16 bits of the fp32 master beside every bf16 weight, which is its high half."""
AUTO = Format("auto", {torch.float32: FP32, torch.bfloat16: SPLIT_BF16, torch.float16: MASTER_FP16})
"""The smallest exact codec for each dtype: split for bf16, master for fp16."""
FORMATS = {f.name: f for f in (MASTER, SPLIT, AUTO)}


WEIGHT_CODECS = (FP32, SPLIT_BF16, MASTER_BF16, MASTER_FP16)
"""All weight codecs. The index is the code that compiled backends know them by."""


def resolve(format: str | Format) -> Format:
    """The format named `format`, or `format` itself. Raises ValueError for an unknown name."""
    if isinstance(format, Format):
        return format
    if format not in FORMATS:
        raise ValueError(f"format must be a Format or one of {', '.join(map(repr, FORMATS))}; got {format!r}")
    return FORMATS[format]
