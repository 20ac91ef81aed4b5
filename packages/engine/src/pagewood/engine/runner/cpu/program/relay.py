"""What a program needs to pass hidden states from stage to stage of a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.models.stage import NO_HEAD, HeadNeeds
from pagewood.engine.runner.cpu.compiled import exchange, hand_over
from pagewood.engine.runner.cpu.program.tape import Buffer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Channel:
    """Memory through which a rank gives rows to the same rank of the next stage; see `compiled.hand_over`."""

    places: NDArray[np.float32]
    """[L, D, PIECE]"""
    sent: NDArray[np.int64]
    """[L, LINE]"""
    taken: NDArray[np.int64]
    """[L, LINE]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChannelRelay:
    """`models.stage.Relay` between processes. All that goes in a step is witnessed on both sides."""

    incoming: Channel | None
    """From the stage before; None: this is the first one."""
    outgoing: Channel | None
    """To the next stage; None: this is the last one."""
    ended: NDArray[np.int64]
    """[>= 1], the first other than 0 when the group has ended: nothing is waited for any more."""
    states: NDArray[np.int64]
    """[>= 2], to which programs add the sums of the bits of what was sent, and of what was received."""
    needs: HeadNeeds = NO_HEAD
    """See `models.stage.Relay`."""

    def receive(self, tokens: Buffer, size: int) -> Buffer:
        """Write the instruction that waits for the rows of the stage before."""
        assert self.incoming is not None
        tape, own = tokens.tape, self.incoming
        out = tape.buffer(tokens.rows, size)
        tape.write(
            hand_over.receive_rows, out.rows, out=out, size=size, places=own.places, sent=own.sent, taken=own.taken,
            ended=self.ended,
        )  # fmt: skip
        tape.write(exchange.witness, out.rows, x=out, size=size, out=self.states[1:])
        return out

    def send(self, x: Buffer) -> None:
        """Write the instructions that give rows to the next stage."""
        assert self.outgoing is not None
        own = self.outgoing
        x.tape.write(exchange.witness, x.rows, x=x, size=x.size, out=self.states)
        x.tape.write(
            hand_over.send_rows, x.rows, x=x, size=x.size, places=own.places, sent=own.sent, taken=own.taken,
            ended=self.ended,
        )  # fmt: skip
