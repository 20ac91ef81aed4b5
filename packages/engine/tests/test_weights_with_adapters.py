"""Weights that change under loaded adapters, on a CPU and on a CUDA device without a GPU, against PEFT."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from adapter_bench import BUILDS, NUM_TOKENS, PROMPTS, Bench, check_scores, check_tokens, greedy_tokens, write_models
from adapter_folders import HEADS, write_adapter, write_mixture
from families.case import Case
from pagewood.engine.api import LoadAdapter, Refusal, UnloadAdapter
from pagewood.engine.core.adapter import Adapter, LoadedAdapter
from pagewood.engine.core.memory.adapters import AdapterPool
from pagewood.engine.weight_commands import Sleep
from pagewood.schedpolicy import SlotShares
from parts import make_request

pytestmark = pytest.mark.usefixtures("small_buffers")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Mapping[str | None, Any], Any]:
    """The folder of a model with adapters, that of other weights, and PEFT's models with both."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    references = write_models(old, Case(kind="Qwen3", extra=HEADS))
    return old, new, references, on_other_weights(old, new, references)


def on_other_weights(old: Path, new: Path, references: Mapping[str | None, Any]) -> Mapping[str | None, Any]:
    """Write a model with other weights; return it, and PEFT's models of it with the same adapters."""
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
    return changed


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
    assert bench.update("first", new) is None
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
    assert bench.tell(LoadAdapter(request_id="load", name="dora", folder=str(tmp_path / "dora"))) is None
    check_scores(bench, {None: changed[None], "dora": own})
    refusals = [bench.update("second", old), bench.tell(Sleep(request_id="sleep", drops_weights=True))]
    assert all(one is not None and "the adapter 'dora'" in one.message for one in refusals)
    check_again(bench, after)
    assert bench.tell(UnloadAdapter(request_id="unload", name="dora")) is None
    assert bench.update("third", old) is None
    check_again(bench, expected)
    assert bench.engine.violation() is None
    bench.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "deepseek3"])
@pytest.mark.parametrize("device", BUILDS)
def test_adapters_of_experts_add_to_the_new_weights(device: str, name: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    references = write_mixture(old, name)
    changed = on_other_weights(old, new, references)
    build, options = BUILDS[device]
    own = Bench(old, build=build, **{**options, **({"max_adapter_expert_rank": 8} if options else {})})
    check_scores(own, references)
    own.ask("running", PROMPTS[0], "a")
    while len(own.outputs.get("running", ())) < 3:
        own.step()
    for turn, (folder, expected) in enumerate(((new, changed), (old, references), (new, changed)), 1):
        assert own.update(f"to {turn}", folder) is None
        check_scores(own, expected, turn=turn)
    assert len(own.outputs["running"]) == NUM_TOKENS
    assert own.engine.violation() is None
    own.engine.close()


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
    """One that was read while the weights changed is refused; one that was loaded before is known until its last
    request has ended."""
    source = _Source()
    pool = AdapterPool(2, source=source, sharing=SlotShares(2, max_passes=4))
    loaded = LoadedAdapter(version="1", weights=object(), is_bound=is_bound)
    assert pool.begin_load(LoadAdapter(request_id="", name="a", folder="a")) is None
    source.loads[0].set_result(loaded)
    [(_, adapter)] = pool.poll()
    assert isinstance(adapter, Adapter)
    request = make_request([1])
    request.adapter = adapter
    name = "a" if is_bound else None
    assert pool.bound([]) == name
    assert pool.unload("a")
    assert pool.bound([request]) == name
    assert pool.bound([]) is None
    assert pool.begin_load(LoadAdapter(request_id="", name="b", folder="b")) is None
    pool.note_update()
    source.loads[1].set_result(loaded)
    [(_, found)] = pool.poll()
    assert (isinstance(found, Refusal) and found.code == "weights_changed") == is_bound
