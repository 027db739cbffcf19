from __future__ import annotations

import pytest

import oracle
from oracle.verdict import Verdict

FUNCTIONS = ("concat_forward", "concat_backward", "static_forward", "static_backward")

# Of the official probes those that the others do not imply; all of them take the interpreter
# several minutes. The CPU fallback is judged on all.
OFFICIAL = {
    "concat_forward": "halves,random,near-ties,subnormal,huge,special-copies,special-rotations",
    "concat_backward": "random,special-rotations,head-cancellation",
    "static_forward": "shuffled,random,subnormal,huge,overwritten-nan,special-rotations,last-row",
    "static_backward": "shuffled,long-cache,subnormal,huge,cleared-nan,special-rotations,head-ties",
}
GENERAL = {
    "concat_forward": "one-pair,head-dim-10.float32,all-transposed,all-every-second-column.float16,"
    "shared-cos,nothing-cached,no-batch,no-tokens-at-all",
    "concat_backward": "one-pair,head-dim-10.float32,all-transposed,many-head-absorption.float32,"
    "odd-head-ties.float16,no-new-tokens,no-batch",
    "static_forward": "one-pair,head-dim-10.float32,all-transposed,every-second-position,"
    "shared-sin,all-unaligned.float16,no-new-tokens",
    "static_backward": "one-pair,head-dim-10.float32,all-transposed,every-second-position,"
    "odd-head-cancellation,all-expanded-heads.float16,no-new-tokens",
}


def operator_id(function: str) -> str:
    return f"kv_rope.{function.rstrip('_').replace('_', '.')}"


def judge(function: str, *, device: str, cases: str, domain: str, style: str = "return") -> Verdict:
    return oracle.verify(
        f"fast.kv_rope:{function}",
        operator_id(function),
        cases=cases,
        domain=domain,
        style=style,  # type: ignore[arg-type]
        contract="correctly_rounded",
        device=device,
        isolate=device != "cpu",
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_kernels_are_correctly_rounded_on_official_probes(function: str) -> None:
    verdict = judge(function, device="interpreter", cases=OFFICIAL[function], domain="official")
    verdict.raise_for_failure()
    assert verdict.grade == "correctly_rounded"


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_kernels_are_correctly_rounded_in_all_types_sizes_and_layouts(function: str) -> None:
    verdict = judge(function, device="interpreter", cases=GENERAL[function], domain="general")
    verdict.raise_for_failure()
    assert verdict.grade == "correctly_rounded"


def test_the_kernel_in_place_writes_the_new_rows_and_nothing_else() -> None:
    verdict = judge(
        "static_forward_",
        device="interpreter",
        cases="shuffled,special-copies,last-row",
        domain="official",
        style="inplace",
    )
    verdict.raise_for_failure()
    assert verdict.grade == "correctly_rounded"


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_kernels_are_correctly_rounded_on_a_gpu(function: str) -> None:
    verdict = judge(function, device="cuda", cases="all", domain="general")
    verdict.raise_for_failure()
    assert verdict.grade == "correctly_rounded"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_plain_torch_is_correctly_rounded_on_all_official_probes(function: str) -> None:
    verdict = judge(function, device="cpu", cases="probes", domain="official")
    verdict.raise_for_failure()
    assert verdict.grade == "correctly_rounded"


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_plain_torch_is_correctly_rounded_in_all_types_sizes_and_layouts(function: str) -> None:
    verdict = judge(function, device="cpu", cases=GENERAL[function], domain="general")
    verdict.raise_for_failure()
    assert verdict.grade == "correctly_rounded"
