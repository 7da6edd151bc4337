"""`badam` as a program started by ``python -m badam_kernels run`` imports it: this package's drop-in."""

from badam_kernels.integrations import badam as _drop_in


def __getattr__(name):
    return getattr(_drop_in, name)
