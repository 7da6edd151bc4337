"""The compiled backend for CPU tensors: one vectorised pass over the block, on threads of its own.

Its C++ codecs, rules and tables mirror those here. The names are compared when this module loads: an extension built from
other sources is refused, since it would read the table wrongly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import formats, rules
from ..visit import COLUMNS, HYPER, Visit

try:
    from badam_kernels import _C
except ImportError as error:
    _C, _IMPORT_ERROR = None, str(error)

__all__ = ["BACKEND", "isas"]


def _dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.") if dtype else ""


def _codec_names(codec: formats.Codec) -> tuple[str, str, str]:
    return codec.name, _dtype_name(codec.primary), _dtype_name(codec.auxiliary)


def _mismatch() -> str | None:
    """Where the extension's tables differ from those here; None if nowhere."""
    here = {
        "RULES": [*rules.RULES],
        "CODECS": [_codec_names(codec) for codec in formats.WEIGHT_CODECS],
        "GRAD_DTYPES": [_dtype_name(dtype) for dtype in formats.PARAM_DTYPES],
        "COLUMNS": [*COLUMNS],
        "HYPER": [*HYPER],
    }
    for table, names in here.items():
        if getattr(_C, table, None) != names:
            return f"{table} is {names} here and {getattr(_C, table, None)} in the extension"
    return None


def _problem() -> str | None:
    if _C is None:
        return f"the compiled extension is missing ({_IMPORT_ERROR}); install a C++17 compiler and badam_kernels again"
    mismatch = _mismatch()
    return mismatch and f"the compiled extension does not match this version ({mismatch}); install badam_kernels again"


def isas() -> list[str]:
    """Instruction sets that the extension was built for and this CPU has, the one in use last; empty without extension."""
    return [] if _C is None else [*_C.ISAS]


class _Cpu:
    name = "cpu"

    def __init__(self) -> None:
        self._problem = _problem()
        self._rules = {rule: code for code, rule in enumerate(rules.RULES.values())}

    def unavailable(self, device: torch.device) -> str | None:
        return f"it serves CPU tensors, not {device.type}" if device.type != "cpu" else self._problem

    def apply(
        self,
        visit: Visit,
        scale: float | Tensor | None,
        max_norm: float | None,
        found_inf: Tensor | None = None,
        *,
        isa: str | None = None,
    ) -> tuple[float | None, bool]:
        """`isa` picks one of `isas()`. Bits depend neither on it nor on the number of threads, torch.get_num_threads()."""
        rule = self._rules.get(visit.rule)
        if rule is None:
            raise ValueError(
                f"rule {visit.rule.name!r} is not in the extension: use backend='reference', or add it to csrc/rules.h"
            )
        if found_inf is not None and float(found_inf) != 0.0:
            return None, True
        table, scale = visit.table, None if scale is None else float(scale)
        return _C.apply(table.data_ptr(), len(table), visit.hyper, rule, scale, max_norm, torch.get_num_threads(), isa)


BACKEND = _Cpu()
