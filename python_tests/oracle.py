"""Independent answers: codecs by fp64 arithmetic instead of bits, updates by the textbook in fp64, torch's own in fp32."""

import numpy as np
import torch
from torch import Tensor

_FIELDS = {torch.bfloat16: (7, -126, 2.0**128), torch.float16: (10, -14, 2.0**16), torch.float32: (23, -126, 2.0**128)}
"""Mantissa bits, least exponent, and the power of two that is infinity."""


def spacing(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The distance of the numbers of `dtype` around fp64 `x` that are no smaller in magnitude."""
    mantissa, least, _ = _FIELDS[dtype]
    exponent = np.frexp(x)[1] - 1
    return np.ldexp(1.0, np.maximum(np.where(x == 0, least, exponent), least) - mantissa)


def ulp(x: Tensor) -> Tensor:
    """The spacing of fp32 numbers around fp64 `x`."""
    return torch.as_tensor(spacing(x.numpy(), torch.float32))


def round_to(x: Tensor, dtype: torch.dtype, ties: str = "even") -> Tensor:
    """fp32 `x` to the nearest number of `dtype`, ties to "even" or "away" from zero; one NaN for all."""
    exact = x.double().numpy()
    with np.errstate(invalid="ignore"):
        step = spacing(exact, dtype)
        quotient = np.abs(exact) / step
        nearest = np.copysign((np.rint(quotient) if ties == "even" else np.floor(quotient + 0.5)) * step, exact)
    nearest[np.isinf(exact) | (np.abs(nearest) >= _FIELDS[dtype][2])] = np.inf
    return torch.from_numpy(np.where(np.isnan(exact), np.nan, np.copysign(nearest, exact))).to(dtype)


def encode(codec, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(primary, auxiliary) of CPU fp32 `x`, not NaN: bit for bit what every backend must store."""
    if codec.name == "fp32":
        return x.clone(), None
    if codec.name == "master":
        return round_to(x, codec.primary), x.clone()
    primary = round_to(x, codec.primary, ties="away")
    low = x.view(torch.int32).long() - (primary.view(torch.int16).long() << 16)
    return primary, ((low + 2**31) % 2**32 - 2**31).to(torch.int16)


def decode(codec, primary: Tensor, auxiliary: Tensor | None) -> Tensor:
    """The fp32 number of which (primary, auxiliary) on the CPU is the encoding; no stale residuals here."""
    if codec.name != "split":
        return (primary if auxiliary is None else auxiliary).clone()
    bits = (primary.view(torch.int16).long() << 16) + auxiliary.long()
    return torch.from_numpy(bits.numpy().astype(np.int32)).view(torch.float32)


def norm_and_factor(grads: list[Tensor], scale: float | None, max_norm: float | None) -> tuple[float | None, float]:
    """The fp64 norm of the scaled gradients (None where none is asked for) and the factor on every gradient."""
    if scale is None and max_norm is None:
        return None, 1.0
    factor = 1.0 if scale is None else scale
    norm = float(torch.cat([torch.zeros(1, dtype=torch.float64), *(g.double() for g in grads)]).norm()) * factor
    return norm, factor * (1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6)))


def step(rule: str, w: Tensor, g: Tensor, moments: list[Tensor], group: dict, t: int) -> list[tuple[Tensor, Tensor]]:
    """(value, magnitude) of the weight and of each moment after update number `t`, in fp64.

    The magnitude is the same formula with every term taken positive; see tolerances.py.
    """
    lr, (b1, b2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    m, size = moments[0], g.abs()
    if rule != "adamw":
        g, size = g + decay * w, size + decay * w.abs()
    if rule == "sgd":
        m, m_size = b1 * m + g, b1 * m.abs() + size
        return [(w - lr * m, w.abs() + lr * m_size), (m, m_size)]
    m, m_size = b1 * m + (1 - b1) * g, b1 * m.abs() + (1 - b1) * size
    v, v_size = b2 * moments[1] + (1 - b2) * g**2, b2 * moments[1] + (1 - b2) * size**2
    per_m = lr / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps)
    shrink = lr * decay if rule == "adamw" else 0.0
    return [(w - shrink * w - per_m * m, (1 + shrink) * w.abs() + per_m * m_size), (m, m_size), (v, v_size)]


def torch_step(rule: str, w: Tensor, g: Tensor, moments: list[Tensor], group: dict, t: int) -> list[Tensor]:
    """Weight and moments after update number `t` by torch's own optimizer, all in fp32."""
    param = torch.nn.Parameter(w.clone())
    param.grad = g.clone()
    held = [moment.clone() for moment in moments]
    if rule == "sgd":
        optimizer = torch.optim.SGD(
            [param], lr=group["lr"], momentum=group["betas"][0], weight_decay=group["weight_decay"], foreach=False
        )
        optimizer.state[param] = {"momentum_buffer": held[0]}
    else:
        kind = torch.optim.AdamW if rule == "adamw" else torch.optim.Adam
        optimizer = kind([param], **{**group, "foreach": False})
        optimizer.state[param] = {"step": torch.tensor(t - 1.0), "exp_avg": held[0], "exp_avg_sq": held[1]}
    optimizer.step()
    return [param.detach(), *held]
