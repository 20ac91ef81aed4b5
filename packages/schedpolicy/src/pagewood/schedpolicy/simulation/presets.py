"""Machines with one H100, derived from published throughput."""

from pagewood.schedpolicy.simulation.machine import Machine
from pagewood.schedpolicy.steps.latency import StepModel

_PUBLISHED = (
    "NVIDIA TensorRT-LLM {}, docs/source/performance/perf-overview.md, FP8 throughput of {} at {} pairs of lengths"
)

H100_8B = Machine(
    name="h100-8b",
    source=_PUBLISHED.format("1.0", "Llama 3.1 8B on one H100 SXM", "ten"),
    model=StepModel(base_s=6.0e-3, prefill_s=14.1e-6, decode_s=13.6e-6, kv_s=19.6e-9),
    kv_tokens=915_456,
)
"""Llama 3.1 8B, weights and KV in FP8, one H100 SXM 80 GB.

At full load a request of I prompt and O output tokens costs `prefill_s * I + decode_s * O + kv_s * O * (I + O / 2)`,
plus its share of `base_s` in each of O steps; the number of running requests is what 60 GB of KV at 65,536 bytes a
token holds. Least squares of the relative error over the ten published (I, O, tokens/s) hardly determines `base_s`; it
is set so that the fitted `kv_s` equals the roofline, 65,536 bytes at 3.35 TB/s = 19.6 ns. All ten are met within 6%.
"""

H100_70B = Machine(
    name="h100-70b",
    source=_PUBLISHED.format("0.20", "Llama 3.3 70B on one H100 80GB HBM3 (TP 1)", "six"),
    model=StepModel(base_s=28.0e-3, prefill_s=150e-6, decode_s=17e-6, kv_s=48.9e-9),
    kv_tokens=50_000,
)
"""Llama 3.3 70B, weights and KV in FP8, one H100 SXM 80 GB: little room for KV, so a step mostly reads weights.

Fitted like `H100_8B`, but because memory is short, it matters what a request holds: all its I + O tokens from the
start, since that scheduler does not preempt. `kv_s` is the roofline, 163,840 bytes at 3.35 TB/s. The figures determine
only the ratio of `base_s` to `kv_tokens` (0.56 us); 50,000 tokens is what remains of 85 GB after about 73 GB of weights
(embedding and head are 16 bit) and 4 GB of everything else, and `base_s` is then 1.3 times the roofline of the weights.
All six are met within 2%. (The table of TensorRT-LLM 1.0 has no single H100 for this model.)
"""

PRESETS = (H100_8B, H100_70B)


def preset_named(name: str) -> Machine:
    """Return a preset by name.

    Raises:
        ValueError: The name is unknown.
    """
    for preset in PRESETS:
        if preset.name == name:
            return preset
    raise ValueError(f"preset must be one of {', '.join(preset.name for preset in PRESETS)}, got {name!r}")
