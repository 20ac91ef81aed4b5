"""How many calls and instructions each operation of a request takes, and how long: where the floor of pure Python is.

    python benchmarks/request_calls.py [--requests 1500] [--pages 1 16 64]

A chat of 20 conversations over one system prompt of 1,000 tokens, with eviction; then a decode step of 256
requests over a runner that computes nothing. Counts are medians: calls of functions in Python and in C
(`sys.setprofile`), those of numpy among the latter, and instructions of bytecode (`sys.settrace`). Times are
CPU time without either, less that of measuring nothing. `fastest` is the first percentile: what an operation
takes when code and data are in the processor's caches. `floor` is what as many empty calls and as many reads of
an attribute would take on this machine, and an empty call of numpy for each of numpy's: no code in Python with
these counts can be faster. It takes some ten seconds.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import Engine, EngineInfo
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.request import Request
from pagewood.engine.links import MemoryInbox
from pagewood.kvpool import PageAllocator
from pagewood.radixcache import RadixCache

Int32 = NDArray[np.int32]
NUM_TOKENS = 120_000
"""Of the pool; about a third of the conversations fit."""


class Meter:
    """Times of operations, or counts of what they do. Invariant: it does one of the two, never both at once."""

    def __init__(self, *, counts: bool) -> None:
        self.counts = counts
        self.values: dict[str, list[Any]] = {}

    @contextmanager
    def of(self, name: str) -> Generator[None]:
        """Measure the body of a `with` statement as an operation."""
        values = self.values.setdefault(name, [])
        if self.counts:
            counts = [0, 0, 0, 0]
            sys.settrace(partial(_count_instructions, counts))
            sys.setprofile(partial(_count_calls, counts))
            try:
                yield
            finally:
                sys.setprofile(None)
                sys.settrace(None)
            values.append(counts)
        else:
            start = time.process_time_ns()
            yield
            values.append(time.process_time_ns() - start)


def _count_calls(counts: list[int], frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        counts[0] += 1
    elif event == "c_call":
        counts[1] += 1
        owner = getattr(argument, "__self__", None)
        module = getattr(argument, "__module__", None) or type(owner).__module__
        counts[2] += module.startswith("numpy")


def _count_instructions(counts: list[int], frame: FrameType, event: str, argument: Any) -> Any:
    frame.f_trace_opcodes = True
    counts[3] += event == "opcode"
    return partial(_count_instructions, counts)


def conversation_turns(num_requests: int) -> list[tuple[Int32, Int32]]:
    """Return prompts, each with its answer appended."""
    rng = np.random.default_rng(0)

    def random_tokens(num: int) -> Int32:
        return rng.integers(0, 128_000, num, dtype=np.int32)

    system = random_tokens(1000)
    texts = [system] * 20
    turns: list[tuple[Int32, Int32]] = []
    for index in range(num_requests):
        which = index % len(texts)
        text = system if len(texts[which]) > 4000 else texts[which]
        prompt = np.concatenate([text, random_tokens(350)])
        texts[which] = np.concatenate([prompt, random_tokens(170)])
        turns.append((prompt, texts[which]))
    return turns


def leaves(turns: list[tuple[Int32, Int32]], page_size: int, meter: Meter) -> None:
    """Serve the requests with RadixCache and PageAllocator."""
    cache, allocator = RadixCache(page_size), PageAllocator(NUM_TOKENS // page_size)
    row = np.zeros(8192 // page_size + 1, np.int32)
    spare = allocator.num_pages // 256

    def make_room(num_lacking: int) -> Int32:
        return cache.evict(num_lacking + spare)

    for prompt, whole in turns:
        with meter.of("nothing"):
            pass
        num_pages, num_full = -(-len(whole) // page_size), len(whole) // page_size
        with meter.of("match"):
            match = cache.match(prompt[:-1])
        with meter.of("lock"):
            lease = cache.lock(match.node)
        first = len(match.pages)
        with meter.of("copy page ids"):
            row[:first] = match.pages
        is_full = num_pages - first > allocator.num_free
        with meter.of("alloc, evicting" if is_full else "alloc"):
            allocator.alloc(num_pages - first, out=row[first:num_pages], evict=make_room)
        with meter.of("insert"):
            insertion = cache.insert(whole[first * page_size :], row[first:num_full], after=lease, relock=True)
        with meter.of("free"):
            if num_full < num_pages:
                allocator.free(row[num_full:num_pages])
            if insertion.num_existing:
                allocator.free(row[first : first + insertion.num_existing])
        with meter.of("unlock"):
            cache.unlock(insertion.node)


def kv_space(turns: list[tuple[Int32, Int32]], page_size: int, meter: Meter) -> None:
    """Serve the requests with KVSpace, which publishes the prompt, and the output at the end."""
    kv = KVSpace(
        make_cache=partial(RadixCache, page_size),
        allocator=PageAllocator(NUM_TOKENS // page_size),
        page_size=page_size,
        num_rows=40,
    )
    sampling = SamplingParams(max_tokens=256, ignore_eos=True)
    for index, (prompt, whole) in enumerate(turns):
        with meter.of("nothing"):
            pass
        with meter.of("make a Request"):
            tokens = np.empty(len(prompt) + 256, np.int32)
            tokens[: len(prompt)] = prompt
            request = Request(
                request_id=str(index), sampling=sampling, seed=index, stop_ids=frozenset(), priority=0, key=None,
                carry=b"", arrival=index, arrived_s=0.0, num_prompt=len(prompt), max_length=len(tokens), tokens=tokens,
                num_known=len(prompt),
            )  # fmt: skip
        with meter.of("admit"):
            assert kv.admit(request, max_tokens=1 << 30, num_reserved=0)
        with meter.of("publish"):
            request.num_computed = len(prompt)
            kv.publish(request)
        with meter.of("grow"):
            assert kv.grow(request, len(whole))
        tokens[: len(whole)] = whole
        request.num_known = request.num_computed = len(whole)
        with meter.of("release"):
            kv.release(request)


class _NoStep:
    def __init__(self, num_sampled: int) -> None:
        self._result = StepResult.of_one_each(np.full(num_sampled, 7, np.int32))

    def wait(self) -> StepResult:
        return self._result


class _NoDevice:
    def launch(self, batch: Batch) -> _NoStep:
        return _NoStep(len(batch.sampled))

    def close(self) -> None: ...


class _NoReader:
    def send(self, deltas: object) -> None: ...


def decode_steps(num_steps: int, page_size: int, meter: Meter) -> None:
    """Step an engine that decodes 256 requests."""
    inbox, length = MemoryInbox(), 1000 + num_steps + 400
    engine: Engine = assemble(
        EngineConfig(max_running=256, chunked_prefill_size=8192, page_size=page_size, max_prefills=64),
        info=EngineInfo(
            model_name="none", max_length=length, vocab_size=128_000, eos_token_ids=(2,),
            num_pages=256 * -(-length // page_size) + 1024, page_size=page_size,
        ),
        make_runner=lambda kv: _NoDevice(),
        inbox=inbox,
        outbox=_NoReader(),
    )  # fmt: skip
    rng = np.random.default_rng(5)
    for index in range(256):
        tokens = rng.integers(0, 128_000, 1000, dtype=np.int32).tobytes()
        inbox.put(Submit(request_id=str(index), tokens=tokens, sampling=SamplingParams(max_tokens=length - 1000)))
    for _ in range(40):
        engine.step()
    assert engine.counters().num_running == 256
    gc.collect()
    gc.freeze()
    for _ in range(num_steps):
        with meter.of("nothing"):
            pass
        with meter.of("decode step of 256"):
            engine.step()
    engine.close()


class _Thing:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


def costs_ns() -> NDArray[np.float64]:
    """Return the nanoseconds of an empty call in Python, in C and of numpy, and of an instruction."""
    thing, empty = _Thing(), np.empty(0, np.bool_)

    def nothing() -> None: ...

    def read() -> None:
        for _ in range(1000):
            _ = thing.value, thing.value, thing.value, thing.value, thing.value, thing.value, thing.value, thing.value

    def best(work: Callable[[], object], num: int) -> float:
        fastest = float("inf")
        for _ in range(30):
            start = time.perf_counter_ns()
            for _ in range(num):
                work()
            fastest = min(fastest, (time.perf_counter_ns() - start) / num)
        return fastest

    in_python, in_c = best(nothing, 1000), best(_Thing, 1000)
    in_numpy, instruction = best(partial(np.count_nonzero, empty), 1000), best(read, 3) / 19_000
    return np.array([in_python, in_c - in_python, in_numpy, instruction]).clip(1)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500, help="requests that are timed")
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 16, 64], help="page sizes, tokens")
    arguments = parser.parse_args()
    costs = costs_ns()
    print("an empty call in Python, in C, of numpy; an instruction: {:.0f}, {:.0f}, {:.0f}; {:.1f} ns\n".format(*costs))
    turns = conversation_turns(arguments.requests)
    for page_size in arguments.pages:
        print(f"Pages of {page_size} tokens\n")
        print("| operation | calls in Python | in C | of numpy | instructions | us, median | p99 | fastest | floor |")
        print("|---|---|---|---|---|---|---|---|---|")
        for title, work in (
            ("RadixCache + PageAllocator", partial(leaves, turns, page_size)),
            ("KVSpace", partial(kv_space, turns, page_size)),
            ("Engine", partial(decode_steps, 200, page_size)),
        ):
            counted, timed = Meter(counts=True), Meter(counts=False)
            work(counted)
            work(timed)
            skipped = [len(values) // 4 for values in timed.values.values()]  # the cache is full by then
            nothing_ns = np.median(timed.values.pop("nothing"))
            nothing = np.median(np.array(counted.values.pop("nothing")), axis=0)
            for (name, times), start in zip(timed.values.items(), skipped[1:], strict=True):
                num = np.median(np.array(counted.values[name][start:]), axis=0) - nothing
                later = np.maximum(np.array(times[start:]) - nothing_ns, 0) / 1e3
                floor = (num * costs).sum() / 1e3
                print(
                    f"| {title}: {name} | {num[0]:.0f} | {num[1]:.0f} | {num[2]:.0f} | {num[3]:,.0f} | "
                    f"{np.median(later):,.1f} | {np.percentile(later, 99):,.1f} | {np.percentile(later, 1):,.1f} | "
                    f"{floor:,.1f} |"
                )
        print()


if __name__ == "__main__":
    main()
