"""What the runner requires of drafters that look tokens up, and of drafters that compute inside its program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.head import Head
from pagewood.engine.runner.cpu.compiled.layout import Outcome
from pagewood.engine.runner.cpu.program.passes import Accepted, Grants, HeldLogits, Pass
from pagewood.engine.runner.cpu.program.tape import Buffer, Tape

T = TypeVar("T")


class LookupDrafter(Protocol):
    """Finds drafts in tokens that are known, in the runner's table of tokens. The runner calls it on its worker.

    Legend: S rows.
    """

    @property
    def follows(self) -> bool:
        """Whether it keeps what `begin` and `advance` say; otherwise they are not called."""
        ...

    def begin(self, row: int, namespace: int, num_prompt: int) -> None:
        """Note that a row has a new request, with this many known tokens."""
        ...

    def advance(self, rows: Int32, ends: Int32) -> None:
        """Note that rows `[S]` have tokens up to `ends` `[S]`; called before drafts, and before a row is given away."""
        ...

    def draft(self, rows: Int32, ends: Int32, most: Int32, counts: Int32) -> None:
        """Write drafts to the runner's table, `tokens[rows[i], ends[i] : ends[i] + counts[i]]`, and their `counts`.

        Args:
            rows: `[S] int32`, rows to draft for.
            ends: `[S] int32`, number of known tokens of each.
            most: `[S] int32`, most draft tokens of each.
            counts: `[S] int32`, written, at most `most`.
        """
        ...


class DraftCounts(NamedTuple):
    """What a drafter found in its KV memory, in the order of `Tally`."""

    num_ready: int = 0
    """Drafts of a row that needed only tokens which no earlier step could compute."""
    num_rebuilt: int = 0
    """Positions that were computed again, or for the first time, because their slots were not valid."""
    num_postponed: int = 0
    """Times that a row got no drafts: too many of its slots were not valid, or the head had no state of the row yet."""
    num_short: int = 0
    """Times that a row went on with a shorter context, because slots were not valid and could not be computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterParts:
    """What a drafter drafts with that changes with the weights of its target."""

    model: Decoder[Buffer] | Head[Buffer]
    root: int
    """Stands for the weights on which the KV of the drafter depends, see `ValidSlots`."""


class ProgramDrafter(Protocol):
    """Drafts with a model, by instructions of the runner's program.

    The program is written anew when a step needs more memory; the methods with a tape are then called again. Their
    passes get scopes of their own on that tape.
    """

    has_rest: bool
    """Whether the step that was planned last runs the instructions of `record_rest`."""
    captures: bool
    """Whether the step that was planned last runs the instructions of `record_target` because a later step reads what
    they keep. A step without drafts, rest and captures runs a program without the drafter."""

    @property
    def counts(self) -> DraftCounts:
        """What the drafter found in its KV memory, since it was made; `plan` counts."""
        ...

    def exchange(self, parts: DrafterParts) -> DrafterParts:
        """Draft with other weights, or for those of another target; return what it had before.

        The program is written anew afterwards.
        """
        ...

    def plan(self, batch: Batch, grants: Grants | None) -> None:
        """Decide on the worker what a step drafts, before its passes are laid out.

        It may lower `grants.counts` of grants that promise more than one token: such a grant has fewer drafts.

        Args:
            batch: of the step; its page updates and token updates have been applied.
            grants: of the target's pass; None: the step draws no tokens.
        """
        ...

    def record_drafts(self, tape: Tape, verify: Pass) -> HeldLogits | None:
        """Write instructions that run before the target's, in steps in which a grant promises more than one token.

        They write drafts to `verify.tokens`. Until then these tokens are what the token table happens to hold. A draft
        must be a token of the vocabulary.

        Returns:
            The logits that the drafts were drawn from, with seeds of `Domain.DRAFT`: rejection
            sampling verifies them. None: the target's draws are compared with the drafts.
        """
        ...

    @property
    def captured(self) -> Sequence[int]:
        """Numbers of the target's hidden states that it reads, see `Decoder.states`."""
        ...

    def record_target(self, tape: Tape, verify: Pass, hidden: Sequence[Buffer]) -> None:
        """Write instructions that run behind the target's.

        Args:
            tape: to write to.
            verify: pass of the target, or this rank's part of it.
            hidden: `[T, E]` each, the states of `captured`.
        """
        ...

    def record_rest(self, tape: Tape, verify: Pass, accepted: Accepted) -> None:
        """Write instructions that run after tokens have been accepted, in steps with `has_rest`."""
        ...

    def lay_out(self, scopes: NDArray[np.int64], counts: NDArray[np.int64], grants: Grants) -> Outcome:
        """Lay out the drafter's passes for a step, on the worker, after that of the target; see `Pass.lay_out`.

        Args:
            scopes: of the run; the target's is complete.
            counts: of the run.
            grants: of the target's pass.

        Returns:
            DONE, or TOO_LARGE after writing to `counts` how much is needed; it is then called again.
        """
        ...


def exchanged(drafter: ProgramDrafter, parts: DrafterParts, write: Callable[[], T]) -> T:
    """Return the program that `write` writes with other parts of a drafter, which keeps its own if there is no memory.

    Raises:
        MemoryError: that is so.
    """
    before = drafter.exchange(parts)
    try:
        return write()
    except MemoryError:
        drafter.exchange(before)
        raise
