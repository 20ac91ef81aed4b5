import json
from pathlib import Path
from typing import Any

import pytest

from pagewood.schedpolicy.simulation.trace import Trace, TraceRequest, scaled
from pagewood.schedpolicy.simulation.trace_file import load_trace, save_trace
from pagewood.schedpolicy.simulation.workloads import WORKLOADS, generate

MOONCAKE: dict[str, Any] = {"timestamp": 1500, "input_length": 1300, "output_length": 20, "hash_ids": [7, 9, 4]}


DEFAULTS: dict[str, Any] = {"name": "poisson", "num_requests": 1, "rate": 1.0, "seed": 0}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def request(num_prompt: int = 10, num_output: int = 1, keys: tuple[int, ...] = ()) -> TraceRequest:
    return TraceRequest(
        arrived_s=0.0, num_prompt=num_prompt, num_output=num_output, max_new_tokens=num_output, keys=keys
    )


def test_a_mooncake_line(tmp_path: Path):
    later = {**MOONCAKE, "timestamp": 4000, "hash_ids": [7, 8], "tenant": "ada", "priority": 3, "deadline_s": 9}
    trace = load_trace(write(tmp_path / "trace.jsonl", later, "", {**MOONCAKE, "max_new_tokens": 100}))
    assert trace.block_size == 512
    first, second = trace.requests
    assert (first.arrived_s, first.num_prompt, first.num_output, first.max_new_tokens) == (0.0, 1300, 20, 100)
    assert (second.arrived_s, second.tenant, second.priority, second.deadline_s) == (2.5, "ada", 3, 9)
    assert first.keys[0] == second.keys[0]
    assert len({*first.keys, *second.keys}) == 4


def test_openai_lines_with_a_common_text_share_keys(tmp_path: Path):
    system = {"role": "system", "content": "x" * 4000}
    ask = {"role": "user", "content": "why? " * 200}
    lines = [
        {"created": 1_700_000_000, "messages": [system], "max_tokens": 16, "user": "ada"},
        {"created": 1_700_000_003, "messages": [system, ask], "usage": {"completion_tokens": 5}, "max_tokens": 50},
        {"created": 1_700_000_001, "body": {"prompt": "hello", "max_completion_tokens": 4}},
    ]
    trace = load_trace(write(tmp_path / "log.jsonl", *lines))
    one, other, longer = trace.requests
    assert [r.arrived_s for r in trace.requests] == [0.0, 1.0, 3.0]
    assert (one.tenant, one.num_output, longer.num_output, longer.max_new_tokens) == ("ada", 16, 5, 50)
    assert one.num_prompt == pytest.approx(1010, abs=10)
    assert one.keys == longer.keys[: len(one.keys)]
    assert len(longer.keys) > len(one.keys) >= 15
    assert not other.keys


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "must have at least one request"),
        ((MOONCAKE, "{"), ":2: a line must be JSON"),
        ((MOONCAKE, "", "[1]"), ":3: a line must be a JSON object, got list"),
        (({**MOONCAKE, "input_length": "long"},), ":1: input_length must be an integer, got 'long'"),
        (({**MOONCAKE, "hash_ids": ["x"]},), ":1: hash_ids must be a list of integers"),
        (({**MOONCAKE, "output_length": 0},), ":1: num_output must be >= 1, got 0"),
        ((MOONCAKE, {**MOONCAKE, "hash_ids": [8, 9]}), ":2: hash_ids must identify all blocks before them"),
        (({"timestamp": 0},), ":1: a request must have hash_ids"),
        (({"prompt": "x"},), ":1: a request must have one of completion_tokens"),
        ((MOONCAKE, {"prompt": "x", "max_tokens": 1}), ":2: lines must be all of one kind"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, lines: tuple[object, ...], message: str):
    with pytest.raises(ValueError, match=message):
        load_trace(write(tmp_path / "bad.jsonl", *lines))


@pytest.mark.parametrize("name", [name for name, _ in WORKLOADS])
def test_generated_traces_are_reproducible_and_survive_a_file(tmp_path: Path, name: str):
    trace = generate(name, num_requests=120, rate=5.0, seed=3)
    assert trace == generate(name, num_requests=120, rate=5.0, seed=3)
    assert trace != generate(name, num_requests=120, rate=5.0, seed=4)
    assert len(trace.requests) == 120
    save_trace(trace, tmp_path / "trace.jsonl")
    again = load_trace(tmp_path / "trace.jsonl", block_size=trace.block_size)
    for one, other in zip(trace.requests, again.requests, strict=True):
        assert one.arrived_s - trace.requests[0].arrived_s == pytest.approx(other.arrived_s)
        assert (one.num_prompt, one.tenant, one.deadline_s) == (other.num_prompt, other.tenant, other.deadline_s)
        assert len(one.keys) == len(other.keys)


def test_a_page_has_the_key_of_its_last_block_or_its_share_of_one():
    trace = Trace(name="x", requests=(request(100, keys=(3, 5, 6, 9)),), block_size=16)
    (one,) = trace.requests
    assert trace.page_keys(one, 16) == (3, 5, 6, 9)
    assert trace.page_keys(one, 32) == (5, 9)
    assert trace.page_keys(one, 8) == (6, 7, 10, 11, 12, 13, 18, 19)
    with pytest.raises(ValueError, match=r"page_size must divide block_size \(16\) or be a multiple, got 24"):
        trace.page_keys(one, 24)


def test_only_computed_pages_have_keys():
    trace = Trace(name="x", requests=(request(15, 2, keys=(3, 5)),), block_size=8)
    assert trace.page_keys(trace.requests[0], 8) == (3, 5)
    assert trace.page_keys(request(15, 1, keys=(3, 5)), 8) == (3,)


def test_a_trace_is_sped_up():
    trace = generate("poisson", num_requests=5, rate=1.0, seed=0)
    faster = scaled(trace, rate=2.0)
    assert [r.arrived_s for r in faster.requests] == [r.arrived_s / 2 for r in trace.requests]
    with pytest.raises(ValueError, match="rate must be > 0"):
        scaled(trace, rate=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "tidal"}, "workload must be one of poisson, .*, got 'tidal'"),
        ({"num_requests": 0}, "num_requests must be >= 1"),
        ({"rate": 0.0}, "rate must be > 0"),
    ],
)
def test_an_unknown_workload_is_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        generate(**(DEFAULTS | arguments))


def test_requests_are_checked():
    with pytest.raises(ValueError, match="max_new_tokens must be >= num_output"):
        TraceRequest(arrived_s=0, num_prompt=1, num_output=2, max_new_tokens=1)
    with pytest.raises(ValueError, match="requests must be sorted"):
        Trace(
            name="x",
            requests=(TraceRequest(arrived_s=1, num_prompt=1, num_output=1, max_new_tokens=1), request()),
            block_size=1,
        )
