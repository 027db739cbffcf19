from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from oracle.capture import HeadTail


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def captured(pipe: tuple[int, int], *chunks: bytes) -> str:
    kept = HeadTail(5)
    for chunk in chunks:
        os.write(pipe[1], chunk)
        assert kept.read(pipe[0])
    return kept.text()


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ((), ""),
        ((b"abc",), "abc"),
        ((b"abcdefghij",), "abcdefghij"),
        ((b"abcdefghijk",), "abcde\n[1 bytes left out]\nghijk"),
        ((b"abc", b"defgh", b"ijk"), "abcde\n[1 bytes left out]\nghijk"),
        ((b"a" * 100, b"b" * 100, b"c"), "aaaaa\n[191 bytes left out]\nbbbbc"),
    ],
)
def test_both_ends_are_kept_and_the_rest_is_counted(
    pipe: tuple[int, int], chunks: tuple[bytes, ...], text: str
) -> None:
    assert captured(pipe, *chunks) == text


def test_bytes_that_are_no_text_are_replaced(pipe: tuple[int, int]) -> None:
    assert captured(pipe, b"a\xffb") == "a\ufffdb"


def test_all_that_is_there_is_read_and_no_more_is_waited_for(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    kept = HeadTail(100)
    kept.read_all(reading)
    assert kept.text() == ""
    os.write(writing, b"x" * 60)
    os.write(writing, b"y" * 30)
    kept.read_all(reading)
    assert kept.text() == "x" * 60 + "y" * 30


def test_the_end_of_the_stream_is_told() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert not HeadTail(5).read(reading)
    os.close(reading)
