"""Test an engine without weights: an echo model, and random scenarios that compare it with a sequential oracle."""

from pagewood.engine.testing.echo import EchoRunner, oracle_tokens, oracle_vector
from pagewood.engine.testing.faulty import Fault, random_faults
from pagewood.engine.testing.parts import make_queue, make_request, make_space
from pagewood.engine.testing.scenario import (
    Arrival,
    Scenario,
    random_scenario,
    run_scenario,
    with_drafts,
    with_grammars,
    with_interruptions,
    with_logprobs,
    with_pooling,
    with_trees,
)

__all__ = [
    "Arrival",
    "EchoRunner",
    "Fault",
    "Scenario",
    "make_queue",
    "make_request",
    "make_space",
    "oracle_tokens",
    "oracle_vector",
    "random_faults",
    "random_scenario",
    "run_scenario",
    "with_drafts",
    "with_grammars",
    "with_interruptions",
    "with_logprobs",
    "with_pooling",
    "with_trees",
]
