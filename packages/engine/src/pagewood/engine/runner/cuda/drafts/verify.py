"""Verification of drafts: finds rows whose start the host does not know, and the accepted drafts.

Legend: R rows of the tables, G grants, V verified positions, S sampled grants, D grants with drafts, W tokens that a
grant promises at most, M grants with drafts and masks.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import EXCLUDED, StepResult
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.runner.cuda.attention import HostArrays, Places
from pagewood.engine.runner.cuda.device import Event, Stamp
from pagewood.engine.runner.cuda.division import DividedRows, RequestDivision
from pagewood.engine.runner.cuda.drafts.masks import Masks
from pagewood.engine.runner.cuda.drafts.verify_arrays import VerifyArrays, VerifyStep
from pagewood.engine.runner.cuda.staging import StagingSlot
from pagewood.engine.runner.cuda.step_arrays import TableShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The rows to draft for in a step."""

    tokens: Tensor
    """[R, positions] int32, the token table."""
    page_table: Tensor
    """[places] int32, page ids."""
    rows: Tensor
    """[D] int32, rows to draft for."""
    lengths: Tensor
    """[D] int32, known tokens of each row, at least 1."""
    num_drafts: int
    """Draft tokens of each row; rows with smaller grants do not use the last ones."""
    longest: int
    """The largest value that `lengths` can have, plus `num_drafts`."""
    host_rows: Int32
    """[D], `rows` on the host."""
    host_starts: Int32
    """[D], upper bound of the position of each row's last known token."""
    kv_lens: Int32
    """[D], positions for which each row has pages, at least its known tokens and its drafts."""
    sampling: SamplingArrays
    """Sampling parameters of the D rows."""
    tables: TableShape
    """Shape of the tables."""
    slot: StagingSlot
    """Pinned memory of the step."""
    division: RequestDivision | None = None
    """Of the rows among ranks, each of which has the KV of its own; None: this rank has all."""
    spare_page: int | None = None
    """Page for the KV of positions behind `kv_lens`, which are then those of whole pages; drafts that need such
    positions are not used. None: no row has more drafts than positions."""

    def pages_of(self, kv_indptr: Tensor, page_shifts: Tensor, num_pages: int) -> Tensor:
        """Return the page ids of rows, `[num_pages] int32`; the arguments are those of `StepArrays`."""
        pages = torch.arange(num_pages, dtype=torch.int32, device=kv_indptr.device)
        owners = torch.searchsorted(kv_indptr[1:], pages, right=True, out_int32=True)
        return self.page_table.index_select(0, page_shifts.index_select(0, owners).add_(pages))


class ToldDrafts:
    """Drafts on their way to the host, which must know them before it makes the masks of a step."""

    __slots__ = ("_done", "_drafts", "_grants", "_on_host", "_size")

    def __init__(self, done: Event, on_host: Tensor, *, grants: Int32, size: int) -> None:
        """Expect drafts.

        Args:
            done: reached when the drafts have arrived.
            on_host: `[M + M * (W - 1)] int32`, pinned: the number of drafts of each grant, then the drafts of each.
            grants: `[M]`, see `VerifyArrays.told`.
            size: W - 1.
        """
        self._done = done
        self._on_host = on_host
        self._grants = grants
        self._size = size
        self._drafts: dict[int, list[int]] | None = None  # written by: by_grant

    def by_grant(self) -> dict[int, list[int]]:
        """Wait for the drafts, and return them for each sampled grant with drafts."""
        if self._drafts is None:
            self._done.synchronize()
            words, num = self._on_host.tolist(), len(self._grants)
            firsts = range(num, len(words), self._size)
            self._drafts = {
                grant: words[first : first + count]
                for grant, count, first in zip(self._grants.tolist(), words[:num], firsts, strict=True)
            }
        return self._drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """A step that the target has computed and sampled, for a head that reads its hidden states."""

    host: HostArrays
    places: Places
    masks: Masks | None
    """None: each token sees the positions up to its own."""
    tokens: Tensor
    """[T] int32, the token after each computed one; any valid token after one that was rejected."""
    features: Tensor
    """[T, E]"""
    wanted: Tensor
    """[max(S, 1)] int32, the token before the last one that each grant yields."""
    rows: Tensor
    """[S] int64, rows of the sampled grants."""
    slot: StagingSlot
    """Pinned memory of the step."""
    division: DividedRows | None = None
    """Of the tokens among ranks: `tokens` are then those of all, and everything else is of this one. None: this rank
    has all."""


class Drafter(Protocol):
    """Proposes tokens, without waiting for the device."""

    def note(self, batch: Batch) -> None:
        """Follow the rows of a step, whether it has drafts or not; called before its drafts."""
        ...

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Return draft tokens `[D, num_drafts] int32`, and the number of real drafts of each row, `[D] int32`.

        The others are verified, too, but never accepted; they must be valid tokens.
        """
        ...


@runtime_checkable
class HeadDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the target after every step."""

    @property
    def windows(self) -> Sequence[int]:
        """Windows for which plans need memory."""
        ...

    @property
    def mask_windows(self) -> Sequence[int]:
        """Windows for which extensions need masks."""
        ...

    @property
    def captured(self) -> Sequence[int]:
        """Numbers of the hidden states that it reads, see `Decoder.states`."""
        ...

    @property
    def feature_size(self) -> int:
        """E."""
        ...

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """Return the features that it keeps from the captured states, `[T, E]`."""
        ...

    def extend(self, extension: Extension) -> None:
        """Read a step."""
        ...


class InexactRows:
    """Tracks on the host the rows that may have fewer tokens than steps in flight have promised.

    Invariant: a row is inexact from a launch that promises several of its tokens until that launch is waited for, or
    until the row is given to another request. Ranks wait at times of their own, and must compute a step in the same
    way: there, a row is inexact for a number of launches. More inexact rows than necessary change no result.

    Args:
        num_rows: R.
        num_in_flight: the most steps that are in flight when another one is launched, if the model is divided among
            ranks; None: it is whole.
    """

    __slots__ = ("_latest", "_num_in_flight", "_num_launched")

    def __init__(self, num_rows: int, *, num_in_flight: int | None = None) -> None:
        self._num_in_flight = num_in_flight
        self._latest = np.zeros(num_rows + 1, np.int64)  # contents written by: InexactRows
        """[R + 1], number of the latest launch that made each row inexact; 0: the row is exact, as the
        last one is, which belongs to no request."""
        self._num_launched = 0  # written by: mark

    def admit(self, batch: Batch) -> None:
        """Mark the rows of admitted requests as exact."""
        self._latest[batch.rows[batch.admitted]] = 0

    def of(self, batch: Batch) -> NDArray[np.bool_]:
        """Return `[G]`: whether the row of each grant is inexact."""
        settled = 0 if self._num_in_flight is None else max(0, self._num_launched - self._num_in_flight)
        return self._latest[batch.rows] > settled

    def mark(self, batch: Batch) -> int:
        """Mark the rows as inexact for which the batch promises several tokens; return the number of the launch."""
        self._num_launched += 1
        self._latest[batch.rows[batch.sampled[batch.num_promised > 1]]] = self._num_launched
        return self._num_launched

    def settle(self, launch: int) -> None:
        """Mark the rows as exact that no launch after `launch` made inexact; the host knows the result of `launch`."""
        if self._num_in_flight is None:
            self._latest[self._latest == launch] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlaces:
    """The places of a step's tokens, on the device; all int32."""

    starts: Tensor
    """[G] first position of each grant."""
    positions: Tensor
    """[T]"""
    sources: Tensor
    """[T] places in the token table."""


def exact_places(step: VerifyArrays[Tensor], lengths: Tensor, tokens_per_row: int) -> ExactPlaces:
    """Return the places of a step's tokens, given the known tokens of all rows, `lengths` `[R] int32`."""
    known = lengths.index_select(0, step.rows)
    starts = torch.where(step.is_inexact > 0, torch.minimum(step.starts, known - 1), step.starts)
    positions = starts.index_select(0, step.token_grants) + step.token_offsets
    rows = step.rows.index_select(0, step.token_grants)
    return ExactPlaces(starts=starts, positions=positions, sources=rows * tokens_per_row + positions)


def masked_positions(batch: Batch, told: ToldDrafts | None) -> NDArray[np.int64]:
    """Return the verified positions, of V, that the masks of a step belong to, in their order."""
    firsts = np.cumsum(batch.num_promised) - batch.num_promised
    drafts = {} if told is None else told.by_grant()
    return np.concatenate(
        [firsts[grant] + np.arange(1 + len(drafts.get(grant, ())), dtype=np.int64) for grant in batch.constrained]
    )


def count_accepted(is_equal: Tensor, is_broken: Tensor, cells: Tensor, num_drafted: Tensor, width: int) -> Tensor:
    """Return `[S] int32`: the tokens that each grant yields.

    A grant yields its drafts up to the first that differs from the token drawn in its place, and that token. It ends
    before the first position where no token can be drawn.

    Args:
        is_equal: `[V] bool`, whether the draft after each verified position is the token drawn there.
        is_broken: `[V] bool`, whether no token can be drawn there.
        cells: `[V] int32`, place of each position in a matrix of S rows and `width` columns.
        num_drafted: `[S] int32`, drafts of each grant.
        width: W.
    """
    places = cells.long()
    equal = torch.zeros(len(num_drafted) * width, dtype=torch.int32, device=cells.device)
    sound = torch.ones_like(equal)
    equal = equal.index_copy_(0, places, is_equal.int()).view(-1, width)
    sound = sound.index_copy_(0, places, (~is_broken).int()).view(-1, width)
    steps = torch.arange(width, dtype=torch.int32, device=cells.device)
    equal *= steps < num_drafted[:, None]
    accepted = equal.cumprod(1).sum(1)
    return torch.minimum(accepted + 1, sound.cumprod(1).sum(1)).int()


@dataclass(frozen=True, slots=True, kw_only=True)
class Yielded:
    """The layout of the result of a step that verified drafts: V tokens, S counts, and S numbers of drafts."""

    promised: Int32
    """[S]"""
    stamps: Sequence[Stamp]
    """Before the drafts, after them, after acceptance, and after the drafter's extension."""

    @property
    def size(self) -> int:
        """Number of words of the result."""
        return int(self.promised.sum()) + 2 * len(self.promised)

    def places(self, result: StepResult) -> NDArray[np.int64]:
        """Return the verified position at which each token of the result was drawn."""
        firsts = np.cumsum(self.promised) - self.promised
        ends = np.cumsum(result.counts)
        return np.repeat(firsts - (ends - result.counts), result.counts) + np.arange(len(result.tokens))

    def result(self, words: Int32) -> StepResult:
        """Return the result in `words` `[size]`; the device has reached the end of the step."""
        num_tokens, num_grants = int(self.promised.sum()), len(self.promised)
        counts = words[num_tokens : num_tokens + num_grants]
        ends = np.cumsum(self.promised)
        places = np.arange(num_tokens) - np.repeat(ends - self.promised, self.promised)
        tokens = words[:num_tokens][places < np.repeat(counts, self.promised)]
        drafting_s, verifying_s, extending_s = (one.seconds_until(other) for one, other in pairwise(self.stamps))
        is_excluded = (counts == 0) & (words[ends - self.promised] == EXCLUDED)
        return StepResult(
            tokens=tokens,
            counts=counts,
            excluded=np.flatnonzero(is_excluded).tolist(),
            num_drafted=words[num_tokens + num_grants :],
            draft_s=drafting_s + extending_s,
            verify_s=verifying_s,
        )


def result_size(max_rows: int, width: int, *, ahead: bool) -> int:
    """Return the words of the largest result of a step that verifies, with as many drafts `ahead` if there are any."""
    return max_rows * (width + 2 + (width - 1) * ahead)


def num_mask_bytes(step: VerifyStep) -> int:
    """Return the size of a step's mask."""
    return int(step.mask.offsets[-1])
