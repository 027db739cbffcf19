"""What all tests share: hypothesis profiles, the report header, and the rule for tests on a GPU."""

from __future__ import annotations

import os
import platform
import signal
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from hypothesis import settings

# No deadline: the first call of a kernel compiles it, and a loaded machine is slow, not wrong.
settings.register_profile("local", deadline=None)
# On CI the same examples are drawn every time, and a failure prints how to replay it.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A shell that runs tests in the background lets them ignore SIGINT, and so would every process that
# a test starts in order to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> list[str]:
    packages = ("torch", "triton", "numpy", "hypothesis")
    versions = [f"{package} {_version(package)}" for package in packages]
    return [
        f"kernel-oracle: python {platform.python_version()}, {', '.join(versions)}",
        f"device: {_device()}",
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch.cuda finds none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device() -> str:
    if torch.cuda.is_available():
        return f"cuda, {torch.cuda.get_device_name()}"
    return f"cpu, {torch.get_num_threads()} threads (no CUDA GPU)"
