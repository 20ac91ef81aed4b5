"""Test an engine without weights: an echo model, and random scenarios that compare it with a sequential oracle."""

from pagewood.engine.testing.echo import EchoRunner, oracle_tokens
from pagewood.engine.testing.parts import make_queue, make_request, make_space
from pagewood.engine.testing.scenario import Arrival, Scenario, random_scenario, run_scenario

__all__ = [
    "Arrival",
    "EchoRunner",
    "Scenario",
    "make_queue",
    "make_request",
    "make_space",
    "oracle_tokens",
    "random_scenario",
    "run_scenario",
]
