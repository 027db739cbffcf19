"""The catalogue of variants: wrong ones are rejected and told apart, legal ones accepted."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

import oracle
from oracle import certified
from oracle.comparison import compare
from oracle.definition import Case, Operator, Variant
from oracle.operators.kv_rope import variants
from oracle.rounding import format_of

CATALOGUE: Mapping[str, tuple[Variant, ...]] = {
    "kv_rope.concat.forward": variants.concat_forward_variants(),
    "kv_rope.concat.backward": variants.concat_backward_variants(),
    "kv_rope.static.forward": variants.static_forward_variants(),
    "kv_rope.static.backward": variants.static_backward_variants(),
}
DTYPES = ("bfloat16", "float16", "float32")

every_operator = pytest.mark.parametrize(
    "operator", [oracle.find_operator(name) for name in CATALOGUE], ids=lambda op: op.id
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def wrong(operator: Operator) -> tuple[Variant, ...]:
    return tuple(variant for variant in CATALOGUE[operator.id] if not variant.legal)


def legal(operator: Operator) -> tuple[Variant, ...]:
    return tuple(variant for variant in CATALOGUE[operator.id] if variant.legal)


def named(operator_id: str, name: str) -> Variant:
    return next(variant for variant in CATALOGUE[operator_id] if variant.name == name)


def outputs_of(
    operator: Operator, variant: Variant, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    outputs = variant.compute([inputs[spec.name] for spec in operator.inputs])
    return {spec.name: out for spec, out in zip(operator.outputs, outputs, strict=True)}


def resized(operator: Operator, case: Case, sizes: tuple[int, ...], **changes: str) -> Case:
    """Return the case with (B, H, N, rows besides the new ones, D) and other changes."""
    batch, heads, new, rows, width = sizes
    values = {
        "batch_size": batch,
        "num_kv_heads": heads,
        "new_seq_len": new,
        "current_seq_len": rows,
        "max_seq_len": rows + new,
        "head_dim": width,
    }
    free = [axis.name for axis in operator.axes if not axis.sum_of]
    return replace(case, sizes={axis: values[axis] for axis in free}, **changes)


# The catalogue itself


@every_operator
def test_names_are_words_and_unique(operator: Operator) -> None:
    names = [variant.name for variant in CATALOGUE[operator.id]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)


@every_operator
def test_descriptions_are_one_sentence(operator: Operator) -> None:
    for variant in CATALOGUE[operator.id]:
        assert variant.description.endswith("."), variant.name
        sentence = variant.description.replace("...", "")
        assert not re.search(r"\.\s", sentence), variant.name


@every_operator
def test_there_are_enough_of_each(operator: Operator) -> None:
    """Issue 2 asks for 40 and 30 kinds; that they are distinct is tested below."""
    assert len(wrong(operator)) >= (40 if operator.id.endswith("backward") else 30)
    assert len(legal(operator)) >= 15


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small: threads that meet after each operation lose more than they win."""
    with certified.one_thread():
        yield


# Everywhere in the general domain

SIZES = {
    "usual": (2, 3, 5, 7, 8),
    "all-one": (1, 1, 1, 1, 2),
    "no-batch": (0, 2, 3, 4, 4),
    "no-new-tokens": (2, 2, 0, 3, 4),
    "nothing-cached": (2, 3, 4, 0, 6),
    "nothing-at-all": (2, 1, 0, 0, 2),
    "above-tiles": (17, 2, 18, 20, 2),
}


def random_inputs(
    operator: Operator, sizes: tuple[int, ...], dtype: torch.dtype, ones: tuple[str, ...] = ()
) -> list[torch.Tensor]:
    """Return inputs in call order; those named in ``ones`` have one batch row."""
    generator = torch.Generator().manual_seed(0)
    case = resized(operator, operator.probes[0], sizes)
    full = operator.all_sizes(case.sizes)
    inputs = []
    for spec in operator.inputs:
        shape = list(operator.shape(spec, case.sizes))
        if spec.indexes is not None:
            inputs.append(torch.randperm(full[spec.indexes], generator=generator)[: shape[0]])
            continue
        if spec.name in ones:
            shape[0] = 1
        inputs.append(torch.randn(shape, generator=generator).to(dtype))
    return inputs


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in transposed memory with gaps, inside a larger buffer."""
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 3)
    cut = wide[..., 3::2]
    cut.copy_(tensor)
    if tensor.dim() < 3:
        return cut
    return cut.transpose(0, 2).contiguous().transpose(0, 2)


@every_operator
@every_dtype
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_variant_runs_and_returns_fresh_contiguous_outputs(
    operator: Operator, dtype: str, sizes: tuple[int, ...]
) -> None:
    inputs = random_inputs(operator, sizes, format_of(dtype).dtype)
    full = resized(operator, operator.probes[0], sizes).sizes
    shapes = [operator.shape(spec, full) for spec in operator.outputs]
    laid_out = [strided(tensor) for tensor in inputs]
    before = [tensor.clone() for tensor in laid_out]
    memory = {tensor.untyped_storage().data_ptr() for tensor in laid_out if tensor.numel()}
    for variant in CATALOGUE[operator.id]:
        outputs = variant.compute(laid_out)
        assert [tuple(out.shape) for out in outputs] == shapes, variant.name
        assert all(out.dtype == inputs[0].dtype for out in outputs), variant.name
        assert all(out.is_contiguous() for out in outputs), variant.name
        places = [out.untyped_storage().data_ptr() for out in outputs if out.numel()]
        assert len(set(places)) == len(places), f"{variant.name}: outputs share memory"
        assert not memory & set(places), f"{variant.name}: an output is an input's memory"
        assert all(map(torch.equal, laid_out, before)), f"{variant.name} changes an input"


@every_operator
def test_strides_do_not_matter(operator: Operator) -> None:
    inputs = random_inputs(operator, SIZES["usual"], torch.bfloat16)
    laid_out = [strided(tensor) for tensor in inputs]
    for variant in CATALOGUE[operator.id]:
        plain, other = variant.compute(inputs), variant.compute(laid_out)
        assert digest(plain) == digest(other), variant.name


@pytest.mark.parametrize("ones", [("cos", "sin"), ("cos",), ("sin",)], ids="-".join)
@pytest.mark.parametrize("operator_id", ["kv_rope.concat.forward", "kv_rope.static.forward"])
def test_tables_of_one_row_serve_the_whole_batch(operator_id: str, ones: tuple[str, ...]) -> None:
    operator = oracle.find_operator(operator_id)
    inputs = random_inputs(operator, SIZES["usual"], torch.bfloat16, ones)
    expanded = [
        tensor.expand(2, *tensor.shape[1:]) if spec.name in ones else tensor
        for spec, tensor in zip(operator.inputs, inputs, strict=True)
    ]
    # These two read what a batch of tables holds, so how many rows there are changes them.
    by_batch = {"tables-summed-over-the-batch", "tables-read-token-major"}
    for variant in CATALOGUE[operator.id]:
        outputs = variant.compute(inputs)
        if variant.name not in by_batch:
            assert digest(outputs) == digest(variant.compute(expanded)), variant.name


# The wrong ones are rejected and told apart


def digest(outputs: Sequence[torch.Tensor]) -> bytes:
    """Return a digest of the outputs' bits."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in outputs:
        state.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return state.digest()


def by_size(operator: Operator, dtype: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the inputs of the official probes, drawn in a type, the small ones first."""

    def elements(case: Case) -> int:
        shapes = (operator.case_shape(spec, case) for spec in operator.inputs)
        return sum(torch.Size(shape).numel() for shape in shapes)

    for probe in sorted(operator.probes, key=elements):
        case = replace(probe, dtype=dtype, layouts={})
        yield dict(oracle.make_inputs(case, 0, operator=operator))


def small_cases(operator: Operator, dtype: str) -> Iterator[Case]:
    """Yield a small case of every kind of input, and two with sizes above common tiles."""
    for kind in sorted(operator.input_kinds):
        probe = replace(operator.probes[0], name=f"small-{kind}", kind=kind, layouts={})
        yield resized(operator, probe, (2, 5, 4, 7, 16), dtype=dtype)
    probe = next(case for case in operator.probes if case.name == "long-cache")
    yield resized(operator, probe, (17, 1, 18, 20, 2), dtype=dtype)
    yield resized(operator, probe, (1, 1, 3, 1030, 2), dtype=dtype)


@every_operator
@every_dtype
def test_every_wrong_variant_is_rejected(operator: Operator, dtype: str) -> None:
    accepted = list(wrong(operator))
    for case in small_cases(operator, dtype):
        inputs = dict(oracle.make_inputs(case, 0, operator=operator))
        # The right parts, of which every wrong variant has all but one: equal bits show no fault.
        right = outputs_of(operator, named(operator.id, "float32"), inputs)
        accepted = [v for v in accepted if not is_rejected(operator, v, inputs, right)]
    assert [variant.name for variant in accepted] == []


def is_rejected(
    operator: Operator,
    variant: Variant,
    inputs: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
) -> bool:
    outputs = outputs_of(operator, variant, inputs)
    if digest(list(outputs.values())) == digest(list(right.values())):
        return False
    return compare(operator, inputs, outputs, "stored_intermediates").status != "passed"


@every_operator
def test_no_two_wrong_variants_are_equal_on_all_probes(operator: Operator) -> None:
    alike: list[list[Variant]] = [list(wrong(operator))]
    for inputs in by_size(operator, "bfloat16"):
        alike = [part for group in alike for part in split(operator, group, inputs)]
        if not alike:
            break
    assert [[variant.name for variant in group] for group in alike] == []


def split(
    operator: Operator, group: Sequence[Variant], inputs: Mapping[str, torch.Tensor]
) -> list[list[Variant]]:
    """Split a group of variants by their outputs, and drop those that are alone."""
    parts: dict[bytes, list[Variant]] = {}
    for variant in group:
        outputs = outputs_of(operator, variant, inputs)
        parts.setdefault(digest(list(outputs.values())), []).append(variant)
    return [part for part in parts.values() if len(part) > 1]


# The legal ones are accepted


@every_operator
def test_legal_variants_are_accepted_on_crafted_inputs(operator: Operator) -> None:
    dtypes = itertools.cycle(DTYPES)
    # Where the rows lie makes no difference to the arithmetic.
    kinds = [kind for kind in sorted(operator.input_kinds) if not kind.startswith("positions_")]
    for seed, kind in enumerate(kinds):
        probe = replace(operator.probes[0], name=f"legal-{kind}", kind=kind, layouts={})
        case = resized(operator, probe, (2, 5, 3, 4, 6), dtype=next(dtypes))
        inputs = dict(oracle.make_inputs(case, seed, operator=operator))
        # Every variant gets every second kind, which spares half the time.
        for variant in legal(operator)[seed % 2 :: 2]:
            outputs = outputs_of(operator, variant, inputs)
            comparison = compare(operator, inputs, outputs, "stored_intermediates")
            assert comparison.status == "passed", (variant.name, kind, case.dtype)


@every_operator
@every_dtype
def test_legal_variants_are_accepted_on_random_inputs(operator: Operator, dtype: str) -> None:
    probe = next(case for case in operator.probes if case.random)
    case = resized(operator, probe, (1, 6, 4, 3, 16), dtype=dtype)
    inputs = dict(oracle.make_inputs(case, 0, operator=operator))
    for variant in legal(operator):
        outputs = outputs_of(operator, variant, inputs)
        comparison = compare(operator, inputs, outputs, "stored_intermediates")
        assert comparison.status == "passed", variant.name


@every_operator
def test_the_legal_variant_that_says_so_is_correctly_rounded(operator: Operator) -> None:
    variant = named(operator.id, "correctly-rounded")
    for dtype, kind in itertools.product(DTYPES, ("near_ties", "cancellation", "ties")):
        probe = replace(operator.probes[0], kind=kind, layouts={})
        case = resized(operator, probe, (2, 4, 3, 4, 16), dtype=dtype)
        inputs = dict(oracle.make_inputs(case, 0, operator=operator))
        outputs = outputs_of(operator, variant, inputs)
        assert compare(operator, inputs, outputs, "correctly_rounded").status == "passed"


# What the names say, on numbers worked out by hand


def turned_keys(name: str) -> list[float]:
    """Rotate (0, ..., 7) by cos 0 and sin 1 with a variant of the concatenating forward."""
    key = torch.arange(8, dtype=torch.bfloat16).view(1, 1, 1, 8)
    empty = key[:, :, :0]
    zero, one = torch.zeros_like(key), torch.ones_like(key)
    keys, _ = named("kv_rope.concat.forward", name).compute((key, key, zero, one, empty, empty))
    return keys.flatten().tolist()


def test_pairings_and_signs() -> None:
    assert turned_keys("float32") == [-4, -5, -6, -7, 0, 1, 2, 3]
    assert turned_keys("interleaved-pairing") == [-1, 0, -3, 2, -5, 4, -7, 6]
    assert turned_keys("minus-on-the-wrong-half") == [4, 5, 6, 7, 0, -1, -2, -3]
    assert turned_keys("minus-missing") == [4, 5, 6, 7, 0, 1, 2, 3]
    assert turned_keys("minus-on-both-halves") == [-4, -5, -6, -7, 0, -1, -2, -3]
    assert turned_keys("halves-not-swapped") == [0, -1, -2, -3, 4, 5, 6, 7]
    assert turned_keys("cos-and-sin-swapped") == [0, 1, 2, 3, 4, 5, 6, 7]
    assert turned_keys("interleaved-result") == [-4, 0, -5, 1, -6, 2, -7, 3]


def turned_gradient(name: str) -> list[float]:
    """Rotate the gradient (0, ..., 7) back by cos 0 and sin 1 with the concatenating backward."""
    gradient = torch.arange(8, dtype=torch.bfloat16).view(1, 1, 1, 8)
    zero, one = torch.zeros_like(gradient), torch.ones_like(gradient)
    variant = named("kv_rope.concat.backward", name)
    return variant.compute((gradient, gradient, zero, zero, one))[0].flatten().tolist()


def test_pairings_and_signs_backward() -> None:
    assert turned_gradient("float32") == [4, 5, 6, 7, 0, -1, -2, -3]
    assert turned_gradient("interleaved-pairing") == [1, 0, 3, -2, 5, -4, 7, -6]
    assert turned_gradient("rotated-forward-instead-of-back") == [-4, -5, -6, -7, 0, 1, 2, 3]
    assert turned_gradient("halves-not-swapped") == [0, 1, 2, 3, -4, -5, -6, -7]


def head_sum(name: str, gradients: Sequence[float], dtype: torch.dtype) -> float:
    """Return grad_cos of a variant for one gradient per head and keys of one."""
    gradient = torch.tensor(gradients, dtype=dtype).view(1, -1, 1, 1).expand(-1, -1, 1, 2)
    table = torch.ones(1, 1, 1, 2, dtype=dtype)
    key = torch.ones_like(gradient)
    variant = named("kv_rope.concat.backward", name)
    return float(variant.compute((gradient, gradient, key, table, table))[2].flatten()[0])


def test_sums_over_heads() -> None:
    three = [1.0, 16.0, 256.0]
    assert head_sum("float32", three, torch.float32) == 273
    assert head_sum("head-mean-instead-of-sum", three, torch.float32) == 91
    assert head_sum("head-0-instead-of-the-sum", three, torch.float32) == 1
    assert head_sum("last-head-instead-of-the-sum", three, torch.float32) == 256
    assert head_sum("last-head-missing-from-the-sum", three, torch.float32) == 17
    assert head_sum("odd-heads-missing-from-the-sum", three, torch.float32) == 257
    assert head_sum("first-head-counted-twice", three, torch.float32) == 274
    assert head_sum("small-heads-skipped", three, torch.float32) == 272


@every_dtype
def test_a_low_precision_sum_absorbs_small_heads(dtype: str) -> None:
    many = [256.0] + 31 * [1.0]
    assert head_sum("float32", many, format_of(dtype).dtype) == (
        288 if dtype == "bfloat16" else 287
    )
    assert head_sum("head-sum-in-bfloat16", many, format_of(dtype).dtype) == 256
    assert head_sum("head-sum-in-bfloat16-reversed", many, format_of(dtype).dtype) == 288


def stored_sum(name: str, total: float, dtype: torch.dtype) -> float:
    """Return what a variant stores for a number that is ``total`` before rounding.

    The number is the sum of two heads: itself rounded down to the type, and the rest.
    """
    spacing = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    first = total // spacing * spacing
    return head_sum(name, [first, total - first], dtype)


@every_dtype
def test_roundings_go_to_the_neighbour_that_their_names_say(dtype: str) -> None:
    """In float32 the neighbours are those of TF32, which has float16's spacing around one."""
    storage = format_of(dtype).dtype
    ulp = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    tie, odd_tie, above_tie = 1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 5 * ulp / 8
    table = {
        "truncated-instead-of-rounded": (1, 1 + ulp, 1),
        "rounded-away-from-zero": (1 + ulp, 1 + 2 * ulp, 1 + ulp),
        "ties-away-from-zero": (1 + ulp, 1 + 2 * ulp, 1 + ulp),
        "ties-to-zero": (1, 1 + ulp, 1 + ulp),
        "ties-up": (1 + ulp, 1 + 2 * ulp, 1 + ulp),
        "rounded-twice": (1, 1 + 2 * ulp, 1),
        "rounded-down": (1, 1 + ulp, 1),
    }
    for name, expected in table.items():
        for total, stored in zip((tie, odd_tie, above_tie), expected, strict=True):
            assert stored_sum(name, total, storage) == stored, (name, total)


def test_ties_of_negative_numbers() -> None:
    tie = -1 - 2.0**-8
    assert stored_sum("ties-up", tie, torch.bfloat16) == -1
    assert stored_sum("ties-away-from-zero", tie, torch.bfloat16) == -1 - 2.0**-7
    assert stored_sum("rounded-down", tie, torch.bfloat16) == -1 - 2.0**-7
    assert stored_sum("truncated-instead-of-rounded", tie, torch.bfloat16) == -1


@pytest.mark.parametrize(
    ("name", "given", "copied"),
    [
        ("nan-payload-lost", 0xFF91, 0x7FC0),
        ("nan-sign-lost", 0xFF91, 0x7F91),
        ("signalling-nan-quieted", 0xFF91, 0xFFD1),
        ("nan-as-zero", 0x7F91, 0x0000),
        ("infinities-clamped", 0xFF80, 0xFF7F),
        ("flushed-subnormals", 0x8001, 0x8000),
        ("negative-zero-lost", 0x8000, 0x0000),
        ("last-bit-lost", 0x3F81, 0x3F80),
        ("float32", 0xFF91, 0xFF91),
    ],
)
def test_copies_change_the_bits_that_their_names_say(name: str, given: int, copied: int) -> None:
    bits = torch.tensor(given - (given >> 15 << 16), dtype=torch.int16)
    value = bits.view(torch.bfloat16).expand(1, 1, 1, 2)
    one = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)
    variant = named("kv_rope.concat.forward", name)
    _, values = variant.compute((one, value, one, one, one, value))
    found = {int(pattern) & 0xFFFF for pattern in values.view(torch.int16).flatten()}
    assert found == {copied}


# Where a fault cannot show, there is none


def test_faults_vanish_where_they_cannot_show() -> None:
    operator = oracle.find_operator("kv_rope.static.backward")
    inputs = random_inputs(operator, (1, 1, 3, 2, 8), torch.bfloat16)
    inputs[-1] = torch.arange(3)
    right = digest(named(operator.id, "float32").compute(inputs))
    one_of_each = (
        "positions-assumed-arange",
        "positions-assumed-ascending",
        "positions-assumed-consecutive",
        "positions-in-8-bits",
        "tables-of-batch-0",
        "heads-in-groups-of-two",
        "head-mean-instead-of-sum",
        "summed-over-the-batch-too",
        "only-batch-0-cleared",
        "partial-tile-of-tokens-missing",
        "batches-from-16-missing",
    )
    for name in one_of_each:
        assert digest(named(operator.id, name).compute(inputs)) == right, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@every_operator
@every_dtype
def test_wrong_variants_are_the_same_on_a_gpu(operator: Operator, dtype: str) -> None:
    inputs = random_inputs(operator, SIZES["usual"], format_of(dtype).dtype)
    on_gpu = [tensor.cuda() for tensor in inputs]
    for variant in wrong(operator):
        outputs = [tensor.cpu() for tensor in variant.compute(on_gpu)]
        assert digest(outputs) == digest(variant.compute(inputs)), variant.name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@every_operator
@every_dtype
def test_legal_variants_are_accepted_on_a_gpu(operator: Operator, dtype: str) -> None:
    probe = next(case for case in operator.probes if case.random)
    case = resized(operator, probe, (2, 5, 4, 3, 16), dtype=dtype)
    inputs = {k: v.cuda() for k, v in oracle.make_inputs(case, 0, operator=operator).items()}
    for variant in legal(operator):
        outputs = outputs_of(operator, variant, inputs)
        comparison = compare(operator, inputs, outputs, "stored_intermediates")
        assert comparison.status == "passed", variant.name
