"""Experts and hidden states of positions: those of `transformers`, and each once whatever happens to the request; and
what filters leave for each token."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import distributed

from cuda_ranks import use_stand_ins
from families.case import build
from families.registry import CASES
from group_in_threads import ranks_are_threads
from node_threads import following, over_nodes
from pagewood.engine.api import FinishReason, Rows, SamplingParams, Submit
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.build import build_engine
from pagewood.engine.core import requirements
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.cuda.stage_relay import StageRelay
from stand_ins import flashinfer_torch, tiny_heads
from stand_ins.nccl_gloo import NCCLGroup
from stand_ins.recording_device import RecordingDevice
from weight_bench import PROMPTS, WeightBench, bench_config

DEFAULT = ("qwen3-moe", "deepseek3")
FAMILIES = [
    name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow)
    for name in CASES
    if name != "llama-dynamic"  # the reference computes a text in another way as a whole than token by token
]
WHOLE: dict[str, Any] = {"routed_experts_from": 0, "hidden_states_from": 0}


def _array(rows: Rows | None, kind: str) -> NDArray[Any]:
    assert rows is not None
    return np.frombuffer(rows.data, kind).reshape(rows.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    case = CASES[family]
    reference = build(case, tmp_path)
    shape = ModelConfig.from_folder(tmp_path).expert_shape
    asked = WHOLE if shape is not None else {"hidden_states_from": 0}
    with WeightBench(tmp_path, max_running=8, max_length=48) as bench:
        found = bench.run(bench.submit(PROMPTS[1], num_tokens=6, **asked))[0]
    text = torch.tensor([*PROMPTS[1], *found.tokens[:-1]])
    chosen: list[NDArray[Any]] = []

    def note(module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Keep the indices that a block of experts is called with."""
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        chosen.extend(one.reshape(-1, one.shape[-1]).numpy() for one in tensors if one.dtype == torch.int64)

    for name, module in reference.named_modules():
        if case.kind == "Llama4" and name.endswith(".router"):  # its experts compute all tokens, with scores of 0
            module.register_forward_hook(lambda *args: chosen.append(args[2][1].topk(1).indices.numpy()))
        elif name.endswith("experts") and "shared" not in name:
            module.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        out = reference(text[None], output_hidden_states=True)
    states = _array(found.rows[1], "<f4")
    np.testing.assert_allclose(states, out.hidden_states[-1][0].numpy(), atol=1e-4, rtol=1e-4)
    if shape is None:
        assert found.rows[0] is None
        return
    experts = _array(found.rows[0], "<i4")
    assert experts.shape == (len(text), *shape)
    with_experts = np.flatnonzero([one is not None for one in ModelConfig.from_folder(tmp_path).routers])
    for layer, expected in zip(with_experts.tolist(), chosen, strict=True):
        assert (np.sort(experts[:, layer], axis=1) == np.sort(expected, axis=1)).all()
    assert not np.delete(experts, with_experts, axis=1).any()


_Traffic = list[tuple[list[int], Any, int]]


def _traffic(
    folder: Path, requests: Sequence[dict[str, Any]], *, nodes: int = 1, build: Any = build_engine, **options: Any
) -> _Traffic:
    """Return the tokens, the rows with what filters left, and the drafted tokens of requests that run together."""
    config = bench_config(folder, max_running=8, max_length=80, **options)
    config = config if nodes == 1 else replace(over_nodes(nodes, config), num_threads=2)
    with nullcontext() if nodes == 1 else following(config), WeightBench(folder, config=config, build=build) as bench:
        found = bench.run(*[bench.submit(**request) for request in requests])
        assert all(one.end is not None and one.end.finish is FinishReason.LENGTH for one in found)
        assert (bench.engine.counters().num_preempted > 0) == ("schedule_conservativeness" in options)
        return [(one.tokens, [*one.rows, one.kept], one.end.num_drafted_tokens if one.end else 0) for one in found]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a model with experts in three of four layers, and its reference."""
    folder, case = tmp_path_factory.mktemp("model"), CASES["qwen3-moe"]
    return folder, build(replace(case, extra={**case.extra, "num_hidden_layers": 4}), folder)


@pytest.fixture(scope="module")
def alone(model: tuple[Path, Any]) -> _Traffic:
    """Return what each of `REQUESTS` is answered alone."""
    return [_traffic(model[0], [request])[0] for request in REQUESTS]


@pytest.fixture
def folder(model: tuple[Path, Any]) -> Path:
    return model[0]


SCARCE = {"max_total_tokens": 96, "schedule_conservativeness": 0.05}
FILTERED = {"top_p": 0.9, "top_k": 30, "min_p": 0.02, "repetition_penalty": 1.2, "kept_tokens": 900}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": PROMPTS[0], "num_tokens": 24, **WHOLE},
    {"prompt": PROMPTS[1], "num_tokens": 20, "routed_experts_from": 5, "hidden_states_from": -1},
    {"prompt": PROMPTS[0], "num_tokens": 16, "hidden_states_from": 7},
    {"prompt": PROMPTS[1][:9], "num_tokens": 30, "temperature": 1.0, "seed": 4, **FILTERED},
    {"prompt": [3, 4] * 9, "num_tokens": 30, "routed_experts_from": 18, "temperature": 0.0, "kept_tokens": 30},
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False, "chunked_prefill_size": 8},
        {"chunked_prefill_size": 8, **SCARCE},
        {"speculative": "ngram", "speculative_control": "fixed", "chunked_prefill_size": 8},
        {"speculative": "draft", "speculative_control": "fixed"},
        {"speculative": "ngram", "speculative_control": "fixed", "stream_interval": 5, **SCARCE},
    ],
    ids=str,
)
def test_rows_do_not_depend_on_the_traffic(folder: Path, alone: _Traffic, options: dict[str, Any]) -> None:
    if options.get("speculative") == "draft":
        options = {**options, "speculative_model": str(folder)}
    found = _traffic(folder, REQUESTS, **options)
    for request, (tokens, rows, _), (own_tokens, own_rows, _) in zip(REQUESTS, found, alone, strict=True):
        assert tokens == own_tokens
        assert rows == own_rows
        *inner, kept = rows
        nums = [None if one is None else len(one) // 4 for one in kept]
        if "kept_tokens" not in request:
            assert set(nums) == {None}
        else:
            assert (set(nums) == {1}) == (request.get("temperature", 0.0) == 0.0)
        for own, name in zip(inner, ("routed_experts_from", "hidden_states_from"), strict=True):
            first, length = request.get(name), len(request["prompt"])
            first = length - 1 if first == -1 else first
            assert (own and own.shape[0]) == (None if first is None else length + request["num_tokens"] - 1 - first)
    if "speculative" in options:
        assert sum(num for _, _, num in found) > 0


RANKS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2, **SCARCE, "chunked_prefill_size": 8},
    {"tensor_parallel_size": 2, "enable_dp_attention": True, "expert_parallel": True, "chunked_prefill_size": 8},
    {"pipeline_parallel_size": 3},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "overlap": True},
    {"pipeline_parallel_size": 3, "speculative": "suffix", "speculative_control": "fixed"},
    {"tensor_parallel_size": 2, "speculative": "ngram", "speculative_control": "fixed", **SCARCE},
    {"tensor_parallel_size": 2, "nodes": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nodes": 2, "chunked_prefill_size": 8},
]


@pytest.mark.parametrize(
    "options", [one if i < 2 else pytest.param(one, marks=pytest.mark.slow) for i, one in enumerate(RANKS)], ids=str
)
def test_ranks_and_stages_report_the_same(
    options: dict[str, Any], folder: Path, alone: _Traffic, monkeypatch: Any
) -> None:
    """Experts and ids exactly, hidden states but for the order of additions."""
    ranks_are_threads(monkeypatch)
    found = _traffic(folder, REQUESTS, num_threads=4, **options)
    for (tokens, rows, _), (own_tokens, own_rows, _) in zip(found, alone, strict=True):
        assert tokens == own_tokens
        (experts, states, kept), (own_experts, own_states, own_kept) = rows, own_rows
        assert experts == own_experts
        assert kept == own_kept
        assert (states is None) == (own_states is None)
        if states is not None and own_states is not None:
            np.testing.assert_allclose(_array(states, "<f4"), _array(own_states, "<f4"), atol=1e-5)
            if "tensor_parallel_size" not in options:
                assert states == own_states
    assert ("speculative" in options) == (sum(num for _, _, num in found) > 0)


BY_REQUEST: dict[str, Any] = {"tensor_parallel_size": 2, "enable_dp_attention": True}
CUDA: list[dict[str, Any]] = [
    {"chunked_prefill_size": 8, **SCARCE},
    {},
    {"batch_invariant": True, "overlap": False},
    {"speculative": "ngram", "speculative_control": "fixed", "chunked_prefill_size": 8},
    {"speculative": "draft", "speculative_control": "fixed", **SCARCE},
    {"tensor_parallel_size": 2, "chunked_prefill_size": 8},
    {"pipeline_parallel_size": 2, "chunked_prefill_size": 8, **SCARCE},
    {"pipeline_parallel_size": 3, "overlap": True},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "chunked_prefill_size": 8},
    {"pipeline_parallel_size": 2, "speculative": "ngram", "speculative_control": "fixed"},
    {"pipeline_parallel_size": 2, "speculative": "draft", "speculative_control": "fixed", **SCARCE},
    {**BY_REQUEST, "chunked_prefill_size": 8},
    {**BY_REQUEST, "expert_parallel": True, "overlap": False},
    {**BY_REQUEST, "speculative": "ngram", "speculative_control": "fixed", "chunked_prefill_size": 8},
    {**BY_REQUEST, "speculative": "draft", "speculative_control": "fixed", "batch_invariant": True},
]


def _check_alike(found: _Traffic, alone: _Traffic) -> None:
    """Compare with what one process of the CPU reports: hidden states to 1e-4, all else exactly."""
    for (tokens, (experts, states, kept), _), (own_tokens, own, _) in zip(found, alone, strict=True):
        assert tokens == own_tokens
        assert (experts, kept) == (own[0], own[2])
        assert (states is None) == (own[1] is None)
        if states is not None:
            np.testing.assert_allclose(_array(states, "<f4"), _array(own[1], "<f4"), atol=1e-4)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize(
    "options", [one if i < 1 else pytest.param(one, marks=pytest.mark.slow) for i, one in enumerate(CUDA)], ids=str
)
def test_a_cuda_device_reports_the_same(
    options: dict[str, Any], folder: Path, alone: _Traffic, monkeypatch: Any
) -> None:
    """Nothing more waits for the device."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    if options.get("speculative") == "draft":
        options = {**options, "speculative_model": str(folder)}
    device = RecordingDevice()
    options = {"device": "cuda", "dtype": "float32", "num_threads": 4, **options}
    found = _traffic(folder, REQUESTS, build=partial(build_on, device, flashinfer_torch), **options)
    _check_alike(found, alone)
    assert ("speculative" in options) == (sum(num for _, _, num in found) > 0)
    assert set(device.waits) <= {"event.synchronize", "device.finish"}


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize(
    "options",
    [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "nodes": 2}, BY_REQUEST],
    ids=str,
)
def test_ranks_with_a_device_each_have_graphs_beside(
    options: dict[str, Any], folder: Path, alone: _Traffic, monkeypatch: Any
) -> None:
    """Their exchanges are in graphs, or around them, in steps that report nothing; on one host or on two."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = RecordingDevice()
    plain = {"prompt": PROMPTS[1], "num_tokens": 50}
    options = {"device": "cuda", "dtype": "float32", "num_threads": 2, **options}
    found = _traffic(folder, [*REQUESTS, plain], build=partial(build_on, device, flashinfer_torch), **options)
    _check_alike(found[:-1], alone)
    assert device.num_replayed > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_go_between_stages_in_any_dtype(dtype: torch.dtype) -> None:
    """Also those whose bits are no numbers in it."""
    numbers = torch.tensor([[0, -1, 2**31 - 1], [0x7FC0_0001, 0x7F80_FF81, 255]], dtype=torch.int32)
    sent: list[torch.Tensor] = []
    channel: Any = SimpleNamespace(send=sent.append, receive=lambda x: x.copy_(sent.pop()))
    first, last = StageRelay(None, channel, dtype=dtype), StageRelay(channel, None, dtype=dtype)
    first.send_numbers(numbers)
    assert sent[0].dtype == dtype
    assert (last.receive_numbers(torch.zeros(2), 3) == numbers).all()


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("options", [{}, {"pipeline_parallel_size": 2}, BY_REQUEST], ids=str)
def test_a_head_that_reads_the_last_states_changes_no_rows(options: dict[str, Any], monkeypatch: Any) -> None:
    """The last layer then computes all tokens, and the head has experts too."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    target, _ = tiny_heads.folders_of("experts")
    requests = [{"prompt": [5 + i * i % 40 for i in range(length)], "num_tokens": 12, **WHOLE} for length in (9, 20)]
    drafting = {"speculative": "eagle", "speculative_control": "fixed"}
    options = {"device": "cuda", "dtype": "float32", "num_threads": 2, **drafting, **options}
    build = partial(build_on, RecordingDevice(), flashinfer_torch)
    found = _traffic(target, requests, build=build, chunked_prefill_size=8, **options)
    _check_alike(found, _traffic(target, requests))
    assert sum(num for _, _, num in found) > 0


def test_a_model_that_transformers_computes_reports_states_and_kept_ids(folder: Path, alone: _Traffic) -> None:
    which = [index for index, one in enumerate(REQUESTS) if "routed_experts_from" not in one]
    found = _traffic(folder, [REQUESTS[i] for i in which], model_impl="transformers", chunked_prefill_size=8)
    _check_alike(found, [alone[i] for i in which])


def test_an_answer_has_rows_up_to_its_stop_string() -> None:
    with LLM() as llm:
        sampling = SamplingParams(max_tokens=24, temperature=0.0, hidden_states_from=-1, logprobs=0, kept_tokens=99)
        [whole] = llm.generate("Count from 1 to 20", sampling)
        [cut] = llm.generate("Count from 1 to 20", sampling, stop=[whole.text[4:6]])
    assert whole.hidden_states is not None
    assert cut.hidden_states is not None
    assert cut.routed_experts is None
    assert [kept.tolist() for kept in cut.kept_tokens if kept is not None] == [[token] for token in cut.tokens]
    assert len(cut.hidden_states) == len(cut.tokens) < len(whole.tokens)
    assert (cut.hidden_states == whole.hidden_states[: len(cut.tokens)]).all()


def test_answers_to_one_prompt_share_its_rows(monkeypatch: Any) -> None:
    prompt, asked = list(range(40, 120)), SamplingParams(max_tokens=6, temperature=1.0, seed=3, hidden_states_from=9)
    with LLM() as llm:
        [answers] = llm.generate([prompt], asked, n=3, keep_stop_token=True)
        assert [one.num_cached_tokens >= 64 for one in answers] == [False, True, True]  # the prompt is computed once
        for answer in answers:
            text = [*prompt, *answer.tokens[:-1]]
            [whole] = llm.generate([text], replace(asked, max_tokens=1))
            assert answer.hidden_states is not None
            assert len(answer.hidden_states) == len(text) - 9
            assert (answer.hidden_states == whole.hidden_states).all()
        assert len({one.tokens for one in answers}) == 3
        assert answers[0].hidden_states is not None
        monkeypatch.setattr(requirements, "MAX_INNER_BYTES", 10 * answers[0].hidden_states[0].nbytes)
        assert {one.finish for one in llm.generate([prompt], asked, n=3)[0]} == {FinishReason.REFUSED}


def _left(logits: NDArray[Any], sampling: dict[str, Any], slack: float) -> set[int]:
    """Return the tokens that filters leave: too many with a positive slack, too few with a negative one."""
    scaled = logits.astype(np.float64) / sampling["temperature"]
    order = np.argsort(-scaled, kind="stable")[: sampling.get("top_k") or None]
    probs = np.exp(scaled[order] - scaled[order[0]])
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    is_left = (before < sampling.get("top_p", 1.0) + slack) & (probs >= sampling.get("min_p", 0.0) * probs[0] - slack)
    return {int(order[0]), *order[is_left].tolist()}


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.7}, {"top_k": 9}, {"min_p": 0.1}, {"top_p": 0.8, "top_k": 20, "min_p": 0.03}, {}]
)
def test_kept_tokens_are_those_that_the_filters_leave(filters: dict[str, Any], model: Any) -> None:
    folder, reference = model
    sampling = {"temperature": 0.8, "seed": 7, **filters}
    with WeightBench(folder, max_length=80) as bench:
        found = bench.run(bench.submit(PROMPTS[0], kept_tokens=5000, **sampling))[0]
        kept = [np.frombuffer(one or b"", "<i4").tolist() for one in found.kept]
        most = sum(map(len, kept[:3]))
        cut = bench.run(bench.submit(PROMPTS[0], kept_tokens=most, **sampling))[0]
        assert cut.tokens == found.tokens
        assert cut.kept == [*found.kept[:3], *[None] * 9]
        tokens = np.array(PROMPTS[0], "<i4").tobytes()
        one = SamplingParams(max_tokens=1, logprobs=0, kept_tokens=1)
        refusal = bench.tell(Submit(request_id="search", tokens=tokens, sampling=one, is_search=True)).refusal
        assert refusal is not None
        assert refusal.message == "kept_tokens must be None in a beam search, got 1"
    with torch.no_grad():
        logits = reference(torch.tensor([[*PROMPTS[0], *found.tokens]])).logits[0, len(PROMPTS[0]) - 1 : -1].numpy()
    assert len(kept) == len(found.tokens) == 12
    for row, ids, token in zip(logits, kept, found.tokens, strict=True):
        assert ids == sorted(ids)
        assert token in ids
        assert _left(row, sampling, -1e-4) <= set(ids) <= _left(row, sampling, 1e-4)
    assert filters or {len(ids) for ids in kept} == {97}


@pytest.mark.parametrize(
    "sampling", [FILTERED, {"logit_bias": tuple((token, -math.inf) for token in range(40)), "kept_tokens": 9999}]
)
def test_kept_tokens_are_those_with_a_processed_log_probability(sampling: dict[str, Any], folder: Path) -> None:
    asked = {"logprobs": 64, "temperature": 1.0, "seed": 4, "frequency_penalty": 1.5, **sampling}
    with WeightBench(folder, max_length=80) as bench:
        names = [bench.submit(PROMPTS[0], logprobs_kind=kind, **asked) for kind in ("raw", "processed")]
        raw, processed = bench.run(*names)
    assert raw.kept == processed.kept
    for one in processed.logprobs:
        left = sorted(token for token, value in one.top if value > -math.inf)
        assert np.frombuffer(one.kept or b"", "<i4").tolist() == left


@pytest.mark.parametrize(
    ("family", "sampling", "options", "message"),
    [
        ("qwen3", {"routed_experts_from": 0}, {}, "routed_experts_from must be None because the model has none"),
        ("qwen3", {"hidden_states_from": 19}, {}, "hidden_states_from must be at most the length of the prompt, 18"),
        ("qwen3", {"hidden_states_from": 0, "num_tokens": None}, {}, "at most 16 positions (4096 bytes)"),
        ("qwen3-moe", {"routed_experts_from": 0}, {"model_impl": "transformers"}, "this engine does not report them"),
    ],
)
def test_refused_by_name(
    family: str, sampling: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(requirements, "MAX_INNER_BYTES", 4096)
    build(CASES[family], tmp_path)
    with WeightBench(tmp_path, **{"max_length": 80, "num_threads": 2, **options}) as bench:
        end = bench.run(bench.submit(PROMPTS[0], **sampling))[0].end
        kept = bench.run(bench.submit(PROMPTS[0], kept_tokens=1))[0].end
    assert kept is not None
    assert kept.refusal is None
    assert end is not None
    assert end.refusal is not None
    assert message in end.refusal.message
    assert end.refusal.param == next(iter(sampling))
