"""`check_runner` passes the runners of this package and the one of the README, and finds what is wrong with others."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewood.engine.core.loop import Runner
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cpu.drafts.suffix import SuffixIndex
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cuda.drafts.lookup import NgramDrafter
from pagewood.engine.runner.cuda.ops import CUDAOps
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.testing import EchoRunner, MadeUpTokens, RunnerSize, check_runner
from pagewood.engine.testing.echo import STATE_SIZE
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from seeded_faults import Edit, seed_fault
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from wrong_results import WRONG, WrongRunner

VOCAB = 50
README = Path(__file__).parents[1] / "README.md"
(SNIPPET,) = [
    code for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "check_runner" in code
]


def echo(size: RunnerSize) -> EchoRunner:
    return EchoRunner(
        num_rows=size.num_rows, max_length=size.max_length, num_pages=size.num_pages, page_size=size.page_size,
        vocab_size=VOCAB, guess_quality=0.8,
    )  # fmt: skip


@pytest.mark.parametrize("page_size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 16))])
def test_the_echo_model_conforms(page_size: int) -> None:
    check_runner(
        echo, vocab_size=VOCAB, page_sizes=(page_size,), max_drafts=4, vector_size=STATE_SIZE, has_logprobs=True
    )
    check_runner(echo, vocab_size=VOCAB, page_sizes=(page_size,), has_grammars=True)


ALONE = "request . must get the tokens that it gets alone"
FAULTS: dict[str, tuple[str, str, str]] = {
    "ignores the page table": (
        "self.pages[row, places // self.page_size]", "(row * self.pages.shape[1] + places // self.page_size)",
        ALONE,
    ),
    "keeps old pages": (
        "self.pages[batch.page_rows, batch.page_columns] = batch.page_ids",
        "for place, page in zip(zip(batch.page_rows, batch.page_columns), batch.page_ids): "
        "self.pages[place] = self.pages[place] or page",
        ALONE,
    ),
    "reads the page before": (
        "places // self.page_size]", "np.maximum(places // self.page_size - (places >= 16), 0)]", ALONE,
    ),
    "ignores the start of chunks": (
        "np.outer(places[start:],", "np.outer(places[: count],", ALONE,
    ),
    "computes the last position only": (
        "self.kv[slots[start:]] = self.embedding[self.tokens[row, places[start:]]] * np.cos(angles)",
        "self.kv[slots[-1:]] = (self.embedding[self.tokens[row, places[start:]]] * np.cos(angles))[-1:]",
        "must depend on the first token of the prompt",
    ),
    "ignores the KV before a chunk": (
        "kv = self.kv[slots]", "kv = self.kv[slots[start:]] if count > 1 else self.kv[slots]", ALONE,
    ),
    "mixes rows": ("self.head @ states[grant]", "self.head @ states[i]", ALONE),
    "rows in reverse": (
        "np.argmax(self.head @ states[grant]", "np.argmax(self.head @ states[batch.sampled[-1 - i]]", ALONE,
    ),
    "keeps old tokens": (
        "self.tokens[batch.token_rows, batch.token_positions] = batch.token_ids",
        "self.tokens[batch.token_rows, batch.token_positions] = np.where("
        "self.tokens[batch.token_rows, batch.token_positions] > 0, "
        "self.tokens[batch.token_rows, batch.token_positions], batch.token_ids)",
        ALONE,
    ),
    "forgets what it has drawn": ("self.tokens[rows, ends] = tokens", "pass", "must depend on|must get the tokens"),
    "enters tokens too early": ("self.tokens[rows, ends] = tokens", "self.tokens[rows, ends - 1] = tokens", "must"),
    "ignores seeds": ("+ sampling.temperatures[i] * noise", "", "must depend on the seed at temperature 1"),
    "seeds by place in the batch": (
        "int(sampling.seeds[i]) % 2**64", "i + int(sampling.seeds[i]) % 2**64", ALONE,
    ),
    "draws anew in every process": (
        "np.random.default_rng(0)", "np.random.default_rng()", "the output must be the same on every new runner",
    ),
    "results in memory that is used again": (
        "tokens = np.zeros(len(rows), np.int32)",
        "self.memory = getattr(self, 'memory', np.zeros(64, np.int32)); tokens = self.memory[: len(rows)]",
        "no later step may write to the arrays of a result",
    ),
    "a result that can be read once": (
        "return self.result", "result = self.__dict__.pop('result'); return result", "request 0 must get tokens",
    ),
    "another result the second time": (
        "return self.result",
        "self.__dict__['num'] = self.__dict__.get('num', -1) + 1; "
        "return StepResult.of_one_each((self.result.tokens + self.num) % VOCAB)",
        "a second call of wait must return the result again",
    ),
}  # fmt: skip


def runner_of(code: str) -> Callable[[RunnerSize], Runner]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code[: code.index("check_runner(SmallRunner")], names)
    return names["SmallRunner"]


def test_the_runner_of_the_readme_conforms() -> None:
    check_runner(runner_of(SNIPPET), vocab_size=VOCAB, page_sizes=(1, 4, 16))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str) -> None:
    old, new, message = FAULTS[fault]
    assert SNIPPET.count(old) == 1, f"update the fault: {old!r} is {SNIPPET.count(old)} times in the runner"
    with pytest.raises(AssertionError, match=message):
        check_runner(runner_of(SNIPPET.replace(old, new)), vocab_size=VOCAB, page_sizes=(4,))


ECHO_FAULTS: dict[str, tuple[Edit, str]] = {
    "one draft too many": (
        (EchoRunner, "_compute", "if not is_draft:", "if not is_draft and end > start + 1:"),
        "drafts, chunked_prefill_size=64, .* must get the tokens that it gets alone",
    ),
    "reports of the place before": (
        (
            EchoRunner,
            "_logprobs",
            "first = int(self._lengths[row]) - len(tokens)",
            "first = int(self._lengths[row]) - 1",
        ),
        "log probabilities with drafts, .* must have the logprobs that it has alone",
    ),
    "reports of the first chunk": (
        (EchoRunner, "_prompt_logprobs", "int(batch.starts[grant])", "0"),
        "log probabilities, .* must have the prompt_logprobs that it has alone",
    ),
    "states of cached tokens": (
        (EchoRunner, "_hidden", "range(first + 1, first + 1 + num)", "range(1, 1 + num)"),
        "vectors, .* must have the vector that it has alone",
    ),
    "masks of another request": (
        (EchoRunner, "_read_masks", "masks[at + offset]", "masks[offset]"),
        "grammars, .* must",
    ),
}


@pytest.mark.parametrize("fault", ECHO_FAULTS)
def test_a_seeded_fault_of_drafts_reports_vectors_or_masks_is_found(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit, message = ECHO_FAULTS[fault]
    seed_fault([edit], monkeypatch)
    able: dict[str, Any] = {"has_grammars": True}
    if "mask" not in fault:
        able = {"max_drafts": 4, "vector_size": STATE_SIZE, "has_logprobs": True}
    with pytest.raises(AssertionError, match=message):
        check_runner(echo, vocab_size=VOCAB, **able)


@pytest.mark.parametrize("kind", WRONG)
def test_a_result_that_breaks_a_rule_is_found(kind: str) -> None:
    wrong = WRONG[kind]
    with pytest.raises(AssertionError, match=f"must get tokens, got an error: the step .*{wrong.message}"):
        check_runner(
            lambda size: WrongRunner(echo(size), wrong), vocab_size=VOCAB, max_drafts=4, vector_size=STATE_SIZE,
            has_logprobs=True,
        )  # fmt: skip


def test_a_runner_whose_tokens_do_not_depend_on_the_text_shows_nothing() -> None:
    with pytest.raises(AssertionError, match="the output must depend on the first token of the prompt"):
        check_runner(lambda size: MadeUpTokens(num_rows=size.num_rows, vocab_size=VOCAB), vocab_size=VOCAB)


def test_a_runner_that_never_ends_is_found() -> None:
    class Silent:
        def launch(self, batch: Any) -> Any:
            raise RuntimeError("out of device memory")

        def close(self) -> None: ...

    message = r"a request alone, page_size=4: request 0 must get tokens, got an error: .*out of device memory"
    with pytest.raises(AssertionError, match=message):
        check_runner(lambda size: Silent(), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config: Any = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("page_size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 16))])
def test_the_cpu_runner_conforms(page_size: int, folder: Path) -> None:
    model, kernel = load_model(folder, CPUOps()), warm_up(16)

    def make(size: RunnerSize) -> CPURunner:
        layout = MultiHeadLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_size=size.page_size, order="HND")
        return CPURunner(
            model, KVStorage(layout, size.num_pages), kernel, max_rows=size.num_rows, max_length=size.max_length,
            num_threads=2, max_drafts=size.max_drafts,
            make_lookup=SuffixIndex if size.max_drafts else None,
        )  # fmt: skip

    check_runner(
        make, vocab_size=VOCAB, page_sizes=(page_size,), max_drafts=3, vector_size=32, has_logprobs=True,
        has_grammars=True,
    )  # fmt: skip


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("with_graphs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_cuda_runner_conforms_with_stand_ins(with_graphs: bool, folder: Path) -> None:
    model = load_model(folder, CUDAOps(flashinfer_torch))

    def make(size: RunnerSize) -> CUDARunner:
        layout = MultiHeadLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_size=size.page_size)
        return CUDARunner(
            model, KVStorage(layout, size.num_pages + 1), flashinfer_torch, RecordingDevice(), max_rows=size.num_rows,
            max_length=size.max_length, graph_sizes=[1, 2, 4] if with_graphs else (), max_drafts=size.max_drafts,
            drafter=NgramDrafter() if size.max_drafts else None,
        )  # fmt: skip

    check_runner(make, vocab_size=VOCAB, max_drafts=3, vector_size=32, has_logprobs=True, has_grammars=True)
