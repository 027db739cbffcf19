from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oracle.call import Footprint, TensorLayout, returned_outputs
from tests.calls import make_call

LAYOUT = TensorLayout("first", "bfloat16", (2, 3), (3, 1), 0)


class TestTensorLayout:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dtype": "float8"}, "has dtype 'float8'; known are bfloat16"),
            ({"strides": (1,)}, "give one stride an axis"),
            ({"offset": 3}, "must be a multiple of 2"),
            ({"offset": -2}, "leave room"),
            ({"offset": 4, "storage_offset": 3}, "leave room"),
            ({"storage_offset": -1}, "leave room"),
        ],
    )
    def test_one_that_cannot_be_built_is_refused(
        self, change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            replace(LAYOUT, **change)

    def test_its_footprint_is_the_bytes_of_the_file(self) -> None:
        layout = replace(LAYOUT, dtype="float32", offset=40, storage_offset=10)
        assert layout.footprint == Footprint(40, 4, (2, 3), (3, 1))


class TestFootprint:
    @pytest.mark.parametrize(
        ("shape", "strides", "extent"),
        [
            ((2, 3), (3, 1), 12),
            ((2, 3), (1, 2), 12),
            ((2, 3), (10, 2), 30),
            ((4, 5), (0, 1), 10),
            ((), (), 2),
            ((2, 0, 3), (3, 3, 1), 0),
        ],
    )
    def test_extent(self, shape: tuple[int, ...], strides: tuple[int, ...], extent: int) -> None:
        assert Footprint(64, 2, shape, strides).extent_bytes == extent


class TestCallRequest:
    @pytest.mark.parametrize("fill_byte", [-1, 255, 256])
    def test_a_fill_byte_that_malloc_does_not_know_is_refused(
        self, tmp_path: Path, fill_byte: int
    ) -> None:
        with pytest.raises(ValueError, match=f"fill_byte is {fill_byte}"):
            make_call(tmp_path, fill_byte=fill_byte)


class TestReturnedOutputs:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"style": "return"}, {3: (0, 1, 2)}),
            ({"style": "out"}, {0: ()}),
            ({"style": "inplace", "inplace": ((0, 1),)}, {2: (0, 2), 3: (0, 1, 2)}),
            ({"style": "inplace", "inplace": ((0, 0), (1, 1), (2, 2))}, {0: (), 3: (0, 1, 2)}),
        ],
    )
    def test_by_style_and_count(
        self, tmp_path: Path, options: dict[str, Any], expected: dict[int, tuple[int, ...]]
    ) -> None:
        request = make_call(tmp_path, outputs=(LAYOUT,) * 3, **options).request
        for count in range(6):
            assert returned_outputs(request, count) == expected.get(count)
