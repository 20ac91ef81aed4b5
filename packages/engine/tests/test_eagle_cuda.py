"""A drafting head on the CUDA runner, with FlashInfer's stand-in: its drafts are those of the head in plain torch."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import pytest
import torch

from pagewood.engine.api import SamplingParams
from pagewood.engine.runner.cuda.drafts.drafting_head import EagleDrafter
from pagewood.engine.runner.cuda.drafts.verify import DraftRequest
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.storage import storage_for
from row_driver import DrivenSequence, RowDriver
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from stand_ins.tiny_heads import KINDS, drafted, load, prompts_of
from stand_ins.torch_decoding import torch_ops

pytestmark = [pytest.mark.usefixtures("small_buffers"), pytest.mark.slow]

ALL_KINDS = [*KINDS, "experts", "latents"]
NUM_PAGES, MAX_LENGTH, MAX_TOKENS = 600, 96, 5


class WatchedDrafter(EagleDrafter):
    """Keeps the latest drafts."""

    latest: torch.Tensor

    def draft(self, request: DraftRequest) -> tuple[torch.Tensor, torch.Tensor]:
        drafts, counts = super().draft(request)
        self.latest = drafts
        return drafts, counts


class Bench:
    """A runner with a head."""

    def __init__(self, kind: str, sampling: SamplingParams, *, page_size: int, with_graphs: bool) -> None:
        target, head = load(kind, torch_ops())
        target_storage, head_storage = (
            storage_for(config.memory_layout(page_size=page_size), NUM_PAGES + 1)
            for config in (target.config, head.config.layer)
        )
        self.sampling = sampling
        self.device = RecordingDevice()
        self.drafter = WatchedDrafter(
            head, head_storage, flashinfer_torch, self.device, max_rows=8, max_length=MAX_LENGTH
        )
        self.runner = CUDARunner(
            target, target_storage, flashinfer_torch, self.device, max_rows=8, max_length=MAX_LENGTH,
            graph_sizes=[1, 4, 8] if with_graphs else (), drafter=self.drafter, max_drafts=MAX_TOKENS,
        )  # fmt: skip
        self.driver = RowDriver(self.runner, num_pages=NUM_PAGES, page_size=page_size)
        self.device.waits.clear()

    def prefilled(self, prompts: list[list[int]], *, chunk: int = 7) -> list[DrivenSequence]:
        """Return sequences of which only the last token is not computed."""
        sequences = [self.driver.add(prompt, sampling=self.sampling, seed=7 + i) for i, prompt in enumerate(prompts)]
        for sequence in sequences:
            sequence.num_sent_tokens = 0
        self.driver.generate(sequences, num_tokens=1, chunk=chunk)
        return sequences

    def step(self, sequences: list[DrivenSequence], drafts: list[int]) -> list[list[int]]:
        """Compute a step with drafts; return the drafts of each sequence."""
        batch = self.driver.batch([(one, 1) for one in sequences], drafts=drafts)
        with self.device.watching():
            handle = self.runner.launch(batch)
        assert set(self.device.waits) <= {"event.synchronize"}
        result = handle.wait()
        if any(drafts):
            assert result.num_drafted is not None
            assert result.num_drafted.tolist() == drafts
        for sequence, tokens in zip(sequences, result.by_grant(), strict=True):
            sequence.tokens.extend(tokens)
            sequence.num_computed = len(sequence.tokens) - 1
        latest = iter(self.drafter.latest.tolist() if any(drafts) else [])
        return [next(latest)[:n] if n else [] for n in drafts]


@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_drafts_are_those_of_the_head(kind: str, page_size: int, with_graphs: bool) -> None:
    """After a prompt in chunks, after accepted and rejected drafts, and after steps without drafts."""
    bench = Bench(kind, SamplingParams(temperature=0.0), page_size=page_size, with_graphs=with_graphs)
    sequences = bench.prefilled(prompts_of(4))
    for drafts in ([5, 3, 0, 1], [5, 5, 5, 5], [0, 0, 0, 0], [1, 5, 2, 4]):
        expected = [drafted(kind, one.tokens, n)[0] if n else [] for one, n in zip(sequences, drafts, strict=True)]
        assert bench.step(sequences, drafts) == expected
    assert (bench.device.num_replayed > 0) == with_graphs


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_the_text_is_that_of_plain_decoding(kind: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=0.95)
    texts: list[list[list[int]]] = []
    for drafts, with_graphs in ((0, False), (1, True), (5, True), (5, False)):
        bench = Bench(kind, sampling, page_size=4, with_graphs=with_graphs)
        sequences = bench.prefilled(prompts_of(6))
        while live := [one for one in sequences if len(one.output) < 25]:
            bench.step(live, [drafts] * len(live))
        texts.append([one.output[:25] for one in sequences])
    assert all(text == texts[0] for text in texts)
