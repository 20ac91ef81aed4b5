"""Runs policies over traces in virtual time; `python -m pagewood.schedpolicy.simulate` is its command line."""

from pagewood.schedpolicy.simulation.cache import BlockCache, PrefixCache
from pagewood.schedpolicy.simulation.decisions import Decision
from pagewood.schedpolicy.simulation.fleet import Fleet, simulate
from pagewood.schedpolicy.simulation.machine import Machine, load_machine
from pagewood.schedpolicy.simulation.operations import Failures, Operations, Scaling
from pagewood.schedpolicy.simulation.policies import Policies, policies_named
from pagewood.schedpolicy.simulation.presets import H100_8B, H100_70B
from pagewood.schedpolicy.simulation.report import Objective, Summary, summarise
from pagewood.schedpolicy.simulation.routed import FleetObservations, simulate_routed
from pagewood.schedpolicy.simulation.routed_request import RoutedSimRequest
from pagewood.schedpolicy.simulation.token_cache import OverTokens
from pagewood.schedpolicy.simulation.trace import Trace, TraceRequest
from pagewood.schedpolicy.simulation.trace_file import load_trace, save_trace
from pagewood.schedpolicy.simulation.workloads import generate

__all__ = [
    "H100_8B", "H100_70B", "BlockCache", "Decision", "Failures", "Fleet", "FleetObservations", "Machine", "Objective",
    "Operations", "OverTokens", "Policies", "PrefixCache", "RoutedSimRequest", "Scaling", "Summary", "Trace",
    "TraceRequest", "generate", "load_machine", "load_trace", "policies_named", "save_trace", "simulate",
    "simulate_routed", "summarise",
]  # fmt: skip
