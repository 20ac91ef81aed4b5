"""A request that is submitted with the output that another engine gave it goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagewood.engine.api import EngineConfig, FinishReason, Grammar, SamplingParams, Submit, TokenLogprob
from pagewood.engine.build import build_engine
from pagewood.engine.core import intake
from pagewood.engine.core.loop import Engine
from pagewood.engine.core.messages.adjustments import Adjustments
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from seeded_faults import Edit, seed_fault

PROMPT = tuple(range(40, 75))
NUM_TOKENS = 40
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
KINDS: dict[str, SamplingParams] = {
    "greedy": replace(DRAWN, temperature=0.0),
    "drawn": DRAWN,
    "penalties": replace(DRAWN, frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=1.5, temperature=0.3),
    "min_tokens": replace(DRAWN, seed=1, ignore_eos=False, min_tokens=20, max_tokens=None),
    "bad_words": replace(DRAWN, bad_words=((101, 108), (32, 116)), temperature=0.0),
    "logprobs": replace(DRAWN, logprobs=2, logprobs_kind="processed"),
    "grammar": replace(DRAWN, grammar=Grammar.regex('"[a-z]{10,20}", [0-9]{6}'), max_tokens=60),
    "choice": replace(DRAWN, grammar=Grammar.choice(["the sea is wide and deep", "the sea is calm"])),
}
Found = tuple[list[int], list[TokenLogprob], FinishReason | None]


class Bench:
    """An engine with the embedded model."""

    def __init__(self, **options: Any) -> None:
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        config = EngineConfig(
            max_total_tokens=4096, max_running=8, num_threads=1, chunked_prefill_size=32, prefix_cache=False, **options
        )
        self.engine: Engine = build_engine(config, inbox=self._inbox, outbox=self._outbox)
        self._number = 0

    def run(self, sampling: SamplingParams, *outputs: Sequence[int], **fields: Any) -> list[Found]:
        """Return the new tokens of requests behind these outputs, with how each ended."""
        names: list[str] = []
        for output in outputs:
            self._number += 1
            names.append(f"r{self._number}")
            self._inbox.put(
                Submit(
                    request_id=names[-1],
                    tokens=np.array(PROMPT, "<i4").tobytes(),
                    output=np.array(output, "<i4").tobytes(),
                    sampling=sampling,
                    **fields,
                )
            )
        found: dict[str, Found] = {name: ([], [], None) for name in names}
        pending = None
        for _ in range(1000):
            pending = self.engine.advance(pending)
            for delta in self._outbox.take():
                tokens, logprobs, _ = found[delta.request_id]
                found[delta.request_id] = (tokens + list(delta.tokens), logprobs + list(delta.logprobs), delta.finish)
                assert delta.refusal is None, delta.refusal
            if all(finish is not None for _, _, finish in found.values()) and pending is None:
                return list(found.values())
        raise AssertionError("a request does not end")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_is_what_would_have_followed(bench: Bench, kind: str) -> None:
    check(bench, kind)


def check(bench: Bench, kind: str) -> None:
    """Cut an answer at several places, and compare what comes behind each."""
    ((tokens, logprobs, finish),) = bench.run(KINDS[kind], ())
    assert len(tokens) > 3
    cuts = sorted({1, 2, len(tokens) // 3, len(tokens) // 2, len(tokens) - 2, len(tokens) - 1})
    for cut, (rest, entries, end) in zip(cuts, bench.run(KINDS[kind], *(tokens[:cut] for cut in cuts)), strict=True):
        assert (rest, end) == (tokens[cut:], finish), cut
        if KINDS[kind].logprobs is not None:
            assert entries == logprobs[cut:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"speculative": "ngram"}, {"overlap": False}, {"num_continuous_decode_steps": 4}])
def test_in_every_loop_and_with_drafts(kind: str, options: dict[str, Any]) -> None:
    bench = Bench(**options)
    check(bench, kind)
    bench.engine.close()


def test_an_output_that_completes_the_grammar_has_ended(bench: Bench) -> None:
    sampling = KINDS["choice"]
    ((tokens, _, finish),) = bench.run(sampling, ())
    assert finish is FinishReason.STOP
    ((rest, _, end),) = bench.run(sampling, tokens)
    assert (rest, end) == ([], FinishReason.STOP)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output": b"123"}, "output must be int32 token ids, got 3 bytes"),
        ({"output": np.array([-1], "<i4").tobytes()}, r"output must have token ids in \[0, \d+\), got -1"),
        ({"output": np.zeros(4, "<i4").tobytes()}, "output must be shorter than max_tokens 4, got 4 tokens"),
    ],
)
def test_a_wrong_output_is_refused(bench: Bench, fields: dict[str, Any], message: str) -> None:
    submit = Submit(
        request_id="x",
        tokens=np.array(PROMPT, "<i4").tobytes(),
        sampling=SamplingParams(max_tokens=4),
        **fields,
    )
    requirements = bench.engine._intake._requirements  # pyright: ignore[reportPrivateUsage]
    refusal = requirements.refusal(submit, np.array(PROMPT, np.int32))
    assert refusal is not None
    assert refusal.param == "output"
    with pytest.raises(ValueError, match=message):
        raise ValueError(refusal.message)


def test_an_output_that_the_grammar_does_not_allow_ends_with_an_error(bench: Bench) -> None:
    with pytest.raises(AssertionError, match="grammar_failed"):
        bench.run(KINDS["grammar"], [PROMPT[0], PROMPT[1]])


FAULTS: dict[str, tuple[Edit, str]] = {
    "a token is lost at the seam": (
        (intake.Intake, "_submit", "len(prompt) + len(output)", "len(prompt) + max(0, len(output) - 1)"), "drawn"
    ),
    "a token comes twice": (
        (intake.Intake, "_submit", 'np.frombuffer(submit.output, "<i4")',
         'np.frombuffer(submit.output + submit.output[-4:], "<i4")'), "drawn"
    ),
    "the seed is drawn anew": ((intake.Intake, "_submit", "if sampling.seed is None", "if submit.output"), "drawn"),
    "penalties are not replayed": ((Adjustments, "of", "one.num_prompt for", "one.num_known for"), "penalties"),
    "the grammar is not replayed": (
        (intake.Intake, "poll", "request.num_prompt : request.num_known", "0:0"), "grammar"
    ),
    "min_tokens count anew": (
        (intake.Intake, "_submit", "num_prompt=len(prompt)", "num_prompt=num_known"), "min_tokens"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, kind = FAULTS[fault]
    bench = Bench(overlap=False)
    monkeypatch.setattr(Bench, "run", _first_whole(Bench.run, edit, monkeypatch))
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check(bench, kind)
    bench.engine.close()


def _first_whole(run: Any, edit: Edit, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Seed a fault when the answer to compare with is known."""
    calls: list[int] = []

    def counted(self: Bench, *args: Any, **fields: Any) -> list[Found]:
        if calls:
            seed_fault([edit], monkeypatch)
        calls.append(1)
        return run(self, *args, **fields)

    return counted
