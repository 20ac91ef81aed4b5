"""Weights that change, and engines that sleep, on a CUDA device, without a GPU: on one that records waits."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from cuda_ranks import pages_are_on_a_device, use_stand_ins
from families.case import Case
from families.registry import CASES
from pagewood.engine.assembly.cuda import weights
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.assembly.cuda.weights import CUDAPart
from pagewood.engine.runner.device_memory import DeviceMemory
from pagewood.engine.weight_commands import CheckWeights, JoinGroup, Received, Sleep, SleepTag, WakeUp, sleep_at
from seeded_faults import Edit, seed_fault
from stand_ins import flashinfer_torch
from stand_ins.nccl_gloo import NCCLGroup
from stand_ins.recording_device import RecordingDevice
from tiny_models import model_folder as tiny_model
from weight_bench import PROMPTS, Pair, WeightBench, close, make_pair, tensors_of, trainer, write_tensors

pytestmark = pytest.mark.usefixtures("small_buffers")

SMALL: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_running": 4, "chunked_prefill_size": 16}
HEADS = {"head_dim": 64}
QWEN = Case(kind="Qwen3", extra=HEADS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(QWEN, tmp_path_factory.mktemp("pair"))


def bench(folder: Path, **options: Any) -> WeightBench:
    return WeightBench(folder, build=partial(build_on, RecordingDevice(), flashinfer_torch), **{**SMALL, **options})


def fresh(folder: Path, **options: Any) -> list[Any]:
    with bench(folder, **options) as own:
        return own.scores()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[CUDAPart]:
    """The parts of the engines that are built from now on."""
    found: list[CUDAPart] = []
    begin = CUDAPart.__init__
    monkeypatch.setattr(CUDAPart, "__init__", lambda self, *given: found.append(self) or begin(self, *given))
    pages_are_on_a_device(monkeypatch)
    return found


def held(part: CUDAPart) -> tuple[int, int]:
    """Return the bytes of weights and of KV on the device."""
    weights, kv = ([one.nbytes() for one in memory._storages] for memory in (part._weights, part._kv))
    return sum(weights), sum(kv)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 64, **HEADS}
WAYS: dict[str, tuple[Case, dict[str, Any]]] = {
    "graphs": (QWEN, {}), "without graphs": (QWEN, {"cuda_graph": False}), "drafts": (QWEN, {"speculative": "ngram"}),
    "biases, sinks and experts": (Case(kind="GptOss", extra=EXPERTS), {"max_length": 60}),
    "recurrent layers": (CASES["qwen3.5"], {}),
    "norms with an offset": (Case(kind="Gemma2", extra={**HEADS, "sliding_window": 64}), {"max_length": 60}),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_an_update_replaces_all_weights_where_they_are(way: str, tmp_path: Path) -> None:
    """There and back, with graphs that were captured before."""
    case, options = WAYS[way]
    pair = make_pair(case, tmp_path)
    with bench(pair.old, **options) as own:
        before = own.scores()
        assert own.update(folder=str(pair.new), version="a") is None
        after = own.scores()
        assert close(after, fresh(pair.new, **options))
        assert not close(after, before)
        assert own.update(files=(str(pair.old / "model.safetensors"),)) is None
        assert close(own.scores(), before)


def test_a_wrong_update_leaves_the_old_weights(pair: Pair, tmp_path: Path) -> None:
    tensors = tensors_of(pair.new)
    name = "model.layers.1.mlp.down_proj.weight"
    wrong = write_tensors(tmp_path / "wrong.safetensors", {**tensors, name: tensors[name][:-1]})
    with bench(pair.old) as own:
        before = own.scores()
        assert own.tell(CheckWeights(request_id="a", action="snapshot")).refusal is None
        refusal = own.update(files=(wrong,))
        assert refusal is not None
        assert f"{name} must have shape" in refusal.message
        assert own.tell(CheckWeights(request_id="b", action="compare")).refusal is None
        assert close(own.scores(), before)
        assert own.update(folder=str(pair.new)) is None
        assert own.tell(CheckWeights(request_id="c", action="compare")).refusal is not None


LEVELS: dict[str, tuple[tuple[SleepTag, ...], bool]] = {
    "both": (("weights", "kv_cache", "scheduling"), False),
    "weights dropped": (("weights", "kv_cache", "scheduling"), True),
    "KV alone": (("kv_cache",), False),
    "weights alone": (("weights",), False),
}


@pytest.mark.parametrize(
    ("level", "has_states"), [*((level, False) for level in LEVELS), ("KV alone", True), ("weights alone", True)]
)
def test_memory_is_given_back_and_taken_again(
    level: str, has_states: bool, pair: Pair, parts: list[CUDAPart], tmp_path: Path
) -> None:
    """A request that runs goes on behind it, with the tokens that it would have had."""
    tags, drops = LEVELS[level]
    pair = make_pair(WAYS["recurrent layers"][0], tmp_path) if has_states else pair
    with bench(pair.old) as own:
        expected, name = own.run(own.submit(PROMPTS[0], num_tokens=30))[0].scores, own.submit(PROMPTS[0], num_tokens=30)
        while name not in own.known:
            own.step()
        awake = held(parts[0])
        assert min(awake) > 0
        assert own.tell(Sleep(request_id="sleep", tags=tags, drops_weights=drops)).refusal is None
        assert held(parts[0]) == tuple(
            0 if tag in tags else size for tag, size in zip(("weights", "kv_cache"), awake, strict=True)
        )
        for states in parts[0]._built.beside:
            assert (states.array(0, "tail").untyped_storage().nbytes() == 0) == ("kv_cache" in tags)
        assert own.tell(WakeUp(request_id="wake")).refusal is None
        if drops:
            assert held(parts[0]) == (0, awake[1])
            assert own.update(folder=str(pair.old)) is None
        assert held(parts[0]) == awake
        assert close([own.run(name)[0].scores], [expected])
        assert own.engine.violation() is None


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_drafters_sleep_too(kind: str, pair: Pair, parts: list[CUDAPart]) -> None:
    """Their weights come back, though those of the model are dropped: updates bring none of a draft model."""
    folder = pair.old if kind == "draft" else tiny_model("glm4-moe", has_mtp=True)
    options = {"speculative": kind, "speculative_control": "fixed", "speculative_num_tokens": 3}

    def accepted(own: WeightBench) -> tuple[list[Any], int]:
        [known] = own.run(own.submit(list(range(1, 40)), num_tokens=24))
        assert known.end is not None
        return [known.scores], known.end.num_accepted_tokens

    def own_bytes() -> int:
        return sum(one.nbytes() for one in parts[0]._of_drafter._storages)

    with bench(folder, **options, speculative_model=str(folder) if kind == "draft" else None) as own:
        before = accepted(own)
        assert before[1] > 10 or kind == "eagle"
        assert (own_bytes() > 0) == (kind == "draft")
        assert own.tell(sleep_at(2, "sleep")).refusal is None
        assert held(parts[0]) == (0, 0)
        assert own_bytes() == 0
        assert own.tell(WakeUp(request_id="wake")).refusal is None
        assert own.update(folder=str(folder)) is None
        after = accepted(own)
        assert close(after[0], before[0])
        assert after[1] == before[1]


def test_prefixes_in_a_host_cache_outlive_sleep(
    pair: Pair, parts: list[CUDAPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies find the memory of KV where it is afterwards, and nothing that other weights have computed."""
    with bench(pair.old, host_cache_gb=0.01) as own:
        [before] = own.run(own.submit(PROMPTS[0]))
        assert own.tell(sleep_at(1, "sleep")).refusal is None
        assert held(parts[0]) == (0, 0)
        assert own.tell(WakeUp(request_id="wake")).refusal is None
        [after] = own.run(own.submit(PROMPTS[0]))
        assert close([after.scores], [before.scores])
        assert after.end is not None
        assert after.end.num_cached_tokens > 0
        assert own.update(folder=str(pair.new)) is None
        [other] = own.run(own.submit(PROMPTS[0]))
        assert other.end is not None
        assert other.end.num_cached_tokens == 0
        assert close([other.scores], fresh(pair.new)[:1])


FAULTS: dict[str, Edit] = {
    "weights are not kept": (DeviceMemory, "take", "if self._copies is None", "if True"),
    "graphs have the old addresses": (CUDAPart, "wake", "if not self._asleep", "if False"),
    "an update is copied by half": (
        weights, "replace_numbers", "zip(targets, sources, strict=True)", "zip(targets, sources[: len(sources) // 2])",
    ),
    "memory of KV stays": (CUDAPart, "sleep", "self._memories[tag]", "self._memories['weights']"),
}  # fmt: skip


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_are_found(
    fault: str | None, pair: Pair, parts: list[CUDAPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is found without one."""

    def check() -> None:
        with bench(pair.old) as own:
            before = own.scores()
            assert own.tell(sleep_at(1, "sleep")).refusal is None
            assert held(parts[0]) == (0, 0)
            assert own.tell(WakeUp(request_id="wake")).refusal is None
            assert parts[0]._built.runner._graphs.size_for(1) is not None
            assert close(own.scores(), before)
            assert own.update(folder=str(pair.new)) is None
            assert close(own.scores(), fresh(pair.new))

    if fault is None:
        check()
        return
    seed_fault([FAULTS[fault]], monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_two_ranks_sleep_and_change_together(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights alone sleep: memory of KV on a CPU cannot be resized."""
    use_stand_ins(monkeypatch)
    options = {"tensor_parallel_size": 2, "num_threads": 2, "max_total_tokens": 512}
    with bench(pair.old, **options) as own:
        before = own.scores()
        assert own.tell(Sleep(request_id="sleep", tags=("weights",))).refusal is None
        assert own.tell(WakeUp(request_id="wake")).refusal is None
        assert close(own.scores(), before)
        assert own.update(folder=str(pair.new)) is None
        after = own.scores()
        assert not close(after, before)
        assert own.update(folder=str(pair.old)) is None
        assert close(own.scores(), before)


def test_a_trainer_sends_tensors_over_nccl(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By gloo in NCCL's place, with NCCL's place in the store."""
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    tensors = sorted(tensors_of(pair.new).items())
    wanted = tuple(Received(name, str(one.dtype), tuple(one.shape)) for name, one in tensors)
    with trainer(pair.new / "model.safetensors", world_size=2, device="cuda") as port, bench(pair.old) as own:
        fields: dict[str, Any] = {"address": "127.0.0.1", "port": port, "first_rank": 1, "world_size": 2}
        refusal = own.tell(JoinGroup(request_id="mpi", name="trainer", **fields, backend="mpi")).refusal
        assert refusal is not None
        assert "backend must be gloo or nccl, got 'mpi'" in refusal.message
        assert own.tell(JoinGroup(request_id="join", name="trainer", **fields, backend="nccl")).refusal is None
        assert own.update(group="trainer", received=wanted) is None
        assert close(own.scores(), fresh(pair.new))
