"""Test an engine without weights: an echo model, random scenarios that compare it with a sequential oracle, and a
simulated device that makes the work of the host measurable. Test a runner: `check_runner`.
"""

from pagewood.engine.testing.conformance import RunnerSize, check_runner
from pagewood.engine.testing.echo import EchoRunner, oracle_tokens, oracle_vector
from pagewood.engine.testing.faulty import Fault, random_faults
from pagewood.engine.testing.made_up_tokens import MadeUpTokens, made_up_token
from pagewood.engine.testing.parts import make_queue, make_request, make_space
from pagewood.engine.testing.scenario import (
    Arrival,
    Scenario,
    random_scenario,
    run_scenario,
    with_drafts,
    with_grammars,
    with_holds,
    with_interruptions,
    with_limits,
    with_logprobs,
    with_pooling,
    with_trees,
    with_urgency,
)
from pagewood.engine.testing.simulated_device import DeviceTimes, SimulatedDevice, VirtualClock, WallClock, seconds_by
from pagewood.engine.testing.simulated_engine import SimulatedEngine, simulated_engine

__all__ = [
    "Arrival",
    "DeviceTimes",
    "EchoRunner",
    "Fault",
    "MadeUpTokens",
    "RunnerSize",
    "Scenario",
    "SimulatedDevice",
    "SimulatedEngine",
    "VirtualClock",
    "WallClock",
    "check_runner",
    "made_up_token",
    "make_queue",
    "make_request",
    "make_space",
    "oracle_tokens",
    "oracle_vector",
    "random_faults",
    "random_scenario",
    "run_scenario",
    "seconds_by",
    "simulated_engine",
    "with_drafts",
    "with_grammars",
    "with_holds",
    "with_interruptions",
    "with_limits",
    "with_logprobs",
    "with_pooling",
    "with_trees",
    "with_urgency",
]
