"""Engines on a CPU that sleep: memory goes back to the system, nothing is lost, and all bits are as before."""

# pyright: basic
# torch and transformers are typed in part only.

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from group_in_threads import ranks_are_threads
from node_threads import following, over_nodes
from pagewood.engine import LLM, LLMAsleepError, SamplingParams
from pagewood.engine.api import Pause, Refusal, Resume
from pagewood.engine.core.weights import ServedWeights
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.weight_commands import CheckWeights, Sleep, SleepTag, UpdateWeights, WakeUp, sleep_at
from system_memory import settled_bytes
from weight_bench import Scores, WeightBench, bench_config, fresh_scores, tensors_of, write_tensors

FOLDER = model_folder(None)
SLOW = pytest.mark.slow
SIZES = {"vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def make_model(folder: Path, *, seed: int = 0, hidden_size: int = 128, **fields: Any) -> Path:
    """Write a model whose matrices are larger than pages of the system."""
    torch.manual_seed(seed)
    config = Qwen3Config(hidden_size=hidden_size, intermediate_size=3 * hidden_size, **{**SIZES, **fields})
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("new"), seed=1)


def sleep(bench: WeightBench, level: int = 1) -> Refusal | None:
    return bench.tell(sleep_at(level, f"sleep {len(bench.known)}")).refusal


def wake(bench: WeightBench, *tags: SleepTag) -> Refusal | None:
    return bench.tell(WakeUp(request_id=f"wake {len(bench.known)}", tags=tags)).refusal


@pytest.mark.parametrize(
    ("num_ranks", "level"), [(1, 1), *(pytest.param(*one, marks=SLOW) for one in ((2, 1), (1, 2), (2, 2)))]
)
def test_processes_give_memory_back_to_the_system(num_ranks: int, level: int, tmp_path: Path) -> None:
    """Weights of 51 MB and KV of 25 MB: the processes of all ranks shrink by nine tenths of that, and grow again."""
    folder = make_model(tmp_path, hidden_size=640, vocab_size=1024, num_hidden_layers=3)
    num_bytes = sum(tensor.nbytes for tensor in tensors_of(folder).values()) + 16384 * 3 * 2 * 2 * 32 * 4
    assert num_bytes > 70e6
    with WeightBench(folder, tensor_parallel_size=num_ranks, num_threads=num_ranks, max_total_tokens=16384) as bench:
        own = psutil.Process()
        living = [one for one in own.children() if one.status() != psutil.STATUS_ZOMBIE]  # others have ended
        processes = [own, *(living if num_ranks > 1 else ())]
        before = bench.scores()
        awake = settled_bytes(processes)
        assert sleep(bench, level) is None
        assert settled_bytes(processes) < awake - 0.9 * num_bytes
        assert wake(bench) is None
        if level == 2:
            assert bench.update(folder=str(folder)) is None
        assert bench.scores() == before
        assert settled_bytes(processes) > awake - 0.5 * num_bytes


def test_ranks_on_two_hosts_sleep_and_change(old: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives the memory of its part back; files of updates must be on all hosts."""
    ranks_are_threads(monkeypatch)
    config = over_nodes(2, bench_config(old, tensor_parallel_size=2, num_threads=2))
    with following(config) as errors, WeightBench(old, config=config) as bench:
        before = bench.scores()
        assert sleep(bench, 1) is None
        assert wake(bench) is None
        assert bench.scores() == before
        assert sleep(bench, 2) is None
        assert wake(bench) is None
        assert bench.update(folder=str(old)) is None
        assert bench.scores() == before
        assert bench.update(files=(str(new / "model.safetensors"),)) is None
        assert bench.scores() != before
    assert not errors


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_all_forms_of_weights_come_back(form: str, old: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where quantised weights are kept in files, where they are written first, and where they cannot be."""
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path))
    expected = None
    for _ in range(2):
        with WeightBench(old, weights=form) as bench:
            before = bench.scores()
            expected = expected or before
            for _ in range(2):
                assert sleep(bench) is None
                assert wake(bench) is None
                assert bench.scores() == before == expected


def test_requests_wait_while_the_engine_sleeps(old: Path) -> None:
    """One that runs, one that waits for a row, and one that comes meanwhile; none has lost a token."""
    prompts = [np.random.default_rng(seed).integers(1, 500, 30).tolist() for seed in range(3)]
    with WeightBench(old, max_running=1) as bench:
        expected = [bench.run(bench.submit(prompt))[0].scores for prompt in prompts]
    with WeightBench(old, max_running=1) as bench:
        names = [bench.submit(prompts[0]), bench.submit(prompts[1])]
        for _ in range(5):
            bench.step()
        assert 0 < len(bench.known[names[0]].scores) < 12
        assert sleep(bench) is None
        names.append(bench.submit(prompts[2]))
        assert bench.tell(Resume(request_id="resume")).refusal is None
        known = [len(bench.known[names[0]].scores)]
        for _ in range(3):
            bench.step()
        assert known == [len(bench.known[names[0]].scores)]
        assert bench.engine.counters().num_free_pages == bench.engine.counters().num_pages
        assert wake(bench) is None
        assert [one.scores for one in bench.run(*names)] == expected
        assert bench.engine.violation() is None


@pytest.mark.parametrize("options", [{}, {"host_cache_gb": 0.1}, {"retained_share": 0.5}], ids=str)
def test_cached_prefixes_are_forgotten_but_for_lower_tiers(options: dict[str, Any], old: Path) -> None:
    prompt = list(range(1, 60))
    with WeightBench(old, **options) as bench:
        before = bench.run(bench.submit(prompt))[0]
        assert sleep(bench) is None
        assert bench.engine.counters().num_cached_pages == 0
        assert wake(bench) is None
        after = bench.run(bench.submit(prompt))[0]
        assert after.scores == before.scores
        assert after.end is not None
        assert (after.end.num_cached_tokens > 0) == ("host_cache_gb" in options)


def test_weights_alone_sleep_and_requests_keep_their_memory(old: Path) -> None:
    with WeightBench(old) as bench:
        expected = bench.scores()
        name = bench.submit([*range(1, 40)], num_tokens=20)
        for _ in range(5):
            bench.step()
        assert bench.tell(Sleep(request_id="sleep", tags=("weights",))).refusal is None
        assert bench.engine.asleep == {"weights"}
        assert bench.engine.counters().num_running == 1
        assert wake(bench, "weights") is None
        bench.run(name)
        assert bench.engine.counters().num_preempted == 0
        assert bench.scores() == expected


def test_tags_wake_up_one_after_the_other(old: Path) -> None:
    with WeightBench(old) as bench:
        before = bench.scores()
        assert sleep(bench) is None
        assert wake(bench, "scheduling") is None
        assert bench.engine.asleep == {"weights", "kv_cache"}
        assert wake(bench, "weights") is None
        assert bench.engine.asleep == {"kv_cache"}
        assert wake(bench, "kv_cache") is None
        assert not bench.engine.asleep
        assert bench.tell(Pause(request_id="pause")).refusal is None
        assert sleep(bench, 0) is None
        assert bench.engine.asleep == {"scheduling"}
        assert wake(bench) is None
        name = bench.submit([1, 2, 3])
        for _ in range(3):
            bench.step()
        assert name not in bench.known  # still paused
        assert bench.tell(Resume(request_id="resume")).refusal is None
        assert bench.scores() == before


@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_drafters_come_back(kind: str, old: Path) -> None:
    """As many drafts are accepted as before: all of those of a draft model that is the model itself."""
    options: dict[str, Any] = {"speculative": kind, "speculative_num_tokens": 3, "speculative_control": "fixed"}
    if kind == "draft":
        options["speculative_model"] = str(old)

    def accepted(bench: WeightBench) -> tuple[Scores, int]:
        [known] = bench.run(bench.submit(list(range(1, 40)), num_tokens=24))
        assert known.end is not None
        return known.scores, known.end.num_accepted_tokens

    with WeightBench(old, **options) as bench:
        before = accepted(bench)
        assert before[1] > 10 or kind == "ngram"
        assert sleep(bench) is None
        assert wake(bench) is None
        assert accepted(bench) == before
        assert sleep(bench, 2) is None
        assert wake(bench) is None
        assert bench.update(folder=str(old)) is None
        assert accepted(bench) == before


def test_dropped_weights_are_awaited(old: Path, new: Path, tmp_path: Path) -> None:
    """All tensors must come, in as many parts as the trainer likes; requests wait until then."""
    tensors, expected = tensors_of(new), fresh_scores(new)
    names = sorted(tensors)
    halves = [
        write_tensors(tmp_path / f"{index}.safetensors", {name: tensors[name] for name in names[index::2]})
        for index in range(2)
    ]
    with WeightBench(old) as bench:
        bench.scores()
        assert sleep(bench, 2) is None
        assert bench.engine.asleep == {"weights", "kv_cache", "scheduling"}
        assert wake(bench, "weights") is None
        refusal = bench.update(files=(halves[0],))
        assert refusal is not None
        assert names[1] in refusal.message
        assert bench.update(files=(halves[0],), is_last=False) is None
        assert wake(bench) is None
        assert bench.engine.asleep == {"weights"}
        name = bench.submit([5, 6, 7])
        for _ in range(3):
            bench.step()
        assert name not in bench.known
        assert bench.update(files=(halves[1],), version="b") is None
        assert not bench.engine.asleep
        assert set(bench.run(name)[0].versions) == {"b"}
        assert bench.scores() == expected


def test_updated_weights_come_back_from_files_that_are_gone(old: Path, new: Path, tmp_path: Path) -> None:
    """They lie in shared memory no longer, and a later update of some tensors counts on top of them."""
    tensors = tensors_of(new)
    norm = {"model.norm.weight": torch.full((128,), 0.5)}
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_bytes((old / "config.json").read_bytes())
    write_tensors(whole / "model.safetensors", {**tensors, **norm})
    shared = Path("/dev/shm") / f"sleep-{tmp_path.parent.name}-{tmp_path.name}.safetensors"
    with WeightBench(old) as bench:
        try:
            assert bench.update(files=(write_tensors(shared, tensors),), version="a") is None
        finally:
            shared.unlink()
        assert shared.name in Path("/proc/self/maps").read_text()
        assert sleep(bench) is None
        assert shared.name not in Path("/proc/self/maps").read_text()
        assert wake(bench) is None
        assert bench.scores() == fresh_scores(new)
        assert bench.update(files=(write_tensors(tmp_path / "norm.safetensors", norm),)) is None
        assert bench.scores() == fresh_scores(whole)


def test_an_engine_that_cannot_sleep_goes_on(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    with WeightBench(old) as bench:
        before = bench.scores()
        blocked.touch()
        monkeypatch.setenv("PAGEWOOD_CACHE", str(blocked))
        refusal = sleep(bench)
        assert refusal is not None
        assert refusal.code == "sleep_failed"
        assert not bench.engine.asleep
        assert bench.scores() == before
        monkeypatch.undo()
        bench.inbox.put(sleep_at(1, "first"))
        assert bench.tell(sleep_at(1, "second")).refusal == bench.tell(WakeUp(request_id="third")).refusal
        bench.run("first")
        for command in (sleep_at(2, "fourth"), UpdateWeights(request_id="fifth", folder=str(old))):
            refusal = bench.tell(command).refusal
            assert refusal is not None
            assert refusal.code == "asleep"
        assert wake(bench) is None
        assert bench.scores() == before


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sleep_at(3, "a"), "level must be 0, 1 or 2, got 3"),
        (lambda: Sleep(request_id="a", tags=()), "tags must name some of weights, kv_cache, scheduling, got none"),
        (lambda: WakeUp(request_id="a", tags=("kv",)), "tags must be some of"),  # pyright: ignore[reportArgumentType]
        (lambda: Sleep(request_id="a", tags=("kv_cache",), drops_weights=True), "drops_weights must be False"),
    ],
)
def test_wrong_commands_name_the_argument(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_what_cannot_sleep_is_refused_by_name(old: Path, tmp_path: Path) -> None:
    refusal = ServedWeights(None).refusal_to_sleep(sleep_at(1, "a"), bound=None)
    assert refusal is not None
    assert refusal.message.endswith("because its runner cannot do that")


def test_an_llm_says_that_it_sleeps() -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    with LLM(max_total_tokens=1024, num_threads=1) as llm:
        before = llm.generate(["The sea"], greedy)
        stream = llm.stream("The sea", greedy)
        llm.sleep()
        assert llm.is_sleeping
        with pytest.raises(LLMAsleepError, match="kv_cache, scheduling, weights"):
            llm.generate(["The sea"], greedy)
        with pytest.raises(LLMAsleepError):
            list(stream)
        llm.wake_up(["weights"])
        assert llm.is_sleeping
        llm.wake_up(["kv_cache"])
        assert not llm.is_sleeping
        assert "".join(stream) == before[0].text
        llm.sleep(2)
        llm.wake_up()
        with pytest.raises(ValueError, match="an update must have all tensors"):
            llm.update_weights([("model.norm.weight", torch.ones(ModelConfig.from_folder(FOLDER).hidden_size))])
        assert llm.is_sleeping
        llm.update_weights(FOLDER)
        assert llm.generate(["The sea"], greedy)[0].text == before[0].text


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=SLOW)])
def test_checks_find_what_differs(num_ranks: int, old: Path, new: Path, tmp_path: Path) -> None:
    """Tensors by name, and memory; both as they were after a sleep, and after dropped weights came again."""

    def check(action: Literal["checksum", "snapshot", "compare"]) -> tuple[str, str]:
        answer = bench.tell(CheckWeights(request_id=f"check {len(bench.known)}", action=action))
        return answer.weights, "" if answer.refusal is None else answer.refusal.message

    with WeightBench(old, num_threads=num_ranks, tensor_parallel_size=num_ranks) as bench:
        first = check("checksum")[0]
        assert "snapshot" in check("compare")[1]
        assert check("snapshot") == (first, "")
        assert sleep(bench) is None
        assert "awake" in check("compare")[1]
        assert wake(bench) is None
        assert check("compare") == (first, "")
        norm = {"model.norm.weight": torch.full((128,), 0.5)}
        assert bench.update(files=(write_tensors(tmp_path / "norm.safetensors", norm),)) is None
        assert check("compare")[1].endswith("got others: model.norm.weight")
        assert check("checksum")[0] != first
        assert bench.tell(Sleep(request_id="drop", tags=("weights",), drops_weights=True)).refusal is None
        assert bench.update(folder=str(old)) is None
        assert check("compare") == (first, "")
        if num_ranks == 1:
            array = bench.engine._rest._weights.source._part._rank.loaded.memory.made[0]  # pyright: ignore
            array.reshape(-1)[0] += 1
            assert "memory of weights" in check("compare")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "host_cache_gb": 0.1},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_dp_attention": True},
    ],
    ids=str,
)
def test_ranks_of_all_kinds_sleep(options: dict[str, Any], old: Path) -> None:
    """Memory that ranks share with the host cache, stages, and pages that are divided by request."""
    processes = psutil.Process()
    with WeightBench(old, num_threads=2, max_total_tokens=32768, **options) as bench:
        before = bench.scores()
        ranks = [processes, *processes.children()]
        awake = settled_bytes(ranks)
        assert sleep(bench) is None
        assert settled_bytes(ranks) < awake - 10e6  # of 33 MB of KV
        assert wake(bench) is None
        assert bench.scores() == before
        assert bench.engine.violation() is None
