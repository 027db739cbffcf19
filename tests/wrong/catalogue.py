"""What the collection of wrong kernels says about each of them, and the words it uses.

A wrong kernel is a plain function of an operator's inputs, right but for one fault. The judge must
reject it with one of the statuses named, provided that a case has what the fault ``needs`` to show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Admissible statuses of the verdict.
WRONG_VALUES = ("wrong_values",)
INACCURATE = ("wrong_values", "below_contract")  # which one depends on the data of the case
WRONG_SHAPE = ("wrong_shape",)
WRONG_DTYPE = ("wrong_dtype",)
WRONG_LAYOUT = ("wrong_layout",)
CALL_VIOLATION = ("call_violation",)
# The fault of the call is seen by a guard that may not have been exercised; then the values tell.
CALL_OR_VALUES = ("call_violation", "wrong_values")

# Violations: which rule a `call_violation` breaks.
INPUT_MUTATED = "input_mutated"
OUTPUT_ALIASES_INPUT = "output_aliases_input"
OUTPUT_ALIASES_OUTPUT = "output_aliases_output"
OUTPUT_ALIASES_EARLIER_OUTPUT = "output_aliases_earlier_output"
EARLIER_OUTPUT_CHANGED = "earlier_output_changed"
UNINITIALISED_OUTPUT = "uninitialised_output"
STALE_ANSWER = "stale_answer"
OUT_OF_BOUNDS_WRITE = "out_of_bounds_write"
WRONG_OUTPUT_COUNT = "wrong_output_count"
WRONG_RETURN_TYPE = "wrong_return_type"

# What a case must have to expose a fault.
ANY = "any case with random inputs"
TWO_BATCHES = "at least two batch rows, with different tables"
TWO_HEADS = "at least two heads"
TWO_BATCHES_AND_HEADS = "at least two batch rows and two heads"
THREE_HEADS = "at least three heads"
FOUR_HEADS = "at least four heads"
TWO_TOKENS = "at least two new tokens"
HEADS_AND_TOKENS = "at least two heads and two new tokens"
OLD_ROWS = "at least two cached rows"
TWO_ROWS = "at least two rows in the updated cache"
TWO_TABLE_ROWS = "more than one batch row or new token"
UNTOUCHED_ROWS = "a row of the cache that no position names"
UNPAIRED_TABLES = "tables whose two halves differ"
TABLES_OFF_THE_CIRCLE = "tables with cos^2 + sin^2 other than 1"
EMPTY_CACHE = "an empty cache"
LARGE = "an output of 2^20 elements or more"
BATCHES_FROM_16 = "more than 16 batch rows"
HEADS_FROM_8 = "more than 8 heads"
ROWS_FROM_1024 = "more than 1024 rows in the cache"
LONG_CACHE = "a cache of 256 rows or more"
PARTIAL_TOKEN_BLOCK = "more than 16 new tokens, and not a multiple of 16"
PARTIAL_ROW_BLOCK = "more than 64 rows in the cache, and not a multiple of 64"
COPIED_NAN = "a NaN among the copied values"
COPIED_NAN_PAYLOAD = "a NaN with a payload among the copied values"
COPIED_SUBNORMAL = "a subnormal among the copied values"
COPIED_NEGATIVE_ZERO = "a -0.0 among the copied values"
COPIED_INFINITY = "an infinity among the copied values"
COPIED_OUTSIDE_FP16 = "copied values too large or too small for float16"
PRODUCTS_OUTSIDE_FP16 = "products too large or too small for float16"
COMPUTED_NAN = "a NaN among the values computed with"
COMPUTED_INFINITY = "an infinity among the values computed with"
ZERO_TIMES_INFINITY = "an infinity that meets a zero in a table"
TIES = "exact products whose sum lies half way between two results"
CANCELLATION = "terms that cancel to a small part of their size"
SUBNORMAL_RESULTS = "computed results that are subnormal"
CPU_OUTPUTS = "output tensors on a CPU, with room around them"
TWO_CALLS = "two calls in one process with inputs of the same shapes"
SAME_MEMORY_TWICE = "two calls in one process with other values at the same addresses"
POSITIONS_NOT_ARANGE = "positions other than 0, 1, 2, ..."
POSITIONS_NOT_ASCENDING = "positions that do not ascend"
POSITIONS_WITH_GAPS = "positions with gaps"
POSITIONS_IN_A_RUN = "consecutive ascending positions"
POSITIONS_PAST_HALF = "a position in the second half of the cache"
POSITIONS_FROM_256 = "a position of 256 or more"
POSITIONS_FROM_1024 = "a position of 1024 or more"
ROWS_BEHIND_THE_FIRST_POSITION = "an untouched row behind the first position"
EVERY_ROW_NEW = "as many tokens as rows, at the positions 0, 1, 2, ..."
ZEROED_NON_FINITE = "a NaN or an infinity in a row that is zeroed"


@dataclass(frozen=True)
class WrongKernel:
    """A kernel with one fault, and the verdict it must get.

    Attributes:
        function: takes the operator's inputs positionally; with style ``out`` the output tensors
            follow them and nothing is returned.
        needs: what a case must have to expose the fault.
        status: the admissible statuses of the verdict, the usual one first.
        violations: for ``call_violation``, the rules one of which is named as broken.
        style: ``return`` or ``out``.
    """

    function: Callable[..., object]
    needs: str
    status: tuple[str, ...] = WRONG_VALUES
    violations: tuple[str, ...] = ()
    style: str = "return"

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def description(self) -> str:
        """The fault in one sentence: the function's docstring."""
        return " ".join((self.function.__doc__ or "").split())
