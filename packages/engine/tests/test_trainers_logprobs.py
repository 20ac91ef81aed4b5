"""Log probabilities that trainers compare: the same bits cold, after a hit, in a batch, and scored with their prompt.

Raw ones of outputs are those that one pass over prompt and output yields, for every family; processed ones do not
depend on the cache or on the batch either.
"""

from pathlib import Path
from typing import Any

import pytest

from families.case import build
from families.registry import CASES
from weight_bench import PROMPTS, WeightBench

DEFAULT = ("qwen3", "gpt-oss", "gemma2", "deepseek3")
FAMILIES = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3}


@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_the_same_bits(family: str, kind: str, tmp_path: Path) -> None:
    build(CASES[family], tmp_path)
    options: dict[str, Any] = {"num_tokens": 8, "logprobs_kind": kind, **SAMPLED}
    with WeightBench(tmp_path, max_running=8, max_length=48) as bench:
        cold = bench.run(bench.submit(PROMPTS[0], **options))[0]
        hit = bench.run(bench.submit(PROMPTS[0], **options))[0]
        assert hit.scores == cold.scores
        text = [*PROMPTS[0], *(token for token, _ in cold.scores)]
        scored = bench.run(bench.submit(text, num_tokens=1, prompt_logprobs=0))[0].prompt_scores
        if kind == "raw":
            assert scored[len(PROMPTS[0]) - 1 :] == cold.scores
        start: dict[str, Any] = {"prompt_logprobs": 0, "prompt_logprobs_start": len(PROMPTS[0])}
        assert bench.run(bench.submit(text, num_tokens=1, **start))[0].prompt_scores == scored[len(PROMPTS[0]) - 1 :]
    with WeightBench(tmp_path, max_running=8, max_length=48) as bench:
        others = [bench.submit(PROMPTS[1][number:], num_tokens=12, temperature=1.0) for number in range(3)]
        batched = bench.run(bench.submit(PROMPTS[0], **options), *others)[0]
        assert batched.scores == cold.scores
    assert len({value for _, value in cold.scores}) > 1
