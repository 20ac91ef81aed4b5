"""Engines of tiny models that see images, the requests that they get, and what these are compared with."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from PIL.Image import Image as Picture

from families.case import SMALL
from pagewood.engine.api import Delta, EngineConfig, FinishReason, Image, SamplingParams, Submit
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pictured import IMAGE, Pictured, pictures
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from tiny_models import WIDTH, random_head

NO_IMAGES = ((IMAGE, -inf),)
GREEDY = SamplingParams(temperature=0, max_tokens=5, logprobs=64, ignore_eos=True, logit_bias=NO_IMAGES)
"""Without tokens of images, which the reference would take for some in a text that goes on behind them."""
FEW = replace(GREEDY, max_tokens=48, logprobs=2, logit_bias=(*NO_IMAGES, *((token, 40.0) for token in (20, 21, 22))))
"""Answers of three tokens, so that looking up the last ones often finds what comes next, and often does not."""


class Driven:
    """An engine, and the requests that it gets."""

    def __init__(self, model: Pictured, *, build: Any = build_engine, **options: Any) -> None:
        """Build it by `build`."""
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        usual: dict[str, Any] = {
            "images": "on", "page_size": 4, "max_length": 200, "max_total_tokens": 1200, "num_threads": 1,
            "max_running": 6,
        }  # fmt: skip
        config = EngineConfig(model=str(model.folder), **(usual | options))
        self.engine: Engine = build(config, inbox=self.inbox, outbox=self.outbox)

    def answers(self, submits: Sequence[Submit], *, names: Iterable[str] = ()) -> dict[str, list[Delta]]:
        """The deltas of requests, also of those that it has already by `names`, when all have ended."""
        for submit in submits:
            self.inbox.put(submit)
        found: dict[str, list[Delta]] = {name: [] for name in (*names, *(submit.request_id for submit in submits))}
        pending = None
        while any(not deltas or deltas[-1].finish is None for deltas in found.values()):
            pending = self.engine.advance(pending)
            for delta in self.outbox.take():
                found.setdefault(delta.request_id, []).append(delta)
        while pending is not None:
            pending = self.engine.advance(pending)
        return found

    def answer(self, tokens: Sequence[int], images: Sequence[Image], **options: Any) -> list[Delta]:
        """The deltas of one request."""
        return self.answers([submit("a", tokens, images, **options)])["a"]


class DrivenOnDevice(Driven):
    """An engine on a recording device."""

    def __init__(self, model: Pictured, **options: Any) -> None:
        self.device = RecordingDevice()
        build = partial(build_on, self.device, flashinfer_torch)
        super().__init__(model, build=build, **({"device": "cuda", "dtype": "float32"} | options))


def submit(name: str, tokens: Sequence[int], images: Sequence[Image], **options: Any) -> Submit:
    options = {"sampling": GREEDY, **options}
    return Submit(
        request_id=name,
        tokens=torch.tensor(tokens, dtype=torch.int32).numpy().tobytes(),
        images=tuple(images),
        **options,
    )


def drafting(model: Pictured, kind: str, **options: Any) -> dict[str, Any]:
    """The options of an engine whose memory is too small for `check_drafts`, with a drafter of a kind."""
    folder = None
    if kind == "draft":
        folder = str(model.folder)  # which gets no images
    elif kind == "eagle":
        folder = str(random_head({**SMALL, "head_dim": 16, "intermediate_size": WIDTH, "eos_token_id": 0}, seed=12))
    usual: dict[str, Any] = {
        "speculative": kind, "speculative_model": folder, "speculative_control": "fixed", "chunked_prefill_size": 5,
        "max_running": 6, "schedule_conservativeness": 0.01, "max_length": 160,
        "max_total_tokens": 164 if model.kind == "gemma3" else 184,
    }  # fmt: skip
    return usual | options


def check_drafts(model: Pictured, plain: Driven, own: Driven, *, is_exact: bool, least: int, **sampling: Any) -> None:
    """Compare the answers of an engine that drafts, to requests side by side, with those of one without, one by one.

    Args:
        model: of both.
        plain: gets each request alone.
        own: has room for some of the requests, so that prompts are computed beside drafts; those of text have the rows
            of images, and the other way around. Some lose their memory.
        is_exact: whether answers must be the same bits.
        least: drafts that must be accepted.
        sampling: of all requests, beside their seeds.
    """
    shown = pictures(5, seed=21)
    asked = {f"{index}": conversation(model, shown[index:5:2]) for index in range(5)}
    asked |= {"text": ([40, 41, 42, *[20, 21, 22] * 3], []), "all": conversation(model, shown)}
    image = model.image(shown[0])
    tokens = model.tokens(image)[:-1]
    asked["seen"] = [*range(50, 54 + (1 - len(tokens)) % 4), *tokens], [image]  # whole pages but for its last token
    each = [replace(FEW, **({"temperature": 0.5 * (seed % 2), "seed": seed} | sampling)) for seed in range(len(asked))]
    submits = [submit(name, *one, sampling=chosen) for (name, one), chosen in zip(asked.items(), each, strict=True)]
    expected = {one.request_id: plain.answers([one])[one.request_id] for one in submits}
    for found in (own.answers(submits), own.answers(submits[-1:])):  # the last step of the second prompt has drafts
        for name, deltas in found.items():
            assert same(deltas, expected[name])
            assert bits(deltas) == bits(expected[name]) or not is_exact
    counters = own.engine.counters()
    assert counters.num_preempted > 0 or model.kind == "gemma3"  # its layers with windows give memory back
    assert counters.speculation is not None
    assert counters.speculation.num_drafted > counters.speculation.num_accepted >= least


def drawn(deltas: Sequence[Delta]) -> list[int]:
    assert deltas[-1].finish in (FinishReason.STOP, FinishReason.LENGTH), deltas[-1].refusal
    return [token for delta in deltas for token in delta.tokens]


def bits(deltas: Sequence[Delta]) -> list[Any]:
    return [one for delta in deltas for one in delta.logprobs]


def same(found: Sequence[Delta], expected: Sequence[Delta]) -> bool:
    """Whether tokens are the same, and log probabilities but for rounding."""
    pairs = zip(bits(found), bits(expected), strict=True)
    return drawn(found) == drawn(expected) and all(abs(one.logprob - other.logprob) < 1e-4 for one, other in pairs)


def check(
    model: Pictured, prompt: Sequence[int], shown: Sequence[Picture], deltas: Sequence[Delta], *, atol: float = 1e-4
) -> None:
    """Compare an answer with the reference; log probabilities may differ by `atol`."""
    tokens = drawn(deltas)
    expected = model.logprobs([*prompt, *tokens], shown)[len(prompt) - 1 :]
    for row, one in zip(expected, bits(deltas), strict=False):
        ids = torch.tensor([token for token, _ in one.top])
        own = torch.tensor([logprob for _, logprob in one.top])
        torch.testing.assert_close(own, row[ids], atol=atol, rtol=0)
        row = row.index_fill(0, torch.tensor([IMAGE]), -inf)
        assert row[one.token] >= row.max() - atol


def conversation(model: Pictured, shown: Sequence[Picture]) -> tuple[list[int], list[Image]]:
    """A text with pictures among its words."""
    images = [model.image(one) for one in shown]
    tokens = [3, 4, 5]
    for number, image in enumerate(images):
        tokens += [*range(10 + 7 * number, 13 + 7 * number), *model.tokens(image), 6, 7]
    return tokens, images
