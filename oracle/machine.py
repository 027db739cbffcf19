"""The machine a verdict was reached on, and which of its devices a candidate runs on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from . import __version__

Device = Literal["cuda", "cpu", "interpreter"]
DEVICES: tuple[Device, ...] = get_args(Device)

_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_GIB = 2**30


class DeviceUnavailable(RuntimeError):
    """The device asked for is not on this machine; the message says what to do."""


def environment() -> dict[str, Any]:
    """Describe this machine and the versions on it as plain JSON data.

    Returns:
        ``kernel_oracle``, ``python``, ``platform``, ``cpu`` (model name), ``cores`` (those this
        process may use), ``memory_GiB``, ``torch``, ``triton``, ``numpy`` (versions; None where
        not installed), ``cuda_runtime`` (of the torch build; None for a CPU build), ``gpus`` (one
        dict each: ``name``, ``memory_GiB``, ``compute_capability``, ``driver``) and
        ``triton_interpret`` (whether ``TRITON_INTERPRET`` is set in this process).
    """
    import torch

    return {
        "kernel_oracle": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB, 1),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "cuda_runtime": torch.version.cuda,
        "gpus": _gpus(),
        "triton_interpret": "TRITON_INTERPRET" in os.environ,
    }


def choose_device(requested: str | None, triton_candidate: bool) -> Device:
    """Choose where a candidate runs.

    Args:
        requested: one of :data:`DEVICES`, or None for cuda where there is one, else the
            interpreter for a candidate that uses ``triton.jit``, else cpu.
        triton_candidate: whether the candidate uses ``triton.jit``.

    Raises:
        DeviceUnavailable: if the requested device is not on this machine.
        ValueError: if there is no device of the requested name.
    """
    if requested is None:
        if _has_gpu():
            return "cuda"
        return "interpreter" if triton_candidate else "cpu"
    for device in DEVICES:
        if device == requested:
            _check_available(device)
            return device
    raise ValueError(f"there is no device {requested!r}; known are {', '.join(DEVICES)}")


def _check_available(device: Device) -> None:
    if device == "cuda" and not _has_gpu():
        raise DeviceUnavailable(
            f"device cuda was asked for, but {_why_no_gpu()}; use --device interpreter (Triton"
            " kernels) or --device cpu, or run on a machine with a GPU"
        )
    if device == "interpreter" and find_spec("triton") is None:
        raise DeviceUnavailable(
            "device interpreter was asked for, but triton is not installed here; install it with"
            " 'pip install triton', or use --device cpu for a candidate without Triton"
        )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _why_no_gpu() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} here is a build without CUDA"
    return f"torch {torch.__version__} finds no usable CUDA GPU here"


def _gpus() -> list[dict[str, Any]]:
    if not _has_gpu():
        return []
    import torch

    driver = _nvidia_driver()
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": gpu.name,
            "memory_GiB": round(gpu.total_memory / _GIB, 1),
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "driver": driver,
        }
        for gpu in every
    ]


def _nvidia_driver() -> str | None:
    """Return the version of the NVIDIA kernel module; None where the system does not show it."""
    if not _NVIDIA_DRIVER.exists():
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _NVIDIA_DRIVER.read_text())
    return found.group() if found else None


def _cpu_model() -> str:
    """Return the CPU's model name; its architecture where the system names no model."""
    if _CPUINFO.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.machine()


def _version(distribution: str) -> str | None:
    """Return an installed distribution's version without importing it.

    Importing triton here would fix the mode (compiled or interpreted) for the whole process.
    """
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
