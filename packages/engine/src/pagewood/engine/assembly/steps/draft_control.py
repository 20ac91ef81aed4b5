"""The policy that decides how much the runner drafts, with the cost of this machine's steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic

from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.steps.step_times import measure_draft_times, measure_step_times
from pagewood.engine.core.loop import EngineInfo, Runner
from pagewood.engine.core.request import Request
from pagewood.schedpolicy import DraftControl, DraftCost, StepCost, WeightByUrgency

_log = logging.getLogger(__name__)


def draft_control(
    config: EngineConfig, *, computes_padding: bool = False, are_cores_taken: Callable[[], bool] | None = None
) -> DraftControl[Request] | None:
    """Return the policy of an engine, or None if it does not speculate.

    Args:
        config: whether and how much to draft.
        computes_padding: whether the runner computes all granted positions, even if it drafts fewer.
        are_cores_taken: see `DraftControl`.
    """
    if config.speculative == "off":
        return None
    return DraftControl(
        config.speculative_num_tokens,
        mode=config.speculative_control,
        computes_padding=computes_padding,
        weight=WeightByUrgency(monotonic),
        are_cores_taken=are_cores_taken,
    )


def measure_cost(control: DraftControl[Request], config: EngineConfig, info: EngineInfo, runner: Runner) -> None:
    """Measure the steps of a runner that has not computed anything yet, and give the policy their cost.

    A policy of fixed lengths needs none.
    """
    if config.speculative_control == "fixed":
        return
    times = measure_step_times(
        runner,
        num_rows=config.num_rows,
        max_length=info.max_length,
        num_pages=info.num_pages,
        page_size=info.page_size,
        has_states=info.num_states > 0,
    )
    cases = measure_draft_times(
        runner,
        num_rows=config.num_rows,
        max_length=info.max_length,
        num_drafts=config.speculative_num_tokens,
        has_states=info.num_states > 0,
    )
    draft_cost = _draft_cost(cases)
    control.set_cost(StepCost(times.sizes, times.seconds), draft_cost)
    pairs = zip(times.sizes, times.seconds, strict=True)
    _log.info(
        "cost of steps: %s; of drafts: %.0f us a step, %.0f us a position, %.1f us a token",
        ", ".join(f"{size} tokens {seconds * 1e3:.2f} ms" for size, seconds in pairs),
        draft_cost.per_step_s * 1e6,
        draft_cost.per_pass_s * 1e6,
        draft_cost.per_token_s * 1e6,
    )


def _draft_cost(cases: Sequence[tuple[int, int, float]]) -> DraftCost:
    """Return the cost fitted to the cases of `measure_draft_times`, with no negative part."""
    measured = [case for case in cases if case[2] > 0]
    if not measured:
        return DraftCost()
    num_passes, num_tokens, seconds = measured[0]
    per_pass_s = per_token_s = 0.0
    for more_passes, more_tokens, more_s in measured[1:]:
        slower_s = max(0.0, more_s - seconds)
        if more_passes > num_passes:
            per_pass_s = slower_s / (more_passes - num_passes)
        else:
            per_token_s = slower_s / (more_tokens - num_tokens)
        num_passes, num_tokens, seconds = more_passes, more_tokens, more_s
    per_pass_s = max(0.0, per_pass_s - per_token_s)
    first_passes, first_tokens, first_s = measured[0]
    per_step_s = max(0.0, first_s - per_pass_s * first_passes - per_token_s * first_tokens)
    return DraftCost(per_step_s=per_step_s, per_pass_s=per_pass_s, per_token_s=per_token_s)
