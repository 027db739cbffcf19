"""A second opinion on truth and tolerance, in exact rational arithmetic.

Everything here is plain Python on ``fractions.Fraction``: floating-point formats, correct rounding,
the four ``kv_rope`` operators and the acceptance intervals of the numeric contracts. It imports
nothing from the package it checks, and uses torch only to read the bits of tensors and to hold
finished bits. It is slow and meant to be obviously right.

A *value* is a ``Fraction``, or one of the strings ``"inf"``, ``"-inf"``, ``"nan"``. Both zeros are
``Fraction(0)``: the sign of zero is kept only in bit patterns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch

Value = Fraction | Literal["inf", "-inf", "nan"]
Index = tuple[int, ...]


# Formats and rounding


@dataclass(frozen=True)
class Format:
    """An IEEE 754 binary interchange format, or bfloat16, which is built the same way.

    ``precision`` counts the significand bits with the implicit one; ``width`` is the size in bits.
    """

    name: str
    width: int
    precision: int

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number: it lies in [2^emax, 2^(emax + 1))."""
        exponent_bits = self.width - self.precision
        return (1 << (exponent_bits - 1)) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number, 2^emin."""
        return 1 - self.emax

    @property
    def unit_roundoff(self) -> Fraction:
        """u, half the distance from 1 to the next number."""
        return power_of_two(-self.precision)


BF16 = Format("bfloat16", width=16, precision=8)
FP16 = Format("float16", width=16, precision=11)
FP32 = Format("float32", width=32, precision=24)
FP64 = Format("float64", width=64, precision=53)

FORMAT_OF_DTYPE = {
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float32: FP32,
    torch.float64: FP64,
}
_DTYPE_OF_FORMAT = {form: dtype for dtype, form in FORMAT_OF_DTYPE.items()}
_INTEGER_OF_WIDTH = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def power_of_two(exponent: int) -> Fraction:
    """2**exponent, exactly, for any integer exponent."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def decode(bits: int, form: Format) -> Value:
    """The value of a bit pattern, given as an unsigned integer of ``form.width`` bits."""
    fraction_bits = form.precision - 1
    fraction = bits % (1 << fraction_bits)
    biased_exponent = (bits >> fraction_bits) % (1 << (form.width - form.precision))
    negative = bits >> (form.width - 1) == 1
    if biased_exponent == 2 * form.emax + 1:
        if fraction != 0:
            return "nan"
        return "-inf" if negative else "inf"
    if biased_exponent == 0:
        magnitude = fraction * power_of_two(form.emin - fraction_bits)
    else:
        significand = (1 << fraction_bits) + fraction
        magnitude = significand * power_of_two(biased_exponent - form.emax - fraction_bits)
    return -magnitude if negative else magnitude


def floor_log2(magnitude: Fraction) -> int:
    """The integer e with 2^e <= magnitude < 2^(e + 1); ``magnitude`` is positive."""
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return exponent if power_of_two(exponent) <= magnitude else exponent - 1


def round_to_bits(value: Value, form: Format) -> int:
    """The pattern of ``value`` rounded to nearest, ties to even, by the rules of IEEE 754.

    Subnormal results are kept; a result past the largest finite number is an infinity. NaN gives
    the quiet NaN without sign or payload. An exact zero gives +0; a negative value that rounds to
    zero gives -0.
    """
    sign_bit = 1 << (form.width - 1)
    infinity = (2 * form.emax + 1) << (form.precision - 1)
    if value == "nan":
        return infinity + (1 << (form.precision - 2))
    if value == "inf":
        return infinity
    if value == "-inf":
        return infinity + sign_bit
    assert isinstance(value, Fraction)
    if value == 0:
        return 0
    magnitude = abs(value)
    exponent = max(floor_log2(magnitude), form.emin)
    quantum = power_of_two(exponent - form.precision + 1)
    multiple = _round_half_even(magnitude / quantum)
    if multiple * quantum >= power_of_two(form.emax + 1):
        pattern = infinity
    else:
        # The implicit bit is part of `multiple`, so it adds one to the exponent field of every
        # normal number, and of those that rounding carries into the next binade, and none to that
        # of a subnormal.
        pattern = ((exponent - form.emin) << (form.precision - 1)) + multiple
    return pattern + (sign_bit if value < 0 else 0)


def _round_half_even(number: Fraction) -> int:
    below = math.floor(number)
    rest = number - below
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1):
        return below + 1
    return below


def round_to(value: Value, form: Format) -> Value:
    """``value`` rounded to nearest, ties to even, as a value."""
    return decode(round_to_bits(value, form), form)


def is_finite(value: Value) -> bool:
    """Whether ``value`` is a number, not an infinity or NaN."""
    return isinstance(value, Fraction)


def multiply(left: Value, right: Value) -> Value:
    """The exact product, with IEEE's rules for infinities and NaN (0 * inf is NaN)."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left * right
    if "nan" in (left, right) or left == 0 or right == 0:
        return "nan"
    return "-inf" if _is_negative(left) != _is_negative(right) else "inf"


def negate(value: Value) -> Value:
    """The value with its sign turned."""
    if isinstance(value, Fraction):
        return -value
    if value == "nan":
        return "nan"
    return "inf" if value == "-inf" else "-inf"


def total(terms: Sequence[Value]) -> Value:
    """The exact sum; with non-finite terms, its class: an infinity, or NaN (inf - inf is NaN)."""
    if "nan" in terms or ("inf" in terms and "-inf" in terms):
        return "nan"
    if "inf" in terms:
        return "inf"
    if "-inf" in terms:
        return "-inf"
    return sum((term for term in terms if isinstance(term, Fraction)), Fraction(0))


def _is_negative(value: Value) -> bool:
    return value < 0 if isinstance(value, Fraction) else value == "-inf"


# Arrays


@dataclass(frozen=True)
class Array:
    """A row-major array of values, or of the patterns of a tensor as integers of either sign."""

    shape: tuple[int, ...]
    values: Sequence[Value] = ()
    patterns: Sequence[int] = ()
    form: Format | None = None

    def value(self, index: Index) -> Value:
        """The value at ``index``."""
        bits = self.bits(index)
        if bits is None or self.form is None:
            return self.values[self._offset(index)]
        return decode(bits, self.form)

    def bits(self, index: Index) -> int | None:
        """The bit pattern at ``index``, unsigned; None for an array of bare values."""
        if self.form is None:
            return None
        return self.patterns[self._offset(index)] % (1 << self.form.width)

    def _offset(self, index: Index) -> int:
        offset = 0
        for position, size in zip(index, self.shape, strict=True):
            if not 0 <= position < size:
                raise IndexError(f"index {index} lies outside shape {self.shape}")
            offset = offset * size + position
        return offset


def read(tensor: torch.Tensor) -> Array:
    """The array of a floating-point tensor, decoded element by element when asked."""
    form = FORMAT_OF_DTYPE[tensor.dtype]
    integers = tensor.detach().cpu().contiguous().view(_INTEGER_OF_WIDTH[form.width])
    return Array(tuple(tensor.shape), patterns=integers.flatten().tolist(), form=form)


def bits_of(tensor: torch.Tensor) -> list[int]:
    """The bit patterns of a floating-point tensor as unsigned integers, row-major."""
    array = read(tensor)
    return [pattern % (1 << FORMAT_OF_DTYPE[tensor.dtype].width) for pattern in array.patterns]


def tensor_of(patterns: Sequence[int], shape: Sequence[int], form: Format) -> torch.Tensor:
    """A tensor on the CPU that holds the given bit patterns, row-major."""
    half = 2 ** (form.width - 1)
    signed = [(pattern + half) % (2 * half) - half for pattern in patterns]
    integers = torch.tensor(signed, dtype=_INTEGER_OF_WIDTH[form.width])
    return integers.view(_DTYPE_OF_FORMAT[form]).reshape(tuple(shape))


# Exact outputs


@dataclass(frozen=True)
class Element:
    """What one output element must be.

    ``computed``: the exact sum of ``terms``. ``copied``: ``terms`` holds the one value, ``bits``
    its pattern (None where the inputs had no bits). ``zeroed``: no terms.
    """

    region: Literal["computed", "copied", "zeroed"]
    terms: tuple[Value, ...]
    bits: int | None = None

    @property
    def exact(self) -> Value:
        """The exact value: the sum of the terms."""
        return total(self.terms)


@dataclass(frozen=True)
class Output:
    """One output of an operator: its shape, and the element at any index, worked out when asked."""

    shape: tuple[int, ...]
    element: Callable[[Index], Element]

    def indices(self) -> Iterator[Index]:
        """All indices, row-major."""
        return itertools.product(*(range(size) for size in self.shape))


Outputs = dict[str, Output]


def copied_from(array: Array, index: Index) -> Element:
    """The element that holds a bit-for-bit copy of ``array`` at ``index``."""
    return Element("copied", (array.value(index),), array.bits(index))


def rotated_source(d: int, head_dim: int) -> tuple[int, int]:
    """(sign, source) with rotate_half(x)[d] = sign * x[source]: concat(-x[D/2:], x[:D/2])."""
    half = head_dim // 2
    return (-1, d + half) if d < half else (+1, d - half)


def transposed_source(d: int, head_dim: int) -> tuple[int, int]:
    """(sign, source) with rotate_half_T(y)[d] = sign * y[source]: concat(y[D/2:], -y[:D/2])."""
    half = head_dim // 2
    return (+1, d + half) if d < half else (-1, d - half)


def signed(sign: int, value: Value) -> Value:
    """``sign * value`` for a sign of +1 or -1."""
    return value if sign > 0 else negate(value)


def table_row(table: Array, batch: int) -> int:
    """The row of cos or sin that belongs to a batch index: a table of one row serves all."""
    return batch if table.shape[0] > 1 else 0


def rotated_key(
    key_states: Array, cos: Callable[[int], Value], sin: Callable[[int], Value], index: Index
) -> Element:
    """k*cos + rotate_half(k)*sin at ``index`` = (b, h, n, d); cos and sin are given as entry(d)."""
    b, h, n, d = index
    sign, source = rotated_source(d, key_states.shape[3])
    cos_term = multiply(key_states.value(index), cos(d))
    sin_term = multiply(signed(sign, key_states.value((b, h, n, source))), sin(d))
    return Element("computed", (cos_term, sin_term))


def unrotated_gradient(
    gradient: Callable[[int], Value],
    cos: Callable[[int], Value],
    sin: Callable[[int], Value],
    d: int,
    head_dim: int,
) -> Element:
    """g*cos + rotate_half_T(g*sin) at ``d``; the three callables give the entry of a d."""
    sign, source = transposed_source(d, head_dim)
    cos_term = multiply(gradient(d), cos(d))
    sin_term = signed(sign, multiply(gradient(source), sin(source)))
    return Element("computed", (cos_term, sin_term))


def concat_forward(
    key_states: Array,
    value_states: Array,
    cos: Array,
    sin: Array,
    key_cache: Array,
    value_cache: Array,
) -> Outputs:
    """``kv_rope.concat.forward``.

    Shapes: [B,H,N,D] twice, [B or 1,1,N,D] twice, [B,H,C,D] twice -> [B,H,C+N,D] twice.
    """
    batch, heads, tokens, head_dim = key_states.shape
    cached = key_cache.shape[2]
    shape = (batch, heads, cached + tokens, head_dim)

    def updated_key(index: Index) -> Element:
        b, h, row, d = index
        if row < cached:
            return copied_from(key_cache, index)
        n = row - cached
        return rotated_key(
            key_states,
            lambda d: cos.value((table_row(cos, b), 0, n, d)),
            lambda d: sin.value((table_row(sin, b), 0, n, d)),
            (b, h, n, d),
        )

    def updated_value(index: Index) -> Element:
        b, h, row, d = index
        if row < cached:
            return copied_from(value_cache, index)
        return copied_from(value_states, (b, h, row - cached, d))

    return {
        "updated_key_cache": Output(shape, updated_key),
        "updated_value_cache": Output(shape, updated_value),
    }


def concat_backward(
    grad_updated_key_cache: Array,
    grad_updated_value_cache: Array,
    key_states: Array,
    cos: Array,
    sin: Array,
) -> Outputs:
    """``kv_rope.concat.backward``.

    Shapes: [B,H,C+N,D] twice, [B,H,N,D], [B,1,N,D] twice -> [B,H,N,D] twice, [B,1,N,D] twice,
    [B,H,C,D] twice.
    """
    batch, heads, tokens, head_dim = key_states.shape
    cached = grad_updated_key_cache.shape[2] - tokens
    new_shape = (batch, heads, tokens, head_dim)
    old_shape = (batch, heads, cached, head_dim)

    def gradient(b: int, h: int, n: int, d: int) -> Value:
        return grad_updated_key_cache.value((b, h, cached + n, d))

    def grad_key(index: Index) -> Element:
        b, h, n, d = index
        return unrotated_gradient(
            lambda d: gradient(b, h, n, d),
            lambda d: cos.value((b, 0, n, d)),
            lambda d: sin.value((b, 0, n, d)),
            d,
            head_dim,
        )

    def grad_value(index: Index) -> Element:
        b, h, n, d = index
        return copied_from(grad_updated_value_cache, (b, h, cached + n, d))

    def grad_cos(index: Index) -> Element:
        b, _, n, d = index
        return head_sum(
            heads, lambda h: gradient(b, h, n, d), lambda h: key_states.value((b, h, n, d))
        )

    def grad_sin(index: Index) -> Element:
        b, _, n, d = index
        sign, source = rotated_source(d, head_dim)
        return head_sum(
            heads,
            lambda h: gradient(b, h, n, d),
            lambda h: signed(sign, key_states.value((b, h, n, source))),
        )

    return {
        "grad_key_states": Output(new_shape, grad_key),
        "grad_value_states": Output(new_shape, grad_value),
        "grad_cos": Output((batch, 1, tokens, head_dim), grad_cos),
        "grad_sin": Output((batch, 1, tokens, head_dim), grad_sin),
        "grad_key_cache": Output(
            old_shape, lambda index: copied_from(grad_updated_key_cache, index)
        ),
        "grad_value_cache": Output(
            old_shape, lambda index: copied_from(grad_updated_value_cache, index)
        ),
    }


def head_sum(heads: int, left: Callable[[int], Value], right: Callable[[int], Value]) -> Element:
    """sum over heads of left(h) * right(h), one term a head."""
    return Element("computed", tuple(multiply(left(h), right(h)) for h in range(heads)))


def static_forward(
    key_states: Array,
    value_states: Array,
    cos: Array,
    sin: Array,
    key_cache: Array,
    value_cache: Array,
    cache_position: Sequence[int],
) -> Outputs:
    """``kv_rope.static.forward``.

    Shapes: [B,H,N,D] twice, [B or 1,N,D] twice, [B,H,M,D] twice, [N] -> [B,H,M,D] twice.
    """
    token_of_row = invert_positions(cache_position, key_cache.shape[2])

    def updated_key(index: Index) -> Element:
        b, h, row, d = index
        if row not in token_of_row:
            return copied_from(key_cache, index)
        n = token_of_row[row]
        return rotated_key(
            key_states,
            lambda d: cos.value((table_row(cos, b), n, d)),
            lambda d: sin.value((table_row(sin, b), n, d)),
            (b, h, n, d),
        )

    def updated_value(index: Index) -> Element:
        b, h, row, d = index
        if row not in token_of_row:
            return copied_from(value_cache, index)
        return copied_from(value_states, (b, h, token_of_row[row], d))

    return {
        "updated_key_cache": Output(key_cache.shape, updated_key),
        "updated_value_cache": Output(value_cache.shape, updated_value),
    }


def static_backward(
    grad_key_cache: Array,
    grad_value_cache: Array,
    key_states: Array,
    cos: Array,
    sin: Array,
    cache_position: Sequence[int],
) -> Outputs:
    """``kv_rope.static.backward``.

    Shapes: [B,H,M,D] twice, [B,H,N,D], [B,N,D] twice, [N] -> [B,H,N,D] twice, [B,N,D] twice,
    [B,H,M,D] twice.
    """
    batch, heads, tokens, head_dim = key_states.shape
    token_of_row = invert_positions(cache_position, grad_key_cache.shape[2])
    new_shape = (batch, heads, tokens, head_dim)

    def gradient(b: int, h: int, n: int, d: int) -> Value:
        return grad_key_cache.value((b, h, cache_position[n], d))

    def grad_key(index: Index) -> Element:
        b, h, n, d = index
        return unrotated_gradient(
            lambda d: gradient(b, h, n, d),
            lambda d: cos.value((b, n, d)),
            lambda d: sin.value((b, n, d)),
            d,
            head_dim,
        )

    def grad_value(index: Index) -> Element:
        b, h, n, d = index
        return copied_from(grad_value_cache, (b, h, cache_position[n], d))

    def grad_cos(index: Index) -> Element:
        b, n, d = index
        return head_sum(
            heads, lambda h: gradient(b, h, n, d), lambda h: key_states.value((b, h, n, d))
        )

    def grad_sin(index: Index) -> Element:
        b, n, d = index
        sign, source = rotated_source(d, head_dim)
        return head_sum(
            heads,
            lambda h: gradient(b, h, n, d),
            lambda h: signed(sign, key_states.value((b, h, n, source))),
        )

    def zeroed_copy(cache: Array) -> Output:
        def element(index: Index) -> Element:
            if index[2] in token_of_row:
                return Element("zeroed", ())
            return copied_from(cache, index)

        return Output(cache.shape, element)

    return {
        "grad_key_states": Output(new_shape, grad_key),
        "grad_value_states": Output(new_shape, grad_value),
        "grad_cos": Output((batch, tokens, head_dim), grad_cos),
        "grad_sin": Output((batch, tokens, head_dim), grad_sin),
        "grad_key_cache_input": zeroed_copy(grad_key_cache),
        "grad_value_cache_input": zeroed_copy(grad_value_cache),
    }


def invert_positions(cache_position: Sequence[int], capacity: int) -> dict[int, int]:
    """{cache row: token}; ValueError names the first position that repeats or is out of range."""
    token_of_row: dict[int, int] = {}
    for token, row in enumerate(cache_position):
        if not 0 <= row < capacity or row in token_of_row:
            raise ValueError(f"cache_position[{token}] = {row}: not distinct in 0..{capacity - 1}")
        token_of_row[row] = token
    return token_of_row


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "kv_rope.concat.forward": concat_forward,
    "kv_rope.concat.backward": concat_backward,
    "kv_rope.static.forward": static_forward,
    "kv_rope.static.backward": static_backward,
}


def exact_outputs(operator: str, inputs: Sequence[torch.Tensor]) -> Outputs:
    """The exact outputs of an operator for torch inputs in the order of its definition."""
    arguments = [x.tolist() if x.dtype == torch.int64 else read(x) for x in inputs]
    return OPERATORS[operator](*arguments)


def correct_bits(element: Element, form: Format) -> int:
    """The pattern of a correct output: a copy's own, +0 where zeroed, else correctly rounded."""
    return round_to_bits(element.exact, form) if element.bits is None else element.bits


def correctly_rounded(output: Output, form: Format) -> torch.Tensor:
    """The whole output as a tensor on the CPU, every element by ``correct_bits``."""
    patterns = [correct_bits(output.element(index), form) for index in output.indices()]
    return tensor_of(patterns, output.shape, form)


# Numeric contracts: acceptance intervals

CONTRACTS = ("correctly_rounded", "single_rounding", "stored_intermediates", "bounded_error")


@dataclass(frozen=True)
class Acceptance:
    """Which results of one computed element a contract accepts.

    ``low`` and ``high`` bound the value before the last rounding; ``rounded_low`` and
    ``rounded_high`` are those bounds rounded to the output format; all four are None where
    ``exact`` is not finite.
    """

    exact: Value
    in_domain: bool
    low: Fraction | None = None
    high: Fraction | None = None
    rounded_low: Value | None = None
    rounded_high: Value | None = None

    def accepts(self, value: Value) -> bool:
        """Whether ``value``, a number of the output format, is acceptable."""
        if not self.in_domain and not is_finite(value):
            return True
        if self.rounded_low is None or self.rounded_high is None:
            return self.in_domain and value == self.exact
        if value == "nan":
            return False
        return _extended(self.rounded_low) <= _extended(value) <= _extended(self.rounded_high)


def acceptance(contract: str, terms: Sequence[Value], form: Format) -> Acceptance:
    """The acceptance interval of ``contract`` for an element that is the exact sum of ``terms``.

    Out of the contract's domain a finite result still has to lie in the interval; an infinity or
    NaN, which an overflow on the way may leave, is accepted as well. An intermediate that overflows
    when it is stored bounds no finite result, so it is left out of the interval and of R.
    """
    if contract not in CONTRACTS:
        raise ValueError(f"no contract is called {contract!r}; there are {', '.join(CONTRACTS)}")
    exact = total(terms)
    finite = [term for term in terms if isinstance(term, Fraction)]
    in_domain = _in_domain(contract, finite, len(terms), form)
    if not isinstance(exact, Fraction):
        return Acceptance(exact, in_domain)
    below, above = _deviation(contract, finite, form)
    low, high = exact + below, exact + above
    return Acceptance(exact, in_domain, low, high, round_to(low, form), round_to(high, form))


def gamma(count: int) -> Fraction:
    """gamma_n(u32) = n*u / (1 - n*u), u = 2^-24: the classical bound on n fp32 roundings."""
    error = count * FP32.unit_roundoff
    return error / (1 - error)


def magnitude_sum(terms: Sequence[Fraction], form: Format) -> Fraction:
    """R = sum of max(|t|, |RN_out t|); a RN_out t that overflows is left out."""
    stored = [round_to(term, form) for term in terms]
    return sum(
        (
            max(abs(term), abs(image)) if isinstance(image, Fraction) else abs(term)
            for term, image in zip(terms, stored, strict=True)
        ),
        Fraction(0),
    )


def summation_error(terms: Sequence[Fraction], form: Format) -> Fraction:
    """d32 = gamma_n(u32) * R + n * 2^-150, or 0 where every partial sum is exact in fp32.

    That is where R <= 2^24 * q, q >= 2^-149 being the largest power of two that divides every t and
    RN_out(t).
    """
    magnitude = magnitude_sum(terms, form)
    images = [round_to(term, form) for term in terms]
    numbers = [x for x in (*terms, *images) if isinstance(x, Fraction) and x != 0]
    if not numbers:
        return Fraction(0)
    exponent = min(largest_dividing_exponent(x) for x in numbers)
    if exponent >= -149 and magnitude <= 2**24 * power_of_two(exponent):
        return Fraction(0)
    count = len(terms)
    return gamma(count) * magnitude + count * power_of_two(-150)


def largest_dividing_exponent(number: Fraction) -> int:
    """The largest e for which the dyadic, nonzero ``number`` is an integer multiple of 2^e."""
    denominator_exponent = number.denominator.bit_length() - 1
    if number.denominator != 2**denominator_exponent:
        raise ValueError(f"{number} is no integer multiple of any power of two")
    trailing_zeros = (number.numerator & -number.numerator).bit_length() - 1
    return trailing_zeros - denominator_exponent


def _deviation(contract: str, terms: Sequence[Fraction], form: Format) -> tuple[Fraction, Fraction]:
    """How far below and above the exact sum the value before the last rounding may lie."""
    if contract == "correctly_rounded":
        return Fraction(0), Fraction(0)
    slack = summation_error(terms, form)
    if contract == "single_rounding":
        return -slack, slack
    if contract == "stored_intermediates":
        errors = [_storing_errors(term, form) for term in terms]
        lowest, highest = sum(map(min, errors), Fraction(0)), sum(map(max, errors), Fraction(0))
        return lowest - slack, highest + slack
    # Storing a product errs by half a unit in the last place, which is constant below emin.
    underflow = power_of_two(form.emin - form.precision + 1) / 2
    stored = (max(form.unit_roundoff * abs(term), underflow) for term in terms if term)
    spread = sum(stored, Fraction(0)) + slack
    return -spread, spread


def _storing_errors(term: Fraction, form: Format) -> list[Fraction]:
    """The errors {0, RN_out(t) - t, RN_out(RN_32(t)) - t} of keeping or storing one product."""
    images = (term, *_stored_images(term, form))
    return [image - term for image in images if isinstance(image, Fraction)]


def _stored_images(term: Fraction, form: Format) -> tuple[Value, Value]:
    """RN_out(t) and RN_out(RN_32(t)): what storing a product once leaves of it."""
    return round_to(term, form), round_to(round_to(term, FP32), form)


def _in_domain(contract: str, terms: Sequence[Fraction], count: int, form: Format) -> bool:
    """Whether nothing overflows before the last rounding; ``count`` includes non-finite terms."""
    if contract == "correctly_rounded":
        return True  # it rounds nothing before the last rounding
    if contract == "stored_intermediates":
        images = [image for term in terms for image in _stored_images(term, form)]
        if not all(map(is_finite, images)):
            return False
    limit = power_of_two(128) * (1 - power_of_two(-25))
    return magnitude_sum(terms, form) * (1 + gamma(count)) < limit


def _extended(value: Value) -> Fraction | float:
    return value if isinstance(value, Fraction) else float(value)
