from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oracle.call import TensorLayout
from oracle.tensor_file import TensorFile

FIRST = TensorLayout("first", "int64", (2, 3), (3, 1), 16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Twenty int64 numbers, each ten times its place."""
    (np.arange(20) * 10).tofile(tmp_path / "tensors")
    return tmp_path / "tensors"


@pytest.fixture
def file(path: Path) -> TensorFile:
    return TensorFile(str(path), torch.device("cpu"), upload=True)


def test_a_tensor_lies_where_its_layout_says(file: TensorFile) -> None:
    tensor = file.tensor(FIRST)
    assert tensor.tolist() == [[20, 30, 40], [50, 60, 70]]
    assert (tensor.dtype, tensor.stride()) == (torch.int64, (3, 1))


def test_strides_are_those_of_the_layout(file: TensorFile) -> None:
    tensor = file.tensor(replace(FIRST, shape=(3, 2), strides=(1, 4)))
    assert tensor.tolist() == [[20, 60], [30, 70], [40, 80]]
    assert tensor.stride() == (1, 4)


def test_a_storage_is_as_if_the_tensor_had_been_allocated_alone(file: TensorFile) -> None:
    tensor = file.tensor(FIRST)
    assert (tensor.storage_offset(), tensor.untyped_storage().nbytes()) == (0, 48)
    assert not tensor._is_view()


def test_a_tensor_may_start_inside_a_larger_buffer(file: TensorFile) -> None:
    tensor = file.tensor(replace(FIRST, offset=40, storage_offset=5))
    assert tensor.tolist() == [[50, 60, 70], [80, 90, 100]]
    assert (tensor.storage_offset(), tensor.untyped_storage().nbytes()) == (5, 40 + 48)
    assert tensor.as_strided((1,), (1,), 0).item() == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int64"])
def test_every_dtype_that_crosses(file: TensorFile, dtype: str) -> None:
    assert file.tensor(replace(FIRST, dtype=dtype)).dtype is getattr(torch, dtype)


@pytest.mark.parametrize("offset", [0, 16, 160])
def test_a_tensor_without_elements_keeps_its_shape(file: TensorFile, offset: int) -> None:
    empty = replace(FIRST, shape=(2, 0, 3), strides=(3, 3, 1), offset=offset)
    assert file.tensor(empty).shape == (2, 0, 3)


def test_what_is_written_is_in_the_file(file: TensorFile, path: Path) -> None:
    file.tensor(FIRST)[0, 1] = 7
    file.write_back()
    expected = np.arange(20) * 10
    expected[3] = 7
    assert np.fromfile(path, np.int64).tolist() == expected.tolist()


def test_memory_is_mapped_as_long_as_a_tensor_over_it_lives(path: Path) -> None:
    tensor = TensorFile(str(path), torch.device("cpu"), upload=True).tensor(FIRST)
    path.unlink()
    assert tensor.sum().item() == 270
