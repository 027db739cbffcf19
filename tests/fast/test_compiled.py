from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fast.ahead_of_time import Compiled, Request, compile_ahead

FUNCTIONS = ("concat_forward", "concat_backward", "static_forward", "static_backward")
SHAPE = (4, 8, 512, 2048, 128)

Lookup = Callable[[Request], Compiled]

REQUESTS = (
    *(Request(function, SHAPE) for function in FUNCTIONS),
    Request("static_backward", (1, 8, 1, 256, 128)),
    Request("static_backward", (32, 8, 2048, 8192, 128)),
    Request("static_forward_", (32, 8, 1, 2048, 128)),
    Request("static_backward", SHAPE, "float16"),
    Request("static_backward", (32, 8, 2048, 8192, 128), "float32"),
    Request("static_backward", SHAPE, "float32"),
    Request("concat_forward", SHAPE, "float32"),
    Request("concat_forward", SHAPE, arch=80),
    Request("concat_backward", SHAPE, arch=80),
    Request("static_forward", SHAPE, arch=100),
    Request("static_backward", SHAPE, arch=100),
)
SM90 = [request for request in REQUESTS if request.arch == 90]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled() -> Lookup:
    found = dict(zip(REQUESTS, compile_ahead(REQUESTS), strict=True))
    return found.__getitem__


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_no_operation_is_fused_and_no_subnormal_flushed(
    compiled: Lookup, request_: Request
) -> None:
    # None is written: two-sum must round each addition, and products are exact without.
    assert (compiled(request_).fused, compiled(request_).flushing) == (0, 0)


@pytest.mark.parametrize("request_", SM90, ids=str)
def test_nothing_spills_or_lies_in_local_memory(compiled: Lookup, request_: Request) -> None:
    made = compiled(request_)
    assert (made.stack_bytes, made.local_bytes, made.local_accesses) == (0, 0, 0), made


@pytest.mark.parametrize("request_", [r for r in SM90 if r.function != "static_forward_"], ids=str)
def test_the_copy_path_moves_16_bytes_at_a_time(compiled: Lookup, request_: Request) -> None:
    accesses = compiled(request_).accesses
    # The tile of a copying program is 8 KiB of each cache: four vectors for each of 128 threads.
    assert accesses["LDG.E.128"] >= 8
    assert accesses["STG.E.128"] >= 8


@pytest.mark.parametrize("function", ["concat_forward", "static_forward"])
def test_keys_are_rotated_16_bytes_at_a_time(compiled: Lookup, function: str) -> None:
    accesses = compiled(Request(function, SHAPE)).accesses
    # Besides the copies: two halves of keys, values, cos and sin, and of both results.
    assert accesses["LDG.E.128"] >= 8 + 8
    assert accesses["STG.E.128"] >= 8 + 4
