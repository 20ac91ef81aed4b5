"""Weights that a trainer sends as vLLM's do, over NCCL, which has a stand-in: ids, calls, and tensors packed or not."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from cuda_ranks import use_stand_ins
from group_in_threads import ranks_are_threads
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.runner import trainer_groups, trainer_nccl
from pagewood.engine.runner.trainer_groups import GroupError, TrainerGroups
from pagewood.engine.runner.trainer_nccl import ID_KEY, NCCLCommunicator, UniqueId, unique_id_in
from pagewood.engine.weight_commands import JoinGroup, LeaveGroup, Received
from seeded_faults import Edit, seed_fault
from stand_ins import flashinfer_torch
from stand_ins.nccl_library import NCCLLibrary
from stand_ins.recording_device import RecordingDevice
from tiny_models import model_folder
from weight_bench import Scores, WeightBench, close, tensors_of, write_tensors

dist: Any = distributed
SMALL: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_running": 4, "chunked_prefill_size": 16}
PROMPT = list(range(3, 33))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> NCCLLibrary:
    found = NCCLLibrary()
    monkeypatch.setattr(trainer_nccl, "load_library", lambda: found)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@contextmanager
def trainer(file: Path, *, world_size: int, packed_bytes: int) -> Iterator[int]:
    """Run the stub; yield its port."""
    port, support = free_port(), Path(__file__).parent / "support"
    arguments = [sys.executable, str(support / "nccl_trainer_stub.py"), str(port), str(world_size), str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([*arguments, str(packed_bytes)], stdin=subprocess.PIPE, env=environment)
    try:
        yield port
    finally:
        process.kill()
        process.communicate(timeout=30)


def joining(port: int, *, world_size: int = 2, **fields: Any) -> JoinGroup:
    own = {
        "address": "127.0.0.1",
        "first_rank": 1,
        "backend": "nccl",
        "is_transfer": True,
        "name": "transfer",
        **fields,
    }
    return JoinGroup(request_id=f"join {port}", port=port, world_size=world_size, **own)


def wanted(tensors: dict[str, torch.Tensor]) -> tuple[Received, ...]:
    return tuple(
        Received(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in sorted(tensors.items())
    )


MIXED = {
    "a": torch.arange(7, dtype=torch.float32).reshape(7, 1), "b": torch.randn(3, 5).bfloat16(),
    "c": torch.tensor([1, 2], dtype=torch.int64), "d": torch.randn(2, 2, 2).half(), "e": torch.tensor(3.0),
    "f": torch.arange(5, dtype=torch.int32), "g": torch.randn(11, dtype=torch.float64),
}  # fmt: skip


def check_received(library: NCCLLibrary, folder: Path, packed_bytes: int) -> None:
    file = Path(write_tensors(folder / "mixed.safetensors", MIXED))
    groups = TrainerGroups(torch.device("cpu"))
    sizes = {0: None, 40: [58, 16 + 16 + 4 + 20, 88], 1 << 30: [202]}[packed_bytes]
    alone = [(one.numel(), one.dtype) for _, one in sorted(MIXED.items())]
    sent = 2 * (alone if sizes is None else [(size, torch.uint8) for size in sizes])
    library.broadcasts = list(sent)
    with trainer(file, world_size=2, packed_bytes=packed_bytes) as port:
        groups.join(joining(port, packed_bytes=packed_bytes), rank=0)
        for named in (wanted(MIXED), ()):  # without names, those of the time before
            found = groups.receive("transfer", named)
            assert found.keys() == MIXED.keys()
            for name, one in MIXED.items():
                assert found[name].dtype == one.dtype
                assert torch.equal(found[name], one)
        calls = list(library.calls)
        groups.leave("transfer")
        assert library.calls == [*calls, ("abort",)]
    assert calls == [("init", 2, 1), ("sum", 1, 7, 0), *(("broadcast", *one, 0) for one in sent)]


@pytest.mark.parametrize("packed_bytes", [0, 40, 1 << 30])
def test_tensors_arrive_as_they_were_sent(packed_bytes: int, library: NCCLLibrary, tmp_path: Path) -> None:
    """By the calls that vLLM's ranks make."""
    check_received(library, tmp_path, packed_bytes)


@pytest.mark.slow
def test_a_trainer_tells_the_id_itself(library: NCCLLibrary, tmp_path: Path) -> None:
    """As one without a store does (`nccl_unique_id_b64`)."""
    file = Path(write_tensors(tmp_path / "mixed.safetensors", MIXED))
    with trainer(file, world_size=2, packed_bytes=0) as port:
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
        unique_id = unique_id_in(store.get(ID_KEY))
        groups = TrainerGroups(torch.device("cpu"))
        groups.join(joining(0, address="", unique_id=unique_id), rank=0)
        assert torch.equal(groups.receive("transfer", wanted(MIXED))["a"], MIXED["a"])
        groups.close()
    wrongs: list[dict[str, Any]] = [{"unique_id": unique_id[1:]}, {"unique_id": unique_id, "backend": "gloo"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"^unique_id must have 128 bytes, of NCCL by vLLM's routes, got 12"):
            joining(0, **wrong)


FAULTS: dict[str, Edit] = {
    "a pack ends before the tensor that is too much": (trainer_groups, "_packs", "> most_bytes", ">= most_bytes - 30"),
    "no sum first": (NCCLCommunicator, "__init__", "self._run(limit_s, self._library.ncclAllReduce, one", "print(one"),
    "it waits for nothing": (NCCLCommunicator, "_call", "if code == _SUCCESS and", "if True and"),
    "names are forgotten": (TrainerGroups, "receive", "wanted or group.wanted", "wanted"),
    "the id of another": (trainer_groups, "unique_id_in", "return found[0]", "return bytes(128)"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, library: NCCLLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_groups, "_JOIN_S", 5.0)
    monkeypatch.setattr(trainer_groups, "_RECEIVE_S", 5.0)
    seed_fault([FAULTS[fault]], monkeypatch)
    with pytest.raises((AssertionError, GroupError, ValueError)):
        check_received(library, tmp_path, 40)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_computes_with_what_was_sent(
    num_ranks: int, library: NCCLLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts that count together, to each rank; then another trainer is in the place of the first."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    old, new = model_folder("llama"), model_folder("llama", seed=1)
    build = partial(build_on, RecordingDevice(), flashinfer_torch)
    options = {**SMALL, "tensor_parallel_size": num_ranks, "num_threads": num_ranks}

    def scores(bench: WeightBench) -> list[Scores]:
        return [one.scores for one in bench.run(bench.submit(PROMPT))]

    with WeightBench(new, build=build, **options) as other:
        expected = scores(other)
    with WeightBench(old, build=build, **options) as own:
        before = scores(own)
        for packed_bytes, label in ((4096, "a"), (0, "b")):
            file = new / "model.safetensors"
            with trainer(file, world_size=1 + num_ranks, packed_bytes=packed_bytes) as port:
                command = joining(port, world_size=1 + num_ranks, packed_bytes=packed_bytes)
                assert own.tell(command).refusal is None
                assert own.update(group="transfer", received=wanted(tensors_of(new)), is_last=False) is None
                assert close(scores(own), before)
                assert own.update(group="transfer", is_last=False) is None
                assert own.update(version=label) is None
                [known] = own.run(own.submit(PROMPT))
                assert close([known.scores], expected)
                assert set(known.versions) == {label}
            assert own.update(folder=str(old)) is None
            assert close(scores(own), before)
        assert own.tell(LeaveGroup(request_id="leave", name="transfer")).refusal is None
    assert library.calls.count(("abort",)) == 2 * num_ranks


def test_a_trainer_that_is_gone_is_an_error(library: NCCLLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all have come, and before a tensor has; the communicator is then left."""
    monkeypatch.setattr(trainer_groups, "_JOIN_S", 0.5)
    monkeypatch.setattr(trainer_groups, "_RECEIVE_S", 0.5)
    groups, port = TrainerGroups(torch.device("cpu")), free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(GroupError, match="cannot be joined"):  # no id in the store
        groups.join(joining(port), rank=0)
    store.set(ID_KEY, pickle.dumps("none"))
    with pytest.raises(GroupError, match="must hold an id of 128 bytes, got 0 of them"):
        groups.join(joining(port), rank=0)
    own = UniqueId()
    library.ncclGetUniqueId(ctypes.byref(own))
    store.set(ID_KEY, pickle.dumps(bytes(own)))
    with pytest.raises(GroupError, match="NCCL has waited for 0 s"):
        groups.join(joining(port), rank=0)
    assert library.calls == [("init", 2, 1), ("abort",)]
    with pytest.raises(ValueError, match="one that was joined"):
        groups.receive("transfer", ())
    with pytest.raises(ValueError, match="backend must be gloo for an engine on a CPU, got 'nccl'"):
        TrainerGroups().join(joining(port), rank=0)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return Path.touch, (tmp_path / "touched", 0o600)

    found = pickle.dumps([Evil(), bytes(range(128))])
    assert unique_id_in(found) == bytes(range(128))
    assert unique_id_in(pickle.dumps(UniqueId.from_buffer_copy(bytes(range(128))))) == bytes(range(128))
    assert not (tmp_path / "touched").exists()
    for wrong in (b"", b"\x80\x05", pickle.dumps(bytes(127)), pickle.dumps([bytes(128), bytes([1] * 128)])):
        with pytest.raises(ValueError, match=r"."):
            unique_id_in(wrong)
