"""Latents attended to in pieces on CUDA: the reference against plain softmax, the kernels against the reference."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pagewood.engine.api import SamplingParams
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.runner.cuda.attention import Places
from pagewood.engine.runner.cuda.drafts.drafting_head import EagleDrafter
from pagewood.engine.runner.cuda.drafts.drafting_model import DraftModel
from pagewood.engine.runner.cuda.drafts.lookup import NgramDrafter
from pagewood.engine.runner.cuda.drafts.verify import Drafter
from pagewood.engine.runner.cuda.latents import attend
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.storage import AnyStorage, storage_for
from row_driver import RowDriver
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from stand_ins.tiny_heads import folders_of, load, prompts_of
from stand_ins.torch_decoding import torch_ops

RANK, ROPE, HEADS = 16, 8, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Tokens of a step over the latents of some rows, in pages of a pool whose other slots are not numbers."""

    q: Tensor
    memory: Tensor
    places: Places
    rows: list[tuple[Tensor, list[int]]]
    """The latents of each row, and the positions of its tokens."""

    @classmethod
    def of(cls, rows: list[tuple[int, list[int]]], *, page_size: int, seed: int = 0) -> Step:
        """Return a step; a row has a number of positions, and tokens at some of them."""
        generator = torch.Generator().manual_seed(seed)
        num_pages = [-(-length // page_size) for length, _ in rows]
        indices = torch.randperm(sum(num_pages) + 3, generator=generator)[: sum(num_pages)].int()
        pool = torch.full((sum(num_pages) + 3, page_size + 1, RANK + ROPE), torch.nan)
        memory = pool[:, :page_size]  # a page is followed by other memory
        indptr = torch.tensor([0, *num_pages]).cumsum(0).int()
        all_latents = [torch.randn(length, RANK + ROPE, generator=generator) for length, _ in rows]
        for first, latents in zip(indptr.tolist(), all_latents, strict=False):
            for position, latent in enumerate(latents):
                memory[indices[first + position // page_size], position % page_size] = latent
        positions = [position for _, own in rows for position in own]
        places = Places(
            grants=torch.tensor([row for row, (_, own) in enumerate(rows) for _ in own]).int(),
            positions=torch.tensor(positions).int(),
            kv_indptr=indptr,
            kv_indices=indices,
            last_page_len=torch.ones(len(rows)).int(),
        )
        q = torch.randn(len(positions), HEADS, RANK + ROPE, generator=generator)
        own = [tokens for _, tokens in rows]
        return cls(q=q, memory=memory, places=places, rows=list(zip(all_latents, own, strict=True)))

    def expected(self) -> Tensor:
        """Return the attention of all tokens by one softmax each, in float64."""
        found, queries = [], iter(self.q.double())
        for latents, positions in self.rows:
            for position in positions:
                seen = latents[: position + 1].double()
                found.append((next(queries) @ seen.T * 0.3).softmax(-1) @ seen[:, :RANK])
        return torch.stack(found)

    def attended(self, *, longest: int, piece: int, tokens: slice = slice(None)) -> Tensor:
        """Return the attention of some tokens in pieces."""
        places = self.places
        own = Places(
            grants=places.grants[tokens], positions=places.positions[tokens], kv_indptr=places.kv_indptr,
            kv_indices=places.kv_indices, last_page_len=places.last_page_len,
        )  # fmt: skip
        return attend(
            self.q[tokens], self.memory, own, rank=RANK, scale=0.3, longest=longest, workspace=torch.empty(0),
            piece=piece,
        )  # fmt: skip


ROWS = [(40, [0, 7, 8, 39]), (1, [0]), (33, [31, 32]), (70, list(range(60, 70)))]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pieces_are_one_softmax_and_do_not_depend_on_the_step(page_size: int) -> None:
    step = Step.of(ROWS, page_size=page_size)
    device = RecordingDevice()
    with device.watching():
        found = step.attended(longest=70, piece=16)
    assert device.waits == []
    torch.testing.assert_close(found.double(), step.expected(), atol=1e-5, rtol=1e-5)
    for token in range(len(step.q)):
        alone = step.attended(longest=int(step.places.positions[token]) + 1, piece=16, tokens=slice(token, token + 1))
        assert torch.equal(alone[0], found[token])


INTERPRETED = """
from dataclasses import replace

import torch
from pagewood.engine.runner.cuda import latents
from pagewood.engine.runner.cuda.attention import Places
from pagewood.engine.runner.cuda.kernels import latents_triton

latents_triton.PIECE = 48  # not a multiple of the positions that a program attends to at a time
latents.PIECE = 48
generator = torch.Generator().manual_seed(0)
lengths, page_size = [150, 5, 48, 97], 16
num_pages = [-(-length // page_size) for length in lengths]
for dtype, atol in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
    for heads, rank, rope in ((3, 32, 16), (20, 64, 32)):
        memory = torch.full((sum(num_pages) + 2, page_size + 3, rank + rope), torch.nan).to(dtype)[:, :page_size]
        indices = torch.randperm(sum(num_pages) + 2, generator=generator)[: sum(num_pages)].int()
        indptr = torch.tensor([0, *num_pages]).cumsum(0).int()
        for row, length in enumerate(lengths):
            for position in range(length):
                own = torch.randn(rank + rope, generator=generator)
                memory[indices[indptr[row] + position // page_size], position % page_size] = own.to(dtype)
        tokens = [(0, 0), (0, 47), (0, 48), (0, 149), (1, 4), (2, 47), (3, 60), (3, 96)]
        places = Places(
            grants=torch.tensor([row for row, _ in tokens]).int(),
            positions=torch.tensor([position for _, position in tokens]).int(),
            kv_indptr=indptr, kv_indices=indices, last_page_len=torch.ones(4).int(),
        )
        q = torch.randn(len(tokens), heads, rank + rope, generator=generator).to(dtype)
        options = {"rank": rank, "scale": 0.2}
        room = latents.numbers_of_token(heads, rank, 150)
        together = latents_triton.attend(q, memory, places, longest=150, workspace=torch.zeros(9 * room), **options)
        exact = latents.attend(
            q.float(), memory.float(), places, longest=150, workspace=torch.zeros(0), piece=512, **options
        )
        torch.testing.assert_close(together.float(), exact, atol=atol, rtol=atol)
        by_three = latents_triton.attend(q, memory, places, longest=150, workspace=torch.zeros(3 * room), **options)
        assert torch.equal(by_three, together)
        for token, (_, position) in enumerate(tokens):
            one = slice(token, token + 1)
            own = replace(places, grants=places.grants[one], positions=places.positions[one])
            alone = latents_triton.attend(
                q[one], memory, own, longest=position + 1, workspace=torch.zeros(room), **options
            )
            assert torch.equal(alone[0], together[token])
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
def test_the_kernels_in_their_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported, so in a process of its own
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True)


MAX_LENGTH, NUM_PAGES = 64, 100


def texts(drafter: str | None, *, batch_invariant: bool, sizes: list[int]) -> tuple[list[list[int]], int, int]:
    """Return the texts of some prompts, the accepted drafts, and the steps that graphs computed."""
    target, head = load("latents", torch_ops())
    device = RecordingDevice()

    def storage(config: ModelConfig) -> AnyStorage:
        found = storage_for(config.memory_layout(page_size=4), NUM_PAGES + 1)
        for layer in range(found.layout.num_layers):
            found.layer(layer).fill_(1e3)  # unwritten positions must not count
        return found

    options = {"max_rows": 4, "max_length": MAX_LENGTH, "batch_invariant": batch_invariant}
    made: Drafter | None = None
    if drafter == "mtp":
        made = EagleDrafter(head, storage(head.config.layer), flashinfer_torch, device, **options)
    elif drafter == "model":
        model = load_model(folders_of("latents")[0], torch_ops())
        made = DraftModel(model, storage(model.config), flashinfer_torch, device, **options)
    elif drafter == "ngram":
        made = NgramDrafter()
    runner = CUDARunner(
        target, storage(target.config), flashinfer_torch, device, graph_sizes=sizes, drafter=made, max_drafts=3,
        **options,
    )  # fmt: skip
    driver = RowDriver(runner, num_pages=NUM_PAGES, page_size=4)
    sequences = [
        driver.add(prompt, sampling=SamplingParams(temperature=0.7 * (i % 2)), seed=i)
        for i, prompt in enumerate(prompts_of(4))
    ]
    for sequence in sequences:
        sequence.num_sent_tokens = 0
    driver.generate(sequences, num_tokens=1, chunk=7)
    device.waits.clear()
    accepted = 0
    while live := [one for one in sequences if len(one.output) < 20]:
        with device.watching():
            handle = runner.launch(driver.batch([(one, 1) for one in live], drafts=[3 if made else 0] * len(live)))
        assert set(device.waits) <= {"event.synchronize"}
        for sequence, tokens in zip(live, handle.wait().by_grant(), strict=True):
            sequence.tokens.extend(tokens)
            sequence.num_computed = len(sequence.tokens) - 1
            accepted += len(tokens) - 1
    return [one.output[:20] for one in sequences], accepted, device.num_replayed


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("drafter", ["ngram", "mtp", "model"])
def test_drafts_do_not_change_the_text(drafter: str) -> None:
    """Of n-grams, of a layer for multi-token prediction with latents, of a draft model, which is the target itself."""
    plain, _, _ = texts(None, batch_invariant=False, sizes=[])
    for batch_invariant, sizes in ((False, []), (True, [1, 4])):
        found, accepted, num_replayed = texts(drafter, batch_invariant=batch_invariant, sizes=sizes)
        assert found == plain
        assert (num_replayed > 0) == bool(sizes)
        assert accepted > 40 or drafter != "model"
