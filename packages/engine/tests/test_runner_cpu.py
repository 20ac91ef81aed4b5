"""The worker thread of the CPU runner: order, errors, threads, and steps launched before their tokens are known."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from answered import answers_to, request, tokens_of
from pagewood.engine.api import EngineConfig, SamplingParams
from pagewood.engine.build import build_engine
from pagewood.engine.core.messages.batch import NUM_STOP_IDS
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.storage import storage_for
from pagewood.engine.runner.worker import Worker
from pagewood.engine.text import Tokenizer
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from row_driver import RowDriver


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config: Any = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_runner(folder: Path, *, dtype: str = "float32", num_threads: int = 2) -> CPURunner:
    model = load_model(folder, CPUOps())
    layout = MultiHeadLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_size=4, dtype=dtype, order="HND")
    kernel = warm_up(16, int8=dtype == "int8")
    return CPURunner(model, KVStorage(layout, 64), kernel, max_rows=8, max_length=64, num_threads=num_threads)


@pytest.fixture
def runner(folder: Path) -> Iterator[CPURunner]:
    runner = make_runner(folder)
    yield runner
    runner.close()


def driver_of(runner: CPURunner) -> RowDriver:
    return RowDriver(runner, num_pages=64, page_size=4)


def test_steps_can_be_launched_before_their_tokens_are_known(runner: CPURunner) -> None:
    driver = driver_of(runner)
    plain = driver.add([3, 1, 4])
    driver.generate([plain], num_tokens=12, chunk=8)

    ahead = driver.add([3, 1, 4])
    handles = []
    for _ in range(12):
        handles.append(runner.launch(driver.batch([(ahead, 8)])))
        ahead.tokens.append(-1)  # its id is in the runner's table only
    assert [int(handle.wait().tokens[0]) for handle in handles] == plain.output

    from_host = driver.add([3, 1, 4, *plain.output[:-1]])  # the same tokens, this time from the host
    driver.generate([from_host], num_tokens=1, chunk=64)
    assert from_host.output == plain.output[-1:]


def test_an_idle_worker_computes_a_step_while_its_caller_keeps_the_interpreters_lock(runner: CPURunner) -> None:
    driver = driver_of(runner)
    interval, lengths = sys.getswitchinterval(), runner._rows.lengths
    sys.setswitchinterval(60.0)
    try:
        for _ in range(3):
            sequence = driver.add([3, 1, 4])
            handle = runner.launch(driver.batch([(sequence, 8)]))
            end = time.monotonic() + 10
            while lengths[sequence.row] < 4 and time.monotonic() < end:
                pass
            assert lengths[sequence.row] == 4
            handle.wait()
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_tokens_do_not_depend_on_the_number_of_threads_or_their_timing(
    folder: Path, runner: CPURunner, num_threads: int
) -> None:
    driver = driver_of(runner)
    expected = [driver.add([3, 1, i]) for i in range(6)]
    driver.generate(expected, num_tokens=10, chunk=8)

    other = make_runner(folder, num_threads=num_threads)
    driver = driver_of(other)
    sequences = [driver.add([3, 1, i]) for i in range(6)]
    handles = []
    for step in range(10):
        handles.append(other.launch(driver.batch([(sequence, 8) for sequence in sequences])))
        for sequence in sequences:
            sequence.tokens.append(-1)
        time.sleep(0.001 * (step % 3))  # `wait` may be called before, during or after the work
    outputs = [handle.wait().tokens.tolist() for handle in handles]
    assert outputs == [list(tokens) for tokens in zip(*(one.output for one in expected), strict=True)]
    assert handles[0].wait().tokens.tolist() == outputs[0]
    other.close()


def test_seeded_tokens_do_not_depend_on_the_batch(runner: CPURunner) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95)
    driver = driver_of(runner)
    alone = driver.add([5, 6, 7], sampling=sampling, seed=42)
    driver.generate([alone], num_tokens=20, chunk=8)
    again = driver.add([5, 6, 7], sampling=sampling, seed=42)
    others = [driver.add([9, i], sampling=sampling, seed=i) for i in range(3)]
    driver.generate([*others, again], num_tokens=20, chunk=2)
    assert again.output == alone.output
    assert len({tuple(sequence.output) for sequence in [alone, *others]}) == 4


@pytest.mark.parametrize("end", ["stop token", "limit"])
def test_rows_that_have_ended_are_left_out(runner: CPURunner, end: str) -> None:
    driver = driver_of(runner)
    plain = [driver.add(prompt) for prompt in ([3, 1, 4], [5, 9, 2])]
    driver.generate(plain, num_tokens=3, chunk=8)
    stop = plain[0].output[0]
    ends, goes_on = driver.add([3, 1, 4]), driver.add([5, 9, 2])
    stop_ids = np.full((2, NUM_STOP_IDS), -1, np.int32)
    stop_ids[0, 3] = stop if end == "stop token" else -1
    stop_ids[1, :3] = [3, 5, 2]  # its prompt does not end it
    assert not {3, 5, 2} & set(goes_on.output)
    batches = []
    for _ in range(3):
        batches.append(driver.batch([(ends, 8), (goes_on, 8)]))
        for sequence in (ends, goes_on):
            sequence.tokens.append(-1)
    batches.append(driver.batch([(ends, 8)]))
    batches.append(driver.batch([(ends, 8), (driver.add([1] * 9), 4)]))  # what is left of the step samples nothing
    limits = np.array([4 if end == "limit" else 64, 64], np.int32)
    batches[0] = dataclasses.replace(
        batches[0], admitted=np.arange(2, dtype=np.int32), limits=limits, stop_ids=stop_ids
    )
    num_begun = runner._writer.kernel.num_begun
    results = [handle.wait() for handle in [runner.launch(batch) for batch in batches]]
    assert runner._writer.kernel.num_begun == num_begun + len(batches)  # a thread that helped would wait for the others
    assert [result.counts.tolist() for result in results] == [[1, 1], [0, 1], [0, 1], [0], [0]]
    assert results[0].tokens.tolist() == [stop, plain[1].output[0]]
    assert [results[1].tokens.tolist(), results[2].tokens.tolist()] == [[token] for token in plain[1].output[1:]]


def test_a_step_that_samples_nothing(runner: CPURunner) -> None:
    driver = driver_of(runner)
    sequence = driver.add([1, 2, 3, 4, 5])
    tokens = runner.launch(driver.batch([(sequence, 3)])).wait().tokens
    assert tokens.shape == (0,)
    assert tokens.dtype == np.int32


def test_the_error_of_a_step_is_raised_by_its_wait(runner: CPURunner) -> None:
    driver = driver_of(runner)
    good, bad = driver.add([1, 2]), driver.add([1, 50])
    first = runner.launch(driver.batch([(good, 8)]))
    broken = runner.launch(driver.batch([(bad, 8)]))
    good.tokens.append(-1)
    last = runner.launch(driver.batch([(good, 8)]))
    assert first.wait().tokens.shape == (1,)
    with pytest.raises(IndexError):
        broken.wait()
    assert last.wait().tokens.shape == (1,)


def test_a_batch_may_be_read_only(runner: CPURunner) -> None:
    driver = driver_of(runner)
    sequence = driver.add([1, 2, 3], sampling=SamplingParams(temperature=1.0))
    batch = driver.batch([(sequence, 8)])
    values = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    for value in [*values, batch.sampling.words]:
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    assert runner.launch(batch).wait().tokens.shape == (1,)


def test_a_worker_that_is_dropped_ends_and_a_closed_one_takes_nothing() -> None:
    before = threading.active_count()
    worker = Worker("dropped", begin=lambda: None)
    assert worker.submit(lambda: 5).take() == 5
    failed = worker.submit(lambda: [][0])
    for _ in range(2):
        with pytest.raises(IndexError):
            failed.take()
    del worker, failed
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == before
    closed = Worker("closed", begin=lambda: None)
    closed.close()
    with pytest.raises(RuntimeError, match="the runner is closed"):
        closed.submit(lambda: 5)


def test_close_ends_the_worker(folder: Path) -> None:
    before = threading.active_count()
    layout = MultiHeadLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_size=4, order="HND")
    model = load_model(folder, CPUOps())
    runner = CPURunner(model, KVStorage(layout, 8), warm_up(16), max_rows=1, max_length=16, num_threads=1)
    driver = RowDriver(runner, num_pages=8, page_size=4)
    handle = runner.launch(driver.batch([(driver.add([1]), 1)]))
    runner.close()
    assert handle.wait().tokens.shape == (1,)
    assert threading.active_count() == before
    runner.close()


def test_int8_memory_moves_logits_of_the_embedded_model_by_less_than_a_hundredth() -> None:
    """Relative to their Euclidean norm, over all positions of some of the model's questions; 0.65% when measured."""
    folder = model_folder(None)
    model, tokenizer = load_model(folder, CPUOps()), Tokenizer.from_folder(folder)
    questions = ("What can you do?", "What is 12 + 7?", "Sort these words: stone river cloud apple.")
    prompts = [list(tokenizer.encode_chat([{"role": "user", "content": question}])) for question in questions]

    def logits(dtype: str) -> np.ndarray:
        config = model.config
        layout = config.memory_layout(page_size=4, dtype=dtype, order="HND")
        kernel = warm_up(layout)
        runner = CPURunner(model, storage_for(layout, 64), kernel, max_rows=8, max_length=64, num_threads=2)
        driver = driver_of(runner)
        sequences = [driver.add(prompt) for prompt in prompts]
        parts = []
        while any(sequence.num_computed < sequence.num_prompt for sequence in sequences):
            due = [sequence for sequence in sequences if sequence.num_computed < sequence.num_prompt]
            parts.append(runner.forward(driver.batch([(sequence, 7) for sequence in due])))
        runner.close()
        return np.concatenate(parts)

    exact = logits("float32")
    error = np.linalg.norm(logits("int8") - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 1e-2


def test_an_engine_with_int8_memory(folder: Path) -> None:
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    config = EngineConfig(model=str(folder), page_size=4, max_total_tokens=64, max_running=2, kv_cache_dtype="int8")
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    [answer] = answers_to(engine, inbox, outbox, [request("a", [1, 2, 3], max_tokens=20)])
    engine.close()
    assert len(tokens_of(answer)) == 20
