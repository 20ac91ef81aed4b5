"""Logits processors, against `logit_bias` and against `transformers` whose logits are changed in the same way.

Engines must give the same text with and without overlap, preemption, cache hits, chunks and every kind of drafts.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logits_functions import follow_text
from pagewood.engine.api import (
    EngineConfig,
    FinishReason,
    Grammar,
    LogitsProcessor,
    Refusal,
    SamplingParams,
    Submit,
)
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.assembly.named_processors import load_processors
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner import processors
from pagewood.engine.runner.cpu.program import processing
from pagewood.engine.runner.cpu.program.tape import Program, Run
from pagewood.engine.runner.cuda import runner as cuda
from scale import scaled
from scenarios.drawing import random_grammar
from seeded_faults import Edit, seed_fault
from speculating import (
    PROCESSORS,
    Answer,
    Drafter,
    arrival,
    make,
    plain_answer,
    random_drafting,
    random_traffic,
    run,
    traffic,
)
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from tiny_models import model_folder

PROMPT = (9, 8, 7, 3, 9, 8)
NUM_TOKENS = 30


def call(name: str, **arguments: Any) -> LogitsProcessor:
    return LogitsProcessor(name, json.dumps(arguments))


FOLLOW = call("follow_text")
LENIENT = call("follow_text", strength=2.5, penalty=3.0)
"""It forbids nothing, so it agrees with every grammar."""


def open_engine(**config: Any) -> tuple[Engine, MemoryInbox, MemoryOutbox]:
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    sizes = {"max_total_tokens": 512, "max_length": 128, "num_threads": 1}
    options = {"model": str(model_folder("llama")), "logits_processors": PROCESSORS, **sizes, **config}
    return build_engine(EngineConfig(**options), inbox=inbox, outbox=outbox), inbox, outbox


def serve(engine: Engine, inbox: MemoryInbox, outbox: MemoryOutbox, *samplings: SamplingParams) -> list[Answer]:
    """Return the answers to requests that come at the same time."""
    for index, sampling in enumerate(samplings):
        tokens = np.array(PROMPT, "<i4").tobytes()
        inbox.put(Submit(request_id=str(index), tokens=tokens, sampling=sampling))
    answers = [Answer() for _ in samplings]
    pending = None
    while pending is not None or any(answer.last is None for answer in answers):
        pending = engine.advance(pending)
        for delta in outbox.take():
            answers[int(delta.request_id)].add(delta)
    return answers


def sampled(**options: Any) -> SamplingParams:
    """Return parameters, greedy unless told otherwise."""
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS, "seed": 1, **options})


def answers_to(*samplings: SamplingParams, **config: Any) -> list[Answer]:
    engine, inbox, outbox = open_engine(**config)
    answers = serve(engine, inbox, outbox, *samplings)
    assert engine.counters().num_violations == 0
    engine.close()
    return answers


def refusal(sampling: SamplingParams, **config: Any) -> Refusal:
    (answer,) = answers_to(sampling, **config)
    assert answer.last is not None
    assert answer.last.finish is FinishReason.REFUSED
    assert answer.last.refusal is not None
    return answer.last.refusal


def decoded(num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    """Return greedy tokens of `transformers`, whose logits `follow_text` changes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    text: list[int] = list(PROMPT)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, -1].clone()
        follow_text(torch.tensor(text, dtype=torch.int32), logits)
        text.append(int(logits.argmax()))
    return tuple(text[len(PROMPT) :])


@pytest.mark.parametrize("speculative", ["off", "ngram"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_function_of_the_text_is_that_of_transformers(speculative: str, num_threads: int) -> None:
    drafting = {"speculative": speculative, "speculative_control": "fixed", "speculative_num_tokens": 6}
    one = sampled(logits_processors=(FOLLOW,))
    plain = sampled()
    found = answers_to(one, plain, num_threads=num_threads, **drafting)
    assert found[0].tokens == decoded()
    assert found[1].tokens == answers_to(plain)[0].tokens
    assert found[0].tokens != found[1].tokens


def test_processors_run_in_their_order() -> None:
    """What is forbidden stays so, and numbers that are added and subtracted change nothing."""
    (plain,) = answers_to(sampled())
    likely = [[token, 50.0] for token in {PROMPT[-1], *plain.tokens}]
    more = call("add_biases", biases=[[PROMPT[-1], 1000.0]])
    only_once = sampled(max_tokens=1, logits_processors=(more, FOLLOW))
    assert answers_to(only_once)[0].tokens != (PROMPT[-1],)
    assert answers_to(replace(only_once, logits_processors=(FOLLOW, more)))[0].tokens != (PROMPT[-1],)  # stays -inf
    assert answers_to(replace(only_once, logits_processors=(more,)))[0].tokens == (PROMPT[-1],)
    twice = (call("add_biases", biases=likely), call("add_biases", biases=[[token, -50.0] for token, _ in likely]))
    assert answers_to(sampled(max_tokens=9, logits_processors=twice))[0].tokens == plain.tokens[:9]


def with_processors(rng: random.Random, sampling: SamplingParams) -> tuple[SamplingParams, SamplingParams | None]:
    """Return the parameters with random processors and other changes, and others of the same meaning, if there are."""
    sampling = replace(
        sampling,
        grammar=random_grammar(rng) if rng.random() < 0.3 else None,
        logprobs=rng.choice((None, None, 2)),
        logprobs_kind=rng.choice(("raw", "processed")),
        repetition_penalty=rng.choice((1.0, 1.0, 1.5)),
    )
    if sampling.grammar is None:  # a grammar may leave nothing but a bad word
        sampling = replace(sampling, bad_words=rng.choice(((), ((1, 2), (3,)))))
    biases = rng.choice((((3, 2.0), (7, -100.0)), tuple([(token, 1.5) for token in range(20)])))
    bias, follow = call("add_biases", biases=biases), FOLLOW if sampling.grammar is None else LENIENT
    match rng.randrange(4):
        case 0:
            return sampling, None
        case 1:
            return replace(sampling, logits_processors=(bias,)), replace(sampling, logit_bias=biases)
        case 2:
            return replace(sampling, logits_processors=(bias, follow)), replace(
                sampling, logit_bias=biases, logits_processors=(follow,)
            )
        case _:
            return replace(sampling, logits_processors=(follow,)), None


@settings(max_examples=scaled(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), kind=st.sampled_from(["off", "ngram", "unrelated", "perturbed", "eagle"]))
def test_engines_call_processors_as_plain_decoding_does(rng: random.Random, kind: str) -> None:
    """Under overlap, chunks, preemption, cache hits, aborts, grammars, and drafts."""
    scenario = random_traffic(rng, overlap=rng.random() < 0.7)
    model, drafter = make("suffix" if kind == "off" else kind, "llama")
    changed = [with_processors(rng, one.sampling) for one in scenario.arrivals]
    arrivals = tuple([replace(one, sampling=own) for one, (own, _) in zip(scenario.arrivals, changed, strict=True)])
    options: dict[str, Any] = {"num_tokens": rng.choice((2, 4, 8)), "make_drafting": random_drafting(rng)}
    run(replace(scenario, arrivals=arrivals), model=model, drafter=None if kind == "off" else drafter, **options)
    for one, (own, same) in zip(scenario.arrivals, changed, strict=True):
        if same is not None and len(one.prompt) + (own.max_tokens or 1) <= scenario.max_length:
            own, same = (replace(each, max_tokens=own.max_tokens or 9) for each in (own, same))
            ours, theirs = (plain_answer(model, False, one.prompt, each) for each in (own, same))
            ends = [answer.last.refusal for answer in (ours, theirs) if answer.last is not None]
            if ends == [None, None]:  # of a grammar that fails, tokens may have come at once which it forced
                assert ours.tokens == theirs.tokens


def test_drafts_are_accepted_with_the_calls() -> None:
    """Drafts of the same model, most of which are right where the bias is weak."""
    model, drafter = make("perturbed", "llama")
    weak = call("add_biases", biases=[[5, 0.01]])
    arrivals = [
        arrival([i, 2, 3], max_tokens=40, temperature=0.0, logits_processors=calls)
        for i, calls in enumerate([(weak,), (weak, FOLLOW), (FOLLOW,), ()])
    ]
    report = run(traffic(arrivals, num_pages=90, page_size=4), model=model, drafter=drafter)
    assert report.counts.num_accepted > 20


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_an_exception_ends_its_request_only(speculative: str, caplog: pytest.LogCaptureFixture) -> None:
    length = len(PROMPT) + 8
    bias = tuple([(token, 100.0) for token in (4, 5)])  # text that repeats, so that it is drafted
    failing = sampled(logit_bias=bias, logits_processors=(FOLLOW, call("fail_at", length=length)))
    at_once = sampled(logits_processors=(call("fail_at", length=len(PROMPT)),))
    others = [sampled(logit_bias=bias), sampled(logits_processors=(FOLLOW,))]
    engine, inbox, outbox = open_engine(speculative=speculative, speculative_control="fixed", num_threads=2)
    with caplog.at_level(logging.ERROR):
        one, two, *rest = serve(engine, inbox, outbox, failing, at_once, *others)
    for answer, num in ((one, 8), (two, 0)):
        assert answer.last is not None
        assert answer.last.finish is FinishReason.ERROR
        assert answer.last.refusal is not None
        assert answer.last.refusal.code == "logits_not_numbers"
        assert len(answer.tokens) == num
    # With another test's log level, the settings of the engine are logged too, and name the processor.
    failures = [one for one in caplog.records if one.levelno == logging.ERROR and "fail_at" in one.getMessage()]
    assert len(failures) == 2  # once for each request
    assert all(record.exc_info is not None for record in failures)
    assert [answer.tokens for answer in rest] == [answer.tokens for answer in answers_to(*others)]
    without = replace(failing, logits_processors=(FOLLOW,), max_tokens=8)
    assert serve(engine, inbox, outbox, without)[0].tokens == one.tokens
    assert engine.violation() is None
    engine.close()


def test_reports_are_of_the_distribution_before_or_after() -> None:
    processed_ = sampled(temperature=1.0, max_tokens=6, logprobs=3, logits_processors=(FOLLOW,))
    kinds = [replace(processed_, logprobs_kind="processed"), replace(processed_, logprobs_kind="raw")]
    after, before = answers_to(*kinds)
    assert after.tokens == before.tokens
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    for num, (one, other) in enumerate(zip(after.logprobs, before.logprobs, strict=True)):
        text = torch.tensor([[*PROMPT, *after.tokens[:num]]], dtype=torch.int32)
        with torch.no_grad():
            logits = model(text.long()).logits[0, -1].clone()
        assert other.logprob == pytest.approx(float(logits.log_softmax(-1)[other.token]), abs=1e-4)
        follow_text(text[0], logits)
        assert one.logprob == pytest.approx(float(logits.log_softmax(-1)[one.token]), abs=1e-4)


def test_only_a_step_with_processors_has_more_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, int | None]] = []
    start = Program.start

    def counted(self: Program, *arguments: Any, first: int = 0, last: int | None = None) -> Run:
        started.append((first, last))
        return start(self, *arguments, first=first, last=last)

    monkeypatch.setattr(Program, "start", counted)
    engine, inbox, outbox = open_engine(overlap=False)

    def runs(**options: Any) -> list[tuple[int, int | None]]:
        before = engine.counters().num_steps
        started.clear()
        serve(engine, inbox, outbox, sampled(max_tokens=5, **options))
        assert engine.counters().num_steps - before == 5
        return list(started)

    penalised = {"repetition_penalty": 2.0}
    for options in ({}, penalised):
        assert runs(**options) == [(0, None)] * 5
    assert len(runs(logits_processors=(FOLLOW,))) == 10
    assert runs() == [(0, None)] * 5  # the row of a request that had some
    engine.close()
    engine, inbox, outbox = open_engine(overlap=False, model=None)
    assert runs(grammar=Grammar(kind="regex", text="[a-z ]{9,90}")) == [(0, None)] * 5  # masks are waited for inside
    engine.close()


def test_wrong_processors_are_refused() -> None:
    unknown = refusal(sampled(logits_processors=(LogitsProcessor("nothing"),)))
    assert (unknown.code, unknown.param) == ("unknown_logits_processor", "logits_processors")
    assert unknown.message == ("logits_processors must be one of add_biases, follow_text, fail_at, got 'nothing'")
    none = refusal(sampled(logits_processors=(FOLLOW,)), logits_processors=())
    assert none.code == "unknown_logits_processor"
    assert none.message == "logits_processors must be empty: this engine has none, got 'follow_text'"
    for arguments, message in (
        ("{", "logits_processors must have JSON objects as arguments, got for 'follow_text': Expecting"),
        ("[1]", "got for 'follow_text': not a JSON object but list"),
        ('{"strength": NaN}', "NaN is not a JSON number"),
        ("[" * 4000, "too deeply nested"),
        ('{"weight": 1}', "got for 'follow_text': got an unexpected keyword argument 'weight'"),
        ('{"tokens": 1}', "got for 'follow_text': multiple values for argument 'tokens'"),
    ):
        found = refusal(sampled(logits_processors=(LogitsProcessor("follow_text", arguments),)))
        assert message in found.message
        assert (found.code, found.param) == ("invalid_value", "logits_processors")


def test_wrong_fields_are_errors() -> None:
    with pytest.raises(ValueError, match="name must have 1 to 128 characters, got 0"):
        LogitsProcessor("")
    with pytest.raises(ValueError, match="arguments must have at most 4096 bytes, got 4097"):
        LogitsProcessor("x", " " * 4097)
    with pytest.raises(ValueError, match="logits_processors must hold at most 8, got 9"):
        SamplingParams(logits_processors=(FOLLOW,) * 9)
    for entries, message in (
        ((("", "m:f"),), "must have names of 1 to 128 characters, got ''"),
        ((("x", "m:f"), ("x", "m:g")), "must have each name once, got 'x' again"),
        ((("x", "m.f"),), "must be found at places like package.module:function, got 'm.f' for 'x'"),
        ((("x", "os; f:g"),), "must be found at places"),
    ):
        with pytest.raises(ValueError, match=f"logits_processors {message}"):
            EngineConfig(logits_processors=entries)
    for place, message in (
        ("no_such_module:f", "must be importable, got 'no_such_module:f' for 'x': ModuleNotFoundError"),
        ("logits_functions:nothing", "must be importable, got 'logits_functions:nothing' for 'x': AttributeError"),
        ("logits_functions:torch", "must be functions, got module at 'logits_functions:torch' for 'x'"),
    ):
        with pytest.raises(ValueError, match=f"logits_processors {message}"):
            open_engine(logits_processors=(("x", place),))
    assert load_processors(EngineConfig(logits_processors=PROCESSORS))["follow_text"] is follow_text


FAULTS: dict[str, list[Edit]] = {
    "drafts not in the text": [(processing.Processing, "change", "own[1 : last + 1]", "own[:0]")],
    "later drafts in the text": [(processing.Processing, "change", "own[1 : last + 1]", "own[1:]")],
    "logits of another position": [(processing.Processing, "change", "logits[first + j]", "logits[first]")],
    "former request's calls": [(processors.RowProcessors, "admit", "self._is_on[rows] = False", "pass"),
                               (processors.RowProcessors, "admit", "self._calls.pop(row, None)", "pass")],
}  # fmt: skip


def check_all() -> None:
    """Run tests that must find every fault."""
    test_drafts_are_accepted_with_the_calls()
    calls = {"max_tokens": 8, "temperature": 0.0, "logits_processors": (FOLLOW,)}
    arrivals = [arrival([5, 6], **calls), arrival([5, 7], at_step=40, max_tokens=8, temperature=0.0)]
    run(traffic(arrivals, num_pages=60, page_size=4, max_running=1), model=model_folder("llama"), drafter=None)


def test_without_a_fault_nothing_is_found() -> None:
    check_all()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(FAULTS[fault], monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - any error counts
        check_all()


# --- the device ---


def on_cuda(*samplings: SamplingParams, speculative: Any) -> list[Answer]:
    """Return the answers of an engine on stand-ins for a GPU."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    config = EngineConfig(
        model=str(model_folder("llama")), device="cuda", dtype="float32", max_running=4, max_length=96,
        max_total_tokens=512, speculative=speculative, speculative_control="fixed", logits_processors=PROCESSORS,
    )  # fmt: skip
    engine = build_on(RecordingDevice(), flashinfer_torch, config, inbox=inbox, outbox=outbox)
    answers = serve(engine, inbox, outbox, *samplings)
    engine.close()
    return answers


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_a_cuda_runner_calls_processors_as_the_cpu_does(speculative: str) -> None:
    bias = tuple([(token, 100.0) for token in (4, 5)])
    samplings = [
        sampled(logits_processors=(FOLLOW,)),
        sampled(logits_processors=(call("add_biases", biases=bias),)),
        sampled(repetition_penalty=1.5, logits_processors=(FOLLOW, call("add_biases", biases=[[7, 3.0]]))),
        sampled(),
    ]
    found = on_cuda(*samplings, speculative=speculative)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in answers_to(*samplings)]
    assert found[0].tokens == decoded()
    assert found[1].tokens == answers_to(sampled(logit_bias=bias))[0].tokens


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_an_exception_on_a_cuda_runner_ends_its_request_only(speculative: str) -> None:
    failing = sampled(logits_processors=(call("fail_at", length=len(PROMPT) + 5),))
    one, other = on_cuda(failing, sampled(), speculative=speculative)
    assert one.last is not None
    assert one.last.finish is FinishReason.ERROR
    assert one.tokens == other.tokens[:5]
    assert other.tokens == answers_to(sampled())[0].tokens


CUDA_FAULTS: dict[str, list[Edit]] = {
    "one token less": [(cuda.CUDARunner, "_ends", "+ batch.counts", "+ batch.counts - 1")],
    "text of the first row": [(cuda.CUDARunner, "_process", "ends[index] // width * width :", "0 :")],
    "changes dropped": [(processors, "processed", "chosen.to(logits.dtype)", "logits.index_select(0, index)")],
}


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("fault", CUDA_FAULTS)
def test_a_fault_of_the_cuda_runner_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = CUDA_FAULTS[fault]
    seed_fault(edits, monkeypatch)
    if edits[0][1] == "processed":
        monkeypatch.setattr(cuda, "processed", processors.processed)
    with pytest.raises(AssertionError):
        test_a_cuda_runner_calls_processors_as_the_cpu_does("off")


def test_a_grammar_and_a_processor_together_are_plain_decoding() -> None:
    """Both interrupt a step, and the calls see the forbidden tokens."""
    grammar = Grammar(kind="regex", text="3 40 999 0")
    arrivals = [
        arrival([i, 4], max_tokens=30, temperature=0.9, grammar=grammar if i % 2 else None, logits_processors=calls)
        for i, calls in enumerate([(FOLLOW,), (LENIENT,), (), ()])
    ]
    for drafter in (None, Drafter(kind="ngram")):
        run(traffic(arrivals, num_pages=80, page_size=4), model=model_folder("llama"), drafter=drafter)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_processor_that_leaves_no_token_ends_its_request(overlap: bool) -> None:
    """Also where a grammar has left one only, which must not be taken without a call."""
    every = call("add_biases", biases=[[token, -1e39] for token in range(60)])
    (answer,) = answers_to(sampled(logits_processors=(every,)), overlap=overlap)
    assert answer.last is not None
    assert answer.last.finish is FinishReason.ERROR
    forced = Grammar(kind="choice", text='["aaaaaaaa"]')
    config = {"model": None, "overlap": overlap}
    free = answers_to(sampled(grammar=forced), **config)[0]
    assert len(free.tokens) > 1
    banned = call("add_biases", biases=[[free.tokens[1], -1e39]])
    (answer,) = answers_to(sampled(grammar=forced, logits_processors=(banned,)), **config)
    assert answer.last is not None
    assert answer.last.finish is FinishReason.ERROR or answer.tokens != free.tokens
    assert free.tokens[1] not in answer.tokens
