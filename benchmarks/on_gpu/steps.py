"""Measures steps: decode steps of many requests at a given context, and prefills."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from on_gpu.subject import PAGE_SIZE, Plan, Subject
from pagewood.engine.api import SamplingParams
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.experts import ExpertsConfig
from pagewood.engine.models.parts.feed_forward import FeedForwardConfig

_WARM_UP = 3  # steps to warm up
_NOTHING = FeedForwardConfig(size=1)


def decode_seconds(subject: Subject, batch: int, context: int, *, num_drafts: int = 0) -> float:
    """Return the seconds of a step that decodes `batch` requests of `context` tokens, two steps in flight.

    Every request has last pages of its own. If there are too few full pages, requests share them (`shares_pages`).

    Args:
        subject: what is measured.
        batch: requests.
        context: tokens of each request before the first step.
        num_drafts: tokens that a step drafts and verifies for each request; the runner must accept all of them, so that
            the next step begins behind them.
    """
    num_steps, width = subject.plan.num_steps, 1 + num_drafts
    pages = row_pages(batch, context, (num_steps + _WARM_UP) * width, subject.num_pages)
    last = None
    start_s = perf_counter()
    for number in range(num_steps + _WARM_UP):
        step = decode_batch(batch, context + number * width, pages if number == 0 else None, width=width)
        handle = subject.runner.launch(step)
        if last is not None:
            last.wait()
        last = handle
        if number + 1 == _WARM_UP:
            last.wait()
            start_s = perf_counter()
    if last is not None:
        last.wait()
    return (perf_counter() - start_s) / num_steps


def shares_pages(subject: Subject, batch: int, context: int) -> bool:
    """Return whether there are too few pages for `batch` requests of `context` tokens, so that some are read twice."""
    num_own = -(-(context + subject.plan.num_steps + _WARM_UP) // PAGE_SIZE)
    return batch * num_own > subject.num_pages


def decode_bytes(subject: Subject, batch: int, context: int) -> float:
    """Return the bytes that a decode step reads: the weights once, and the KV of every request.

    Of the experts these are as many as random choices of all requests would use; it is an estimate.
    """
    share = 0.0
    if isinstance(part := subject.plan.model.layers[0].feed_forward, ExpertsConfig):
        share = 1 - (1 - part.router.num_chosen / part.router.num_experts) ** batch
    return subject.read_bytes + share * subject.expert_bytes + batch * context * subject.token_bytes


def prefill_seconds(subject: Subject, num_tokens: int) -> float:
    """Return the seconds of a step that computes a whole prompt and its first token; best of three."""
    times: list[float] = []
    for number in range(4):
        start_s = perf_counter()
        subject.runner.launch(prefill_batch(num_tokens, subject.plan.model.vocab_size, number)).wait()
        times.append(perf_counter() - start_s)
    return min(times[1:])


def prefill_flops(plan: Plan, num_tokens: int) -> float:
    """Return the multiplications and additions of a prefill: projections, causal attention, one row of logits."""
    model = plan.model
    mixer, feed_forward = model.paged[0], model.layers[0].feed_forward
    if isinstance(mixer, AttentionConfig):
        layer, pair = model.hidden_size * (2 * mixer.q_size + 2 * mixer.kv_size), 2 * mixer.q_size
    else:
        shape = mixer.shape
        layer = model.hidden_size * (shape.query_size + shape.latent_size + shape.num_heads * shape.value_dim)
        layer += shape.head_rows * shape.rank
        pair = shape.num_heads * (shape.latent_size + shape.rank)
    if isinstance(feed_forward, ExpertsConfig):
        width = feed_forward.size * feed_forward.router.num_chosen + (feed_forward.shared or _NOTHING).size
    else:
        width = feed_forward.size
    layer += 3 * model.hidden_size * width
    attention = 2 * num_tokens * (num_tokens + 1) / 2 * pair
    return model.num_layers * (2 * num_tokens * layer + attention) + 2 * model.hidden_size * model.vocab_size


def row_pages(batch: int, context: int, num_more: int, num_pages: int) -> Int32:
    """Return `[batch, columns] int32`, page ids; pages that are written belong to one request only.

    Raises:
        ValueError: there are too few pages for what is written.
    """
    num_full = context // PAGE_SIZE
    num_own = -(-(context + num_more) // PAGE_SIZE) - num_full
    num_shared = num_pages - batch * num_own
    if num_shared < num_full:
        raise ValueError(f"KV memory must hold {num_full + batch * num_own} pages, got {num_pages}")
    order = np.random.default_rng(0).permutation(num_shared).astype(np.int32)
    places = np.arange(batch * num_full).reshape(batch, num_full) % num_shared
    own = num_shared + np.arange(batch * num_own, dtype=np.int32).reshape(batch, num_own)
    return np.concatenate([order[places], own], 1)


def decode_batch(batch: int, position: int, pages: Int32 | None, *, width: int = 1) -> Batch:
    """Return a step of the token at `position` and `width - 1` drafts per row; the first step also passes `pages`."""
    rows = np.arange(batch, dtype=np.int32)
    if pages is None:
        return _batch(rows, _full(batch, position), _full(batch, width), num_promised=width)
    num_columns = pages.shape[1]
    return _batch(
        rows,
        _full(batch, position),
        _full(batch, width),
        num_promised=width,
        pages=(np.repeat(rows, num_columns), np.tile(np.arange(num_columns, dtype=np.int32), batch), pages.ravel()),
        tokens=(rows, _full(batch, position), 7 * rows + 1),  # of several kinds, so that experts differ
    )


def prefill_batch(num_tokens: int, vocab_size: int, seed: int) -> Batch:
    """Return a step that computes a random prompt in row 0."""
    columns = np.arange(-(-(num_tokens + 1) // PAGE_SIZE), dtype=np.int32)
    tokens = np.random.default_rng(seed).integers(0, vocab_size, num_tokens).astype(np.int32)
    return _batch(
        _full(1, 0),
        _full(1, 0),
        _full(1, num_tokens),
        pages=(np.zeros_like(columns), columns, columns.copy()),
        tokens=(np.zeros_like(tokens), np.arange(num_tokens, dtype=np.int32), tokens),
    )


_Columns = tuple[Int32, Int32, Int32]
_NONE: _Columns = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int32))


def _batch(
    rows: Int32,
    starts: Int32,
    counts: Int32,
    *,
    num_promised: int = 1,
    pages: _Columns = _NONE,
    tokens: _Columns = _NONE,
) -> Batch:
    size = len(rows)
    return Batch(
        page_rows=pages[0], page_columns=pages[1], page_ids=pages[2], token_rows=tokens[0],
        token_positions=tokens[1], token_ids=tokens[2], rows=rows, starts=starts, counts=counts,
        sampled=np.arange(size, dtype=np.int32), num_promised=_full(size, num_promised),
        sampling=SamplingArrays.of([SamplingParams(temperature=0.0)] * size, [0] * size),
    )  # fmt: skip


def _full(size: int, value: int) -> Int32:
    return np.full(size, value, np.int32)
