"""Weights that change under loaded adapters, on a CPU and on a CUDA device without a GPU, against PEFT."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from adapter_bench import PROMPTS, Bench, check_scores, check_tokens, greedy_tokens, write_models
from adapter_folders import write_adapter
from families.case import Case
from pagewood.engine.api import LoadAdapter, Refusal, UnloadAdapter
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.build import build_engine
from pagewood.engine.core.adapter import LoadedAdapter
from pagewood.engine.core.memory.adapters import AdapterPool
from pagewood.engine.weight_commands import Sleep, UpdateWeights
from pagewood.schedpolicy import SlotShares
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

pytestmark = pytest.mark.usefixtures("small_buffers")

BUILDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cpu": (build_engine, {}),
    "cuda": (
        partial(build_on, RecordingDevice(), flashinfer_torch),
        {"device": "cuda", "dtype": "float32", "max_running": 6, "max_adapter_rank": 8},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Mapping[str | None, Any], Any]:
    """The folder of a model with adapters, that of other weights, and PEFT's models with both."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    references = write_models(old, Case(kind="Qwen3", extra={"head_dim": 64}))
    base = copy.deepcopy(references[None])
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    base.save_pretrained(new)
    (new / "config.json").write_bytes((old / "config.json").read_bytes())
    changed: dict[str | None, Any] = {None: base}
    for name in "abc":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            changed[name] = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(old / name)).eval()
    return old, new, references, changed


def tell(bench: Bench, command: Any) -> Refusal | None:
    bench.inbox.put(command)
    bench.run_to(command.request_id)
    return bench.ends[command.request_id].refusal


def update(bench: Bench, name: str, folder: Path) -> Refusal | None:
    command = UpdateWeights(request_id=name, folder=str(folder), version=name, old_kv="recompute")
    bench.inbox.put(command)
    bench.step()
    while not bench.engine._rest.has_new_weights and name not in bench.ends:  # pyright: ignore[reportPrivateUsage]
        time.sleep(0.001)  # without steps, which would end what runs
    bench.run_to(name)
    return bench.ends[name].refusal


def check_again(bench: Bench, expected: Any) -> None:
    bench.outputs.clear()
    bench.ends.clear()
    check_tokens(bench, expected)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "cuda"])
def test_adapters_add_to_the_new_weights(device: str, models: Any, tmp_path: Path) -> None:
    """Also in a request that runs meanwhile. Adapters with numbers of the model get those that it has then."""
    old, new, references, changed = models
    build, options = BUILDS[device]
    bench = Bench(old, build=build, **options)
    expected, after = greedy_tokens(references), greedy_tokens(changed)
    assert all(expected[key] != after[key] for key in expected)
    check_tokens(bench, expected)
    bench.ask("running", PROMPTS[0], "a")
    while len(bench.outputs.get("running", ())) < 3:
        bench.step()
    assert update(bench, "first", new) is None
    bench.run("running")
    text, before = ([*PROMPTS[0], *own] for own in (bench.outputs["running"], expected["a", 0]))
    first = next(place for place in range(len(PROMPTS[0]), len(text)) if text[place] != before[place])
    assert first >= len(PROMPTS[0]) + 3
    with torch.inference_mode():
        for place in range(first, len(text)):
            assert int(changed["a"](torch.tensor([text[:place]])).logits[0, -1].argmax()) == text[place]
    check_again(bench, after)

    own = write_adapter(
        copy.deepcopy(changed[None]), tmp_path / "dora", seed=5, r=4, use_dora=True, bias="lora_only",
        target_modules=["q_proj", "down_proj"],
    )  # fmt: skip
    assert tell(bench, LoadAdapter(request_id="load", name="dora", folder=str(tmp_path / "dora"))) is None
    check_scores(bench, {None: changed[None], "dora": own})
    refusals = [update(bench, "second", old), tell(bench, Sleep(request_id="sleep", drops_weights=True))]
    assert all(one is not None and "the adapter 'dora'" in one.message for one in refusals)
    check_again(bench, after)
    assert tell(bench, UnloadAdapter(request_id="unload", name="dora")) is None
    assert update(bench, "third", old) is None
    check_again(bench, expected)
    assert bench.engine.violation() is None
    bench.engine.close()


class _Source:
    """Reads nothing: loads end when the test says so."""

    def __init__(self) -> None:
        self.loads: list[Future[LoadedAdapter | Refusal]] = []

    def load(self, folder: str) -> Future[LoadedAdapter | Refusal]:
        self.loads.append(Future())
        return self.loads[-1]

    def keep(self, number: int, weights: object) -> None: ...

    def forget_unused(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("is_bound", [False, True])
def test_numbers_of_old_weights_are_in_no_adapter(is_bound: bool) -> None:
    """One that was read while the weights changed is refused; one that was loaded before is known until it is gone."""
    source = _Source()
    pool = AdapterPool(2, source=source, sharing=SlotShares(2, max_passes=4))
    loaded = LoadedAdapter(version="1", weights=object(), is_bound=is_bound)
    assert pool.begin_load(LoadAdapter(request_id="", name="a", folder="a")) is None
    source.loads[0].set_result(loaded)
    [(_, adapter)] = pool.poll()
    assert pool.bound == ("a" if is_bound else None)
    assert pool.unload("a")
    assert pool.bound == ("a" if is_bound else None)  # a request may have it
    del adapter
    assert pool.bound is None
    assert pool.begin_load(LoadAdapter(request_id="", name="b", folder="b")) is None
    pool.note_update()
    source.loads[1].set_result(loaded)
    [(_, found)] = pool.poll()
    assert (isinstance(found, Refusal) and found.code == "weights_changed") == is_bound
