"""The log of an engine whose weights and adapters change: it says which computed what, and is replayed as any other."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_bench import BUILDS, PROMPTS, write_models
from adapter_bench import Bench as AdapterBench
from cuda_ranks import pages_are_on_a_device
from logged_scenarios import scenario_of
from pagewood.engine.api import LoadAdapter, Retain, SamplingParams, Submit, UnloadAdapter
from pagewood.engine.assemble import assemble
from pagewood.engine.core.memory.adapters import AdapterPool
from pagewood.engine.core.rest import Rest
from pagewood.engine.core.weights import ServedWeights
from pagewood.engine.decision_log.frames import Record
from pagewood.engine.decision_log.log_file import Log
from pagewood.engine.decision_log.plain import Renaming, command_of, plain_command
from pagewood.engine.decision_log.replay import replay
from pagewood.engine.decision_log.why import why
from pagewood.engine.weight_commands import (
    UNIQUE_ID_BYTES,
    CheckWeights,
    DropUpdate,
    FinishUpdate,
    JoinGroup,
    Received,
    UpdateWeights,
    WakeUp,
    sleep_at,
)
from pagewood.kvpool.tiers import ArrayPages, HostTier, TieredIndex
from pagewood.radixcache import RadixCache
from pagewood.schedpolicy import SlotShares
from scenarios.running import run_scenario
from seeded_faults import Edit, seed_fault
from weight_bench import WeightBench, bench_config, close, make_pair


def records(path: Path) -> list[Record]:
    return [frame for frame in Log.at(path).frames() if isinstance(frame, Record)]


def same_decisions(path: Path) -> bool:
    found = replay(path, assemble=assemble)
    assert found.num_records == len(records(path))
    return found.difference is None


@pytest.mark.parametrize(
    ("device", "host_cache_gb"),
    [
        ("cpu", 0.01),
        ("cuda", None),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("cpu", None), ("cuda", 0.01))),
    ],
)
def test_weights_that_change_and_sleep(
    device: str, host_cache_gb: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages_are_on_a_device(monkeypatch)
    pair, path = make_pair("qwen3", tmp_path / "models"), tmp_path / "log"
    build, options = BUILDS[device]
    fields = {key: value for key, value in options.items() if key != "max_adapter_rank"}
    config = bench_config(pair.old, decision_log=str(path), host_cache_gb=host_cache_gb, **fields)
    with WeightBench(pair.old, config=config, build=build) as bench:
        before = bench.scores()
        name = bench.submit(PROMPTS[0], num_tokens=30)
        while len(bench.known[name].tokens if name in bench.known else ()) < 3:
            bench.step()
        assert bench.update(folder=str(pair.new), version="new", old_kv="recompute") is None
        assert bench.update(folder=str(tmp_path)) is not None  # there is no model
        [known] = bench.run(name)
        assert set(known.versions) == {"", "new"}
        for level in (0, 1, 2):
            assert bench.tell(sleep_at(level, f"sleep {level}")).refusal is None
            if level == 2:
                assert bench.update(folder=str(pair.old), version="old") is None
            assert bench.tell(WakeUp(request_id=f"wake {level}")).refusal is None
        assert bench.tell(CheckWeights(request_id="check")).refusal is None
        for behind in (FinishUpdate(request_id="finish", update="waits finish"), DropUpdate(request_id="drop")):
            waiting: dict[str, Any] = {"folder": str(pair.old), "version": "old", "waits": True}
            assert bench.tell(UpdateWeights(request_id=f"waits {behind.request_id}", **waiting)).refusal is None
            assert bench.tell(behind).refusal is None
        assert close(bench.scores(), before)
    assert same_decisions(path)
    assert [version for record in records(path) for _, version in record.versions] == ["new", "old"]
    texts = [line.text for line in why(path, name)]
    assert "weights new have computed its tokens from here on" in texts
    last = max(bench.known, key=lambda one: int(one) if one.isdecimal() else 0)
    assert "its first token was sent, computed by weights old" in [line.text for line in why(path, last)]


@pytest.mark.parametrize("device", BUILDS)
def test_adapters_that_are_replaced(device: str, tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "log"
    write_models(folder)
    build, options = BUILDS[device]
    bench = AdapterBench(folder, adapters="ac", build=build, decision_log=str(path), **options)
    for number, name in enumerate("acc"):  # c has an activation, which the last prompt has
        bench.ask(f"{name} {number}", PROMPTS[number], name)
    bench.ask("b 0", PROMPTS[0], "b")
    bench.step()
    assert bench.tell(LoadAdapter(request_id="load b", name="b", folder=str(folder / "b"))) is None
    assert bench.tell(LoadAdapter(request_id="none", name="d", folder=str(folder / "d"))) is not None
    load = LoadAdapter(request_id="replace a", name="a", folder=str(folder / "b"), replaces=True, is_pinned=True)
    assert bench.tell(load) is None
    for name in "ab":
        bench.ask(f"{name} again", PROMPTS[0], name)
    bench.run("a 0", "c 1", "c 2", "a again", "b again")
    assert bench.tell(UnloadAdapter(request_id="unload b", name="b")) is None
    assert bench.outputs["a again"] == bench.outputs["b again"] != bench.outputs["a 0"]
    bench.engine.close()
    assert same_decisions(path)
    ids = {arrival: name for record in records(path) for arrival, name in record.names}
    used = {ids[arrival]: (name, version) for record in records(path) for arrival, name, version in record.adapters}
    assert [used[name][0] for name in ("a 0", "c 2", "a again", "b again")] == ["a", "c", "a", "b"]
    assert "c 1" not in used  # nothing activates it
    assert used["a again"][1] == used["b again"][1] != used["a 0"][1]
    assert bench.ends["b 0"].refusal.code == "adapter_not_found"
    [line] = [line for line in why(path, "a again") if line.kind == "admitted"]
    assert line.text.startswith("was admitted with adapter a: ")
    assert line.numbers["adapter_version"] == used["a again"][1]


@pytest.mark.parametrize("seed", range(4))
def test_updates_beside_lower_tiers(seed: int, tmp_path: Path) -> None:
    rng, path = random.Random(seed), tmp_path / "log"

    def make_caches(memory: Any, page_size: int) -> Callable[[], TieredIndex]:
        device = ArrayPages([[memory.view(np.uint8).reshape(-1, page_size * 8)]])
        host = HostTier(page_bytes=page_size * 8, num_pages=rng.randint(1, 40))
        return lambda: TieredIndex(RadixCache(page_size), device=device, host=host, page_size=page_size)

    run_scenario(scenario_of(seed, "updates", path, prefix_cache=True), make_caches=make_caches)
    assert same_decisions(path)


FAULTS: dict[str, tuple[str, list[Edit], str]] = {
    "a slot less": ("adapters", [(SlotShares, "may_admit", "self._num_free >", "self._num_free - 1 >")], "in the log"),
    "names as versions": ("adapters", [(AdapterPool, "_put", "=loaded.version", "=command.name")], "adapters are"),
    "an adapter that stays after it was unloaded": (
        "adapters", [(AdapterPool, "unload", "pop(name, None)", "get(name)")], "refused"
    ),
    "the number as version": ("updates", [(ServedWeights, "exchange", "command.version or ", "")], "weights are"),
    "prefixes of the weights before": ("updates", [(Rest, "exchange", "!= old", "is None")], "tokens"),
}  # fmt: skip
"""What is changed, in which mix, and a word of what a replay says."""


@pytest.mark.parametrize("name", FAULTS)
def test_other_adapters_and_versions_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mix, edits, word = FAULTS[name]
    paths = [tmp_path / str(seed) for seed in range(12)]
    for seed, path in enumerate(paths):
        run_scenario(scenario_of(seed, mix, path))
    seed_fault(edits, monkeypatch)
    found = [said for path in paths if (said := replay(path, assemble=assemble).difference) is not None]
    assert any(word in said for said in found), found


def test_a_log_has_no_tokens_and_no_secrets_of_other_commands() -> None:
    renaming = Renaming(100, is_real=False, keeps_names=False)
    tokens = np.arange(20, dtype="<i4").tobytes()
    sampling = SamplingParams()
    submit = Submit(request_id="a", tokens=tokens, namespace="me", tenant="me", sampling=sampling)
    _, submitted = plain_command(submit, None, renaming)
    retain = Retain(request_id="b", tokens=tokens, namespace="me", seconds=4.0)
    kind, retained = plain_command(retain, None, renaming)
    assert submitted["tokens"] == retained["tokens"] != tokens
    assert submitted["namespace"] == submitted["tenant"] == retained["namespace"] != "me"
    assert isinstance(command_of(kind, retained), Retain)
    fields: dict[str, Any] = {"address": "localhost", "port": 0, "first_rank": 1, "world_size": 2}
    unique_id = bytes(range(UNIQUE_ID_BYTES))
    join = JoinGroup(request_id="c", name="", backend="nccl", is_transfer=True, unique_id=unique_id, **fields)
    kind, joined = plain_command(join, None, renaming)
    assert not any(joined["unique_id"])
    assert isinstance(command_of(kind, joined), JoinGroup)
    received = (Received("model.norm.weight", "float32", (4,)),)
    update = UpdateWeights(request_id="d", group="trainer", received=received, version="7")
    kind, updated = plain_command(update, None, renaming)
    assert command_of(kind, updated) == UpdateWeights(request_id="d", group="trainer", version="7")
