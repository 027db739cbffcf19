"""Bit patterns that probes are made of: what each function promises about them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.patterns import codes, decode, every_pattern, scaled, signalling_nans, specials
from oracle.rounding import format_of
from tests import rational
from tests.rational import power_of_two, round_to_bits

FORMS = {"bfloat16": rational.BF16, "float16": rational.FP16, "float32": rational.FP32}
every_dtype = pytest.mark.parametrize("dtype", FORMS)
every_16_bit_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@every_16_bit_dtype
def test_codes_differ_up_to_the_distance_that_they_promise(dtype: str) -> None:
    distance = {"bfloat16": 24_576, "float16": 16_384}[dtype] - 1
    numbers = codes((distance + 5000,), dtype)
    repeats = np.flatnonzero(numbers[1:] == numbers[0]) + 1
    assert repeats.size == 0 or repeats[0] > distance
    for place in (1, 2, 777, 4999):
        window = numbers[place : place + distance + 1]
        assert np.unique(window).size == window.size


@every_dtype
def test_codes_are_normal_numbers_of_alternating_sign_that_small_powers_of_two_keep_exact(
    dtype: str,
) -> None:
    numbers = codes((3, 4, 5000), dtype)
    assert numbers.dtype == np.dtype(f"u{format_of(dtype).width}")
    values = decode(numbers, dtype).reshape(-1)
    form = FORMS[dtype]
    assert np.all(np.abs(values) >= 2.0**form.emin)
    assert np.all(np.isfinite(values))
    assert np.all(np.diff(np.sign(values))[:1000] != 0)
    for factor in (-4, 4):
        assert np.array_equal(
            decode(scaled(numbers, factor, dtype), dtype).reshape(-1), values * 2.0**factor
        )


@every_dtype
def test_codes_that_start_elsewhere_continue_the_same_sequence(dtype: str) -> None:
    whole = codes((1000,), dtype)
    assert np.array_equal(codes((20, 10), dtype, start=300).reshape(-1), whole[300:500])
    assert codes((0, 4), dtype).shape == (0, 4)


odd = st.integers(0, 2**15).map(lambda half: 2 * half + 1)


@every_16_bit_dtype
@settings(max_examples=20)
@given(start=st.integers(0, 2**20), step=odd)
def test_every_pattern_visits_all_65536_patterns_from_any_start_with_any_odd_step(
    dtype: str, start: int, step: int
) -> None:
    patterns = every_pattern((2, 32768), dtype, start, step)
    assert patterns.dtype == np.uint16
    assert np.unique(patterns).size == 65536
    assert patterns[0, 0] == start % 65536


@settings(max_examples=20)
@given(start=st.integers(0, 2**20), step=odd)
def test_every_pattern_visits_all_upper_halves_of_float32_and_both_zeros_and_infinities(
    start: int, step: int
) -> None:
    patterns = every_pattern((2, 32768), "float32", start, step)
    assert patterns.dtype == np.uint32
    assert np.unique(patterns >> 16).size == 65536
    assert np.unique(patterns & 0xFFFF).size > 65500
    assert {0, 0x80000000, 0x7F800000, 0xFF800000} <= set(patterns.reshape(-1).tolist())
    assert patterns[0, 0] >> 16 == start % 65536


@every_dtype
def test_signalling_nans_are_nans_without_the_quiet_bit_of_running_payloads_and_both_signs(
    dtype: str,
) -> None:
    form = FORMS[dtype]
    numbers = signalling_nans((5, 400), dtype)
    assert numbers.dtype == np.dtype(f"u{format_of(dtype).width}")
    quiet = 1 << (form.precision - 2)
    for bits in numbers.reshape(-1).tolist():
        assert rational.decode(bits, form) == "nan"
        assert bits & quiet == 0
    signs = (numbers >> (form.width - 1)).astype(int).reshape(-1)
    assert set(signs.tolist()) == {0, 1}
    payloads = numbers.astype(np.int64) & (quiet - 1)
    assert np.unique(payloads).size == min(2000, quiet - 1)
    continued = signalling_nans((10,), dtype, start=7)
    assert np.array_equal(continued, numbers.reshape(-1)[7:17])
    assert signalling_nans((0, 3), dtype).shape == (0, 3)


@every_dtype
def test_specials_are_infinities_quiet_nans_zeros_and_extremes_of_both_signs(dtype: str) -> None:
    form = FORMS[dtype]
    sign = 1 << (form.width - 1)
    quiet = round_to_bits("nan", form)
    infinity = round_to_bits("inf", form)
    normal = round_to_bits(power_of_two(form.emin), form)
    magnitudes = {0, 1, normal - 1, normal, infinity - 1, infinity, quiet, quiet + 1}
    patterns = specials(dtype)
    assert patterns.dtype == np.dtype(f"u{form.width // 8}")
    assert set(patterns.tolist()) == magnitudes | {pattern + sign for pattern in magnitudes}
    assert len(patterns) == 16


@every_16_bit_dtype
def test_decode_gives_the_value_of_every_pattern(dtype: str) -> None:
    form = FORMS[dtype]
    values = decode(np.arange(65536, dtype=np.uint16), dtype)
    for bits in range(0, 65536, 7):
        exact = rational.decode(bits, form)
        if exact == "nan":
            assert math.isnan(values[bits])
        else:
            assert values[bits] == float(exact)


@every_dtype
@given(bits=st.integers(0, 2**32 - 1), exponent=st.integers(-200, 200))
def test_scaled_multiplies_and_rounds_once(dtype: str, bits: int, exponent: int) -> None:
    form = FORMS[dtype]
    bits %= 1 << form.width
    value = rational.decode(bits, form)
    unsigned = np.dtype(f"u{form.width // 8}")
    (found,) = scaled(np.array([bits], dtype=unsigned), exponent, dtype).tolist()
    if value == "nan":
        assert rational.decode(found, form) == "nan"
        return
    sign = bits >> (form.width - 1) << (form.width - 1)
    product = rational.multiply(value, power_of_two(exponent))
    assert found == (sign if product == 0 else round_to_bits(product, form))


def test_decode_takes_any_strides() -> None:
    bits = np.arange(16_000, 16_024, dtype=np.uint16).reshape(4, 6).T
    expected = torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)
    assert np.array_equal(decode(bits, "bfloat16"), expected.double().numpy())
