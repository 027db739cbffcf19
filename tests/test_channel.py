from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from oracle.call import CallReply, CallRequest, TensorLayout
from oracle.channel import (
    MESSAGE_BYTES,
    Channel,
    Gone,
    Malformed,
    TimedOut,
    channel_pair,
    decode,
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    channel, other = channel_pair()
    yield channel, other
    channel.close()
    other.close()


Ends = tuple[Channel, socket.socket]


class TestChannel:
    def test_messages_arrive_one_by_one(self, ends: Ends) -> None:
        channel, other = ends
        for message in ({"a": 1}, {"b": [None, "ä", {"c": 1.5}]}):
            Channel(other).send(message)
        assert channel.receive() == ({"a": 1}, [])
        assert channel.receive() == ({"b": [None, "ä", {"c": 1.5}]}, [])

    def test_descriptors_go_along_and_are_not_inherited(self, ends: Ends) -> None:
        channel, other = ends
        reading, writing = os.pipe()
        channel.send({}, (writing, reading))
        os.close(reading)
        os.close(writing)
        _, (writing, reading) = Channel(other).receive(descriptors=2)
        os.write(writing, b"through")
        assert os.read(reading, 10) == b"through"
        assert not os.get_inheritable(reading)
        os.close(reading)
        os.close(writing)

    def test_what_stands_in_a_closed_channel_is_still_received(self, ends: Ends) -> None:
        channel, other = ends
        Channel(other).send({"last": True})
        other.close()
        assert channel.receive()[0] == {"last": True}
        with pytest.raises(Gone):
            channel.receive()

    def test_nobody_is_there_to_receive(self, ends: Ends) -> None:
        channel, other = ends
        other.close()
        with pytest.raises(Gone):
            channel.send({})

    def test_nobody_has_received_what_was_sent(self, ends: Ends) -> None:
        channel, other = ends
        channel.send({})
        other.close()
        # Linux tells the sender by a reset.
        with pytest.raises(Gone):
            channel.receive()

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"garbage\xff", "a message that is not JSON"),
            (b"[" * 60_000, "a message that is not JSON"),
            (b"7", "a message that is no JSON object"),
            (b" " * (MESSAGE_BYTES + 1), f"a message of more than {MESSAGE_BYTES} bytes"),
        ],
    )
    def test_what_is_no_message(self, ends: Ends, data: bytes, message: str) -> None:
        channel, other = ends
        other.send(data)
        with pytest.raises(Malformed, match=message):
            channel.receive()
        Channel(other).send({"next": 1})
        assert channel.receive()[0] == {"next": 1}

    def test_a_number_that_json_does_not_know_is_not_sent(self, ends: Ends) -> None:
        with pytest.raises(ValueError, match="JSON"):
            ends[0].send({"seconds": math.nan})

    def test_waiting_ends_at_the_deadline(self, ends: Ends) -> None:
        channel, _ = ends
        started = time.monotonic()
        with pytest.raises(TimedOut):
            channel.wait(started + 0.02)
        assert time.monotonic() - started >= 0.02
        assert not channel.is_readable()

    @pytest.mark.parametrize("closed", [False, True])
    def test_waiting_ends_with_a_message_or_the_other_end(self, ends: Ends, closed: bool) -> None:
        channel, other = ends
        if closed:
            other.close()
        else:
            other.send(b"{}")
        channel.wait(time.monotonic() - 1.0)
        assert channel.is_readable()


class TestDecoding:
    def test_what_was_encoded(self) -> None:
        layout = TensorLayout("first", "bfloat16", (2, 3), (3, 1), 0, axes=("rows", "head_dim"))
        request = CallRequest(
            "in", (layout,) * 2, "out", (layout,), style="inplace", inplace=((1, 0),), fill_byte=3
        )
        assert decode(CallRequest, plain(request)) == request

    @pytest.mark.parametrize(
        "change",
        [
            {"status": "perfect"},
            {"status": None},
            {"seconds": "1"},
            {"seconds": math.nan},
            {"seconds": math.inf},
            {"seconds": True},
            {"seconds": 10**400},
            {"returned_count": 1.5},
            {"returned_count": True},
            {"message": 1},
            {"tensors": None},
            {"tensors": [1]},
            {"tensors": [{"type_name": "torch.Tensor"}]},
            {"input_footprints": [{"address": 0}]},
            {"unknown": 1},
        ],
    )
    def test_a_reply_is_read_strictly(self, change: dict[str, Any]) -> None:
        reply = CallReply(status="returned")
        assert decode(CallReply, plain(reply)) == reply
        with pytest.raises(Malformed):
            decode(CallReply, plain(reply) | change)

    def test_a_pair_is_not_three(self) -> None:
        request = plain(CallRequest("in", (), "out", (), inplace=((1, 0),)))
        with pytest.raises(Malformed):
            decode(CallRequest, request | {"inplace": [[1, 0, 2]]})

    def test_what_a_dataclass_refuses_is_malformed(self) -> None:
        request = plain(CallRequest("in", (), "out", ()))
        with pytest.raises(Malformed, match="fill_byte is 255"):
            decode(CallRequest, request | {"fill_byte": 255})

    def test_a_whole_number_of_seconds_is_a_time(self) -> None:
        reply = decode(CallReply, plain(CallReply("returned")) | {"seconds": 2})
        assert isinstance(reply.seconds, float)
        assert reply.seconds == 2.0

    @pytest.mark.parametrize("value", [None, [], 3, "text", {}])
    def test_what_is_no_reply_at_all(self, value: object) -> None:
        with pytest.raises(Malformed, match="CallReply"):
            decode(CallReply, value)

    def test_a_message_repeats_no_more_than_a_little_of_what_came(self) -> None:
        with pytest.raises(Malformed) as caught:
            decode(CallReply, {"x" * 1000: 1})
        assert len(str(caught.value)) < 300


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as it arrives."""
    return json.loads(json.dumps(asdict(value)))
