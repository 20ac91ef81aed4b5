"""`/metrics`: what is counted is what happened, in our names and in those of other servers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import prometheus_client
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from memory_server import MemoryServer
from pagewood.engine.api import CachedPrefix, Explanation, FinishReason, Flush, RequestOptions, SamplingParams
from pagewood.engine.core.observe.expert_load import ExpertRows
from pagewood.engine.observe.histogram import Histogram
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.metrics import bounds
from pagewood.server.metrics.families import Families, coarser, counted
from pagewood.server.metrics.processes import usage_of
from pagewood.server.metrics.recent import WINDOW_S, Recent
from pagewood.server.metrics.requests import MAX_PRIORITIES, RequestMetrics

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


class Scrape:
    """The samples of one scrape, checked to be valid."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {one.name: one for one in text_string_to_metric_families(text)}
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names)), "a family is there twice"
        for family in self.families.values():
            if family.type == "histogram":
                check_histogram(family)

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels, among others."""
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def names(self) -> set[str]:
        return {sample.name for family in self.families.values() for sample in family.samples}


def check_histogram(family: Metric) -> None:
    """Check that counts do not fall with their bounds, and that the last one is the count."""
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    counts: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        if sample.name.endswith("_bucket"):
            series.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_count"):
            counts[key] = sample.value
    for key, buckets in series.items():
        assert buckets[-1] == (float("inf"), counts[key])
        assert all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(buckets)), family.name


async def scrape(server: MemoryServer) -> Scrape:
    response = await server.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(response.text)


async def ask(server: MemoryServer, prompt: str, **body: Any) -> dict[str, Any]:
    answer = (await server.post(COMPLETIONS, {"prompt": prompt, "ignore_eos": True, **body})).json()
    await server.until_idle()
    return answer


async def test_counts_are_those_of_the_answers(server: MemoryServer) -> None:
    before = await scrape(server)
    assert before.value("pagewood_engine_up") == 1
    prompts = ["one " * 20, "one " * 20, "two " * 10]
    usages = [(await ask(server, prompt, max_tokens=12))["usage"] for prompt in prompts]
    num_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert num_cached > 0
    num_prefill, status = sum(usage["prompt_tokens"] for usage in usages) - num_cached, server.engine_status
    await server.until(lambda: status.measurement is not None and status.measurement.num_prefill_tokens == num_prefill)
    await server.until_idle()  # a pulse of the idle engine has all counts
    found = await scrape(server)
    for prefix in ("pagewood_", "vllm:"):
        assert found.value(f"{prefix}request_success_total", finished_reason="length") == 3
        assert found.value(f"{prefix}prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
        assert found.value(f"{prefix}generation_tokens_total") == 36
        assert found.value(f"{prefix}prefix_cache_hits_total") == num_cached
        assert found.value(f"{prefix}time_to_first_token_seconds_count") == 3
        assert found.value(f"{prefix}inter_token_latency_seconds_count") == 3 * 11
        assert found.value(f"{prefix}e2e_request_latency_seconds_count") == 3
        assert found.value(f"{prefix}request_queue_time_seconds_count") == 3
        assert found.value(f"{prefix}request_generation_tokens_sum") == 36
        assert found.value(f"{prefix}request_params_max_tokens_bucket", le="20.0") == 3
    assert found.value("sglang:num_requests_total") == 3
    assert found.value("sglang:cached_tokens_total", cache_source="total") == num_cached
    assert found.value("sglang:inter_token_latency_seconds_count") == 33
    num_computed = found.value("pagewood_engine_tokens_total")
    assert num_computed == server.engine_status.counters["num_tokens"]
    assert found.value("pagewood_engine_tokens_total", kind="prefill") == num_prefill
    assert found.value("pagewood_step_tokens_count") == server.engine_status.counters["num_steps"]
    assert found.value("pagewood_prefix_cache_requests_total", cause="never_seen") >= 1
    assert found.value("pagewood_http_requests_total", path=COMPLETIONS, status="200") == 3
    assert found.value("pagewood_kv_pages") == server.engine_status.counters["num_pages"]
    assert found.value("pagewood_kv_cache_usage_perc") == found.value("vllm:kv_cache_usage_perc") == 0
    stages = {sample.labels["stage"] for sample in found.families["pagewood_engine_stage_seconds"].samples}
    assert {"intake", "plan", "build", "launch", "wait", "retire"} <= stages


async def test_gauges_follow_requests_that_run_and_wait(server: MemoryServer) -> None:
    server.gate.close()
    tasks = [
        server.client.build_request(
            "POST", COMPLETIONS, json={"model": "echo", "prompt": f"{i} " * 20, "max_tokens": 30, "priority": i % 2}
        )
        for i in range(12)
    ]
    running = [asyncio.create_task(server.client.send(tasks[0]))]
    await server.until(lambda: server.gate.is_held)  # so that the others are all there when one is chosen
    running += [asyncio.create_task(server.client.send(task)) for task in tasks[1:]]
    await server.until(lambda: server.service.live.num_live == 12)
    await server.until(lambda: server.num_queued_commands == 11)  # they have passed the tokenizer

    def are_counted() -> bool:
        counters = server.engine_status.counters
        return (counters["num_running"], counters["num_waiting"]) == (8, 4)

    for _ in range(20):  # a pulse comes between two steps, if the last one is old
        server.gate.allow(1)
        await asyncio.sleep(0.06)
        await server.until(lambda: server.gate.is_held or are_counted())
        if are_counted():
            break
    await server.until(are_counted)
    found = await scrape(server)
    assert found.value("vllm:num_requests_running") == found.value("sglang:num_running_reqs") == 8
    assert found.value("vllm:num_requests_waiting") == found.value("sglang:num_queue_reqs") == 4
    assert found.value("pagewood_num_requests_waiting_by_priority") == 4
    assert found.value("pagewood_num_requests_running_by_priority", priority="1") == 6  # the higher goes first
    assert found.value("pagewood_oldest_waiting_seconds") > 0
    assert 0 < found.value("pagewood_kv_cache_usage_perc") <= 1
    assert found.value("pagewood_requests_live") == 12
    server.gate.open()
    assert [(await task).status_code for task in running] == [200] * 12


async def test_refusals_and_aborts_are_counted(server: MemoryServer) -> None:
    assert (await server.post(COMPLETIONS, {"prompt": "x" * 500})).status_code == 400
    server.gate.close()
    task = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 50}))
    await server.until(lambda: server.service.live.num_live == 1)
    task.cancel()
    await server.until(lambda: server.service.live.num_live == 0)
    server.gate.open()
    await server.until_idle()
    found = await scrape(server)
    assert found.value("pagewood_request_success_total", finished_reason="abort") == 1
    assert found.value("vllm:request_success_total", finished_reason="abort") == 1
    assert found.value("pagewood_http_errors_total", code="context_length_exceeded") == 1
    assert server.metrics.requests.num_open == 0


async def test_names_are_those_that_autoscalers_and_routers_read(server: MemoryServer) -> None:
    await ask(server, "hello", max_tokens=3)
    names = (await scrape(server)).names()
    assert {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= names
    info = (await scrape(server)).families["vllm:cache_config_info"].samples[0].labels
    assert (info["block_size"], info["num_gpu_blocks"]) == ("16", "100")
    lora = (await scrape(server)).families["vllm:lora_requests_info"].samples[0].labels
    assert {"max_lora", "running_lora_adapters", "waiting_lora_adapters"} <= set(lora)
    assert {"sglang:token_usage", "sglang:gen_throughput", "sglang:queue_time_seconds_bucket"} <= names


async def test_preemptions_starvation_and_waiting_have_names_of_sglang_by_priority(server: MemoryServer) -> None:
    for priority in (0, 1, 1):
        await ask(server, "hello", max_tokens=3, priority=priority)
    status = server.engine_status
    assert status.measurement is not None
    assert status.counters["num_starved"] == 0
    status.measurement = msgspec.structs.replace(status.measurement, preempted={"0": 3, "1": 1})
    status.counters = {**status.counters, "num_starved": 2}
    found = await scrape(server)
    assert found.value("sglang:priority_preemption_count_total", priority="0") == 3
    assert found.value("sglang:priority_preemption_count_total", priority="1", tp_rank="0") == 1
    assert found.value("sglang:priority_starvation_count_total") == found.value("pagewood_requests_starved_total") == 2
    name = "sglang:priority_waiting_time_seconds"
    assert [found.value(f"{name}_count", priority=priority) for priority in "01"] == [1, 2]
    assert found.value(f"{name}_sum") == pytest.approx(found.value("sglang:queue_time_seconds_sum"))
    limits = {sample.labels["le"] for sample in found.families[name].samples if "le" in sample.labels}
    assert limits == {*(str(float(bound)) for bound in bounds.SGLANG_QUEUE), "+Inf"}


async def test_no_text_of_a_client_is_a_label(server: MemoryServer) -> None:
    await ask(server, "geheim", max_tokens=3, user="geheim")
    await server.client.get("/geheim")
    await server.client.request("GEHEIM", "/health")
    for index in range(100):
        await server.client.get(f"/v1/models/geheim-{index}")
    response = await server.client.get("/metrics")
    assert "geheim" not in response.text.lower()
    assert Scrape(response.text).value("pagewood_http_requests_total", path="other") >= 101


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def generate(request_id: str, *, priority: int = 0, siblings: tuple[str, ...] = ()) -> wire.Generate:
    return wire.Generate(
        request_id=request_id,
        prompt=wire.TextPrompt(text="x"),
        options=RequestOptions(sampling=SamplingParams(max_tokens=5), priority=priority),
        sibling_ids=siblings,
    )


def answer(request_id: str, num: int, *, finish: FinishReason | None = None, **more: Any) -> wire.Answer:
    options: dict[str, Any] = {"num_prompt_tokens": 10, "num_cached_tokens": 4, "num_output_tokens": num, **more}
    return wire.Answer(request_id=request_id, text="", finish=finish, ended=True, refusal=None, **options)


def test_times_of_a_request_are_those_between_its_messages() -> None:
    clock = Time()
    metrics = RequestMetrics(clock=clock)
    metrics.submitted(generate("a"))
    clock.now_s += 3
    prefix = CachedPrefix(
        cause="evicted", num_reusable_tokens=9, num_tokens=4, first_difference=4, num_possible_tokens=8
    )
    why = Explanation(prefix=prefix, arrived_s=100.5, admitted_s=102.0)
    metrics.answered(wire.Answers((answer("a", 1, explanation=why),)))
    for num in (2, 3):
        clock.now_s += 0.5
        metrics.answered(wire.Answers((answer("a", num), answer("unknown", 7))))
    (account,) = metrics.accounts
    assert [num for _, num in metrics.output_tokens_of_open()] == [3]
    clock.now_s += 1
    metrics.answered(wire.Answers((answer("a", 5, finish=FinishReason.LENGTH),)))
    metrics.left("a", has_failed=False)  # it has ended already
    assert account.num_ended == {"length": 1}
    assert (account.num_prompt_tokens, account.num_cached_tokens, account.num_output_tokens) == (10, 4, 5)
    totals = {
        "first": account.first_token_s.total,
        "queue": account.queue_s.total,
        "request": account.request_s.total,
        "token": metrics.token_s.total,
        "prefill": metrics.prefill_s.total,
        "decode": metrics.decode_s.total,
        "inference": metrics.inference_s.total,
        "per token": metrics.per_token_s.total,
    }
    assert totals == {
        "first": 3, "queue": 1.5, "request": 5, "token": 2, "prefill": 1, "decode": 2, "inference": 3, "per token": 0.5
    }  # fmt: skip
    assert sum(metrics.token_s.counts) == 3
    assert (metrics.causes, metrics.missed_tokens) == ({"evicted": 1}, {"evicted": 5})
    assert metrics.num_open == 0


def test_every_end_is_counted_once() -> None:
    metrics = RequestMetrics()
    metrics.submitted(generate("a", siblings=("b", "c", "d")))
    metrics.renamed("a", new_id="e")  # sent again
    metrics.left("a", has_failed=True)
    assert metrics.num_open == 4
    metrics.left("e", has_failed=False)
    metrics.left("b", has_failed=True)
    metrics.answered(wire.Answers((answer("c", 0, finish=FinishReason.REFUSED),)))
    metrics.answered(wire.Answers((answer("d", 1, finish=FinishReason.STOP),)))
    for name in "abcde":
        metrics.left(name, has_failed=True)
    (account,) = metrics.accounts
    assert account.num_ended == {"abort": 1, "error": 1, "refused": 1, "stop": 1}
    assert sum(account.first_token_s.counts) == sum(account.request_s.counts) == 1
    metrics.submitted(Flush(request_id="flush"))
    assert metrics.num_open == 0


def test_priorities_are_bounded() -> None:
    metrics = RequestMetrics()
    for priority in range(200):
        metrics.submitted(generate(str(priority), priority=priority))
    assert len(metrics.accounts) == MAX_PRIORITIES


def test_histograms_are_written_as_by_the_library() -> None:
    """The oracle is prometheus-client's own histogram."""
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("x_seconds", "Text.", ["a"], buckets=bounds.SGLANG_TOKEN, registry=registry)
    ours = Histogram(bounds.TOKEN)
    for index in range(400):
        value = 1.07**index / 1000 if index % 3 else bounds.TOKEN[index % len(bounds.TOKEN)]
        theirs.labels("b").observe(value)
        ours.add(value)
    families = Families("x_")
    families.histogram("seconds", "Text.", [({"a": "b"}, coarser(counted(ours), bounds.SGLANG_TOKEN))])
    expected = next(iter(registry.collect()))
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in families.found[0].samples}
    for sample in expected.samples:
        if not sample.name.endswith("_created"):
            value = found.pop((sample.name, tuple(sorted(sample.labels.items()))))
            assert value == pytest.approx(sample.value)
    assert not found
    with pytest.raises(ValueError, match=r"bounds must be among those of the histogram, got \[0.12345\]"):
        coarser(counted(ours), (0.12345,))


def test_all_bounds_of_other_servers_are_there() -> None:
    pairs: Mapping[tuple[float, ...], tuple[tuple[float, ...], ...]] = {
        bounds.FIRST_TOKEN: (bounds.VLLM_FIRST_TOKEN, bounds.SGLANG_FIRST_TOKEN),
        bounds.TOKEN: (bounds.VLLM_TOKEN, bounds.SGLANG_TOKEN),
        bounds.REQUEST: (bounds.VLLM_REQUEST, bounds.SGLANG_REQUEST),
        bounds.QUEUE: (bounds.VLLM_REQUEST, bounds.SGLANG_QUEUE),
        bounds.TOKENS: (bounds.one_two_five(1_000_000), bounds.SGLANG_TOKENS),
    }
    assert all(set(some) <= set(fine) for fine, coarse in pairs.items() for some in coarse)
    assert bounds.one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert bounds.one_two_five(1) == (1,)


def test_rates_are_those_of_the_last_seconds() -> None:
    recent = Recent()
    assert recent.growth(0.0) == (0.0, ())
    for second in range(100):
        recent.note(float(second), (2.0 * second, 5.0))
    seconds, growth = recent.growth(99.0)
    assert seconds == pytest.approx(WINDOW_S, abs=1)
    assert growth == (2.0 * seconds, 0.0)
    recent.note(100.0, (0.0, 0.0))  # the engine was replaced
    assert recent.growth(100.0) == (0.0, ())
    recent.note(101.0, (3.0, 1.0))
    assert recent.growth(101.0) == (1.0, (3.0, 1.0))
    assert recent.growth(101.0 + 2 * WINDOW_S) == (0.0, ())


def test_usage_of_processes_is_that_of_the_system() -> None:
    began_s, began = time.process_time(), usage_of({"me": os.getpid()})
    if not began:
        pytest.skip("no /proc here")
    while time.process_time() - began_s < 0.2:
        pass
    found = usage_of({"me": os.getpid(), "gone": 2**30})
    assert set(found) == {"me"}
    assert 0.1 <= found["me"].cpu_s - began["me"].cpu_s <= 1
    assert 10_000_000 < found["me"].resident_bytes < 100_000_000_000
    assert found["me"].num_threads >= 1
    assert found["me"].num_open_files >= 3


async def test_what_waits_for_its_quota_is_not_a_repeated_prompt(server: MemoryServer) -> None:
    status = server.engine_status
    assert status.measurement is not None
    status.incarnation = 1  # not ours; so no pulse changes what is set here
    status.measurement = msgspec.structs.replace(  # not ours
        status.measurement, num_parked=2, num_at_quota=3, num_recalling=1, num_compiling=4
    )
    status.counters = {**status.counters, "num_waiting": 11}  # not ours
    found = await scrape(server)
    reasons = {"capacity": 5, "repeated_prompt": 2, "quota": 3, "recall": 1, "grammar": 4}
    for reason, number in reasons.items():
        assert found.value("pagewood_num_requests_waiting_by_reason", reason=reason) == number
    assert found.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 5
    assert found.value("vllm:num_requests_waiting_by_reason", reason="deferred") == 10
    status.incarnation = 0  # not ours


async def test_free_pages_are_shown_by_rank_where_ranks_divide_them(
    server: MemoryServer, model_folder: Path, tokenizer: Tokenizer
) -> None:
    assert "pagewood_kv_rank_free_pages" not in (await scrape(server)).names()
    assert "free_pages_by_rank" not in (await server.client.get("/ready")).json()
    async with MemoryServer(model_folder, tokenizer, limit=8, num_pages=100, num_pools=2) as own:
        await ask(own, "one " * 20, max_tokens=2)
        await own.until(lambda: own.service.status.counters["num_cached_pages"] > 0)
        await own.until_idle()
        found, ready = await scrape(own), (await own.client.get("/ready")).json()
    num_free = [found.value("pagewood_kv_rank_free_pages", rank=rank) for rank in "01"]
    assert num_free == ready["free_pages_by_rank"]
    assert num_free[0] < num_free[1] == 50
    assert ready["engine"]["num_free_pages"] == sum(num_free)


async def test_rows_of_experts_are_shown_where_they_are_counted(
    server: MemoryServer, model_folder: Path, tokenizer: Tokenizer
) -> None:
    """Two layers of three experts on two ranks; of the first expert of layer 3 there is a copy."""
    assert not any("expert" in name for name in (await scrape(server)).names())
    counts = {3: np.array([4, 0, 2, 6], np.int64), 5: np.array([0, 3, 3, 0], np.int64)}
    every = [np.array(one, np.int32) for one in ([0, 1, 0, 2], [0, 1, 2, 2])]
    rows = ExpertRows(
        counts=counts, experts=every, ranks=[np.array([0, 0, 1, 1], np.int32)] * 2, num_experts=3, num_ranks=2,
        has_experts=True,
    )  # fmt: skip
    async with MemoryServer(model_folder, tokenizer, limit=8, expert_rows=rows) as own:
        await ask(own, "one", max_tokens=2)
        found = await scrape(own)
    assert [found.value("pagewood_expert_rank_rows_total", rank=rank) for rank in "01"] == [7, 11]
    for layer, wanted in (("3", [6, 0, 6]), ("5", [0, 3, 3])):
        assert [found.value("pagewood_expert_rows_total", layer=layer, expert=one) for one in "012"] == wanted
    assert found.value("pagewood_expert_imbalance") == 1.5
    assert found.value("pagewood_expert_rank_imbalance") == pytest.approx((8 / 6 + 1) / 2)
