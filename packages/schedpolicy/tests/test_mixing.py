"""What the ways in which prompts and decodes share steps do to a mixed load."""

from functools import cache

from pagewood.schedpolicy import budget_named
from pagewood.schedpolicy.simulation.choosers import chooser_named
from pagewood.schedpolicy.simulation.fleet import Fleet, simulate
from pagewood.schedpolicy.simulation.policies import policies_named
from pagewood.schedpolicy.simulation.presets import H100_8B
from pagewood.schedpolicy.simulation.report import Objective, Summary, summarise
from pagewood.schedpolicy.simulation.workloads import generate


@cache
def mixed_load(name: str) -> Summary:
    """Return what a load of chats with some long prompts among them experiences."""
    trace = generate("heavy-tailed", num_requests=400, rate=20.0, seed=0)
    fleet = Fleet(machine=H100_8B, num_pages=14_000, page_size=64, num_replicas=1)
    budget = budget_named(name, max_running=256, max_prefill_tokens=256)
    observed = simulate(
        trace,
        fleet,
        make_policies=lambda replica: policies_named("fcfs", page_size=64, budget=budget),
        router=chooser_named("round-robin", seed=0),
    )
    return summarise(observed, Objective())


def test_each_preset_has_its_price_under_a_mixed_load():
    first, stall_free, decode_first = map(mixed_load, ("prefill-first", "stall-free", "decode-first"))
    assert first.ttft.p50 < decode_first.ttft.p50
    assert decode_first.ttft.p50 <= stall_free.ttft.p50
    assert first.itl.p99 > 1.5 * decode_first.itl.p99
    assert stall_free.itl.p99 < decode_first.itl.p99
