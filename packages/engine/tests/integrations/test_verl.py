# pyright: basic, reportMissingImports=false
# (verl and ray are not dependencies of this package)
"""verl's own registries and base classes with our rollout, called as verl does; actors are objects in this process."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

pytest.importorskip("verl", reason="needs verl; nox -s integrations installs it")

from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, get_rollout_replica_class

from pagewood.engine.integrations import verl as integration
from pagewood.engine.model_folder.folder import model_folder

OWN = {"device": "cpu", "dtype": "auto", "num_threads": 1, "max_total_tokens": 2048, "max_running": 4}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
PROMPT = [5, 6, 7, 8, 9]


def config(**fields: Any) -> RolloutConfig:
    own = {"name": "pagewood", "tensor_model_parallel_size": 1, "max_model_len": 256, "response_length": 16, **fields}
    return RolloutConfig(engine_kwargs={"pagewood": OWN}, **own)


class _Actor:
    """What a handle of an actor does, in this process."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=getattr(self._server, name))


@pytest.fixture
def _ray_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    actors: dict[str, _Actor] = {}

    def remote(kind: Any) -> Any:
        def options(*, name: str, **_: Any) -> Any:
            return SimpleNamespace(
                remote=lambda *given, **named: actors.setdefault(name, _Actor(kind(*given, **named)))
            )

        return SimpleNamespace(options=options)

    monkeypatch.setattr(integration.ray, "remote", remote)
    monkeypatch.setattr(integration.ray, "get_actor", actors.__getitem__)
    monkeypatch.setitem(os.environ, "RANK", "0")


@pytest.mark.usefixtures("_ray_without_processes")
def test_a_step_of_training() -> None:
    """As in a hybrid step: launch, answers, sleep, weights, KV, answers."""
    kind: Any = get_rollout_replica_class("pagewood")
    rollout_kind: Any = get_rollout_class("pagewood")
    assert issubclass(kind, RolloutReplica)
    assert issubclass(rollout_kind, BaseRollout)
    assert not inspect.isabstract(kind)
    assert not inspect.isabstract(rollout_kind)

    async def weights() -> AsyncGenerator[tuple[str, Any]]:
        for one in load_file(model_folder(None) / "model.safetensors").items():
            yield one

    async def place(function: Any) -> tuple[str, list[str]]:
        return "1f" * 28, []

    async def main() -> None:
        model = HFModelConfig.__new__(HFModelConfig)
        object.__setattr__(model, "local_path", str(model_folder(None)))  # others are of its tokenizer
        replica = kind(0, config(), model, gpus_per_node=1)
        worker = SimpleNamespace(__ray_call__=SimpleNamespace(remote=place))
        replica.rollout_mode, replica.workers = RolloutMode.HYBRID, [worker]
        await replica.launch_servers()
        rollout = rollout_kind(config=config(), model_config=model, device_mesh=None)
        assert (rollout.replica_rank, rollout.is_leader_rank) == (0, True)
        generate = replica.server_handle.generate.remote
        before = await generate(prompt_ids=PROMPT, sampling_params=dict(GREEDY), request_id="a", image_data=None)
        assert before.stop_reason == "completed"
        assert len(before.token_ids) == len(before.log_probs) <= 16
        await replica.sleep()
        await rollout.resume(tags=["weights"])
        await rollout.update_weights(weights(), global_steps=3, peft_config=None, base_sync_done=True)
        await rollout.resume(tags=["kv_cache"])
        await replica.abort_all_requests()
        await replica.release_kv_cache()
        await replica.resume_kv_cache()
        await replica.resume_generation()
        await replica.clear_kv_cache()
        after = await generate(PROMPT, {**GREEDY, "max_tokens": 4}, "b", priority=1)
        assert after.token_ids == before.token_ids[:4]
        assert after.extra_fields["global_steps"] == 3
        with pytest.raises(ValueError, match=r"rollout\.data_parallel_size must be 1"):
            integration.engine_options(config(data_parallel_size=2), "x")
        with pytest.raises(ValueError, match=r"lora\.merge"):
            await rollout.update_weights(iter(()), peft_config={})
        with pytest.raises(ValueError, match="wire_format"):
            await rollout.update_weights(iter(()), "delta_flush")
        await replica.server_handle.close.remote()

    asyncio.run(main())
