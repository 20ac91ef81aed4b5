"""Test a runner (`check_runner`), and an engine without weights: an echo model with its oracle, and a simulated device
that makes the work of the host measurable.
"""

from pagewood.engine.testing.conformance import RunnerSize, check_runner
from pagewood.engine.testing.echo import EchoRunner, oracle_tokens, oracle_vector
from pagewood.engine.testing.made_up_tokens import MadeUpTokens, made_up_token
from pagewood.engine.testing.simulated_device import DeviceTimes, SimulatedDevice, VirtualClock, WallClock, seconds_by
from pagewood.engine.testing.simulated_engine import SimulatedEngine, simulated_engine

__all__ = [
    "DeviceTimes",
    "EchoRunner",
    "MadeUpTokens",
    "RunnerSize",
    "SimulatedDevice",
    "SimulatedEngine",
    "VirtualClock",
    "WallClock",
    "check_runner",
    "made_up_token",
    "oracle_tokens",
    "oracle_vector",
    "seconds_by",
    "simulated_engine",
]
