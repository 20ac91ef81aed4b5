"""The echo model on the CUDA runner, through its real staging, tables, page arrays, graphs and sampling.

Only the arithmetic of model and attention is replaced. Keys hold hashes, in four parts. Attention adds the
hashes that a token sees, and the logits select the token that the sum hashes to. All work is queued and nothing waits,
so it can be captured, and runs both on a GPU and on a recording device.

Legend: T tokens, G grants, N pages of all grants, P page_size, W tokens whose logits are wanted.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.rope import RopeConfig
from pagewood.engine.runner.cuda.attention import PlannedAttention
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.drafts.verify import DraftRequest
from pagewood.engine.runner.cuda.graphs import graph_sizes
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.kvpool import LayerGroups, MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from stand_ins import flashinfer_torch

_CERTAIN = 1e4  # a logit so large that the others, which are 0, are never drawn
_GARBAGE = 0x5EAD_BEEF
_NUM_PARTS = 4
"""Numbers that a hash is stored as, of 16 bits each: all 64 bits might be a float that is not finite."""


class EchoDecoder:
    """The echo model with the interface of `models.decoder.Decoder`."""

    def __init__(self, vocab_size: int, *, windows: Sequence[int | None] = (None,)) -> None:
        """Make a layer for each window; all are equal, so that it changes the tokens if one sees anything else."""
        rope = RopeConfig(head_dim=4, theta=1.0)
        attention = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=4, rope=rope, scale=1.0)
        layers = [SimpleNamespace(mixer=replace(attention, window=window)) for window in windows]
        self.config = SimpleNamespace(layers=layers)
        self.ropes = [lambda positions: (positions[:, None].float(), positions[:, None].float())]
        self.short_length = None
        self._vocab_size = vocab_size

    def states(
        self,
        tokens: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attention: PlannedAttention,
        wanted: Tensor,
        *,
        captured: tuple[int, ...] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the states `[W, 4]` of tokens, the parts of a hash; see `testing.echo.echo_state`."""
        assert not captured
        positions = rotations[0][0].long()
        hashes = _parts(_mix((tokens.long() << 32) + positions + 1))
        sums, *others = (
            attention.run(hashes, hashes, hashes, layer).view(torch.int64)[:, 0]
            for layer in range(len(self.config.layers))
        )
        sums = sum((3 * (one - sums) for one in others), sums)
        words = _mix(sums.index_select(0, wanted) + positions.index_select(0, wanted) + 1)
        return _parts(words), []

    def head(self, states: Tensor) -> Tensor:
        """Return logits `[W, V]` of states `[W, 4]`."""
        chosen = _token_of(_mix(_joined(states)), self._vocab_size)
        logits = torch.zeros((len(chosen), self._vocab_size), device=chosen.device)
        return logits.scatter(1, chosen[:, None], _CERTAIN)


class EchoFlashInfer:
    """The functions of FlashInfer that the runner calls, for the echo model; see `runner.cuda.flashinfer_api`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.append_paged_kv_cache = flashinfer_torch.append_paged_kv_cache
        self.softmax = flashinfer_torch.softmax

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: Tensor,
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> EchoWrapper:
        """Return a wrapper; with buffers it is for a graph and reads its arrays from them."""
        if paged_kv_indptr_buffer is None or paged_kv_indices_buffer is None or paged_kv_last_page_len_buffer is None:
            return EchoWrapper(None)
        return EchoWrapper(
            _Arrays(
                qo_indptr=torch.arange(len(paged_kv_indptr_buffer), device=self._device),
                indptr=paged_kv_indptr_buffer,
                indices=paged_kv_indices_buffer,
                last_page_len=paged_kv_last_page_len_buffer,
            )
        )

    def BatchPrefillWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: Tensor,
        *,
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> EchoPrefill:
        """Return a wrapper; with buffers it is for a graph and reads its arrays from them."""
        if (
            qo_indptr_buf is None
            or paged_kv_indptr_buf is None
            or paged_kv_indices_buf is None
            or paged_kv_last_page_len_buf is None
        ):
            return EchoPrefill(None)
        graph = _Arrays(
            qo_indptr=qo_indptr_buf,
            indptr=paged_kv_indptr_buf,
            indices=paged_kv_indices_buf,
            last_page_len=paged_kv_last_page_len_buf,
        )
        return EchoPrefill(graph, mask=custom_mask_buf, mask_offsets=mask_indptr_buf)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrays:
    """A plan, on the device."""

    qo_indptr: Tensor
    """[G + 1]"""
    indptr: Tensor
    """[G + 1]"""
    indices: Tensor
    """At least [N]."""
    last_page_len: Tensor
    """[G]"""

    def attend(self, memory: Tensor, num_tokens: int, window_left: int) -> Tensor:
        """Return `[T, 1, 2] float32`: as bits, the sum of the hashes up to each token, of its window if it has one."""
        page_size = memory.shape[2]
        device = memory.device
        values = _joined(memory[:, 0].index_select(0, self.indices)[:, :, 0]).flatten()  # [N * P]
        ends = values.cumsum(0)
        tokens = torch.arange(num_tokens, device=device)
        grants = torch.searchsorted(self.qo_indptr[1:].long().contiguous(), tokens, right=True)
        firsts = self.indptr.long().index_select(0, grants) * page_size
        num_pages = self.indptr.diff().long().index_select(0, grants)
        lengths = (num_pages - 1) * page_size + self.last_page_len.long().index_select(0, grants)
        positions = lengths - (self.qo_indptr.long().index_select(0, grants + 1) - tokens)
        lasts = ends.index_select(0, firsts + positions)
        if window_left >= 0:
            firsts = firsts + (positions - window_left).clamp(min=0)
        sums = lasts - ends.index_select(0, firsts) + values.index_select(0, firsts)
        return sums.view(torch.float32).view(-1, 1, 2)

    def attend_masked(self, memory: Tensor, num_tokens: int, mask: Tensor, mask_offsets: Tensor) -> Tensor:
        """Return `[T, 1, 2] float32`: as bits, the sum of all hashes that each token sees by its mask."""
        page_size, device = memory.shape[2], memory.device
        values = _joined(memory[:, 0].index_select(0, self.indices)[:, :, 0]).flatten()
        tokens = torch.arange(num_tokens, device=device)
        grants = torch.searchsorted(self.qo_indptr[1:].long().contiguous(), tokens, right=True)
        pages = self.indptr.long()
        lengths = (pages.diff() - 1) * page_size + self.last_page_len.long()  # [G]
        lengths = lengths.index_select(0, grants)[:, None]
        rows = (tokens - self.qo_indptr.long().index_select(0, grants))[:, None]
        positions = torch.arange(len(values), device=device)[None]  # more than any grant has
        bits = rows * lengths + positions
        places = mask_offsets.long().index_select(0, grants)[:, None] + bits // 8
        seen = (mask.index_select(0, places.clamp(max=len(mask) - 1).flatten()).view(places.shape) >> (bits % 8)) & 1
        slots = pages.index_select(0, grants)[:, None] * page_size + positions
        found = values.index_select(0, slots.clamp(max=len(values) - 1).flatten()).view(slots.shape)
        sums = torch.where((seen > 0) & (positions < lengths), found, 0).sum(1)
        return sums.view(torch.float32).view(-1, 1, 2)


class EchoWrapper:
    """Adds hashes for grants of one token."""

    def __init__(self, graph: _Arrays | None) -> None:
        self._pin_memory_int_workspace_buffer = torch.empty(0)  # written by: cuda.attention
        self._paged_kv_indices_buf = _indices_of(graph)  # written by: plan, cuda.attention
        self._window_left = -1  # written by: plan
        self._graph = graph
        self._planned: _Arrays | None = graph  # written by: plan

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *shape: object, **options: object) -> None:
        """Take the arrays of a step; `indptr` and `last_page_len` come from the host."""
        self._window_left = int(str(options["window_left"]))
        if self._graph is not None:
            self._graph.indptr.copy_(indptr, non_blocking=True)
            self._graph.indices[: len(indices)].copy_(indices)
            self._graph.last_page_len.copy_(last_page_len, non_blocking=True)
            return
        self._paged_kv_indices_buf = indices
        single = torch.arange(len(indptr), dtype=torch.int32, device=indices.device)
        self._planned = _to_device(single, indptr, indices, last_page_len)

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """Return the sums."""
        assert self._planned is not None
        planned = replace(self._planned, indices=self._paged_kv_indices_buf)
        return planned.attend(paged_kv_cache, len(q), self._window_left)


class EchoPrefill:
    """Adds hashes for grants of any number of tokens."""

    def __init__(
        self, graph: _Arrays | None, *, mask: Tensor | None = None, mask_offsets: Tensor | None = None
    ) -> None:
        self._pin_memory_int_workspace_buffer = torch.empty(0)  # written by: cuda.attention
        self._custom_mask_buf = mask  # written by: plan, cuda.attention
        self._mask_indptr_buf = mask_offsets  # written by: plan, cuda.attention
        self._paged_kv_indices_buf = _indices_of(graph)  # written by: plan, cuda.attention
        self._window_left = -1  # written by: plan
        self._graph = graph
        self._planned: _Arrays | None = graph  # written by: plan

    def plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        *shape: object,
        **options: object,
    ) -> None:
        """Take the arrays of a step; all but `indices` come from the host."""
        self._window_left = int(str(options["window_left"]))
        if self._graph is not None:
            self._graph.qo_indptr.copy_(qo_indptr, non_blocking=True)
            self._graph.indptr.copy_(indptr, non_blocking=True)
            self._graph.indices[: len(indices)].copy_(indices)
            self._graph.last_page_len.copy_(last_page_len, non_blocking=True)
            return
        self._custom_mask_buf = self._mask_indptr_buf = None
        self._paged_kv_indices_buf = indices
        self._planned = _to_device(qo_indptr, indptr, indices, last_page_len)

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """Return the sums."""
        assert self._planned is not None
        planned = replace(self._planned, indices=self._paged_kv_indices_buf)
        if self._custom_mask_buf is None or self._mask_indptr_buf is None:
            return planned.attend(paged_kv_cache, len(q), self._window_left)
        return planned.attend_masked(paged_kv_cache, len(q), self._custom_mask_buf, self._mask_indptr_buf)


def _indices_of(graph: _Arrays | None) -> Tensor:
    return torch.empty(0, dtype=torch.int32) if graph is None else graph.indices


def _to_device(qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> _Arrays:
    where = indices.device
    return _Arrays(
        qo_indptr=qo_indptr.to(where, non_blocking=True),
        indptr=indptr.to(where, non_blocking=True),
        indices=indices,
        last_page_len=last_page_len.to(where, non_blocking=True),
    )


class GuessingDrafter:
    """Drafts for the echo model: each draft is the right token with some probability; satisfies `verify.Drafter`."""

    def __init__(self, *, vocab_size: int, quality: float, seed: int, window: int | None = None) -> None:
        self._window = window
        self._vocab_size = vocab_size
        self._quality = quality
        self._seed = seed
        self._num_calls = 0

    def note(self, batch: Batch) -> None:
        """Do nothing."""

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Return right tokens and wrong ones, by a hash; of every third row fewer than are wanted."""
        self._num_calls += 1
        text = request.tokens.index_select(0, request.rows)
        positions = torch.arange(text.shape[1], device=text.device)
        lengths = request.lengths.long()
        hashes = _mix((text.long() << 32) + positions + 1)
        drafts: list[Tensor] = []
        for step in range(request.num_drafts):
            position = lengths - 1 + step
            distance = position[:, None] - positions
            seen = distance >= 0
            if self._window is not None:
                seen &= distance < self._window
            total = torch.where(seen, hashes, 0).sum(1)
            right = _echo_token(total, position, self._vocab_size)
            noise = _mix(total + position + (self._seed * 1000 + self._num_calls))
            is_right = _shift_right(noise, 11).double() < self._quality * 2.0**53
            drafts.append(torch.where(is_right, right, (right + 1) % self._vocab_size))
            # A row with smaller grants may be too near the end of the table for all of them.
            places = (position + 1).clamp(max=text.shape[1] - 1)
            hashes = hashes.scatter(1, places[:, None], _mix((drafts[-1] << 32) + position + 2)[:, None])
        found = torch.where((lengths + self._num_calls) % 3 > 0, request.num_drafts, request.num_drafts // 2)
        return torch.stack(drafts, 1).int(), found.int()


def _parts(hashes: Tensor) -> Tensor:
    """Return `[n, 4] float32`: the parts of `hashes` `[n] int64`."""
    return torch.stack([_shift_right(hashes, 16 * part) & 0xFFFF for part in range(_NUM_PARTS)], -1).float()


def _joined(parts: Tensor) -> Tensor:
    """Return the hashes `[...] int64` whose parts `[..., 4]` are given."""
    numbers = parts.long() & 0xFFFF
    return sum((numbers[..., part] << 16 * part for part in range(_NUM_PARTS)), torch.zeros_like(numbers[..., 0]))


def _echo_token(sums: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return the tokens that follow `positions`, after hashes that add up to `sums`; int64."""
    return _token_of(_mix(_mix(sums + positions + 1)), vocab_size)


def _token_of(words: Tensor, vocab_size: int) -> Tensor:
    """Return the tokens that hashes stand for: their remainders as unsigned numbers; int64."""
    high, low = _shift_right(words, 32) % vocab_size, (words & 0xFFFF_FFFF) % vocab_size
    return (high * ((1 << 32) % vocab_size) + low) % vocab_size


class WatchedCUDARunner:
    """A CUDA runner over the echo model that counts steps; satisfies `scenarios.running.WatchedRunner`."""

    def __init__(
        self, device: Device, *, num_rows: int, max_length: int, num_pages: int, page_size: int, vocab_size: int,
        with_graphs: bool, max_drafts: int = 0, guess_quality: float = 0.5, guess_seed: int = 0,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:  # fmt: skip
        """Allocate KV memory of `num_pages` pages, filled with garbage; arguments are those of `EchoRunner`.

        All `windows` must be equal.

        With `max_drafts` > 0, grants with drafts get those of a `GuessingDrafter`.
        """
        layout = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=_NUM_PARTS, page_size=page_size)
        storage = KVStorage(layout, num_pages + 1, device=device.torch_device)
        storage.layer(0).view(torch.int32).fill_(_GARBAGE)
        self.memory = storage.memory
        """KV memory, for tiers; the last page belongs to the runner."""
        self._runner = CUDARunner(
            EchoDecoder(vocab_size, windows=windows),  # pyright: ignore[reportArgumentType]
            storage,
            EchoFlashInfer(device.torch_device),  # pyright: ignore[reportArgumentType]
            device,
            max_rows=num_rows,
            max_length=max_length,
            graph_sizes=graph_sizes(num_rows) if with_graphs else (),
            drafter=GuessingDrafter(vocab_size=vocab_size, quality=guess_quality, seed=guess_seed, window=windows[0])
            if max_drafts
            else None,
            max_drafts=max_drafts,
            groups=LayerGroups(
                num_layers=1,
                windows=windows,
                places=tuple((group, 0) for group in range(len(windows))),
                starts=(0,) * len(windows),
            ),
        )
        self._num_open = 0
        self.num_launched_ahead = 0

    def launch(self, batch: Batch) -> _WatchedStep:
        """Queue a step."""
        self.num_launched_ahead += self._num_open > 0
        self._num_open += 1
        return _WatchedStep(self, self._runner.launch(batch).wait)

    @property
    def num_in_flight(self) -> int:
        """Number of launched steps whose results were not waited for."""
        return self._num_open

    def close_step(self) -> None:
        """Count a step as waited for."""
        self._num_open -= 1

    def catch_up(self) -> None:
        """Do nothing, because the device runs by itself."""

    def close(self) -> None:
        """Finish the launched steps."""
        self._runner.close()


class _WatchedStep:
    """A launched step."""

    def __init__(self, runner: WatchedCUDARunner, wait: Callable[[], StepResult]) -> None:
        self._runner = runner
        self._wait = wait

    def wait(self) -> StepResult:
        """Return the tokens of each sampled grant."""
        self._runner.close_step()
        return self._wait()


def _mix(bits: Tensor) -> Tensor:
    """Scramble int64 words, on the device. Source: the finaliser of SplitMix64."""
    bits = (bits ^ _shift_right(bits, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    bits = (bits ^ _shift_right(bits, 27)) * (0x94D049BB133111EB - (1 << 64))
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift int64 words to the right and fill with zeros."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
