"""Models with recurrent layers on ranks and in stages of CUDA devices without a GPU: the answers of one device.

Ranks are threads, on stand-ins. `test_recurrent_ranks.py` has the same for CPUs. The faults in `FAULTS` are seeded one
at a time, and each is found.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from adapter_bench import Bench, check_scores
from adapter_folders import changeable, write_adapter
from cuda_ranks import small, use_stand_ins
from families.case import Case, build
from families.changed import with_next_prediction
from families.registry import CASES, deep
from group_in_threads import ranks_are_threads
from node_threads import over_nodes
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.core.loop import Engine, EngineInfo
from pagewood.engine.model_folder.adapter_modules import model_modules
from pagewood.engine.models.parts import gated_delta, short_convolution, state_space
from pagewood.engine.models.parts.channel_delta import ChannelDelta
from pagewood.engine.runner.cuda.division import RequestDivision
from pagewood.engine.runner.cuda.drafts.lookup import NgramDrafter
from pagewood.engine.runner.cuda.drafts.verify import DraftRequest
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.cuda.state_memory import CUDAStates
from pagewood.engine.runner.ranks import following as following_ranks
from pressed import PROMPTS, Answer, found, say_the_same
from random_traffic import check_alike
from seeded_faults import Edit, seed_fault, slow_ones
from stand_ins import flashinfer_torch
from stand_ins.nccl_gloo import NCCLGroup
from stand_ins.recording_device import RecordingDevice

pytestmark = pytest.mark.usefixtures("small_buffers")

RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
BOTH: dict[str, Any] = {**RANKS, **STAGES}
DIVIDING: dict[str, Any] = {**RANKS, "enable_dp_attention": True}
BY_REQUEST: dict[str, Any] = {**DIVIDING, "max_running": 4, "max_total_tokens": 160, "state_places": 10}
KIMI = replace(
    CASES["kimi-linear"],
    extra={
        **CASES["kimi-linear"].extra, "layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4,
    },
    file={
        **CASES["kimi-linear"].file,
        "linear_attn_config": {
            **CASES["kimi-linear"].file["linear_attn_config"], "full_attn_layers": [2, 4], "kda_layers": [1, 3],
        },
    },
)  # fmt: skip
DIVIDED = (
    "granite4-states", "granite4-groups", "qwen3-next", "lfm2", "falcon-h1", "falcon-h1-norm-last", "olmo-hybrid",
    "nemotron-h", "mamba2", "kimi-linear",
)  # fmt: skip
"""Mamba 2 whose ranks share a group, and with groups; a gated delta rule; a short convolution; Mamba 2 beside attention
without a norm, and with one; filters that are apart; layers without a mixer; Mamba 2 alone; and decays by channel."""
STAGED: dict[str, Case] = {
    "lfm2": deep("lfm2", "rrffrr"),
    "qwen3.5": deep("qwen3.5"),
    "granite4-groups": deep("granite4-groups"),
    "falcon-h1": CASES["falcon-h1"],
    "kimi-linear": KIMI,
    "mamba2": deep("mamba2"),
    "none in the second": deep("qwen3.5", "rrff"),
    "none in the first": deep("qwen3.5", "ffrf"),
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines for CUDA, and their other ranks, use the stand-ins."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)


def made(config: EngineConfig, *, device: RecordingDevice | None = None, **links: Any) -> Engine:
    return build_on(device or RecordingDevice(), flashinfer_torch, config, **links)


def on_devices(folder: Path, *, device: RecordingDevice | None = None, **options: Any) -> list[Answer]:
    """Return what an engine on stand-ins answers."""
    return found(folder, build=partial(made, device=device), device="cuda", dtype="float32", **options)


@pytest.mark.parametrize("name", slow_ones(DIVIDED, *DIVIDED[1:]))
def test_ranks_answer_as_the_cpu(name: str, tmp_path: Path) -> None:
    """And so as one device, see `test_states_cuda`."""
    build(CASES[name], tmp_path)
    expected = found(tmp_path)
    assert sum(one.num_cached for one in expected) > 0
    assert on_devices(tmp_path, **RANKS) == expected
    if name in ("granite4-groups", "qwen3-next"):
        assert on_devices(tmp_path, tensor_parallel_size=4, batch_invariant=True, overlap=False) == expected


@pytest.mark.parametrize("name", slow_ones(DIVIDED, *DIVIDED[1:]))
def test_ranks_by_request_answer_as_the_cpu(name: str, tmp_path: Path) -> None:
    """Each has whole recurrent layers, and the states of its own requests."""
    build(CASES[name], tmp_path)
    infos: list[EngineInfo] = []

    def noted(config: EngineConfig, **links: Any) -> Engine:
        engine = made(config, **links)
        infos.append(engine.info)
        return engine

    two = found(tmp_path, build=noted, device="cuda", dtype="float32", **BY_REQUEST)
    assert say_the_same(two, found(tmp_path))
    assert sum(one.num_cached for one in two) > 0
    assert infos[0].num_states == BY_REQUEST["state_places"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_stages_answer_as_the_cpu(name: str, tmp_path: Path) -> None:
    """Each has the states of its own layers, if any are recurrent."""
    build(STAGED[name], tmp_path)
    expected = found(tmp_path)
    assert say_the_same(on_devices(tmp_path, **STAGES), expected)
    if name == "qwen3.5":
        assert on_devices(tmp_path) == expected
        for options in ({**STAGES, "overlap": True}, BOTH):
            assert say_the_same(on_devices(tmp_path, **options), expected)


DRAFTS: dict[str, Any] = {"speculative": "ngram", "speculative_control": "fixed"}


@pytest.mark.parametrize(
    "options",
    [
        STAGES,
        BY_REQUEST,
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (RANKS, BOTH, {**RANKS, **DRAFTS}, {**STAGES, **DRAFTS}, {**BY_REQUEST, "speculative": "ngram"})
        ),
    ],
)
def test_ranks_with_a_device_each_have_graphs(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups of torch are stand-ins too, with the same methods."""
    build(deep("granite4-groups"), tmp_path)
    expected = found(tmp_path)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    device = RecordingDevice()
    assert say_the_same(on_devices(tmp_path, device=device, **options), expected)
    assert device.num_replayed > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [RANKS, {**STAGES, **DRAFTS, "host_cache_gb": 0.001}, BY_REQUEST])
def test_processes_answer_as_the_cpu(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(deep("qwen3.5"), tmp_path)
    use_stand_ins(monkeypatch)
    assert say_the_same(on_devices(tmp_path, **options), found(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("options", [RANKS, STAGES, BOTH, BY_REQUEST])
def test_two_hosts_answer_as_one_device(options: dict[str, Any], tmp_path: Path) -> None:
    build(deep("qwen3.5"), tmp_path)
    expected = found(tmp_path)
    config = over_nodes(2, EngineConfig(device="cuda", **options))
    hosts: dict[str, Any] = {"nnodes": 2, "master_addr": config.master_addr}
    assert say_the_same(on_devices(tmp_path, **options, **hosts), expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [RANKS, STAGES, {**STAGES, "overlap": True}, BY_REQUEST])
def test_random_traffic_has_the_tokens_of_one_device(options: dict[str, Any], tmp_path: Path) -> None:
    """Chunks, hits, preemption and aborts."""
    build(deep("granite4-groups"), tmp_path)
    few: dict[str, Any] = {
        "max_running": 6, "chunked_prefill_size": 8, "max_total_tokens": 160, "max_length": 80, "state_places": 9,
        "schedule_conservativeness": 0.05,
    }  # fmt: skip
    whole, ranked = small(tmp_path, max_running=6, max_total_tokens=2048), small(tmp_path, **{**few, **options})
    assert sum(check_alike(whole, ranked, seed, build=made) for seed in range(3)) > 0


def knows(texts: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Let n-grams draft what follows in a text, often wrongly; return how many drafts were right and wrong."""
    counts = Counter[bool]()

    def draft(own: object, request: DraftRequest) -> tuple[torch.Tensor, torch.Tensor]:
        del own
        drafts = torch.zeros(len(request.rows), request.num_drafts, dtype=torch.int32)
        for one, row, length in zip(drafts, request.rows.tolist(), request.lengths.tolist(), strict=True):
            known = request.tokens[row, :length].tolist()
            right = next((text[length:] for text in texts if list(text[:length]) == known), [])[: len(one)]
            is_wrong = [(7 * (length + step)) % 10 < 3 for step in range(len(right))]
            one[: len(right)] = torch.tensor(
                [(token + 1) % 90 if wrong else token for token, wrong in zip(right, is_wrong, strict=True)]
            )
            counts.update(not wrong for wrong in is_wrong)
        return drafts, torch.full((len(drafts),), request.num_drafts, dtype=torch.int32)

    monkeypatch.setattr(NgramDrafter, "draft", draft)
    return counts


def drafting(kind: str, folder: Path) -> dict[str, Any]:
    """Return the options of an engine that drafts in every step, and make its draft model beside the folder."""
    own: dict[str, Any] = {**DRAFTS, "speculative": kind, "speculative_num_tokens": 3}
    if kind == "draft":
        build(CASES["llama"], folder.parent / "draft")
        own["speculative_model"] = str(folder.parent / "draft")
    return own


DRAFTED = [
    ("qwen3.5", RANKS), ("qwen3.5", STAGES), ("qwen3.5", BOTH), ("qwen3.5", {**STAGES, "overlap": True}),
    ("granite4-groups", RANKS), ("granite4-groups", STAGES), ("lfm2", RANKS), ("lfm2", STAGES), ("falcon-h1", BOTH),
    ("mamba2", RANKS), ("mamba2", BOTH), ("kimi-linear", BOTH), ("none in the first", STAGES),
    ("none in the second", STAGES), *((name, BY_REQUEST) for name in ("qwen3.5", "granite4-groups", "lfm2", "mamba2")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*one, marks=() if one in (("qwen3.5", BOTH), ("lfm2", BY_REQUEST)) else pytest.mark.slow)
        for one in DRAFTED
    ],
)
def test_drafts_change_no_answer(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank goes back to where a row ends; some drafts are right, and some wrong."""
    build(STAGED.get(name) or CASES[name], tmp_path)
    expected = on_devices(tmp_path)
    counts = knows([[*prompt, *one.tokens] for prompt, one in zip(PROMPTS * 2, expected, strict=True)], monkeypatch)
    assert say_the_same(on_devices(tmp_path, **drafting("ngram", tmp_path), **options), expected)
    assert min(counts.values()) > 50


@pytest.mark.slow
@pytest.mark.parametrize("options", [RANKS, STAGES, BOTH, BY_REQUEST, {**RANKS, "num_continuous_decode_steps": 3}])
@pytest.mark.parametrize("kind", ["ngram", "draft", "eagle"])
def test_drafts_of_all_kinds_change_no_answer(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """On two hosts too."""
    build(STAGED["qwen3.5"], tmp_path / "plain")
    folder = with_next_prediction(tmp_path / "plain", tmp_path / "model")
    expected, drafts = on_devices(folder), drafting(kind, folder)
    config = over_nodes(2, EngineConfig(device="cuda", **options))
    hosts: dict[str, Any] = {"nnodes": 2, "master_addr": config.master_addr}
    for own in ({}, hosts):
        assert say_the_same(on_devices(folder, **drafts, **options, **own), expected)


_ROWS = "found.append(np.arange(start + units.start * size, start + units.stop * size))"
_OTHER_ROWS = "found.append(np.arange(start, start + len(units) * size))"
_BATCH = "assert isinstance(batch, Batch)"
FAULTS: dict[str, tuple[Case, dict[str, Any], Edit]] = {
    "a stage has the states of another layer": (
        STAGED["lfm2"], STAGES, (CUDAStates, "convolve", "self._places[layer]", "0 * self._places[layer]")
    ),
    "a rank forgets copies": (
        CASES["lfm2"], RANKS, (following_ranks, "_follow", _BATCH, f"{_BATCH}; batch.state_copies[:, 1] = 0")
    ),
    "the second stage keeps states of the position before": (
        STAGED["lfm2"], STAGES,
        (CUDARunner, "_launch", "slot = self._staging.take()",
         "batch.state_copies[:, 1] -= self._is_last; slot = self._staging.take()"),
    ),
    "ranks by request share places": (
        CASES["lfm2"], BY_REQUEST,
        (RequestDivision, "note", "states % np.int32(self.num_states)", "0 * states"),
    ),
    "a rank by request makes the copies of another one": (
        CASES["qwen3-next"], BY_REQUEST,
        (RequestDivision, "_states", "copies[is_own[copies[:, 0]]]", "copies[~is_own[copies[:, 0]]]"),
    ),
    "a rank by request finds the rows of the first one": (
        CASES["qwen3-next"], BY_REQUEST,
        (CUDARunner, "_states", "division.own(step.sources)", "step.sources[: len(step.positions)]"),
    ),
    "a rank has heads of another one": (
        CASES["granite4-states"], RANKS, (state_space, "rows_of", _ROWS, _OTHER_ROWS)
    ),
    "a rank has rows of another one": (
        CASES["qwen3-next"], RANKS, (gated_delta, "rows_of", _ROWS, _OTHER_ROWS)
    ),
    "a rank has channels of another one": (
        CASES["lfm2"], RANKS, (short_convolution, "rows_of", _ROWS, _OTHER_ROWS)
    ),
    "a rank has decays of another one": (
        CASES["kimi-linear"], RANKS, (ChannelDelta, "__init__", "rates[numbers]", "rates[: len(numbers)]")
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, options, edit = FAULTS[name]
    build(case, tmp_path)
    expected = found(tmp_path)
    seed_fault([edit], monkeypatch)
    assert not say_the_same(on_devices(tmp_path, **options), expected)


def at_verification(change: str) -> Edit:
    """Return an edit by which states get other arrays of a step that verifies."""
    return CUDARunner, "_queue_verify", "of_verify(own_host, own,", f"of_verify(own_host, replace(own, {change}),"


_MORE = "certain=own.certain + ({})"
_EARLY = "state_copies=(own.state_copies.view(-1, 4) - ({}) * torch.eye(4, dtype=torch.int32)[2]).flatten()"
_OF_RANK_1, _OF_STAGE_1 = "self._model.shard.rank == 1", "self._is_last"
OF_DRAFTS: dict[str, tuple[str, dict[str, Any], Edit]] = {
    "a rejected draft stays in the state of one rank": ("qwen3.5", RANKS, at_verification(_MORE.format(_OF_RANK_1))),
    "a stage does not go back": ("qwen3.5", STAGES, at_verification(_MORE.format(_OF_STAGE_1))),
    "a rejected draft stays in the state of a request": (
        "qwen3.5",
        BY_REQUEST,
        at_verification(_MORE.format(_OF_RANK_1)),
    ),
    "a rank keeps a state of the position before": ("lfm2", RANKS, at_verification(_EARLY.format(_OF_RANK_1))),
    "a stage keeps a state of the position before": ("lfm2", STAGES, at_verification(_EARLY.format(_OF_STAGE_1))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_DRAFTS)
def test_seeded_faults_of_drafts_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, options, edit = OF_DRAFTS[name]
    seed_fault([edit], monkeypatch)
    with pytest.raises(AssertionError, match="say_the_same"):
        test_drafts_change_no_answer(case, options, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("options", [RANKS, STAGES, DIVIDING], ids=["ranks", "stages", "by request"])
@pytest.mark.parametrize("name", ["qwen3.5", "granite4-groups", "lfm2", "kimi-linear"])
def test_adapters_of_recurrent_layers_compute_what_peft_does(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    reference = build(STAGED[name] if name == "kimi-linear" else deep(name), tmp_path)
    known = changeable(name, reference, model_modules(tmp_path))
    changed = write_adapter(copy.deepcopy(reference), tmp_path / "a", r=4, lora_alpha=6, **known)
    own: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_length": 128, "max_adapter_rank": 8}
    own |= {"max_adapter_expert_rank": 4} if name == "kimi-linear" else {}
    bench = Bench(tmp_path, build=made, adapters="a", num_threads=2, **own, **options)
    check_scores(bench, {None: reference, "a": changed})
    bench.engine.close()
