"""Machines of one H100, derived from published throughput."""

from pagewood.schedpolicy.latency import StepModel
from pagewood.schedpolicy.simulation.machine import Machine

_PUBLISHED = "NVIDIA TensorRT-LLM 1.0, docs/source/performance/perf-overview.md, FP8 throughput"

H100_8B = Machine(
    name="h100-8b",
    source=f"{_PUBLISHED} of Llama 3.1 8B on one H100 SXM at ten pairs of lengths",
    model=StepModel(base_s=6.0e-3, prefill_s=14.1e-6, decode_s=13.6e-6, kv_s=19.6e-9),
    kv_tokens=915_456,
)
"""Llama 3.1 8B, weights and KV in FP8, one H100 SXM 80 GB.

At full load a request of I prompt and O output tokens costs `prefill_s * I + decode_s * O + kv_s * O * (I + O / 2)`,
and its share of `base_s` in each of O steps, where as many requests run as 60 GB of KV at 65,536 bytes a token hold.
Least squares of the relative error over the ten published (I, O, tokens/s) leaves `base_s` nearly free; it is set to
where the fitted `kv_s` equals the roofline, 65,536 bytes at 3.35 TB/s = 19.6 ns. All ten are met within 6%.
"""

H100_70B = Machine(
    name="h100-70b",
    source=f"{_PUBLISHED} of Llama 3.3 70B on one H200, what memory bounds times 4.8 / 3.35 for the H100's bandwidth",
    model=StepModel(base_s=31.1e-3, prefill_s=120e-6, decode_s=110e-6, kv_s=48.9e-9),
    kv_tokens=65_536,
)
"""Llama 3.3 70B, weights and KV in FP8, one H100 SXM 80 GB.

That table has no single H100 for this model, but a single H200: the same processor with faster memory (4.8 against
3.35 TB/s). So the model is fitted as for `H100_8B` (60 GB of KV at 163,840 bytes a token; all ten met within 10%), and
the two terms that memory bounds, `base_s` and `kv_s`, are then multiplied by 4.8 / 3.35. What 70.6 GB of weights leave
of 80 GB holds about 65,536 tokens.
"""

PRESETS = (H100_8B, H100_70B)


def preset_named(name: str) -> Machine:
    """Return the preset of that name.

    Raises:
        ValueError: There is none.
    """
    for preset in PRESETS:
        if preset.name == name:
            return preset
    raise ValueError(f"preset must be one of {', '.join(preset.name for preset in PRESETS)}, got {name!r}")
