"""Weights that change on CUDA devices beside drafts, ranks, hosts and a host cache, without a GPU."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cuda_ranks import use_stand_ins
from group_in_threads import ranks_are_threads
from node_threads import following, over_nodes
from noted_drafts import Notes, check_alike, drafts_noted
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.weight_commands import Sleep, WakeUp
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from tiny_models import VOCAB_SIZE, head_folder, model_folder
from weight_bench import PROMPTS, Scores, WeightBench, bench_config, close, tensors_of, write_tensors

pytestmark = pytest.mark.usefixtures("small_buffers")

SMALL: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_running": 4, "chunked_prefill_size": 16, "max_total_tokens": 1024,
    "num_threads": 2,
}  # fmt: skip
ASKED = [[token % VOCAB_SIZE for token in prompt] for prompt in PROMPTS]
STAGES, BY_REQUEST = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_dp_attention": True}


def drafting(kind: str) -> dict[str, Any]:
    """Return the options of an engine that drafts in each step."""
    own: dict[str, Any] = {"speculative": kind, "speculative_control": "fixed", "speculative_num_tokens": 3}
    if kind == "draft":
        own["speculative_model"] = str(model_folder("llama", seed=2))
    if kind == "eagle":
        own["speculative_model"] = str(head_folder("llama"))
    return own


@dataclass(frozen=True, slots=True)
class Way:
    """An engine whose weights change."""

    options: dict[str, Any]
    model: str = "llama"

    def folder(self, seed: int) -> Path:
        return model_folder(self.model, seed=seed, has_mtp=self.model == "glm4-moe")

    @contextmanager
    def bench(self, seed: int, *, is_alone: bool = False) -> Iterator[WeightBench]:
        """Build the engine; `is_alone`: without further ranks and caches."""
        nodes = 1 if is_alone else self.options.get("nnodes", 1)
        options = {
            name: value
            for name, value in self.options.items()
            if name != "nnodes" and (name.startswith("speculative") or not is_alone)
        }
        config = bench_config(self.folder(seed), **SMALL, **options)
        config = config if nodes == 1 else over_nodes(nodes, config)
        build = partial(build_on, RecordingDevice(), flashinfer_torch)
        with (
            following(config) if nodes > 1 else nullcontext([]) as errors,
            WeightBench(self.folder(seed), config=config, build=build) as bench,
        ):
            yield bench
        assert not errors


def told(bench: WeightBench) -> list[Scores]:
    return [one.scores for one in bench.run(*[bench.submit(prompt) for prompt in ASKED])]


def by_text(notes: Notes) -> Notes:
    """Return the same notes without seeds, on which greedy drafts do not depend."""
    return {(0, text): drafts for (_, text), drafts in notes.items()}


SLOW = pytest.mark.slow
WAYS: dict[str, Way] = {
    "a draft model": Way(drafting("draft")),
    "a head": Way(drafting("eagle")),
    "a head of the model's own": Way(drafting("eagle") | {"speculative_model": None}, "glm4-moe"),
    "stages": Way(STAGES),
    "stages with a head": Way({**STAGES, **drafting("eagle")}),
    "stages with a draft model": Way({**STAGES, **drafting("draft")}),
    "by request": Way(BY_REQUEST),
    "by request with a head": Way({**BY_REQUEST, **drafting("eagle")}),
    "hosts": Way({"tensor_parallel_size": 2, "nnodes": 2}),
    "stages on hosts": Way({**STAGES, "nnodes": 2}),
    "ranks with recurrent layers": Way({"tensor_parallel_size": 2}, "falcon-h1"),
    "stages with recurrent layers": Way(STAGES, "falcon-h1"),
    "by request with recurrent layers": Way(BY_REQUEST, "falcon-h1"),
    "host cache": Way({"host_cache_gb": 0.01}),
    "ranks with a head": Way({"tensor_parallel_size": 2, **drafting("eagle")}),
}  # fmt: skip
FEW = ("a head of the model's own", "by request")


@pytest.mark.parametrize("name", [one if one in FEW else pytest.param(one, marks=SLOW) for one in WAYS])
def test_tokens_are_those_of_a_new_engine(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of a request that runs meanwhile, and drafts; a wrong update changes nothing."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    way = WAYS[name]
    notes = drafts_noted(monkeypatch)
    with way.bench(1, is_alone=True) as other:
        expected = told(other)
        fresh = by_text(notes)
        tensors = tensors_of(way.folder(1))
        wrong = {
            key: one[:-1] if key.endswith("layers.1.self_attn.o_proj.weight") else one for key, one in tensors.items()
        }
        with way.bench(0) as own:
            before = told(own)
            assert not close(before, expected)
            assert own.tell(Sleep(request_id="sleep", tags=("weights",))).refusal is None
            assert own.tell(WakeUp(request_id="wake")).refusal is None
            assert close(told(own), before)
            refusal = own.update(files=(write_tensors(tmp_path / "wrong.safetensors", wrong),))
            assert refusal is not None
            assert "must have shape" in refusal.message
            assert close(told(own), before)
            running = own.submit(ASKED[0], num_tokens=40)
            while len(own.known[running].versions if running in own.known else ()) < 6:
                own.step()
            assert own.update(folder=str(way.folder(1)), version="a", old_kv="recompute") is None
            [mixed] = own.run(running)
            at = mixed.versions.index("a")
            assert mixed.versions == [""] * at + ["a"] * (40 - at)
            assert 6 <= at < 40
            text = [*ASKED[0], *(token for token, _ in mixed.scores[:at])]
            rest = other.run(other.submit(text, num_tokens=40 - at))[0].scores
            assert close([mixed.scores[at:]], [rest])
            notes.clear()
            assert close(told(own), expected)
            check_alike(by_text(notes), fresh)
            ends = own.run(*[own.submit(prompt) for prompt in ASKED])
            assert all(one.end is not None and one.end.num_cached_tokens > 0 for one in ends)
            assert close([one.scores for one in ends], expected)
            assert own.update(files=(str(way.folder(0) / "model.safetensors"),)) is None
            assert close(told(own), before)
            assert own.engine.violation() is None
