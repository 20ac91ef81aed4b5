"""The subject: a decoder with random weights made on the device, and a runner with as much KV memory as fits."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewood.engine.assembly.cuda.build import cuda_ops
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.ops import LatentShape
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.experts import ExpertsConfig, RouterConfig
from pagewood.engine.models.parts.feed_forward import FeedForwardConfig
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.models.parts.layer import FrameConfig, LayerConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.parts.rope import Llama3Scaling, RopeConfig
from pagewood.engine.runner.cuda import runner as cuda_runner
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.drafts.lookup import NgramDrafter
from pagewood.engine.runner.cuda.drafts.verify import DraftRequest, count_accepted
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer
from pagewood.engine.runner.storage import storage_for
from pagewood.kvpool.latent_storage import LatentStorage

PAGE_SIZE = 16
NUM_DRAFTS = 4
_RESERVE_BYTES = 8 << 30  # for activations, graphs and tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizes of the model and of the measurements."""

    model: ModelConfig
    dtype: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    long_prompt: int
    chunk: int
    """Prompt tokens per step of the engine."""
    idle_batch: int
    idle_context: int
    num_steps: int
    """Steps of each decode measurement."""
    stream_bytes: int
    matmul_size: int
    peer_batches: tuple[int, ...]
    """Batches of `transformers`; none: it is left out."""
    name: str
    num_drafts: int = NUM_DRAFTS
    """Drafts of each request in steps that verify; 0: none are measured."""

    @property
    def max_length(self) -> int:
        """Longest sequence."""
        return max(self.long_prompt, *self.contexts, *self.prefills) + 256


def model_config(
    *,
    hidden: int,
    feed_forward: FeedForwardConfig | ExpertsConfig,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    qk_norm: bool = False,
) -> ModelConfig:
    """Return the configuration of a Llama 3.1 with these sizes, with norms of q and k or experts if asked."""
    scaling = Llama3Scaling(factor=8.0, original_length=8192, low_frequency_factor=1.0, high_frequency_factor=4.0)
    norm = NormConfig(epsilon=1e-5)
    return _decoder(
        AttentionConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=RopeConfig(head_dim=head_dim, theta=500_000.0, scaling=scaling),
            scale=head_dim**-0.5,
            qk_norm=norm if qk_norm else None,
        ),
        feed_forward,
        hidden=hidden,
        layers=layers,
        vocab=vocab,
    )


def latent_config(
    *, hidden: int, feed_forward: ExpertsConfig, layers: int, shape: LatentShape, vocab: int
) -> ModelConfig:
    """Return the configuration of a DeepSeek V2 Lite with these sizes, whose first layer has experts too."""
    mixer = LatentAttentionConfig(
        shape=shape,
        rope=RopeConfig(head_dim=shape.rope_dim, theta=10_000.0),
        scale=(shape.plain_dim + shape.rope_dim) ** -0.5,
        norm=NormConfig(epsilon=1e-6),
    )
    return _decoder(mixer, feed_forward, hidden=hidden, layers=layers, vocab=vocab)


def _decoder(
    mixer: AttentionConfig | LatentAttentionConfig,
    feed_forward: FeedForwardConfig | ExpertsConfig,
    *,
    hidden: int,
    layers: int,
    vocab: int,
) -> ModelConfig:
    norm = NormConfig(epsilon=1e-5)
    layer = LayerConfig(mixer=mixer, feed_forward=feed_forward, norm=norm, frame=FrameConfig())
    return ModelConfig(
        architecture="random",
        vocab_size=vocab,
        hidden_size=hidden,
        layers=(layer,) * layers,
        norm=norm,
        max_position=131_072,
        tied_embeddings=False,
    )


_SIZES: dict[str, Any] = {
    "dtype": "bfloat16", "batches": (1, 16, 64, 256), "contexts": (1024, 8192), "prefills": (512, 2048, 8192),
    "long_prompt": 32_768, "chunk": 8192, "idle_batch": 64, "idle_context": 1024, "num_steps": 16,
    "stream_bytes": 4 << 30, "matmul_size": 8192,
}  # fmt: skip
LLAMA_8B = Plan(
    model=model_config(
        hidden=4096, feed_forward=FeedForwardConfig(size=14_336), layers=32, heads=32, kv_heads=8, head_dim=128,
        vocab=128_256,
    ),
    name="Llama 3.1 8B", peer_batches=(1, 16, 64), **_SIZES,
)  # fmt: skip
EXPERTS_30B = Plan(
    model=model_config(
        hidden=2048,
        feed_forward=ExpertsConfig(
            size=768, router=RouterConfig(num_experts=128, num_chosen=8, renormalises=True)
        ),
        layers=48, heads=32, kv_heads=4, head_dim=128, vocab=151_936, qk_norm=True,
    ),
    name="Qwen3 30B-A3B", peer_batches=(), num_drafts=0, **_SIZES,
)  # fmt: skip
LATENTS_16B = Plan(
    model=latent_config(
        hidden=2048,
        feed_forward=ExpertsConfig(
            size=1408, router=RouterConfig(num_experts=64, num_chosen=6), shared=FeedForwardConfig(size=2816)
        ),
        layers=27, shape=LatentShape(num_heads=16, plain_dim=128, rope_dim=64, value_dim=128, rank=512),
        vocab=102_400,
    ),
    name="DeepSeek V2 Lite", peer_batches=(), num_drafts=0, **_SIZES,
)  # fmt: skip
TINY = Plan(
    model=model_config(
        hidden=32, feed_forward=FeedForwardConfig(size=48), layers=2, heads=4, kv_heads=1, head_dim=8, vocab=50
    ),
    dtype="float32", batches=(1, 3), contexts=(20, 40), prefills=(8, 24), long_prompt=40, chunk=16,
    idle_batch=3, idle_context=20, num_steps=4, stream_bytes=1 << 16, matmul_size=32, peer_batches=(1, 2),
    name="a tiny model (means nothing)",
)  # fmt: skip
"""For the stand-ins; its numbers mean nothing."""


class RandomWeights:
    """Random parameters, created on the device when they are requested; satisfies `models.ops.Weights`."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self.num_bytes = 0
        """Bytes of all parameters created so far."""

    def stack(
        self, parts: Sequence[tuple[str, int]], *columns: int, order: object = None, inputs: range | None = None
    ) -> Tensor:
        """Return small random numbers for a projection, ones for a norm; they have no order."""
        assert inputs is None, "models are whole"
        return self._make((sum(rows for _, rows in parts), *columns), self._dtype)

    def numbers(self, name: str, rows: int, columns: int, *, order: object = None) -> Tensor:
        """Return small random numbers."""
        return self._make((rows, columns), self._dtype)

    def exact(self, name: str, rows: int, *columns: int, order: object = None) -> Tensor:
        """Return small random numbers for a matrix, ones for a vector, in float32."""
        return self._make((rows, *columns), torch.float32)

    def _make(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        options = {"dtype": dtype, "device": self._device}
        made = torch.randn(size, **options) * 0.02 if len(size) > 1 else torch.ones(size, **options)
        self.num_bytes += made.numel() * made.element_size()
        return made


class AlwaysDrafting:
    """Looks n-grams up as `NgramDrafter` does, and drafts for every row, also where random text has none."""

    def __init__(self) -> None:
        self._drafter = NgramDrafter()

    def note(self, batch: Batch) -> None:
        """Do nothing."""

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Return as many drafts as may be for each row."""
        drafts, found = self._drafter.draft(request)
        return drafts, torch.full_like(found, request.num_drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A runner that is ready, and the bytes that its steps read."""

    device: Device
    runner: cuda_runner.CUDARunner
    plan: Plan
    num_pages: int
    read_bytes: int
    """Bytes of the weights that every decode step reads: all but the embedding table and the experts."""
    expert_bytes: int
    """Bytes of all experts that tokens choose."""
    token_bytes: int
    """Bytes of the KV of one position."""


def accept_all() -> None:
    """Let CUDA runners accept every draft from now on, so that it is known where each step begins."""
    cuda_runner.count_accepted = lambda is_equal, *others: count_accepted(torch.ones_like(is_equal), *others)


def make_subject(device: Device, flashinfer: FlashInfer, plan: Plan) -> Subject:
    """Create the weights, allocate the KV memory, capture the graphs."""
    model, dtype = plan.model, getattr(torch, plan.dtype)
    weights = RandomWeights(dtype=dtype, device=device.torch_device)
    with torch.inference_mode():
        decoder = Decoder(model, weights, cuda_ops(flashinfer, device.torch_device), device=device.torch_device)
    layout = model.memory_layout(page_size=PAGE_SIZE, dtype=plan.dtype)
    needed = max(plan.batches) * -(-plan.max_length // PAGE_SIZE)
    room = max(device.free_bytes() - _RESERVE_BYTES, device.free_bytes() // 2)
    num_pages = min(needed, room // layout.bytes_per_page - 1)
    storage = storage_for(layout, num_pages + 1, device=device.torch_device)
    for layer in range(model.num_layers):
        for part in storage.parts(layer) if isinstance(storage, LatentStorage) else (storage.layer(layer),):
            part.normal_(std=0.5)
    accept_all()
    runner = cuda_runner.CUDARunner(
        decoder,
        storage,
        flashinfer,
        device,
        max_rows=max(plan.batches),
        max_length=plan.max_length,
        graph_sizes=plan.batches,
        drafter=AlwaysDrafting() if plan.num_drafts else None,
        max_drafts=plan.num_drafts,
    )
    expert_bytes = dtype.itemsize * sum(
        3 * part.size * model.hidden_size * part.router.num_experts
        for part in (layer.feed_forward for layer in model.layers)
        if isinstance(part, ExpertsConfig)
    )
    table_bytes = model.vocab_size * model.hidden_size * dtype.itemsize
    return Subject(
        device=device,
        runner=runner,
        plan=plan,
        num_pages=num_pages,
        read_bytes=weights.num_bytes - table_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        token_bytes=layout.bytes_per_page // PAGE_SIZE,
    )
