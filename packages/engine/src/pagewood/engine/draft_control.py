"""The policy that decides how much the runner drafts, with the cost of this machine's steps."""

from __future__ import annotations

import logging

from pagewood.engine.api import EngineConfig
from pagewood.engine.core.loop import EngineInfo, Runner
from pagewood.engine.core.request import Request
from pagewood.engine.step_times import measure_step_times
from pagewood.schedpolicy import DraftControl, StepCost

_log = logging.getLogger(__name__)


def draft_control(config: EngineConfig, *, computes_padding: bool = False) -> DraftControl[Request] | None:
    """Return the policy of an engine, or None if it does not speculate.

    Args:
        config: says whether and how much is drafted.
        computes_padding: whether the runner computes as many positions as are granted, even if it drafts fewer.
    """
    if config.speculative == "off":
        return None
    return DraftControl(
        config.speculative_num_tokens, mode=config.speculative_control, computes_padding=computes_padding
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
    )
    control.set_cost(StepCost(times.sizes, times.seconds))
    pairs = zip(times.sizes, times.seconds, strict=True)
    _log.info("cost of steps: %s", ", ".join(f"{size} tokens {seconds * 1e3:.2f} ms" for size, seconds in pairs))
