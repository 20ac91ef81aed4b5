"""What trainers compare: log probabilities, what filters leave, experts and hidden states are the same bits cold, after
a hit, in a batch, and computed with their prompt.

Raw log probabilities of outputs are those that one pass over prompt and output yields, for every family, and so are
experts and states; processed ones do not depend on the cache or on the batch either.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cuda_ranks import use_stand_ins
from families.case import build
from families.registry import CASES
from group_in_threads import ranks_are_threads
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.models.config import ModelConfig
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from weight_bench import PROMPTS, WeightBench

DEFAULT = ("qwen3", "gpt-oss", "gemma2", "deepseek3")
FAMILIES = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3}


@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_the_same_bits(family: str, kind: str, tmp_path: Path) -> None:
    build(CASES[family], tmp_path)
    _check(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        *(pytest.param(family, kind, {}) for family in ("qwen3-moe", "gemma2") for kind in ("raw", "processed")),
        ("deepseek3", "raw", {"pipeline_parallel_size": 2}),
        ("qwen3-moe", "raw", {"tensor_parallel_size": 2, "enable_dp_attention": True}),
    ],
)
def test_so_they_are_on_cuda_devices(
    family: str, kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batch-invariant mode; on one device, steps that report nothing inner have graphs."""
    build(CASES[family], tmp_path)
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    device = RecordingDevice()
    make = partial(build_on, device, flashinfer_torch)
    options = {"num_threads": 2, **options}
    _check(tmp_path, kind, build=make, device="cuda", dtype="float32", batch_invariant=True, **options)
    assert (device.num_replayed > 0) == (len(options) == 1)


def _check(tmp_path: Path, kind: str, **bench_options: Any) -> None:
    bench_options = {"max_running": 8, "max_length": 48, **bench_options}
    asked = ("hidden_states_from", "routed_experts_from")
    if ModelConfig.from_folder(tmp_path).expert_shape is None:
        asked = asked[:1]
    options: dict[str, Any] = {
        "num_tokens": 8,
        "logprobs_kind": kind,
        "kept_tokens": 999,
        **SAMPLED,
        **dict.fromkeys(asked, -1),
    }
    with WeightBench(tmp_path, **bench_options) as bench:
        cold = bench.run(bench.submit(PROMPTS[0], **options))[0]
        hit = bench.run(bench.submit(PROMPTS[0], **options))[0]
        assert hit.scores == cold.scores
        assert hit.end is not None
        assert hit.end.num_cached_tokens > 0
        assert hit.rows == cold.rows
        assert hit.kept == cold.kept
        text = [*PROMPTS[0], *(token for token, _ in cold.scores)]
        scored = bench.run(bench.submit(text, num_tokens=1, prompt_logprobs=0))[0].prompt_scores
        if kind == "raw":
            assert scored[len(PROMPTS[0]) - 1 :] == cold.scores
        for first in (0, len(PROMPTS[0]) - 1):
            whole = bench.run(bench.submit(text, num_tokens=1, **dict.fromkeys(asked, first)))[0]
            for found, rows in zip(whole.rows, cold.rows, strict=True):
                assert (found is None) == (rows is None)
                if found is not None and rows is not None:
                    assert found.shape == (len(text) - first, *rows.shape[1:])
                    own = found.without_last(1) or found  # `text` has the last token too
                    assert rows.shape[0] == 8
                    assert own.data.endswith(rows.data)
        start: dict[str, Any] = {"prompt_logprobs": 0, "prompt_logprobs_start": len(PROMPTS[0])}
        assert bench.run(bench.submit(text, num_tokens=1, **start))[0].prompt_scores == scored[len(PROMPTS[0]) - 1 :]
    with WeightBench(tmp_path, **bench_options) as bench:
        others = [bench.submit(PROMPTS[1][number:], num_tokens=12, temperature=1.0) for number in range(3)]
        batched = bench.run(bench.submit(PROMPTS[0], **options), *others)[0]
        assert batched.scores == cold.scores
        assert batched.rows == cold.rows
        assert batched.kept == cold.kept
    with WeightBench(tmp_path, **bench_options) as bench:  # nothing is asked for
        plain = {name: value for name, value in options.items() if name not in (*asked, "kept_tokens")}
        assert bench.run(bench.submit(PROMPTS[0], **plain))[0].scores == cold.scores
    assert len({value for _, value in cold.scores}) > 1
    assert len({len(kept or b"") for kept in cold.kept}) > 1
