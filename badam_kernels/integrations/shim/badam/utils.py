"""`badam.utils`: the same names."""

from badam_kernels.integrations import badam as _drop_in


def __getattr__(name):
    return getattr(_drop_in, name)
