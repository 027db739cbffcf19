"""Inputs: the same bits on every call, in any chunks, on any machine; never a zero."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from hashlib import sha256
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from oracle import inputs as inputs_module
from oracle.definition import Case, Operator
from oracle.inputs import (
    TABLES_SHA256,
    CorruptTables,
    Draws,
    as_tensor,
    bits_type,
    encode,
    fill_inputs,
    make_inputs,
    tables,
)
from oracle.rounding import format_of
from tests import rational
from tests.rational import round_to_bits

OPERATORS = tuple(oracle.all_operators().values())
FORWARD = oracle.find_operator("kv_rope.concat.forward")
BACKWARD = oracle.find_operator("kv_rope.static.backward")
CASE = BACKWARD.case("random")

every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.id)
every_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    whole = sha256()
    for name, tensor in tensors.items():
        whole.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        whole.update(bytes_of(tensor))
    return whole.hexdigest()


# The generator


def splitmix64(key: int, place: int) -> int:
    """Word ``place`` of a stream, in Python's integers (Steele, Lea, Flood, OOPSLA 2014)."""
    mask = 2**64 - 1
    z = (key + (place + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_words_are_splitmix64_as_published() -> None:
    # The first outputs for seed 1234567, from the authors' reference program.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567, place) for place in range(3)] == published
    draws = Draws(CASE, 5)
    key = draws._key("cos")
    assert draws.words("cos", 0, 40).tolist() == [splitmix64(key, place) for place in range(40)]
    far = 2**40
    assert draws.words("cos", far, 3).tolist() == [splitmix64(key, far + n) for n in range(3)]


@given(cuts=st.lists(st.integers(0, 50), max_size=6))
def test_words_taken_in_pieces_are_the_words_taken_at_once(cuts: list[int]) -> None:
    draws = Draws(CASE, 0)
    pieces, start = [np.zeros(0, dtype=np.uint64)], 7
    for count in cuts:
        pieces.append(draws.words("x", start, count))
        start += count
    assert np.array_equal(np.concatenate(pieces), draws.words("x", 7, sum(cuts)))


@every_dtype
@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 4093])
def test_a_table_filled_in_chunks_of_any_size_has_the_same_bits(
    dtype: str, chunk: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsigned = np.dtype(f"u{format_of(dtype).width}")
    whole, pieces = np.zeros((2, size), unsigned), np.zeros(2 * size, unsigned)
    draws = Draws(replace(CASE, dtype=dtype), 1)
    draws.table("key_states", whole, "sine")
    monkeypatch.setattr(inputs_module, "_CHUNK_WORDS", chunk)
    draws.table("key_states", pieces, "sine")
    assert np.array_equal(whole.reshape(-1), pieces)


def test_an_element_is_the_table_entry_that_its_sixteen_bits_of_a_word_name() -> None:
    draws = Draws(CASE, 2)
    filled = np.zeros(4001, np.uint16)
    draws.table("cos", filled, "cosine")
    key, entries = draws._key("cos"), tables()["cosine"]
    for place in (0, 1, 2, 3, 4, 777, 4000):
        word = splitmix64(key, place // 4)
        assert filled[place] == entries[word >> (16 * (place % 4)) & 0xFFFF]


@pytest.mark.parametrize("table", ["normal", "cosine", "sine"])
def test_a_float32_number_is_an_entry_and_sixteen_low_bits_of_one_half_of_a_word(
    table: str,
) -> None:
    draws = Draws(replace(CASE, dtype="float32"), 2)
    filled = np.zeros(4001, np.uint32)
    draws.table("cos", filled, table)
    key, entries = draws._key("cos"), tables()[table]
    offset = 1 << 15 if table == "normal" else (1 << 16) - 1
    for place in (0, 1, 2, 3, 777, 4000):
        piece = splitmix64(key, place // 2) >> (32 * (place % 2)) & 0xFFFFFFFF
        assert filled[place] == (int(entries[piece >> 16]) << 16) + (piece & 0xFFFF) - offset


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("table", ["normal", "cosine", "sine"])
def test_wider_numbers_lie_around_the_entries_use_all_bits_and_are_never_zero(
    dtype: str, table: str
) -> None:
    fmt = format_of(dtype)
    filled = np.zeros(1 << 18, np.dtype(f"u{fmt.width}"))
    Draws(replace(CASE, dtype=dtype), 3).table("x", filled, table)
    values = as_tensor(filled, BACKWARD.inputs[0], dtype).double()
    assert bool((values != 0).all())
    assert bool(torch.isfinite(values).all())
    if table != "normal":
        assert float(values.abs().max()) <= 1
    entries = torch.from_numpy(tables()[table].view(np.int16).copy()).view(torch.bfloat16).double()
    for moment in (1, 2, 4):
        expected, spread = (entries**moment).mean(), (entries**moment).std()
        # Beside the spread of 2^18 draws, numbers may lie one place of bfloat16 nearer to zero.
        slack = 6 * float(spread) * 2**-9 + moment * 2**-7 * float((entries**moment).abs().mean())
        assert abs(float((values**moment).mean() - expected)) < slack
    for place in range(fmt.precision - 1):
        assert 0.3 < ((filled >> place) & 1).mean() < 0.7


@given(count=st.integers(0, 300), seed=st.integers())
def test_a_permutation_names_every_row_once(count: int, seed: int) -> None:
    rows = Draws(CASE, seed).permutation("cache_position", count)
    assert rows.dtype == np.int64
    assert sorted(rows.tolist()) == list(range(count))


# Tables


def test_tables_hold_no_zero_and_are_symmetric_quantiles() -> None:
    bits = tables()
    assert list(bits) == ["normal", "cosine", "sine"]
    normal, cosine, sine = (
        torch.from_numpy(table.astype(np.int32).astype(np.int16)).view(torch.bfloat16).double()
        for table in bits.values()
    )
    for table in (normal, cosine, sine):
        assert table.numel() == 65536
        assert bool((table != 0).all())
        assert bool(torch.isfinite(table).all())
    assert bool((normal.diff() >= 0).all())
    assert torch.equal(normal, -normal.flip(0))
    assert torch.equal(sine, -sine.flip(0))
    assert torch.equal(cosine, cosine.flip(0))
    assert float(normal.mean()) == 0
    assert abs(float(normal.var(correction=0)) - 1) < 3e-4
    # The mean of cos of a clamped standard normal: exp(-1/2), less a little for the clamp.
    assert abs(float(cosine.mean()) - np.exp(-0.5)) < 2e-3
    assert float(cosine.min()) == -1
    assert float(cosine.max()) == float(sine.max()) == 1


def test_the_normal_table_is_each_quantile_rounded_once() -> None:
    normal, quantile = tables()["normal"], NormalDist().inv_cdf
    for place in [*range(0, 65536, 331), 32767, 32768, 65535]:
        exact = Fraction(quantile((place + 0.5) / 65536))
        assert normal[place] == round_to_bits(exact, rational.BF16)


@pytest.fixture
def unread_tables() -> Iterator[None]:
    """Forget the tables before and after a test that changes how they are read."""
    tables.cache_clear()
    yield
    tables.cache_clear()


@pytest.mark.usefixtures("unread_tables")
def test_damaged_tables_are_refused_with_both_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_module, "TABLES_SHA256", "0" * 64)
    with pytest.raises(
        CorruptTables, match=f"has SHA-256 {TABLES_SHA256}, expected {'0' * 64}; re"
    ):
        make_inputs(CASE)


@pytest.mark.usefixtures("unread_tables")
def test_a_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(CorruptTables, match="little-endian"):
        tables()


# Whole cases


GOLDEN = {
    (
        "kv_rope.concat.forward",
        "random",
        "bfloat16",
        0,
    ): "9fec5aa4914ca5fc0abdb30848e13f80f42afc8852ed2a21c7ad485e0f2b0a65",
    (
        "kv_rope.static.backward",
        "suite-04-B2-N211-M1024",
        "bfloat16",
        7,
    ): "9c4afc016c67543e3f85c61e98ca5aab7e0063620fb94a9fc0f7ec352179b3ec",
    (
        "kv_rope.concat.backward",
        "random",
        "float16",
        0,
    ): "e68a09552c3985e035482375c972ab2bb88cfdd980df3c67bb96a33648b627ce",
    (
        "kv_rope.static.forward",
        "random",
        "float32",
        0,
    ): "b1fe1d2a70f8a49958345155fb2d307db20d040a2e1ab6fe1f40cae37c49212b",
}


@pytest.mark.parametrize(("operator", "case", "dtype", "seed"), GOLDEN)
def test_inputs_have_the_bits_they_had_when_their_digest_was_written_down(
    operator: str, case: str, dtype: str, seed: int
) -> None:
    made = make_inputs(replace(oracle.find_operator(operator).case(case), dtype=dtype), seed)
    assert digest(made) == GOLDEN[operator, case, dtype, seed]


@every_operator
def test_every_probe_has_the_same_bits_on_every_call_and_fresh_contiguous_tensors(
    operator: Operator,
) -> None:
    for case in operator.probes:
        first, again = make_inputs(case, 3), make_inputs(case, 3)
        assert list(first) == [spec.name for spec in operator.inputs]
        assert digest(first) == digest(again)
        for name, tensor in first.items():
            assert tensor.is_contiguous()
            assert tensor.numel() == 0 or tensor.data_ptr() != again[name].data_ptr()
            assert tensor.dtype == (torch.int64 if name == "cache_position" else torch.bfloat16)
            assert tuple(tensor.shape) == operator.shape(
                next(spec for spec in operator.inputs if spec.name == name), case.sizes
            )


def test_another_seed_case_name_kind_or_size_gives_other_bits_for_every_tensor() -> None:
    def prefix(case: Case, seed: int) -> dict[str, bytes]:
        made = make_inputs(case, seed, operator=BACKWARD)
        return {name: bytes_of(tensor.flatten()[:64]) for name, tensor in made.items()}

    base = prefix(CASE, 0)
    others = [
        prefix(CASE, 1),
        prefix(CASE, -1),
        prefix(CASE, 2**70),
        prefix(replace(CASE, name="renamed"), 0),
        prefix(replace(CASE, sizes={**CASE.sizes, "batch_size": 3}), 0),
        prefix(replace(CASE, sizes={**CASE.sizes, "max_seq_len": 42}), 0),
    ]
    for other in others:
        assert all(other[name] != base[name] for name in base)
    tensors = list(base.values())
    assert len(set(tensors)) == len(tensors), "two tensors of one case have the same bits"
    assert len({digest(make_inputs(CASE, seed)) for seed in range(20)}) == 20


@every_operator
def test_official_inputs_hold_no_zero_and_have_the_moments_of_their_distribution(
    operator: Operator,
) -> None:
    case = operator.case("long-cache")
    for seed in range(3):
        for name, tensor in make_inputs(replace(case, kind="official"), seed).items():
            if tensor.dtype == torch.int64:
                continue
            values = tensor.double()
            assert bool((values != 0).all())
            if ".concat." in operator.id and name in ("cos", "sin"):
                assert float(values.abs().max()) <= 1
                continue
            deviation = values.numel() ** -0.5
            assert abs(float(values.mean())) < 5 * deviation
            assert abs(float(values.var()) - 1) < 5 * 2**0.5 * deviation + 3e-4


def test_backward_suite_cases_have_positions_0_1_2_and_so_on() -> None:
    made = make_inputs(BACKWARD.case("suite-08-B1-N1-M256"), 0)
    assert made["cache_position"].tolist() == [0]
    made = make_inputs(replace(CASE, kind="official"), 0)
    assert made["cache_position"].tolist() == list(range(37))


def test_arrays_may_be_filled_in_place_with_the_bits_of_make_inputs() -> None:
    arrays = {
        spec.name: np.ones(BACKWARD.shape(spec, CASE.sizes), bits_type(spec, CASE.dtype))
        for spec in BACKWARD.inputs
    }
    fill_inputs(BACKWARD, CASE, 4, arrays)
    views = {spec.name: as_tensor(arrays[spec.name], spec, "bfloat16") for spec in BACKWARD.inputs}
    assert digest(views) == digest(make_inputs(CASE, 4))
    assert views["cos"].data_ptr() == arrays["cos"].ctypes.data


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_case_in_a_type_that_its_operator_is_not_judged_in_is_refused_by_name(dtype: str) -> None:
    only = replace(BACKWARD, dtypes=("bfloat16",))
    with pytest.raises(ValueError, match=f"{dtype}; kv_rope.static.backward is judged in bfloat16"):
        make_inputs(replace(CASE, dtype=dtype), operator=only)


# Encoding


@pytest.mark.parametrize(
    ("dtype", "form"),
    [("bfloat16", rational.BF16), ("float16", rational.FP16), ("float32", rational.FP32)],
)
@given(numbers=st.lists(st.floats(), max_size=20))
def test_encode_rounds_each_number_once(
    dtype: str, form: rational.Format, numbers: list[float]
) -> None:
    bits = encode(numbers, dtype)
    assert bits.dtype == np.dtype(f"u{form.width // 8}")
    assert bits.shape == (len(numbers),)
    for number, found in zip(numbers, bits.tolist(), strict=True):
        if np.isnan(number):
            assert rational.decode(found, form) == "nan"
        elif number != 0:
            value = Fraction(number) if np.isfinite(number) else ("inf" if number > 0 else "-inf")
            assert found == round_to_bits(value, form)
        else:
            assert found == (1 << (form.width - 1) if np.signbit(number) else 0)


def test_encode_takes_a_number_and_any_shape() -> None:
    assert encode(1.0, "bfloat16").shape == ()
    assert int(encode(1.0, "bfloat16")) == 0x3F80
    assert encode(np.ones((2, 0, 3)), "float16").shape == (2, 0, 3)
