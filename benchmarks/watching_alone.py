# pyright: basic
# (exchanges are made as the server's front door makes them)
"""Measures what watching a server costs by running the code of each watcher alone, on the messages of a served load.

    python benchmarks/watching_alone.py              # a minute
    python benchmarks/watching_alone.py --quick      # only to see that the script works

`observability.py` compares whole servers, whose throughput differs by some percent between rounds; so it cannot show
that something costs less. Here each watcher gets what a server would give it: 64 streams of 300 tokens, one answer of
each in every step. Its processor time per token is divided by that of a server with everything off, all processes,
which is measured in the same run. Scrapes and the log count as often as they happen: a scrape every second, a line for
every request.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import random
import time
from collections.abc import Callable, Sequence
from statistics import median

from observability import sink
from pagewood.engine.api import CachedPrefix, Explanation, FinishReason, RequestOptions, SamplingParams
from pagewood.engine.core.loop import Pending
from pagewood.server.http.current import current_exchange
from pagewood.server.http.exchange import Exchange
from pagewood.server.messages import wire
from pagewood.server.metrics.requests import RequestMetrics
from pagewood.server.observe import logs
from pagewood.server.observe.tracing import Tracing
from pagewood.server.protocols.common.formats import PromptTokensDetails, Usage
from scheduler_overhead import advance, decoding_engine
from server_cpu import PROCESSES, Server, cost_of, exchange, streams

STREAMS, TOKENS = 64, 300
PREFIX = CachedPrefix(
    cause="never_seen", num_reusable_tokens=19, num_tokens=0, first_difference=0, num_possible_tokens=0
)
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args()
    rounds, num_tokens = (1, 20) if options.quick else (options.rounds, TOKENS)
    with Server(STREAMS, arguments=("--no-metrics",)) as server:
        asyncio.run(streams(server, 8, 40, {}))
        costs = [cost_of(server, STREAMS, num_tokens, {}) for _ in range(min(rounds, 5))]
    server_us = median(sum(one[process] for process in PROCESSES) for one in costs)
    tokens_per_s = median(one["tokens/s"] for one in costs)
    print(f"a server with everything off: {server_us:.1f} us per token, {tokens_per_s:.0f} tokens/s\n")
    requests = repeated(lambda: requests_us(RequestMetrics(), num_tokens), rounds)
    engine = engine_us(rounds, num_steps=20 if options.quick else 200)
    with sink() as port:
        traced = repeated(lambda: traced_us(f"http://127.0.0.1:{port}", num_tokens), rounds)
    plain, compatible = (scrape_us(words, 2 if options.quick else 40) for words in ((), ("vllm", "sglang")))
    found = {
        "metrics of requests": requests,
        "metrics of the engine's steps": engine,
        "metrics, both": requests + engine,
        "a scrape every second": plain / tokens_per_s,
        "a scrape every second, with the names of vLLM and SGLang": compatible / tokens_per_s,
        "traces, with their export, beside metrics": traced - requests,
        "log": repeated(lambda: log_us("text"), rounds) / num_tokens,
        "log as JSON": repeated(lambda: log_us("json"), rounds) / num_tokens,
    }
    print("| | us per token | share |\n|---|---:|---:|")
    for name, us in found.items():
        print(f"| {name} | {us:.3f} | {us / server_us:.2%} |")


def repeated(measure: Callable[[], float], num: int) -> float:
    """Return the median of some measurements, after one that warms up."""
    measure()
    return median(measure() for _ in range(num))


def requests_us(metrics: RequestMetrics, num_tokens: int) -> float:
    """Return the microseconds of processor time per token, all threads, of what the HTTP process does for metrics."""
    messages = [
        wire.Generate(
            request_id=f"req-{index:032x}",
            prompt=wire.TextPrompt(text="What is 12 + 7?"),
            options=RequestOptions(sampling=SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=index)),
        )
        for index in range(STREAMS)
    ]
    found = Explanation(prefix=PREFIX, arrived_s=time.monotonic(), admitted_s=time.monotonic())
    steps: list[wire.Answers] = []
    for step in range(num_tokens):
        finish = FinishReason.LENGTH if step == num_tokens - 1 else None
        steps.append(
            wire.Answers(
                tuple(
                    wire.Answer(
                        one.request_id, "ab", finish, finish is not None, None, 20, 0, step + 1,
                        explanation=None if step else found,
                    )
                    for one in messages
                )
            )
        )  # fmt: skip
    begin = time.process_time()
    for message in messages:
        metrics.submitted(message)
    for answers in steps:
        metrics.answered(answers)
    for message in messages:
        metrics.left(message.request_id, has_failed=False)
    return (time.process_time() - begin) / (STREAMS * num_tokens) * 1e6


def traced_us(endpoint: str, num_tokens: int) -> float:
    """Return the same with a trace of each request, which is written and sent to a receiver."""
    tracing = Tracing(endpoint, model_name="pagewood-demo")
    opened: list[Exchange] = []

    class Traced:
        """Gives each request an exchange of its own, as the front door does."""

        def begin(self, message: wire.Generate) -> object:
            one = an_exchange(message.request_id)
            one.span = tracing.open({"traceparent": f"00-{random.getrandbits(128):032x}-{1:016x}-01"})
            opened.append(one)
            current_exchange.set(one)
            return tracing.begin(message)

        end = staticmethod(tracing.end)

    us = requests_us(RequestMetrics(tracer=Traced()), num_tokens)
    begin = time.process_time()
    for one in opened:
        tracing.close(one, time.monotonic())
    tracing.stop()
    return us + (time.process_time() - begin) / (STREAMS * num_tokens) * 1e6


def an_exchange(request_id: str) -> Exchange:
    """Return the exchange of a chat that has ended."""
    return Exchange(
        request_id=request_id,
        method="POST",
        path="/v1/chat/completions",
        client="127.0.0.1",
        started_s=time.monotonic(),
        status=200,
        is_complete=True,
        usage=Usage(
            prompt_tokens=20,
            completion_tokens=TOKENS,
            total_tokens=20 + TOKENS,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
        ),
        engine_ids=[request_id],
    )


def engine_us(rounds: int, *, num_steps: int) -> float:
    """Return how many microseconds per token more the engine's thread takes if its steps are measured."""
    found: dict[bool, list[float]] = {False: [], True: []}
    pending: dict[bool, Pending | None] = {False: None, True: None}
    with (
        decoding_engine("overlapped", STREAMS, page_size=16) as off,
        decoding_engine("overlapped", STREAMS, page_size=16) as on,
    ):
        on.engine.measure()
        engines = {False: off, True: on}
        for number in range(2 * rounds):
            is_on = bool(number % 2)
            begin = time.thread_time()
            pending[is_on] = advance(engines[is_on], pending[is_on], num_steps=num_steps)
            found[is_on].append((time.thread_time() - begin) / (num_steps * STREAMS) * 1e6)
    return median(on - off for off, on in zip(found[False], found[True], strict=True))


def scrape_us(compatible: Sequence[str], num: int) -> float:
    """Return the microseconds of processor time of one scrape, all processes of a server that does nothing else."""
    words = [word for name in compatible for word in ("--metrics-compat", name)]
    with Server(STREAMS, arguments=words) as server:
        asyncio.run(streams(server, 8, 40, {}))
        assert b"200 OK" in asyncio.run(exchange(server.address, SCRAPE, b""))
        before = sum(server.cpu_s().values())
        for _ in range(num):
            asyncio.run(exchange(server.address, SCRAPE, b""))
        return (sum(server.cpu_s().values()) - before) / num * 1e6


def log_us(form: logs.LogFormat) -> float:
    """Return the microseconds of the line of one request."""
    logs.configure("info", "http", form=form)
    handler = next(one for one in logging.getLogger().handlers if one.name == logs.HANDLER_NAME)
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(io.StringIO())
    some = [an_exchange(f"req-{index:032x}") for index in range(500)]
    begin = time.thread_time()
    for one in some:
        one.log(one.started_s + 1.0)
    us = (time.thread_time() - begin) / len(some) * 1e6
    logs.configure("warning", "http")
    return us


if __name__ == "__main__":
    main()
