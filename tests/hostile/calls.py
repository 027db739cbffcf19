"""Candidates that misbehave when they are called. Each takes any number of tensors."""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch


def raises(*_tensors: torch.Tensor) -> None:
    raise ValueError("the kernel does not like\nthese sizes")


def raises_at_length(*_tensors: torch.Tensor) -> None:
    raise ValueError("x" * 1_000_000)


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises_without_text(*_tensors: torch.Tensor) -> None:
    raise BadText


def raises_base_exception(*_tensors: torch.Tensor) -> None:
    raise BaseException("not even an Exception")  # noqa: TRY002 - the point of it


def raises_keyboard_interrupt(*_tensors: torch.Tensor) -> None:
    raise KeyboardInterrupt


def calls_sys_exit(*_tensors: torch.Tensor) -> None:
    sys.exit(5)


def recurses_for_ever(*tensors: torch.Tensor) -> Any:
    return recurses_for_ever(*tensors)


def allocates_too_much(*_tensors: torch.Tensor) -> torch.Tensor:
    return torch.empty(2**60)


def allocates_too_much_for_numpy(*_tensors: torch.Tensor) -> Any:
    return np.empty(2**58)


def returns_none(*_tensors: torch.Tensor) -> None:
    return None


def returns_a_list(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensors[0].clone()]


def returns_an_array(*tensors: torch.Tensor) -> Any:
    return tensors[0].float().numpy()


def returns_a_tuple_with_none(*tensors: torch.Tensor) -> Any:
    return tensors[0].clone(), None


def returns_many_items(*tensors: torch.Tensor) -> Any:
    return (tensors[0],) * 100_000


def returns_float32(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[0].float()


def returns_another_shape(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[0][None].clone()


def returns_a_sparse_tensor(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[0].to_sparse()


def returns_a_tensor_without_memory(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensors[0], device="meta")


def returns_a_tensor_of_torch_func(*tensors: torch.Tensor) -> torch.Tensor:
    seen = []

    def remember(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x.sum()

    torch.func.vmap(remember)(tensors[0])
    return seen[0]


class Liar(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("nothing may be asked of me")


def returns_a_subclass(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.Tensor.as_subclass(tensors[0].clone(), Liar)


def returns_its_input(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[0]


def returns_uninitialised_memory(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensors[0])


def writes_its_input(*tensors: torch.Tensor) -> torch.Tensor:
    tensors[0].view(-1)[3] = 77
    return tensors[0].clone()


_BUFFERS: dict[torch.Size, torch.Tensor] = {}


def returns_one_buffer_always(*tensors: torch.Tensor) -> torch.Tensor:
    if tensors[0].shape not in _BUFFERS:
        _BUFFERS[tensors[0].shape] = tensors[0].clone()
    buffer = _BUFFERS[tensors[0].shape]
    buffer += 1
    return buffer


def prints_two_gigabytes(*tensors: torch.Tensor) -> torch.Tensor:
    os.write(1, b"first line\n")
    block = b"0123456789abcde\n" * 2**16
    for _ in range(2**11):
        os.write(1, block)
    os.write(2, b"last line\n")
    return tensors[0].clone()


def prints_and_crashes(*_tensors: torch.Tensor) -> None:
    print("about to crash")  # noqa: T201 - the point of it
    ctypes.string_at(0)


def segfaults(*_tensors: torch.Tensor) -> None:
    ctypes.string_at(0)


def aborts(*_tensors: torch.Tensor) -> None:
    os.abort()


def kills_itself(*_tensors: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exits_with_0(*_tensors: torch.Tensor) -> None:
    ctypes.CDLL(None)._exit(0)


def exits_with_3(*_tensors: torch.Tensor) -> None:
    os._exit(3)


def loops_for_ever(*_tensors: torch.Tensor) -> None:
    while True:
        pass


def sleeps_in_c(*_tensors: torch.Tensor) -> None:
    ctypes.CDLL(None).sleep(1000)


def ignores_signals_and_sleeps(*_tensors: torch.Tensor) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def interrupts_its_group(*tensors: torch.Tensor) -> torch.Tensor:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(0, signal.SIGINT)
    return tensors[0].clone()


def kills_its_parent(*_tensors: torch.Tensor) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def closes_all_descriptors(*tensors: torch.Tensor) -> torch.Tensor:
    os.closerange(0, 4096)
    return tensors[0].clone()


def closes_all_descriptors_and_sleeps(*_tensors: torch.Tensor) -> None:
    os.closerange(0, 4096)
    time.sleep(1000)


def _descriptors() -> list[int]:
    return [int(entry.name) for entry in pathlib.Path("/proc/self/fd").iterdir()]


def _write_to_all(data: bytes) -> None:
    for descriptor in _descriptors():
        try:
            os.write(descriptor, data)
        except OSError:
            continue


def writes_garbage_to_all_descriptors(*tensors: torch.Tensor) -> torch.Tensor:
    _write_to_all(b"garbage\xff")
    return tensors[0].clone()


def writes_nested_json_to_all_descriptors(*tensors: torch.Tensor) -> torch.Tensor:
    _write_to_all(b"[" * 60_000)
    return tensors[0].clone()


def writes_a_number_to_all_descriptors(*tensors: torch.Tensor) -> torch.Tensor:
    _write_to_all(b"7")
    return tensors[0].clone()


def writes_a_broken_reply_to_all_descriptors(*tensors: torch.Tensor) -> torch.Tensor:
    _write_to_all(b'{"reply": {"status": "returned"}}')
    return tensors[0].clone()


def sends_too_much(*tensors: torch.Tensor) -> torch.Tensor:
    for descriptor in _descriptors():
        try:
            channel = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        channel.send(b" " * 150_000)
    return tensors[0].clone()


def changes_the_current_folder(*tensors: torch.Tensor) -> torch.Tensor:
    os.chdir("/")
    return tensors[0].clone()


def cuts_the_judges_files_short(*tensors: torch.Tensor) -> torch.Tensor:
    server = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
    judge = server.rpartition(")")[2].split()[1]
    for entry in pathlib.Path(f"/proc/{judge}/fd").iterdir():
        if str(entry.readlink()).startswith("/memfd:kernel-oracle"):
            os.truncate(entry, 0)
    return tensors[0].clone()


def replaces_its_streams(*tensors: torch.Tensor) -> torch.Tensor:
    sys.stdout = None  # type: ignore[assignment]
    sys.stderr.close()
    return tensors[0].clone()


def changes_torchs_defaults(*tensors: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    return tensors[0].clone()


def returns_twice(*tensors: torch.Tensor) -> torch.Tensor:
    os.fork()
    return tensors[0].clone()


def leaves_a_child(*tensors: torch.Tensor) -> torch.Tensor:
    subprocess.Popen(["sleep", "1000"])
    return tensors[0].clone()


def leaves_a_daemon(*tensors: torch.Tensor) -> torch.Tensor:
    between = os.fork()
    if between == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)
    os.waitpid(between, 0)
    return tensors[0].clone()


def leaves_a_child_and_exits(*_tensors: torch.Tensor) -> None:
    # The child keeps all descriptors open.
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)


def leaves_a_chatty_child(*tensors: torch.Tensor) -> torch.Tensor:
    subprocess.Popen(["yes"])
    return tensors[0].clone()
