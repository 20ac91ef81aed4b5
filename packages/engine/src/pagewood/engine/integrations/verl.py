# pyright: basic, reportMissingImports=false
# (verl and ray are not dependencies of this package)
"""This engine as a rollout of verl: `actor_rollout_ref.rollout.name=pagewood`, once this module is imported.

    VERL_USE_EXTERNAL_MODULES=pagewood.engine.integrations.verl python -m verl.trainer.main_ppo \
        actor_rollout_ref.rollout.name=pagewood ...

Written for verl 0.9.1. `engine_kwargs.pagewood` are fields of `EngineConfig`; `engine_options` names verl's own fields
that count. What an engine cannot do is refused by name. Each replica is one engine in one actor, on the host of its
first worker. Weights come as safetensors in shared memory, so a replica must not be larger than a host.
"""

import os
from typing import Any

import ray
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout  # pyright: ignore[reportPrivateUsage]
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from pagewood.engine.integrations.rollout import RolloutServer
from pagewood.engine.offline.weight_files import TensorFolder

NAME = "pagewood"


class PagewoodReplica(RolloutReplica):
    """One engine, as verl's manager of servers knows it."""

    async def launch_servers(self) -> None:
        """Start the actor beside the first worker of this replica.

        Raises:
            ValueError: the replica is larger than a host.
        """
        if self.nnodes > 1:
            raise ValueError(f"a replica must fit on one host, got {self.world_size} ranks on {self.nnodes}")
        places = [await worker.__ray_call__.remote(_place_of_actor) for worker in self.workers]
        variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        if devices := [device for _, own in places for device in own]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        kind = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
        name = f"{NAME}_server{kind}_{self.replica_rank}_0{self.name_suffix}"
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=places[0][0], soft=False)
        actor = ray.remote(RolloutServer).options(
            name=name,
            scheduling_strategy=affinity,
            runtime_env={"env_vars": variables},
            max_concurrency=self.max_concurrency,
        )
        level = {RolloutMode.HYBRID: 2, RolloutMode.COLOCATED: 1}.get(self.rollout_mode, 0)
        server = actor.remote(
            TokenOutput,
            engine_options(self.config, self.model_config.local_path),
            prompt_length=self.config.prompt_length,
            response_length=self.config.response_length,
            has_experts=self.config.enable_rollout_routing_replay,
            has_processed=self.config.logprobs_mode == "processed_logprobs",
            defaults={"ignore_eos": self.config.ignore_eos},
            # weights that the trainer sends anew need not be kept while it has the device
            level=level if self.config.free_cache_engine else None,
        )
        await server.launch_server.remote()
        self.servers.append(server)
        self._server_handle, self._server_address = server, name  # it has no HTTP; verl needs a name


class PagewoodRollout(BaseRollout):
    """What a worker of the trainer calls to send weights to its replica; all but the first of a replica only read."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        size = self.config.tensor_model_parallel_size * self.config.pipeline_model_parallel_size
        rank = int(os.environ["RANK"])  # not ours
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self.sleep_level = 2  # written by: verl
        self._server: Any = None  # written by: _handle

    async def resume(self, tags: list[str]) -> None:
        """Let the engine take memory again."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._handle().wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Let the engine give memory back."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._handle().sleep.remote()

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", *, global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Send all tensors to the engine.

        Raises:
            ValueError: they are not whole tensors of the model itself.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format must be named_tensors, got {wire_format!r}")
        if kwargs.get("peft_config") is not None:
            raise ValueError("lora.merge must be True, because adapters are not sent beside weights, got False")
        folder = TensorFolder() if self.is_leader_rank else None
        try:
            async for name, tensor in ensure_async_iterator(weights):  # all ranks gather each tensor
                if folder is not None:
                    folder.add(name, tensor)
            if folder is not None:
                await self._handle().update_weights.remote(list(folder.files()), global_steps)
        finally:
            if folder is not None:
                folder.close()

    def _handle(self) -> Any:
        if self._server is None:
            self._server = ray.get_actor(f"{NAME}_server_{self.replica_rank}_0")
        return self._server


def engine_options(config: Any, model: str) -> dict[str, Any]:
    """Return the fields of `EngineConfig` for verl's `RolloutConfig`.

    Raises:
        ValueError: it asks for something that an engine cannot do.
    """
    for name, needed in (("data_parallel_size", 1), ("quantization", None)):
        if getattr(config, name) != needed:
            raise ValueError(f"rollout.{name} must be {needed} with {NAME}, got {getattr(config, name)!r}")
    if config.mtp.enable or config.disaggregation.enabled:
        raise ValueError(f"rollout.mtp and rollout.disaggregation must be off with {NAME}, got one of them on")
    own: dict[str, Any] = (config.engine_kwargs or {}).get(NAME) or {}
    return {
        "model": model,
        "device": "cuda",
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "pipeline_parallel_size": config.pipeline_model_parallel_size,
        "max_length": config.max_model_len,
        "max_running": config.max_num_seqs,
        "chunked_prefill_size": config.max_num_batched_tokens,
        "mem_fraction": config.gpu_memory_utilization,
        "prefix_cache": config.enable_prefix_caching,
        "seed": config.seed,
        **own,
    }


def _place_of_actor(actor: object) -> tuple[str, list[str]]:
    """Return the node of an actor, and its devices."""
    del actor
    context = ray.get_runtime_context()
    return context.get_node_id(), [str(one) for one in context.get_accelerator_ids().get("GPU", [])]


RolloutReplicaRegistry.register(NAME, lambda: PagewoodReplica)
_ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.{PagewoodRollout.__name__}"
