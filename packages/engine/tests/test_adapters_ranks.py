"""Adapters of models that are divided among ranks and stages: what they compute is what PEFT does.

The other ranks are threads, with the real programs, exchanges and messages, where nothing must be killed.
"""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import copy
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapter_bench import PROMPTS, Bench, Expected, check_scores, check_tokens, config_of, greedy_tokens, write_models
from adapter_folders import changeable, linear_names, write_adapter
from adapter_kinds import COMPARED, KINDS, TOKENS
from families.case import build
from families.registry import CASES, DIVIDED
from group_in_threads import ranks_are_threads
from node_threads import following, over_nodes
from pagewood.engine.api import Abort, LoadAdapter, SamplingParams, UnloadAdapter
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.model_folder.adapter_modules import model_modules
from pagewood.engine.models.ops import Projection
from pagewood.engine.runner.cpu.program import adapters
from pagewood.engine.runner.cpu.program.adapters import CPUAdapters
from pagewood.engine.runner.ranks import following as following_ranks
from pagewood.engine.runner.ranks import ranked_adapters
from pagewood.engine.runner.ranks.group import Group
from pagewood.engine.runner.ranks.messages import Close, Launch, Sizes, ToRank
from pagewood.engine.runner.ranks.notes import TABLES_EVERY
from pagewood.engine.runner.ranks.ranked_adapters import FollowedAdapters
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner
from seeded_faults import Edit, seed_fault, slow_ones

FOUR: dict[str, Any] = {"num_threads": 4}
DIVISIONS: dict[str, dict[str, Any]] = {
    "two ranks": {"tensor_parallel_size": 2},
    "four ranks": {"tensor_parallel_size": 4, **FOUR},
    "two stages": {"pipeline_parallel_size": 2},
    "two stages of two ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **FOUR},
    "two ranks by request": {"tensor_parallel_size": 2, "enable_dp_attention": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks and a small pool": {
        "chunked_prefill_size": 8, "page_size": 4, "max_total_tokens": 512, "max_running": 9,
    },
    "drafts from the text": {"speculative": "ngram", "speculative_num_tokens": 4},
    "one slot": {"max_adapters": 1},
}  # fmt: skip
FEW = (
    ("two ranks", "small chunks and a small pool"), ("two stages of two ranks", "drafts from the text"),
    ("two stages", "one slot"),
)  # fmt: skip

FEW_FAMILIES = ("gpt-neox", "phi3-window", "gemma3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str | None, Any]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_models(folder)


@pytest.fixture(scope="module")
def folder(models: tuple[Path, Mapping[str | None, Any]]) -> Path:
    return models[0]


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Mapping[str | None, Any]]) -> Expected:
    return greedy_tokens(models[1])


@pytest.mark.parametrize(("division", "kind"), [
    pytest.param(division, kind, marks=() if kind == "plain" or (division, kind) in FEW else pytest.mark.slow)
    for division in DIVISIONS for kind in OPTIONS
])  # fmt: skip
def test_tokens_are_those_of_peft(
    division: str, kind: str, folder: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_are_threads(monkeypatch)
    bench = Bench(folder, **{"num_threads": 2, **DIVISIONS[division], **OPTIONS[kind]})
    check_tokens(bench, expected)
    bench.engine.close()


@pytest.mark.parametrize("division", slow_ones(DIVISIONS, *(DIVISIONS.keys() - {"two ranks"})))
def test_on_two_hosts(division: str, folder: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the folders; one that is loaded later, too."""
    ranks_are_threads(monkeypatch)
    options = {"num_threads": 2, **DIVISIONS[division]}
    config = over_nodes(2, config_of(folder, adapters="bc", **options))
    with following(config) as errors:
        bench = Bench(folder, config=config)
        bench.inbox.put(LoadAdapter(request_id="load", name="a", folder=str(folder / "a")))
        bench.run("load")
        check_tokens(bench, expected)
        bench.engine.close()
    assert not errors


@pytest.mark.parametrize(
    "division", slow_ones(DIVISIONS, "four ranks", "two stages of two ranks", "two ranks by request")
)
def test_every_kind_computes_what_peft_does(division: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases and magnitudes of divided sums, ends of the model, and A and B divided in every way."""
    ranks_are_threads(monkeypatch)
    references: dict[str | None, Any] = {None: build(CASES["llama-biases"], tmp_path)}
    for number, (kind, fields) in enumerate(KINDS.items()):
        whole = {"target_modules": linear_names(references[None]), **fields}
        references[kind] = write_adapter(copy.deepcopy(references[None]), tmp_path / kind, seed=number, **whole)
    bench = Bench(tmp_path, adapters=list(KINDS), **{"num_threads": 2, **DIVISIONS[division]})
    check_scores(bench, references)
    bench.engine.close()


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in FEW_FAMILIES else pytest.mark.slow) for one in COMPARED if one in DIVIDED],
)
def test_every_family_computes_what_peft_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All modules that can be changed, on two ranks and in two stages."""
    ranks_are_threads(monkeypatch)
    reference = build(CASES[name], tmp_path)
    known = changeable(name, reference, model_modules(tmp_path))
    changed = write_adapter(copy.deepcopy(reference), tmp_path / "a", r=4, lora_alpha=6, **known)
    for division in ("two ranks", "two stages"):
        bench = Bench(tmp_path, adapters="a", num_threads=2, max_length=128, **DIVISIONS[division])
        check_scores(bench, {None: reference, "a": changed})
        bench.engine.close()


@pytest.mark.parametrize("name", slow_ones(["gpt-oss", "qwen3-moe", "deepseek3"], "qwen3-moe", "deepseek3"))
def test_ranks_with_whole_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changes those that it has."""
    ranks_are_threads(monkeypatch)
    reference = build(CASES[name], tmp_path)
    known = changeable(name, reference, model_modules(tmp_path))
    changed = write_adapter(copy.deepcopy(reference), tmp_path / "a", r=4, lora_alpha=6, **known)
    options = {"num_threads": 2, "tensor_parallel_size": 2, "expert_parallel": True, "max_length": 128}
    bench = Bench(tmp_path, adapters="a", **options)
    check_scores(bench, {None: reference, "a": changed})
    bench.engine.close()


@pytest.mark.parametrize(
    "division", slow_ones(["two ranks", "two stages of two ranks", "two ranks by request"], "two ranks")
)
def test_loading_under_traffic(
    division: str, folder: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names get other contents, are unloaded and loaded again, and requests are aborted, while others run.

    Every request ends with what its name meant when it came. At last other ranks have no more adapters than rank 0.
    """
    ranks_are_threads(monkeypatch)
    others = followed(monkeypatch)
    bench = Bench(folder, adapters="ab", **{"num_threads": 2, "max_adapters": 1, **DIVISIONS[division]})
    contents: dict[str, str] = {"a": "a", "b": "b"}
    keys: dict[str, tuple[str | None, int]] = {}
    aborted = set[str]()
    draw = random.Random(5)
    for turn in range(24):
        name = draw.choice("ab")
        for number in range(2):
            own = draw.choice([None, *contents])
            keys[f"{turn} {number}"] = contents.get(own or ""), draw.randrange(len(PROMPTS))
            bench.ask(f"{turn} {number}", PROMPTS[keys[f"{turn} {number}"][1]], own)
        bench.step()
        if draw.random() < 0.3:
            aborted.add(f"{turn} 1")
            bench.inbox.put(Abort(request_id=f"{turn} 1"))
        if name in contents and draw.random() < 0.4:
            bench.inbox.put(UnloadAdapter(request_id=f"unload {turn}", name=name))
            bench.run_to(f"unload {turn}")
            del contents[name]
        folder_name = draw.choice("ab")
        loading = LoadAdapter(request_id=f"load {turn}", name=name, folder=str(folder / folder_name), replaces=True)
        bench.inbox.put(loading)
        bench.run_to(f"load {turn}")
        contents[name] = folder_name
    bench.run(*keys.keys() - aborted)
    for request_id, key in keys.items():
        found = bench.outputs.get(request_id, [])
        assert found == expected[key][: len(found) if request_id in aborted else None], request_id
    for name in contents:
        bench.inbox.put(UnloadAdapter(request_id=f"last {name}", name=name))
    bench.ask("last", PROMPTS[0], None)
    bench.run("last", *(f"last {name}" for name in contents))
    bench.engine.close()  # after which ranks have taken all messages
    assert others
    assert all(len(one._parts) <= 1 for one in others)  # what still lies in the slot


def followed(monkeypatch: pytest.MonkeyPatch) -> list[FollowedAdapters]:
    """Return a list that gets the adapters of each other rank."""
    found: list[FollowedAdapters] = []

    def make(*args: Any) -> FollowedAdapters:
        found.append(FollowedAdapters(*args))
        return found[-1]

    monkeypatch.setattr(ranked_adapters, "FollowedAdapters", make)
    return found


def test_several_folders_at_a_time_and_refusals(
    folder: Path, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command gets its own answer, and what one rank refuses, or reads with other contents, is refused."""
    ranks_are_threads(monkeypatch)
    bench = Bench(folder, adapters="", num_threads=2, tensor_parallel_size=2)
    for name in "ab":
        bench.inbox.put(LoadAdapter(request_id=f"load {name}", name=name, folder=str(folder / name)))
    bench.inbox.put(LoadAdapter(request_id="missing", name="x", folder=str(tmp_path)))
    bench.run("load a", "load b", "missing")
    assert bench.ends["missing"].refusal.code == "adapter_missing"
    for name in "ab":
        bench.ask(name, PROMPTS[1], name)
    bench.run("a", "b")
    assert [bench.outputs[name] for name in "ab"] == [expected[name, 1] for name in "ab"]
    faults = {
        "other": ('self._source.load(folder)', 'self._source.load(folder[:-1] + "b")', "got others on rank 1"),
        "none": ('self._source.load(folder)', 'self._source.load("none")', "rank 1: "),
    }  # fmt: skip
    for kind, (old, new, message) in faults.items():
        with monkeypatch.context() as patch:
            seed_fault([(FollowedAdapters, "read", old, new)], patch)
            bench.inbox.put(LoadAdapter(request_id=kind, name=kind, folder=str(folder / "a")))
            bench.run(kind)
        assert message in bench.ends[kind].refusal.message
        bench.ask(f"with {kind}", PROMPTS[1], kind)
        bench.ask(f"after {kind}", PROMPTS[1], "a")
        bench.run(f"with {kind}", f"after {kind}")
        assert bench.ends[f"with {kind}"].refusal.code == "adapter_not_found"
        assert bench.outputs[f"after {kind}"] == expected["a", 1]
    bench.engine.close()


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_loads_ends_the_group(folder: Path) -> None:
    """It is stopped before it can answer, so the load lasts until it is killed."""
    bench = Bench(folder, adapters="a", num_threads=2, tensor_parallel_size=2)
    runner = bench.engine.runner
    assert isinstance(runner, RankedRunner)
    assert isinstance(runner._group, Group)
    (pid,) = runner._group.pids()
    os.kill(pid, signal.SIGSTOP)
    bench.inbox.put(LoadAdapter(request_id="load", name="b", folder=str(folder / "b")))
    bench.step()
    assert "load" not in bench.ends
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunnerLostError, match="rank 1"):
        bench.run("load")
    bench.engine.close()


_BATCH = "assert isinstance(batch, Batch)"
_OTHER_SLOTS = f"""{_BATCH}
                batch.adapters[batch.adapters[:, 0] >= 0, 0] ^= 1"""
_OTHER_ADAPTER = f"""{_BATCH}
                batch.adapters[batch.adapters[:, 0] >= 0, 1] = 1"""
FAULTS: dict[str, tuple[str, Edit]] = {
    "a rank keeps the old adapter of a name": (
        "two ranks", (FollowedAdapters, "keep", "self._parts[load]", "self._parts[min(self._parts)]"),
    ),
    "a stage has another order of slots": ("two stages", (following_ranks, "_follow", _BATCH, _OTHER_SLOTS)),
    "a rank has another order of slots": ("two ranks", (following_ranks, "_follow", _BATCH, _OTHER_SLOTS)),
    "a stage has another adapter": ("two stages", (following_ranks, "_follow", _BATCH, _OTHER_ADAPTER)),
    "inputs of A are not divided": (
        "two ranks", (CPUAdapters, "pack", "projection.part.start : projection.part.stop", ": len(projection.part)"),
    ),
    "rows of B are those of the first rank": (
        "two ranks",
        (Projection, "rows_here", "self.order[is_own] - start", "self.order[is_own].argsort().argsort()"),
    ),
    "every rank adds the bias": ("two ranks", (adapters, "_arrays", " and adds_bias", "")),
}  # fmt: skip


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_are_found(fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters of all modules with biases, and one of the first's name that replaces it."""
    ranks_are_threads(monkeypatch)
    references: dict[str | None, Any] = {None: build(CASES["llama-biases"], tmp_path)}
    for number, name in enumerate("abc"):
        fields = {"r": 4, "target_modules": linear_names(references[None]), "bias": "lora_only"}
        references[name] = write_adapter(copy.deepcopy(references[None]), tmp_path / name, seed=number, **fields)
    if fault is None:
        bench = Bench(tmp_path, adapters="ab", num_threads=2, tensor_parallel_size=2)
        check_with_a_load(bench, references)
        bench.engine.close()
        return
    division, edit = FAULTS[fault]
    seed_fault([edit], monkeypatch)
    bench = Bench(tmp_path, adapters="ab", **{"num_threads": 2, **DIVISIONS[division]})
    message = "other tables of rows than rank 0" if "slots" in fault else "Not equal to tolerance"
    with pytest.raises((AssertionError, RunnerLostError), match=message):
        check_with_a_load(bench, references)
    bench.engine.close()


def check_with_a_load(bench: Bench, references: Mapping[str | None, Any]) -> None:
    """Compare scores, before and after a name gets another adapter, and generate for as long as tables may differ."""
    check_scores(bench, {name: references[name] for name in (None, "a", "b")})
    bench.inbox.put(LoadAdapter(request_id="load", name="a", folder=str(bench.folder / "c"), replaces=True))
    bench.run("load")
    check_scores(bench, {None: references[None], "a": references["c"]}, turn=1)
    bench.ask("long", TOKENS, "a", sampling=SamplingParams(max_tokens=2 * TABLES_EVERY, ignore_eos=True))
    bench.run("long")


def test_without_adapters_ranks_have_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No message, table or instruction of theirs."""
    ranks_are_threads(monkeypatch)
    others, sent = followed(monkeypatch), list[ToRank]()
    tell_all = Group.tell_all
    monkeypatch.setattr(Group, "tell_all", lambda self, message: (sent.append(message), tell_all(self, message)))
    bench = Bench(folder, adapters="", max_adapters=0, num_threads=2, tensor_parallel_size=2)
    bench.ask("one", PROMPTS[0], None)
    bench.run("one")
    bench.engine.close()
    assert {type(one) for one in sent} == {Sizes, Launch, Close}
    assert not others
