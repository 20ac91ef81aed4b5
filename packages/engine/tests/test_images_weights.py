"""Weights of models that see images change and sleep, on a CPU and on a recording device: their towers with them."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from cuda_ranks import pages_are_on_a_device
from pagewood.engine.api import Command, Delta, PauseRequest, ResumeRequest, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.assembly.cpu.weights import CPUPart
from pagewood.engine.assembly.part_with_tower import PartWithTower
from pagewood.engine.core.images import PromptImages
from pagewood.engine.core.intake import Intake
from pagewood.engine.core.rest import Rest
from pagewood.engine.decision_log.replay import replay
from pagewood.engine.models.images.tower_weights import TowerWeights
from pagewood.engine.models.stored.tensor_files import SafetensorsFiles
from pagewood.engine.models.stored.updated_tensors import UpdatedTensors
from pagewood.engine.runner.device_memory import tensors_of
from pagewood.engine.runner.tower_encoder import TowerEncoder
from pagewood.engine.weight_commands import CheckWeights, Sleep, UpdateWeights, WakeUp
from pictured import KINDS, Pictured, pictured, pictures
from pictured_engine import GREEDY, Driven, DrivenOnDevice, check, conversation, same, submit
from scratch import scratch_folder
from seeded_faults import Edit, seed_fault
from system_memory import settled_bytes

pytestmark = pytest.mark.usefixtures("small_buffers")

DEVICES: dict[str, Callable[..., Driven]] = {"cpu": Driven, "cuda": DrivenOnDevice}
LONG = replace(GREEDY, max_tokens=40)


@cache
def changed(kind: str) -> Pictured:
    """The model of a kind with other weights in its tower, and in its last norm."""
    old, folder = pictured(kind), scratch_folder()
    reference = deepcopy(old.reference)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if is_of_tower(name) or name.endswith("language_model.norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    reference.save_pretrained(folder)
    for file in old.folder.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, folder)
    return replace(old, folder=folder, reference=reference)


def is_of_tower(name: str) -> bool:
    return any(part in name for part in ("vision_tower", "visual", "projector"))


def step(own: Driven, known: dict[str, list[Delta]], pending: Any) -> Any:
    pending = own.engine.advance(pending)
    for delta in own.outbox.take():
        known.setdefault(delta.request_id, []).append(delta)
    return pending


def tell(own: Driven, command: Command, known: dict[str, list[Delta]] | None = None, pending: Any = None) -> Any:
    """Carry out a command; no steps go on while weights are read for it, which would end what runs."""
    known = {} if known is None else known
    own.inbox.put(command)
    pending = step(own, known, pending)
    rest = own.engine._rest  # pyright: ignore[reportPrivateUsage]
    while isinstance(command, UpdateWeights) and command.request_id not in known and not rest.has_new_weights:
        time.sleep(0.001)
    while command.request_id not in known:
        pending = step(own, known, pending)
    (answer,) = known[command.request_id]
    assert answer.refusal is None, answer.refusal
    return pending


def update(own: Driven, **fields: Any) -> None:
    tell(own, UpdateWeights(request_id="update", **fields))


@contextmanager
def open_engine(device: str, model: Pictured, **options: Any) -> Iterator[Driven]:
    own = DEVICES[device](model, **options)
    try:
        yield own
        assert own.engine.violation() is None
    finally:
        own.engine.close()


def num_computed(own: Driven) -> int:
    encoder: Any = own.engine._intake._images  # pyright: ignore[reportPrivateUsage]
    return encoder.num_computed


def parts_of(model: Pictured, where: Path) -> list[str]:
    """Files with the parameters of the tower under their names in memory: some, and the others."""
    own = {name: one.detach().clone() for name, one in model.reference.named_parameters() if is_of_tower(name)}
    names = sorted(own)
    files: list[str] = []
    for number in range(2):
        files.append(str(where / f"{number}.safetensors"))
        save_file({name: own[name] for name in names[number::2]}, files[-1])
    return files


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_changes_the_tower(device: str, kind: str, tmp_path: Path) -> None:
    """By a folder, by the names of its files, and by the names in memory, in two parts: as in a new engine."""
    old, new = pictured(kind), changed(kind)
    shown = pictures(2, seed=31)
    tokens, images = conversation(old, shown)
    with open_engine(device, old) as own:
        check(old, tokens, shown, own.answer(tokens, images))
        assert num_computed(own) == 2
        update(own, folder=str(new.folder), version="a")
        found = own.answer(tokens, images)
        assert found[0].num_cached_tokens == 0
        assert {delta.weights for delta in found if delta.tokens} == {"a"}
        check(new, tokens, shown, found)
        assert num_computed(own) == 4
        update(own, files=(str(old.folder / "model.safetensors"),))
        check(old, tokens, shown, own.answer(tokens, images))
        assert num_computed(own) == 6
        first, second = parts_of(new, tmp_path)
        norm = {n: t for n, t in load_file(new.folder / "model.safetensors").items() if n.endswith("model.norm.weight")}
        save_file(norm, tmp_path / "norm.safetensors")
        update(own, files=(first,))
        check_other = own.answer(tokens, images)
        with pytest.raises(AssertionError):
            check(old, tokens, shown, check_other)
        assert num_computed(own) == 8
        update(own, files=(second,))
        own.answer(tokens, images)
        assert num_computed(own) == 10
        update(own, files=(str(tmp_path / "norm.safetensors"),))  # the tower stays: so does what it has made
        check(new, tokens, shown, own.answer(tokens, images))
        assert num_computed(own) == 10


@pytest.mark.parametrize(
    "old_kv", ["drop", *(pytest.param(one, marks=pytest.mark.slow) for one in ("recompute", "keep"))]
)
@pytest.mark.parametrize("device", DEVICES)
def test_requests_go_on_with_rows_of_the_new_tower(device: str, old_kv: Any) -> None:
    """Those that run, one of which is paused, one that has not begun, and one whose image is being encoded; each as if
    its text so far were a prompt."""
    old, new = pictured("qwen3"), changed("qwen3")
    shown, names = pictures(4, seed=32), ("0", "1", "2", "3")
    asked = [conversation(old, [one]) for one in shown]
    known: dict[str, list[Delta]] = {}
    with open_engine(device, old, max_running=2) as own, open_engine(device, new) as other:
        for name, one in zip(names[:3], asked, strict=False):
            own.inbox.put(submit(name, *one, sampling=LONG))
        pending = None
        while len(known.get("1", ())) < 5:
            pending = step(own, known, pending)
        own.inbox.put(PauseRequest(request_id="1"))
        own.inbox.put(submit("3", *asked[3], sampling=LONG))
        command = UpdateWeights(request_id="u", folder=str(new.folder), version="b", old_kv=old_kv)
        pending = tell(own, command, known, pending)
        own.inbox.put(ResumeRequest(request_id="1"))
        while any(not known.get(name) or known[name][-1].finish is None for name in names):
            pending = step(own, known, pending)
        for name, (tokens, images) in zip(names, asked, strict=True):
            so_far = [token for one in known[name] if one.weights != "b" for token in one.tokens]
            rest = [one for one in known[name] if one.weights == "b"]
            assert (len(so_far) > 0) == (name in ("0", "1"))
            assert rest
            if old_kv != "keep":
                sampling = replace(LONG, max_tokens=40 - len(so_far))
                assert same(rest, other.answer([*tokens, *so_far], images, sampling=sampling))


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_the_tower_sleeps_with_the_weights(device: str, drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with an image waits until it is awake; the memory of the tower goes back meanwhile, on a CPU to the
    system: 31 MB."""
    pages_are_on_a_device(monkeypatch)
    model = pictured("qwen2.5", tower_size=512) if device == "cpu" else pictured("qwen3")
    shown = pictures(2, seed=33)
    tokens, images = conversation(model, shown)
    with open_engine(device, model) as own:
        expected = own.answer(tokens, images, namespace="before")
        encoder: Any = own.engine._intake._images  # pyright: ignore[reportPrivateUsage]
        tell(own, CheckWeights(request_id="check", action="snapshot"))
        storage, awake = encoder.tower._patches.weight.untyped_storage(), settled_bytes([psutil.Process()])
        size = sum(one.nbytes for one in tensors_of(encoder.tower))

        def is_gone() -> bool:
            if device == "cuda":
                return storage.nbytes() == 0
            return settled_bytes([psutil.Process()]) < awake - 0.9 * size

        assert device == "cuda" or size > 30e6
        tell(own, Sleep(request_id="sleep", tags=("weights", "kv_cache", "scheduling"), drops_weights=drops))
        assert is_gone()
        known: dict[str, list[Delta]] = {"a": []}
        own.inbox.put(submit("a", tokens, images))
        for _ in range(20):
            step(own, known, None)
            time.sleep(0.001)
        assert encoder.num_computed == 2
        pending = tell(own, WakeUp(request_id="wake"), known)
        if drops:
            assert is_gone()
            again = UpdateWeights(request_id="update", folder=str(model.folder))
            pending = tell(own, again, known, pending)
        while not known["a"] or known["a"][-1].finish is None:
            pending = step(own, known, pending)
        assert same(known["a"], expected)
        assert not is_gone()
        pending = tell(own, CheckWeights(request_id="check again", action="compare"), pending=pending)
        tell(own, Sleep(request_id="sleep again", tags=("weights",)), pending=pending)  # it can be closed then
        own.inbox.put(submit("b", tokens, images, namespace="other"))
        step(own, known, None)


@pytest.mark.parametrize("is_renamed", [False, True])
def test_towers_of_files_by_other_names(is_renamed: bool, tmp_path: Path) -> None:
    """Gemma's files may have one more module around its tower than memory has."""
    old, new = pictured("gemma3"), changed("gemma3")
    folder = tmp_path / "old"
    shutil.copytree(old.folder, folder)
    tensors = load_file(old.folder / "model.safetensors")
    if is_renamed:
        tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = UpdatedTensors.of_folder(folder, folder).with_files(
        SafetensorsFiles.of_paths(map(Path, parts_of(new, tmp_path)))
    )
    expected = dict(new.reference.named_parameters())
    weights = TowerWeights(found, new.recipe.config.prefixes)
    for name in ("embeddings.patch_embedding.bias", "encoder.layers.1.mlp.fc1.weight"):
        own = expected[f"model.vision_tower.{name}"]
        assert torch.equal(weights.read(name, *own.shape), own)


FAULTS: dict[str, Edit] = {
    "what was made of images is kept": (TowerEncoder, "renew", "self._kept.clear()", "pass"),
    "the tower keeps its numbers": (PartWithTower, "load_again", "if not is_same", "if False"),
    "live requests keep their rows": (
        Rest, "exchange", "show_again(self._state, self._kv, self._images)", "0",
    ),
    "rows of an earlier tower are waited for": (Intake, "poll", "found.version != self._images.version", "False"),
    "the memory of the tower stays": (PartWithTower, "sleep", '"weights" in command.tags', "False"),
    "the tower wakes without its numbers": (PartWithTower, "sleep", "not command.drops_weights", "False"),
    "on a CPU its memory stays": (CPUPart, "sleep", "[rank.loaded.memory, self._tower]", "[rank.loaded.memory]"),
    "on a CPU its numbers are lost": (CPUPart, "sleep", "StoredMatrices(memories)", "StoredMatrices(memories[:1])"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS, None])
def test_faults_are_found(fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is found without one."""

    def check_all() -> None:
        test_an_update_changes_the_tower("cuda", "qwen3", tmp_path)
        test_requests_go_on_with_rows_of_the_new_tower("cuda", "drop")
        with pytest.MonkeyPatch.context() as patch:
            for device in DEVICES:
                test_the_tower_sleeps_with_the_weights(device, False, patch)

    if fault is None:
        check_all()
        return
    seed_fault([FAULTS[fault]], monkeypatch)
    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("cpu", "gemma3"), ("cuda", "qwen2.5"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("cpu", "qwen2.5"), ("cuda", "gemma3"))),
    ],
)  # fmt: skip
def test_a_log_has_no_image_and_is_replayed(
    device: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests lose their memory, share images and do not, and a tower changes while some run."""
    old, new, path = pictured(kind), changed(kind), tmp_path / "log"
    shown = pictures(5, seed=33)
    options = {"max_total_tokens": 212 if kind == "gemma3" else 320, "schedule_conservativeness": 0.01}
    with open_engine(device, old, decision_log=str(path), chunked_prefill_size=24, **options) as own:
        asked = [submit(str(i), *conversation(old, shown[i : i + 1]), sampling=LONG) for i in range(5)]
        asked += [submit("two", *conversation(old, shown[:2]), sampling=LONG)]
        asked += [submit("other", *conversation(old, shown[1::-1]), sampling=LONG)]
        wrong = submit("wrong", conversation(old, shown[:1])[0], [])
        assert own.answers([*asked, wrong])["wrong"][-1].refusal is not None
        known: dict[str, list[Delta]] = {}
        own.inbox.put(replace_id(asked[0], "beside"))
        pending = None
        while "beside" not in known:
            pending = step(own, known, pending)
        pending = tell(own, UpdateWeights(request_id="update", folder=str(new.folder), version="a"), known, pending)
        while known["beside"][-1].finish is None or pending is not None:
            pending = step(own, known, pending)
        assert {delta.weights for delta in known["beside"] if delta.tokens} <= {"", "a"}
        own.answers([replace_id(one, f"{one.request_id} again") for one in asked])
        num_preempted = own.engine.counters().num_preempted
    assert num_preempted > 0
    data = path.read_bytes()
    assert asked[0].images[0].pixels[:64] not in data
    for seed in [None, *FAULTS_OF_REPLAY[kind]]:
        with monkeypatch.context() as patch:
            if seed is not None:
                seed_fault([seed], patch)
            assert (replay(path, assemble=assemble).difference is None) == (seed is None), seed


FAULTS_OF_REPLAY: dict[str, list[Edit]] = {
    "gemma3": [(PromptImages, "whole", "not self.see_each_other", "True")],
    "qwen2.5": [(PromptImages, "marked", "+ len(tokens)", "")],
}


def replace_id(one: Submit, name: str) -> Submit:
    return msgspec.structs.replace(one, request_id=name)
