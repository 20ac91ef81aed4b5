"""Whole engines that speculate: whatever drafts, the answers are those of plain decoding, request by request.

Random traffic has shared prefixes, chunked prompts, aborts, priorities, stop tokens, tiny pools with preemption, and in
part int8 memory and a host cache; the invariant of KV memory is checked after every step. Two drafters are predictable:
the target itself, which computes the target's logits to the bit, and a head for a model whose text is a cycle. It is
known which of their drafts are right, and exactly these must be accepted, so these runs also find faults that only cost
speed. The faults in `FAULTS` are seeded one at a time, and each is found:

    tags ignored               slots of draft KV count as valid whatever they hold
    old tags accepted          slots count as valid whatever tokens they were computed for
    row not begun              a row keeps the valid positions of its previous request
    another seed               drafts are drawn with another seed
    seed of another row        drafts are drawn with the seed of another row
    draft a position late      a draft is noted one position behind its own
    draft not passed on        the next pass does not read the draft
    length not lowered         a step begins where the host thought the row would end
    verified a position late   the target draws for the next position
    state of the last position a head drafts from the state at the end of the step, accepted or not
    state of another row       a head drafts from the state of another row
    states from before a sleep a head catches up from hidden states with a gap
    state from before a rest   a head drafts from the state that it had when it was left out
    state not kept             a head computes all of its drafts from one state
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.api import EngineConfig, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.folder import model_folder as model_folder_of
from pagewood.engine.runner.cpu import runner
from pagewood.engine.runner.cpu.drafts import draft_model, eagle, valid_slots
from pagewood.engine.text import Tokenizer
from pagewood.kvpool.tiers.pages import device
from scale import scaled
from scenarios.drawing import with_grammars
from scenarios.scenario import Scenario
from seeded_faults import Edit, assert_fails, by_turns, seed_fault
from speculating import (
    Drafter,
    Report,
    arrival,
    make,
    plain_engines,
    random_drafting,
    random_traffic,
    run,
    runner_of,
    traffic,
)
from tiny_models import ARCHITECTURES, WITH_EXPERTS

KINDS = ("ngram", "suffix", "self", "perturbed", "unrelated", "eagle", "mtp", "cyclic")
WITH_MTP = ("llama", "mimo")


@pytest.fixture(scope="module", autouse=True)
def oracles() -> Iterator[None]:
    """Keep the plain engines until the last test."""
    with plain_engines():
        yield


def random_options(rng: random.Random, *, prefix_cache: bool, has_latents: bool = False) -> dict[str, Any]:
    """Draw the rest of a configuration."""
    options: dict[str, Any] = {
        "num_tokens": rng.choice((1, 2, 4, 8)),
        "make_drafting": random_drafting(rng),
        "control": rng.choice(("fixed", "adaptive")),
        "num_threads": rng.choice((1, 2)),
    }
    if rng.random() < 0.25 and not has_latents:
        options["kv_cache_dtype"] = "int8"
    if prefix_cache and rng.random() < 0.4:
        options["host_cache_gb"] = rng.choice((0.0002, 0.002))
        options["cache_write_policy"] = rng.choice(("write_through", "write_through_selective", "write_back"))
    return options


def run_random(rng: random.Random, kind: str, architecture: str, *, overlap: bool, **more: Any) -> Report:
    model, drafter = make(kind, architecture)
    scenario = random_traffic(rng, overlap=overlap)
    prefix_cache, has_latents = scenario.config.prefix_cache, architecture == "deepseek3"
    options = random_options(rng, prefix_cache=prefix_cache, has_latents=has_latents)
    return run(scenario, model=model, drafter=drafter, **options, **more)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_every_architecture_with_every_drafter(kind: str, architecture: str) -> None:
    if kind == "mtp" and architecture not in WITH_MTP:
        pytest.skip("no checkpoints of this architecture have such layers")
    overlap = (KINDS.index(kind) + ARCHITECTURES.index(architecture)) % 2 == 0
    run_random(random.Random(f"{kind} {architecture}"), kind, architecture, overlap=overlap)


@pytest.mark.parametrize(("kind", "architecture"), [*(("mtp", one) for one in WITH_EXPERTS), ("self", "deepseek3")])
def test_answers_of_drafters_with_experts_and_latents(kind: str, architecture: str) -> None:
    for seed in range(3):
        run_random(random.Random(f"{architecture} {seed}"), kind, architecture, overlap=seed % 2 == 0)


@settings(max_examples=scaled(7), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rng=st.randoms(use_true_random=False),
    overlap=st.booleans(),
    kind=st.sampled_from(KINDS),
    architecture=st.sampled_from(WITH_MTP),
)
def test_drafts_change_no_answer(rng: random.Random, overlap: bool, kind: str, architecture: str) -> None:
    run_random(rng, kind, architecture, overlap=overlap)


@settings(max_examples=scaled(7), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans(), architecture=st.sampled_from(ARCHITECTURES))
def test_every_draft_of_the_target_itself_is_accepted(rng: random.Random, overlap: bool, architecture: str) -> None:
    """Greedy or sampled, after preemption, cache hits, chunks and copies from the host: no draft KV is ever stale."""
    run_random(rng, "self", architecture, overlap=overlap)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rng=st.randoms(use_true_random=False),
    overlap=st.booleans(),
    kind=st.sampled_from(("ngram", "perturbed", "unrelated", "eagle")),
    architecture=st.sampled_from(("gemma3", "qwen2")),
)
def test_drafts_and_grammars_change_no_answer_of_layers_with_windows(
    rng: random.Random, overlap: bool, kind: str, architecture: str
) -> None:
    model, drafter = make(kind, architecture)
    scenario = with_grammars(random_traffic(rng, overlap=overlap), rng)
    run(scenario, model=model, drafter=drafter, num_tokens=rng.choice((1, 4)), make_drafting=random_drafting(rng))


def test_the_traffic_exercises_what_it_claims() -> None:
    reports = {
        kind: [run_random(random.Random(seed), kind, "llama", overlap=seed % 2 == 0) for seed in range(4)]
        for kind in KINDS[:6]
    }
    every = [report for some in reports.values() for report in some]
    assert sum(report.num_preempted for report in every) > 0
    assert sum(report.num_aborted for report in every) > 0
    assert sum(report.num_cached_tokens for report in every) > 250
    rates = {
        kind: sum(one.counts.num_accepted for one in some) / sum(one.counts.num_drafted for one in some)
        for kind, some in reports.items()
    }
    assert rates["self"] == 1.0
    assert 0.1 < rates["perturbed"] < 0.9
    assert rates["unrelated"] < 0.1
    assert all(0.0 < rate < 0.9 for kind, rate in rates.items() if kind != "self")


@pytest.mark.parametrize("kind", ["ngram", "suffix", "self", "cyclic"])
def test_64_requests_at_once(kind: str) -> None:
    rng = random.Random(kind)
    stem = [rng.randrange(1, 40) for _ in range(20)]
    arrivals = [
        arrival(
            stem[: rng.randint(1, 20)] + [rng.randrange(1, 40) for _ in range(rng.randint(0, 3))],
            at_step=rng.choice((0, 0, 3)), max_tokens=12, temperature=rng.choice((0.0, 0.9)), seed=rng.randrange(99),
        )
        for _ in range(64)
    ]  # fmt: skip
    model, drafter = make(kind, "llama")
    scenario = traffic(arrivals, num_pages=700, page_size=4, max_length=60, max_running=64, chunked_prefill_size=512)
    report = run(scenario, model=model, drafter=drafter)
    assert report.counts.num_drafted > 20


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["self", "cyclic", "suffix"])
def test_preempted_requests_in_a_tiny_pool(kind: str, overlap: bool) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(1, 40) for _ in range(rng.randint(4, 20))] for _ in range(8)]
    arrivals = [
        arrival(prompt, at_step=number, max_tokens=40, temperature=0.7 * (number % 2), seed=number)
        for number, prompt in enumerate(prompts)
    ]
    model, drafter = make(kind, "qwen3")
    scenario = traffic(
        arrivals, num_pages=24, page_size=4, max_length=80, overlap=overlap, schedule_conservativeness=0.05,
        chunked_prefill_size=16,
    )  # fmt: skip
    report = run(scenario, model=model, drafter=drafter)
    assert report.num_preempted > 0
    assert report.counts.num_drafted > 20


PROMPTS = (
    "Say it twice: stone river cloud moon",
    "Count from 1 to 20.",
    "one two three one two three one",
)


@pytest.mark.parametrize("kind", ["ngram", "suffix", "draft", "eagle", "auto"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_embedded_model_with_its_own_drafters(kind: str, overlap: bool) -> None:
    tokenizer = Tokenizer.from_folder(model_folder_of(None))
    arrivals = [
        arrival(tokenizer.encode(text).tolist(), max_tokens=24, temperature=temperature, top_p=0.9, at_step=at_step)
        for text in PROMPTS
        for temperature, at_step in ((0.0, 0), (0.8, 20))
    ]
    page_size = {"ngram": 1, "draft": 4}.get(kind, 16)
    scenario = traffic(
        arrivals, num_pages=1024 // page_size, page_size=page_size, overlap=overlap, chunked_prefill_size=7
    )
    report = run(scenario, model=model_folder_of(None), drafter=Drafter(kind=kind))
    assert report.counts.num_drafted > report.counts.num_accepted > 0
    if kind in ("draft", "eagle", "auto"):
        assert report.counts.num_accepted > report.counts.num_drafted // 4


# --- reuse ---


def with_shared_prefix(num_requests: int, **config: Any) -> Scenario:
    """Return traffic of requests one after the other, which repeat a prompt of 30 pages and one token."""
    prompt = [random.Random(1).randrange(1, 40) for _ in range(121)]
    arrivals = [arrival(prompt, at_step=60 * number, max_tokens=20, seed=number) for number in range(num_requests)]
    return traffic(arrivals, num_pages=120, page_size=4, max_length=160, **config)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["self", "unrelated", "eagle", "mtp"])
def test_a_drafter_reuses_the_prefixes_that_its_target_reuses(kind: str, overlap: bool) -> None:
    model, drafter = make(kind, "llama")
    plain = run(with_shared_prefix(3, overlap=overlap), model=model, drafter=None)
    reports = [run(with_shared_prefix(n, overlap=overlap), model=model, drafter=drafter) for n in (1, 3)]
    assert reports[1].cached == plain.cached == {"0": 0, "1": 120, "2": 120}
    first, all_three = (report.drafter for report in reports)
    assert first.num_rebuilt == (0 if drafter.kind == "eagle" else 121)
    assert all_three.num_rebuilt == first.num_rebuilt
    assert all_three.num_ready > first.num_ready
    assert all_three.num_short == 0


def test_a_drafter_that_loses_its_tags_is_found_by_what_it_rebuilds(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault([(draft_model.DraftModel, "record_drafts", "self._slots.record(own)", "pass")], monkeypatch)
    model, drafter = make("self", "llama")
    assert run(with_shared_prefix(3), model=model, drafter=drafter).drafter.num_rebuilt > 121 + 2 * 120


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_draft_kv_returns_from_the_host(policy: str) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(1, 40) for _ in range(97)] for _ in range(3)]
    order = (0, 1, 2, 0, 1, 2)  # each evicts the one before
    model, drafter = make("self", "llama")
    arrivals = [arrival(prompts[n], at_step=80 * i, max_tokens=20) for i, n in enumerate(order)]
    options: dict[str, Any] = {"host_cache_gb": 0.01, "cache_write_policy": policy}
    scenario = traffic(arrivals, num_pages=40, page_size=4)
    report = run(scenario, model=model, drafter=drafter, **options)
    assert [report.cached[str(i)] for i in range(6)] == [0, 0, 0, 96, 96, 96]
    assert report.drafter.num_rebuilt <= 3 * 97 + (0 if policy == "write_back" else 3 * 97)


def test_a_page_copied_while_its_last_drafts_are_computed_has_no_tag_without_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step waits until the copies of the step before have come to the tags, and ends before these are done."""

    def copy_slowly(source: Any, *others: Any) -> None:
        if source.shape[1] == 4 * 8:
            time.sleep(0.005)
        copy_rows(source, *others)

    def compute_late(self: Any, step: Any) -> Any:
        time.sleep(0.002)
        return compute(self, step)

    copy_rows, compute = device.copy_rows, runner.CPURunner._compute
    monkeypatch.setattr(device, "copy_rows", copy_slowly)
    monkeypatch.setattr(runner.CPURunner, "_compute", compute_late)
    test_draft_kv_returns_from_the_host("write_through")


# --- another implementation ---


def test_drafts_of_a_model_are_those_of_transformers() -> None:
    """Of an engine, greedy: the drafts of every step are what `transformers` generates with the draft model."""
    target, drafter = make("perturbed", "qwen2")
    assert drafter.folder is not None
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(drafter.folder)
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    config = EngineConfig(
        model=str(target), speculative="draft", speculative_model=str(drafter.folder), speculative_num_tokens=5,
        speculative_control="fixed", max_total_tokens=128, max_length=64, max_running=1, overlap=False,
    )  # fmt: skip
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    one = arrival([9, 8, 7, 3, 9, 8], max_tokens=40, temperature=0.0)
    inbox.put(Submit(request_id="x", tokens=np.array(one.prompt, "<i4").tobytes(), sampling=one.sampling))
    text, num_compared, is_done = list(one.prompt), 0, False
    while not is_done:
        before = engine.counters().num_tokens
        engine.step()
        [delta] = outbox.take()
        num_drafts = engine.counters().num_tokens - before - 1
        if len(text) > len(one.prompt):
            verified = runner_of(engine)._program.inputs[0].view(np.int32)[: 1 + num_drafts, 0].tolist()
            ids = torch.tensor([text])
            with torch.inference_mode():
                for _ in range(num_drafts):
                    ids = torch.cat([ids, reference(ids).logits[:, -1:].argmax(-1)], dim=1)
            assert verified == ids[0, len(text) - 1 :].tolist()
            num_compared += num_drafts
        text += delta.tokens
        is_done = delta.finish is not None
    engine.close()
    assert num_compared > 40


# --- seeded faults ---


def follow_any(rows: Any, grants: Any, slots: Any) -> None:
    """Advance rows past every slot that has a tag, whatever it is."""
    for row in grants.rows.tolist():
        while slots.positions[row] < rows.lengths[row] - 1:
            page, slot = divmod(int(slots.positions[row]), slots.page_size)
            tag = slots.tags[int(rows.pages[row, page]) * slots.page_size + slot]
            if tag == 0:
                break
            slots.chains[row] = tag
            slots.positions[row] += 1


DRAFT, HEAD, RUNNER = draft_model.DraftModel, eagle.EagleDrafter, runner.CPURunner
FOLLOWED = "rows, slots, division = self._rows, self._slots, self._division"

FAULTS: dict[str, tuple[str, list[Edit]]] = {
    "tags ignored": (
        "self",
        [(DRAFT, "plan", FOLLOWED, f"{FOLLOWED}; slots.positions[grants.rows] = rows.lengths[grants.rows] - 1")],
    ),
    "old tags accepted": ("self", [(DRAFT, "plan", FOLLOWED, f"{FOLLOWED}; follow_any(rows, grants, slots)")]),
    "row not begun": (
        "self",
        [(valid_slots.ValidSlots, "begin", "self.positions[row] = self.begins[row] = 0", "pass")],
    ),
    "another seed": ("self", [(DRAFT, "lay_out", "sampling.words", "sampling.with_seeds(sampling.seeds + 1).words")]),
    "seed of another row": (
        "self",
        [(DRAFT, "lay_out", "sampling.words", "sampling.with_seeds(np.roll(sampling.seeds, 1)).words")],
    ),
    "draft a position late": (
        "self",
        [(DRAFT, "record_drafts", "drawn=drawn, shift=0)", "drawn=drawn, shift=1)")],
    ),
    "draft not passed on": ("self", [(DRAFT, "record_drafts", "if depth > 0:", "if False:")]),
    "length not lowered": (
        "ngram",
        [
            (
                RUNNER,
                "_lay_out",
                "program = self._program",
                "program, rows = self._program, step.grants.rows; "
                "self._rows.lengths[rows] = np.maximum(self._rows.lengths[rows], step.grants.starts + 1)",
            )
        ],
    ),
    "verified a position late": (
        "self",
        [
            (
                RUNNER,
                "_lay_out",
                "all_wanted=not step.samples)",
                "all_wanted=not step.samples, ahead=int(step.is_drafting))",
            )
        ],
    ),
    "state of the last position": (
        "cyclic",
        [
            (
                HEAD,
                "record_rest",
                "tape.write(passes.last, scope.sampled, scope=one.scope, target=scope, counts=accepted.counts)",
                "pass",
            )
        ],
    ),
    "state of another row": (
        "cyclic",
        [(HEAD, "plan", "admitted = ", "self._states[:] = np.roll(self._states, 1, axis=0); admitted = ")],
    ),
    "states from before a sleep": ("cyclic", [(HEAD, "plan", "self._missing[:] = -1", "pass")]),
    "state from before a rest": ("cyclic", [(HEAD, "plan", "self._has_state[:] = False", "pass")]),
    "state not kept": (
        "cyclic",
        [
            (
                HEAD,
                "record_drafts",
                "tape.write(passes.keep, own.scope.sampled, scope=own.scope, x=fed, states=states, size=size)",
                "pass",
            )
        ],
    ),
}


@pytest.mark.parametrize("fault", by_turns(FAULTS))
def test_a_seeded_fault_of_a_drafter_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, edits = FAULTS[fault]
    monkeypatch.setattr(draft_model, "follow_any", follow_any, raising=False)
    seed_fault(edits, monkeypatch)
    assert_fails(lambda seed: run_random(random.Random(seed), kind, "llama", overlap=seed % 3 > 0), range(30))
