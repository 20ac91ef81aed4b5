"""`transformers` on the same device, with its own model and cache unchanged."""

# pyright: basic
# transformers and torch are typed in part only.

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from on_gpu.subject import Plan
from pagewood.engine.runner.cuda.device import Device


class Peer:
    """A model of the same shape with random weights. Invariant: only times are compared."""

    def __init__(self, device: Device, plan: Plan) -> None:
        """Create the model on the device, in the plan's dtype.

        Raises:
            ImportError: transformers is not installed.
        """
        import transformers

        self.version: str = transformers.__version__
        self._device = device
        self._plan = plan
        model = plan.model
        attention, feed_forward = model.attentions[0], model.layers[0].feed_forward
        config = transformers.LlamaConfig(
            vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=feed_forward.size,
            num_hidden_layers=model.num_layers, num_attention_heads=attention.num_heads,
            num_key_value_heads=attention.num_kv_heads, head_dim=attention.head_dim, max_position_embeddings=131_072,
        )  # fmt: skip
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, plan.dtype))
        try:
            with torch.device(device.torch_device):
                self._model: Any = transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    @torch.inference_mode()
    def decode_seconds(self, batch: int, context: int) -> float:
        """Return the seconds of a step that decodes `batch` requests of `context` tokens."""
        tokens = torch.zeros((batch, context), dtype=torch.int64, device=self._device.torch_device)
        cache = self._model(tokens, use_cache=True, logits_to_keep=1).past_key_values
        start_s = 0.0
        for number in range(self._plan.num_steps + 2):
            if number == 2:
                self._device.finish()
                start_s = perf_counter()
            logits = self._model(tokens[:, :1], past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1:].argmax(-1)
        self._device.finish()
        return (perf_counter() - start_s) / self._plan.num_steps

    @torch.inference_mode()
    def prefill_seconds(self, num_tokens: int) -> float:
        """Return the seconds of a pass over a prompt, with the logits of its last token; best of three."""
        tokens = torch.zeros((1, num_tokens), dtype=torch.int64, device=self._device.torch_device)
        times: list[float] = []
        for _ in range(4):
            self._device.finish()
            start_s = perf_counter()
            self._model(tokens, use_cache=True, logits_to_keep=1)
            self._device.finish()
            times.append(perf_counter() - start_s)
        return min(times[1:])
