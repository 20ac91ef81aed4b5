# pyright: basic
"""Batches and results as bytes: everything that they can hold comes back, and nothing else is read."""

from __future__ import annotations

import typing
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from encoded_runner import EncodedRunner
from pagewood.engine.api import LogitsProcessor
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.codec import Drafts, Masks, Message, decode, encode
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.testing import EchoRunner, RunnerSize, check_runner
from pagewood.engine.testing.echo import STATE_SIZE

SHAPES = st.integers(1, 2).flatmap(lambda n: st.tuples(*[st.integers(0, 5)] * n))
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 2**40),
    float: st.floats(allow_nan=False),
    LogitsProcessor: st.builds(LogitsProcessor, name=st.text(min_size=1, max_size=9), arguments=st.just('{"a": 1}')),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for what an annotation allows, so that new fields are drawn too."""
    options = get_args(hint)
    if type(None) in options:
        (kind,) = (one for one in options if one is not type(None))
        return st.none() | values(kind)
    if get_origin(hint) is np.ndarray:
        return SHAPES.flatmap(lambda shape: st_np.arrays(get_args(get_args(hint)[1])[0], shape))
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, type) and is_dataclass(hint):
        return objects(hint)
    if get_origin(hint) is tuple:
        return st.lists(values(options[0]), max_size=3).map(tuple)
    return st.lists(values(options[0]), max_size=3)  # a collection


def objects(made: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(made)
    return st.fixed_dictionaries({one.name: values(hints[one.name]) for one in fields(made)}).map(
        lambda own: made(**own)
    )


MESSAGES = st.one_of(*[objects(made) for made in (Batch, StepResult, Drafts, Masks)])


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert (str(found.dtype), found.shape) == (str(expected.dtype), expected.shape)
        assert found.tobytes() == expected.tobytes()
        assert found.flags.writeable
        assert found.flags.c_contiguous
        assert found.flags.aligned
    elif is_dataclass(expected):
        assert type(found) is type(expected)
        for one in fields(expected):
            assert_same(getattr(found, one.name), getattr(expected, one.name))
    elif isinstance(expected, list | tuple):
        assert list(found) == list(expected)
    else:
        assert found == expected
        assert type(found) is type(expected)


@settings(deadline=None)
@given(message=MESSAGES)
def test_what_goes_in_comes_out(message: Message) -> None:
    assert_same(decode(encode(message)), message)


def test_memory_is_not_shared_with_the_bytes() -> None:
    data = encode(Masks(masks=np.ones((2, 3), np.int32)))
    found = decode(data)
    assert isinstance(found, Masks)
    found.masks[:] = 7
    assert_same(decode(data), Masks(masks=np.ones((2, 3), np.int32)))


def test_what_is_not_contiguous_is_sent_as_it_reads() -> None:
    masks = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert_same(decode(encode(Masks(masks=masks.T))), Masks(masks=np.ascontiguousarray(masks.T)))


@given(drafts=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)))
def test_drafts(drafts: list[tuple[int, ...]]) -> None:
    found = decode(encode(Drafts.of(drafts)))
    assert isinstance(found, Drafts)
    assert found.by_grant() == drafts


@settings(deadline=None)
@given(message=MESSAGES, data=st.data())
def test_what_is_damaged_is_an_error(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    if data.draw(st.booleans()):
        del frame[data.draw(st.integers(0, len(frame) - 1)) :]
    else:
        frame += bytes(8)
    with pytest.raises(ValueError, match="data must"):
        decode(bytes(frame))


@settings(deadline=None)
@given(message=MESSAGES, data=st.data())
def test_what_is_changed_is_a_message_or_an_error(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(3):
        frame[data.draw(st.integers(0, min(len(frame) - 1, 80)))] ^= data.draw(st.integers(1, 255))
    with suppress(ValueError):
        assert isinstance(decode(bytes(frame)), Message)


def test_an_array_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="arrays of a message must be of int32, int64, float32, bool, got float64"):
        encode(Masks(masks=np.ones((1, 1))))  # pyright: ignore[reportArgumentType]


def encoded(size: RunnerSize) -> EncodedRunner:
    return EncodedRunner(
        EchoRunner(
            num_rows=size.num_rows, max_length=size.max_length, num_pages=size.num_pages, page_size=size.page_size,
            vocab_size=50, guess_quality=0.8,
        )
    )  # fmt: skip


def test_a_runner_behind_messages_conforms() -> None:
    check_runner(encoded, vocab_size=50, page_sizes=(4,), max_drafts=4, vector_size=STATE_SIZE, has_logprobs=True)
    check_runner(encoded, vocab_size=50, page_sizes=(4,), has_grammars=True)
