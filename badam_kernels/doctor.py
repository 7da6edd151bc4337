"""What this machine has for badam_kernels: `python -m badam_kernels doctor`."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import warnings
from collections.abc import Callable, Iterator

import torch

from . import __version__, backends, hostmem, monitor
from .blocks import Span
from .store import Store

__all__ = ["findings"]

_PIN_BYTES = 1 << 20


def findings() -> Iterator[tuple[str, str]]:
    """(what, what was found and what to do) of everything that matters here. A probe that fails is a finding too."""
    probes: list[tuple[str, Callable[[], str]]] = [
        ("badam_kernels", lambda: __version__),
        ("python", lambda: f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("torch", lambda: f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("triton", _triton),
        ("compiled extension", _extension),
        ("CUDA driver", _driver),
        ("host memory", _host_memory),
        ("pinned memory", _pinning),
    ]
    for title, probe in probes:
        yield title, _guarded(probe)
    for device in _devices():
        yield f"backend for {device}", _guarded(lambda: _backend(device))
        if device.type == "cuda":
            yield f"memory of {device}", _guarded(lambda: _device_memory(device))


def _guarded(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except Exception as error:  # the point of a doctor is to survive what is broken
        return f"cannot tell ({type(error).__name__}: {error})"


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "not installed; only GPUs need it: pip install triton"
    return importlib.metadata.version("triton")


def _extension() -> str:
    from .backends import cpu

    problem = cpu.BACKEND.unavailable(torch.device("cpu"))
    return f"none: {problem}" if problem else f"uses {cpu.isas()[-1]}; built for this CPU: {', '.join(cpu.isas())}"


def _driver() -> str:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none (libcuda.so.1 not found); install NVIDIA's driver to use its GPUs"
    version, status = ctypes.c_int(), cuda.cuInit(0)
    if status:
        return f"there, but cuInit fails with code {status}: is a GPU there, and its kernel module loaded?"
    cuda.cuDriverGetVersion(ctypes.byref(version))
    found = f"for CUDA up to {version.value // 1000}.{version.value % 1000 // 10}"
    if torch.cuda.is_available():
        return found
    return f"{found}, but torch {torch.__version__} cannot use it: install a torch built for CUDA"


def _host_memory() -> str:
    left = hostmem.available_bytes()
    return "the system does not say" if left is None else f"{monitor.readable(left)} left for idle blocks and all else"


def _pinning() -> str:
    import resource  # not there on Windows

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else monitor.readable(limit)
    told = f"memlock limit {allowed}"
    if not torch.cuda.is_available():
        return f"not used without a CUDA device ({told})"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store({Span("probe", 0, _PIN_BYTES): {"w": torch.uint8}}, [torch.device("cuda", torch.cuda.current_device())])
    memory = store.memory()
    store.close()
    by_place = ", ".join(f"{monitor.readable(size)} {place}" for place, size in memory["w"].items())
    probe = f"asked for {monitor.readable(memory.asked)}, reserved {monitor.readable(memory.reserved)}: {by_place}"
    if "host_pinned" in memory["w"]:
        return f"works, by the driver's own allocation ({told}; a probe {probe})"
    return "; ".join([f"fails ({told}; a probe {probe})", *(str(warning.message) for warning in caught)])


def _device_memory(device: torch.device) -> str:
    left, total = torch.cuda.mem_get_info(device)
    return f"{monitor.readable(left)} of {monitor.readable(total)} left"


def _devices() -> Iterator[torch.device]:
    yield torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        yield torch.device("cuda", index)


def _backend(device: torch.device) -> str:
    name = f" {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    refused = [f"{other} not: {why_not}" for other, why_not in backends.candidates(device) if why_not is not None]
    chosen = backends.resolve("auto", device).name
    return f"{chosen}{name and ' on' + name}" + "".join(f"; {reason}" for reason in refused)
