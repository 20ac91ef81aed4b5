"""The instruction that draws the next token of each sampled grant, and its parameters.

A token depends on its row of logits, the sampling parameters, the seed and the position only.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.runner.cpu.compiled.drawing import draw as drawing
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.splitmix import Domain, seeds_of


def draw(logits: Buffer, choices: Buffer) -> Buffer:
    """Draw the tokens `[S, 1] int32` from `logits` `[S, V]`; `NO_NUMBER` or `NO_CHANCE` where there is none.

    Args:
        logits: of the sampled grants.
        choices: `[S, NUM_CHOICE_COLUMNS] float32`, the words of their parameters and the position of each token.
    """
    tokens = logits.tape.buffer(logits.rows, 1)
    logits.tape.write(
        drawing.draw, logits.rows, logits=logits, choices=choices, out=tokens, vocab_size=logits.size
    )  # fmt: skip
    return tokens


def independent(sampling: SamplingArrays) -> SamplingArrays:
    """Return the parameters with the seeds of drafts that are verified by rejection sampling."""
    return sampling.with_seeds(seeds_of(sampling.seeds, Domain.DRAFT))
