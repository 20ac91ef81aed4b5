import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pagewood.schedpolicy.simulation.machine import FORMAT, Machine, load_machine
from pagewood.schedpolicy.simulation.presets import H100_8B, H100_70B, preset_named
from pagewood.schedpolicy.steps.latency import StepModel

EXACT = Machine(
    name="exact", source="test", model=StepModel(base_s=2**-6, prefill_s=2**-10, decode_s=2**-8, kv_s=2**-14)
)
# Prompt, output, output tokens/s: TensorRT-LLM's overview, 1.0 for the 8B model and 0.20 for the 70B one.
ON_H100_8B = [
    *((128, 128, 28312), (128, 2048, 22714), (128, 4096, 14325), (500, 2000, 17660), (1000, 1000, 15220)),
    *((1000, 2000, 13899), (2048, 128, 3450), (2048, 2048, 9305), (5000, 500, 3459), (20000, 2000, 1351)),
]
ON_H100_70B = [
    *((128, 128, 3128.33), (128, 2048, 756.42), (1000, 1000, 742.14)),
    *((1000, 2000, 533.74), (1024, 2048, 530.16), (5000, 500, 204.94)),
]


def test_many_decode_steps_are_the_sum_of_single_ones():
    kv, total = 100, 0.0
    for num_steps in range(20):
        assert EXACT.decode_s(num_steps, 7, 100) == total
        total += EXACT.model.step_s(num_prefill=0, num_decode=7, num_kv=kv)
        kv += 7


@pytest.mark.parametrize("within_s", [0.0, 0.01, 0.3, 1.0, 1e9])
def test_the_fewest_steps_that_take_a_given_time(within_s: float):
    num_steps = EXACT.num_decode_steps(within_s, 7, 100, at_most=30)
    assert num_steps == 30 or EXACT.decode_s(num_steps, 7, 100) >= within_s
    assert num_steps == 0 or EXACT.decode_s(num_steps - 1, 7, 100) < within_s


@pytest.mark.parametrize(
    ("machine", "published", "kv_tokens", "output_share", "within"),
    [(H100_8B, ON_H100_8B, 60e9 / 65_536, 0.5, 0.06), (H100_70B, ON_H100_70B, H100_70B.kv_tokens, 1.0, 0.02)],
)
def test_presets_give_the_published_throughput(
    machine: Machine,
    published: list[tuple[int, int, float]],
    kv_tokens: float,
    output_share: float,  # part of its output for which a request holds memory, over its lifetime
    within: float,
):
    model = machine.model
    for num_prompt, num_output, tokens_per_s in published:
        num_running = min(2048, kv_tokens / (num_prompt + output_share * num_output))
        step_s = model.decode_s + model.kv_s * (num_prompt + num_output / 2) + model.base_s / num_running
        per_request_s = model.prefill_s * num_prompt + num_output * step_s
        assert num_output / per_request_s == pytest.approx(tokens_per_s, rel=within)


def test_a_file_gives_back_what_was_written(tmp_path: Path):
    path = tmp_path / "machine.json"
    written = {"name": H100_70B.name, "source": H100_70B.source, "kv_tokens": H100_70B.kv_tokens}
    path.write_text(json.dumps({"format": FORMAT, **written, **asdict(H100_70B.model)}))
    assert load_machine(path) == H100_70B


def test_samples_are_fitted(tmp_path: Path):
    rows = [(512, 0, 0), (0, 8, 4000), (0, 64, 90_000), (1024, 32, 20_000), (256, 16, 60_000), (0, 1, 500)]
    samples = [
        {
            "num_prefill": prefill,
            "num_decode": decode,
            "num_kv": kv,
            "seconds": EXACT.model.step_s(num_prefill=prefill, num_decode=decode, num_kv=kv),
        }
        for prefill, decode, kv in rows
    ]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"format": FORMAT, "kv_tokens": 5000, "samples": samples}))
    machine = load_machine(path)
    assert (machine.name, machine.kv_tokens) == ("measured", 5000)
    for name in ("base_s", "prefill_s", "decode_s", "kv_s"):
        assert getattr(machine.model, name) == pytest.approx(getattr(EXACT.model, name), rel=1e-6)


GOOD: dict[str, Any] = {"format": FORMAT, "base_s": 0.01, "prefill_s": 1e-5, "decode_s": 0.0, "kv_s": 0.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object with"),
        (json.dumps({**GOOD, "format": "other"}), "must be a JSON object with"),
        (json.dumps({**GOOD, "base_s": "fast"}), "base_s must be a number, got 'fast'"),
        (json.dumps({**GOOD, "more": 1}), "and nothing else, got .*more"),
        (json.dumps({**GOOD, "kv_tokens": 1.5}), "kv_tokens must be an integer"),
        (json.dumps({"format": FORMAT, "samples": [{"seconds": 1}]}), r"samples\[0\] must have"),
        (json.dumps({"format": FORMAT, "samples": 3}), "samples must be a list"),
        (json.dumps({**GOOD, "base_s": -1}), "base_s must be >= 0"),
        (json.dumps({**GOOD, "base_s": 0}), "base_s \\+ decode_s must be > 0"),
    ],
)
def test_errors_in_a_file_are_named(tmp_path: Path, content: str, message: str):
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_machine(path)


def test_there_are_two_presets():
    assert preset_named("h100-8b") is H100_8B
    with pytest.raises(ValueError, match="preset must be one of h100-8b, h100-70b, got 'a100'"):
        preset_named("a100")
