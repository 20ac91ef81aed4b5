"""What drafters that look text up accept when they follow recorded edits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagewood.engine.runner.cpu.drafts.drafting import LookupDrafter
from pagewood.engine.runner.cpu.drafts.ngram import NgramLookup
from pagewood.engine.runner.cpu.drafts.suffix import SuffixIndex
from speculation.prompts import Edit, recorded_edits

SIZES = (4, 8, 16)


def accepted_lengths(*, num_edits: int) -> Iterator[tuple[str, int, float, float]]:
    """Yield (drafter, most drafts, tokens of a step, share of the steps with drafts), over all edits.

    A step yields the accepted drafts and one token. The suffix index has seen the earlier edits.
    """
    edits = recorded_edits(num_edits)
    width = max(len(edit.prompt) + len(edit.answer) for edit in edits) + max(SIZES)
    for name, make in (("ngram", NgramLookup), ("suffix", SuffixIndex)):
        for size in SIZES:
            table = np.zeros((1, width), np.int32)
            drafter = make(table)
            runs = [_follow(drafter, table, edit, size) for edit in edits]
            num_tokens = sum(len(edit.answer) for edit in edits)
            num_steps, num_drafted = (sum(numbers) for numbers in zip(*runs, strict=True))
            yield name, size, num_tokens / num_steps, num_drafted / num_steps


def _follow(drafter: LookupDrafter, table: np.ndarray, edit: Edit, size: int) -> tuple[int, int]:
    """Draft along a recorded answer; return the steps, and those in which there was a draft."""
    answer = np.array(edit.answer, np.int32)
    end, num_steps, num_drafted = len(edit.prompt), 0, 0
    table[0, :end] = edit.prompt
    row, counts = np.zeros(1, np.int32), np.zeros(1, np.int32)
    drafter.begin(0, 0, end)
    done = 0
    while done < len(answer):
        ends = np.array([end + done], np.int32)
        drafter.advance(row, ends)
        drafter.draft(row, ends, np.array([size], np.int32), counts)
        drafts = table[0, end + done : end + done + counts[0]]
        rest = answer[done : done + len(drafts)]
        differs = np.flatnonzero(drafts[: len(rest)] != rest)
        accepted = int(differs[0]) if len(differs) else len(rest)
        yielded = answer[done : done + accepted + 1]
        table[0, end + done : end + done + len(yielded)] = yielded
        done += len(yielded)
        num_steps += 1
        num_drafted += counts[0] > 0
    return num_steps, num_drafted
