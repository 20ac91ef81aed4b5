"""A log of random traffic is replayed: every decision is the same, byte for byte; a changed policy is noticed."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from logged_scenarios import MIXES, scenario_of
from pagewood.engine import LLM
from pagewood.engine.api import Grammar, SamplingParams
from pagewood.engine.assemble import assemble
from pagewood.engine.core.steps import admission
from pagewood.engine.decision_log.frames import Record
from pagewood.engine.decision_log.log_file import Log, LogFile, older
from pagewood.engine.decision_log.replay import replay
from pagewood.kvpool.tiers import ArrayPages, DiskTier, HostTier, TieredIndex, WritePolicy
from pagewood.radixcache import RadixCache
from pagewood.schedpolicy.admission.deferral import InBatchDeferral
from pagewood.schedpolicy.admission.skip_ahead import SkipAhead
from pagewood.schedpolicy.memory.demand import Demand
from pagewood.schedpolicy.memory.reserve import NewTokenRatio
from pagewood.schedpolicy.orders.ageing import Ageing
from pagewood.schedpolicy.steps.budget import StepBudget
from scale import scaled
from scenarios.running import run_scenario
from seeded_faults import Edit, seed_fault


def records(path: Path) -> list[Record]:
    return [frame for frame in Log.at(path).frames() if isinstance(frame, Record)]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("mix", MIXES)
def test_the_same_decisions_are_taken_again(mix: str, tmp_path: Path) -> None:
    num_plans = 0
    for seed in range(scaled(4)):
        path = tmp_path / f"{seed}.log"
        run_scenario(scenario_of(seed, mix, path))
        found = replay(path, assemble=assemble)
        assert found.difference is None, f"seed {seed}: {found.difference}"
        assert found.num_records == len(records(path))
        num_plans += found.num_plans
    assert num_plans > 50


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_the_same_decisions_are_taken_again_in_many_scenarios(mix: str, tmp_path: Path) -> None:
    for seed in range(100, 100 + scaled(150)):
        run_scenario(scenario_of(seed, mix, tmp_path / "log"))
        found = replay(tmp_path / "log", assemble=assemble)
        assert found.difference is None, f"seed {seed}: {found.difference}"


@pytest.mark.parametrize("seed", range(6))
def test_what_lower_tiers_answered_is_an_input(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    host_pages, policy = rng.randint(1, 40), rng.choice(list(WritePolicy))

    def make_caches(memory: NDArray[np.uint64], page_size: int) -> Callable[[], TieredIndex]:
        device = ArrayPages([[memory.view(np.uint8).reshape(-1, page_size * 8)]])
        disk = DiskTier(tmp_path / "pages", page_bytes=page_size * 8, num_bytes=100 * page_size * 8)
        return lambda: TieredIndex(
            RadixCache(page_size),
            device=device,
            host=HostTier(page_bytes=page_size * 8, num_pages=host_pages),
            disk=disk,
            page_size=page_size,
            write_policy=policy,
        )

    scenario = scenario_of(seed, "faults" if seed % 3 else "plain", tmp_path / "log", prefix_cache=True)
    run_scenario(scenario, make_caches=make_caches)
    assert replay(tmp_path / "log", assemble=assemble).difference is None
    assert any("match" in record.cache for record in records(tmp_path / "log"))


FAULTS: dict[str, tuple[list[Edit], int, str]] = {
    "fewer skipped": ([(SkipAhead, "pass_over", "== self.max_skipped", "== 0")], 214, "passed_over for request 2"),
    "more reserved": (
        [(Demand, "_pages", "self._scale", "2 * self._scale")],
        213,
        "request 0 [3, 11, 7]",
    ),
    "earlier ends": ([(NewTokenRatio, "on_end", "part_of(request)", "0")], 231, "request 9 [1, 49, 40]"),
    "smaller chunks": ([(StepBudget, "offer_prefill", "min(chunk", "min(chunk - 1")], 250, "request 0 got 16 tokens"),
    "parked less": ([(InBatchDeferral, "_await", "< self._min", "< 2 * self._min")], 243, "request 7 got 33 tokens"),
    "older later": ([(Ageing, "ordered", "self.every - 1", "self.every")], 308, "no_tokens for request 7"),
    "another clock": (
        [(admission.Admission, "run", "(step.now_s,", "(step.now_s + 50,")],
        243,
        "request 3 got 6 tokens",
    ),
}
"""What is changed, the scenario that notices it, and words of what it says."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_changed_policy_is_noticed_and_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edits, seed, words = FAULTS[name]
    mix = "interruptions" if seed % 2 else "plain"
    run_scenario(scenario_of(seed, mix, tmp_path / "log", bursts=1.0 if seed % 3 == 0 else 0.0))
    assert replay(tmp_path / "log", assemble=assemble).difference is None
    seed_fault(edits, monkeypatch)
    found = replay(tmp_path / "log", assemble=assemble).difference
    assert found is not None
    assert found.startswith("record ")
    assert words in found, found


def test_a_log_without_tokens_does_not_have_them(tmp_path: Path) -> None:
    scenario = scenario_of(3, "plain", tmp_path / "log", schedule_weights=())
    run_scenario(scenario)
    prompts = {np.array(arrival.prompt, "<i4").tobytes() for arrival in scenario.arrivals}

    def logged() -> set[bytes]:
        commands = [command for record in records(tmp_path / "log") for command in record.commands]
        assert all("carry" not in values for _, values in commands)
        assert any(values.get("namespace") == "tenant" for _, values in commands) == is_real
        return {values["tokens"] for name, values in commands if name == "Submit"}

    assert scenario.config.schedule_policy != "fair"
    assert any(arrival.namespace for arrival in scenario.arrivals)
    is_real = False
    found = logged()
    assert len(found) == len(prompts)
    assert not any(prompt in found for prompt in prompts if len(prompt) > 16)
    is_real = True
    run_scenario(replace(scenario, config=replace(scenario.config, decision_log_tokens=True)))
    assert logged() == prompts
    assert replay(tmp_path / "log", assemble=assemble).difference is None
    is_named = replace(scenario.config, schedule_policy="wrr", schedule_weights=(("tenant", 2.0),))
    run_scenario(replace(scenario, config=is_named))
    logged()  # a name that the configuration has is no secret


def test_a_log_that_was_cut_is_replayed_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run_scenario(scenario_of(6, "all", path))
    data, num_records = path.read_bytes(), len(records(path))
    path.write_bytes(data[: len(data) * 2 // 3])
    found = replay(path, assemble=assemble)
    assert found.difference is None
    assert num_records // 2 < found.num_records < num_records


def test_a_full_file_becomes_the_older_one_and_two_are_one_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run_scenario(scenario_of(5, "all", path))
    size, num_records = path.stat().st_size, len(records(path))
    run_scenario(scenario_of(5, "all", path, decision_log_mb=1.5 * size / 1e6))
    assert older(path).exists()
    assert len(records(path)) == num_records
    assert replay(path, assemble=assemble).difference is None
    run_scenario(scenario_of(5, "all", path, decision_log_mb=0.5 * size / 1e6))
    assert path.stat().st_size + older(path).stat().st_size < 0.6 * size
    assert 0 < len(records(path)) < num_records
    with pytest.raises(ValueError, match="log must have its beginning to be replayed"):
        replay(path, assemble=assemble)
    assert path.stat().st_mode & 0o077 == 0


def test_a_disk_that_is_full_ends_the_log_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)

    def write(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    run_scenario(scenario_of(1, "plain", tmp_path / "log"))
    assert [record.message for record in caplog.records] == ["the decision log ends: it could not be written"]


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("hello")
    with pytest.raises(ValueError, match="log must be a decision log of pagewood"):
        replay(tmp_path / "log", assemble=assemble)
    with pytest.raises(FileNotFoundError):
        replay(tmp_path / "none", assemble=assemble)


def test_a_log_with_an_option_that_this_version_lacks_is_refused_by_its_name(tmp_path: Path) -> None:
    """Such as those of engines that drafted trees."""
    run_scenario(scenario_of(1, "drafts", tmp_path / "log"))
    header = Log.at(tmp_path / "log").header
    file = LogFile(tmp_path / "other", max_bytes=1 << 20)
    file.append(msgspec.structs.replace(header, config=header.config | {"speculative_topk": 2}))
    file.close()
    with pytest.raises(ValueError, match="EngineConfig must have fields that this version knows, got speculative_topk"):
        replay(tmp_path / "other", assemble=assemble)


TEXT = "The harbour was quiet in the morning. "
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
REAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunks": ({"chunked_prefill_size": 64}, {}),
    "drafts": ({"speculative": "ngram"}, {"ignore_eos": True}),
    "grammars": ({}, {"grammar": Grammar.json_schema(SCHEMA), "temperature": 1.0}),
    "tiers": ({"max_total_tokens": 1024, "max_length": 512, "host_cache_gb": 0.2}, {}),
    "measured steps": ({"target_step_s": 0.005, "schedule_policy": "lpm"}, {}),
    "log probabilities": ({"chunked_prefill_size": 64}, {"logprobs": 1, "prompt_logprobs": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_decisions_of_a_real_engine_are_taken_again(name: str, tmp_path: Path) -> None:
    options, sampling = REAL[name]
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, **sampling}
    params = SamplingParams(**fields)
    with LLM(max_running=3, decision_log=str(tmp_path / "log"), **options) as llm:
        for _ in range(2):
            llm.generate([chr(65 + i) + TEXT * (10 + i) for i in range(8)], params)
    found = replay(tmp_path / "log", assemble=assemble)
    assert found.difference is None
    assert found.num_plans > 16
