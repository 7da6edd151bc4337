"""fp32 bit patterns on which roundings go wrong."""

import torch
from torch import Tensor

from badam_kernels.formats import Codec

HALVES = (0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFF)
"""Low halves around a bf16 number and around the tie above it."""


def _floats(bits: Tensor) -> Tensor:
    return ((bits + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32)


def bf16_ties() -> Tensor:
    """Every bf16 number of either sign and every exponent, NaN included, and each tie, with their neighbours in fp32."""
    high = torch.arange(2**16).unsqueeze(1) << 16
    return _floats((high + torch.tensor(HALVES)).flatten())


def all_low_halves() -> Tensor:
    """All 2**16 low halves behind some high halves of either sign: zero, subnormal, below one, below infinity."""
    high = torch.tensor([0x0000, 0x007F, 0x3F7F, 0x7F7F])
    high = torch.cat([high, high + 0x8000]).unsqueeze(1)
    return _floats(((high << 16) + torch.arange(2**16)).flatten())


def fp16_ties() -> Tensor:
    """Every finite fp16 number, subnormals too, and the tie above each (the last one overflows), with their neighbours."""
    numbers = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).double()
    above = torch.cat([numbers[1:], torch.tensor([2.0**16], dtype=torch.float64)])
    exact = torch.cat([numbers, (numbers + above) / 2]).float()
    bits = (exact.view(torch.int32).long().unsqueeze(1) + torch.tensor([-1, 0, 1])).flatten().clamp(min=0)
    return torch.cat([_floats(bits), -_floats(bits)])


def hard(codec: Codec) -> list[Tensor]:
    """The finite numbers above that matter to `codec`: ties first."""
    patterns = [fp16_ties() if codec.primary == torch.float16 else bf16_ties(), all_low_halves()]
    return [x[x.isfinite()] for x in patterns]
