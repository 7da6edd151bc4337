"""badam_kernels: block-coordinate Adam with exact fp32 masters, one fused pass per step.

>>> from badam_kernels import BlockAdam
>>> optimizer = BlockAdam(model.named_parameters(), lr=1e-5, switch_every=100)  # doctest: +SKIP
"""

from . import blocks, formats, rules
from .optimizer import BlockAdam

__all__ = ["BlockAdam", "blocks", "formats", "patch_badam", "rules"]
__version__ = "0.1.0"


def patch_badam() -> None:
    """From now on `import badam` in this process gives this package's drop-in; call it before anything imports badam."""
    from .integrations import run

    run.patch_badam()
