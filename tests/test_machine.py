from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from oracle import __version__, machine
from oracle.machine import DeviceUnavailable, choose_device, environment


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: gpu)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_environment_is_plain_json_and_names_the_versions_that_run() -> None:
    found = environment()

    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["kernel_oracle"] == __version__
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert found["cores"] >= 1
    assert found["memory_GiB"] > 0
    assert found["cpu"]


@pytest.mark.usefixtures("without_gpu")
def test_no_gpu_is_an_empty_list() -> None:
    assert environment()["gpus"] == []


@pytest.mark.usefixtures("with_gpu")
def test_every_gpu_is_described_with_its_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release\n"
    )
    monkeypatch.setattr(machine, "_NVIDIA_DRIVER", driver)
    gpu = {
        "name": "NVIDIA H200",
        "memory_GiB": 150.0,
        "compute_capability": "9.0",
        "driver": "580.82.07",
    }

    assert environment()["gpus"] == [gpu, gpu]


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("text", [None, "no version in here"])
def test_a_driver_that_the_system_does_not_show_is_null(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    driver = tmp_path / "version"
    if text is not None:
        driver.write_text(text)
    monkeypatch.setattr(machine, "_NVIDIA_DRIVER", driver)

    assert environment()["gpus"][0]["driver"] is None


def test_the_cpu_model_is_read_from_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n\nmodel name\t: Other\n")
    monkeypatch.setattr(machine, "_CPUINFO", info)

    assert environment()["cpu"] == "Some CPU @ 3 GHz"


@pytest.mark.parametrize("text", [None, "processor : 0\n"])
def test_a_cpu_without_a_model_name_is_named_by_its_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    info = tmp_path / "cpuinfo"
    if text is not None:
        info.write_text(text)
    monkeypatch.setattr(machine, "_CPUINFO", info)
    monkeypatch.setattr(machine.platform, "machine", lambda: "riscv64")

    assert environment()["cpu"] == "riscv64"


@pytest.mark.parametrize("value", ["0", "1"])
def test_triton_interpret_is_reported_when_set_to_anything(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)

    assert environment()["triton_interpret"] is True


def test_triton_interpret_is_reported_when_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    assert environment()["triton_interpret"] is False


def test_what_is_not_installed_has_no_version() -> None:
    assert machine._version("kernel-oracle-that-nobody-installs") is None


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("triton_candidate", [False, True])
def test_a_gpu_is_used_where_there_is_one(triton_candidate: bool) -> None:
    assert choose_device(None, triton_candidate) == "cuda"


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_triton_runs_in_the_interpreter_and_all_else_on_the_cpu() -> None:
    assert choose_device(None, triton_candidate=True) == "interpreter"
    assert choose_device(None, triton_candidate=False) == "cpu"


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("device", machine.DEVICES)
@pytest.mark.parametrize("triton_candidate", [False, True])
def test_what_was_asked_for_is_taken(device: str, triton_candidate: bool) -> None:
    assert choose_device(device, triton_candidate) == device


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("built_for", "why"),
    [(None, "is a build without CUDA"), ("13.0", "finds no usable CUDA GPU")],
)
def test_cuda_without_a_gpu_is_refused_with_the_reason_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, why: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)

    with pytest.raises(DeviceUnavailable, match=f"cuda.*{why}.*--device interpreter"):
        choose_device("cuda", triton_candidate=True)


def test_the_interpreter_without_triton_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda _name: None)

    with pytest.raises(DeviceUnavailable, match=r"triton is not installed here; .*pip install"):
        choose_device("interpreter", triton_candidate=True)


def test_a_device_of_another_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="no device 'gpu'; known are cuda, cpu, interpreter"):
        choose_device("gpu", triton_candidate=False)
