"""Compares policies on workloads: `python -m pagewood.schedpolicy.simulation.gallery FOLDER`.

Writes a picture of every case into FOLDER/gallery, and the tables into FOLDER/README.md, between two comments.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagewood.schedpolicy.admission.deadlines import Feasibility
from pagewood.schedpolicy.admission.quotas import Quota, Quotas
from pagewood.schedpolicy.orders.ranked import ByLongestMatch, RankedOrder
from pagewood.schedpolicy.simulation.choosers import CHOOSERS, chooser_named
from pagewood.schedpolicy.simulation.fleet import Fleet, simulate
from pagewood.schedpolicy.simulation.metrics import Observations
from pagewood.schedpolicy.simulation.policies import DEFAULT_BUDGET, Policies, policies_named
from pagewood.schedpolicy.simulation.presets import H100_8B
from pagewood.schedpolicy.simulation.report import Objective, Summary, summarise
from pagewood.schedpolicy.simulation.request import SimRequest
from pagewood.schedpolicy.simulation.trace import Trace
from pagewood.schedpolicy.simulation.workloads import generate

TITLE = """# Which policy wins on which workload

Made by `nox -s gallery`, which runs `python -m pagewood.schedpolicy.simulation.gallery`. A request is served well if
its first token comes within 2 s and the mean time between its tokens is at most 0.1 s. A policy that wins here need not
win on your traffic; use the simulator to find out.
"""

Column = tuple[str, Callable[[Summary], str]]
"""Heading, and the cell for a summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a case."""

    policy: str
    router: str = "round-robin"
    tune: Callable[[Policies], Policies] = lambda policies: policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload, and the ways to run it that are compared.

    Attributes:
        name: Name of the picture.
        title: Title of the section.
        finding: What the table shows, in words.
        workload: Name of a generated trace.
        num_requests: Number of requests.
        rate: Requests per second.
        num_pages: Pages of KV of a replica.
        num_replicas: Number of replicas.
        ways: Ways to run the case, by the name in the table.
        columns: Columns of the table.
        wins_by: Criterion for the winner, in words.
        score: The criterion as a number; the highest wins.
    """

    name: str
    title: str
    finding: str
    workload: str
    num_requests: int
    rate: float
    num_pages: int = H100_8B.kv_tokens // 64
    num_replicas: int = 1
    ways: Mapping[str, Way]
    columns: Sequence[Column]
    wins_by: str = "requests served well"
    score: Callable[[Summary], float] = lambda summary: summary.goodput

    def trace(self) -> Trace:
        """Return the trace."""
        return generate(self.workload, num_requests=self.num_requests, rate=self.rate, seed=0)

    def run(self) -> dict[str, list[Observations]]:
        """Return the observations of each way."""
        trace = self.trace()
        fleet = Fleet(machine=H100_8B, num_pages=self.num_pages, page_size=64, num_replicas=self.num_replicas)
        return {
            name: simulate(
                trace,
                fleet,
                make_policies=lambda replica, way=way: way.tune(policies_named(way.policy, page_size=64, seed=replica)),
                router=chooser_named(way.router, seed=0),
            )
            for name, way in self.ways.items()
        }


def _tenants(*names: str, percentile: str) -> Callable[[Summary], str]:
    """Return a function that formats the worst time to first token of some tenants."""

    def worst(summary: Summary) -> str:
        return f"{max(getattr(summary.tenants[name].ttft, percentile) for name in names):.3g}"

    return worst


TTFT: tuple[Column, ...] = (
    ("TTFT p50, s", lambda summary: f"{summary.ttft.p50:.3g}"),
    ("p99", lambda summary: f"{summary.ttft.p99:.3g}"),
)
GOODPUT: Column = ("served well", lambda summary: f"{summary.goodput:.0%}")
HITS: Column = ("hit rate", lambda summary: f"{summary.hit_rate:.1%}")
OVERTAKEN: Column = ("overtaken by, s", lambda summary: f"{summary.overtaken_s:.3g}")
QUIET = ("ada", "bob", "cyd", "dan")


def _aged(tokens_per_s: float) -> Way:
    rank = ByLongestMatch(age_weight=tokens_per_s)
    return Way(
        policy="lpm",
        tune=lambda policies: replace(policies, order=RankedOrder[SimRequest](rank, reads_match=True, notified=True)),
    )


CASES: tuple[Case, ...] = (
    Case(
        name="starvation",
        title="Cold requests among hot ones (SGLang #31954)",
        finding=(
            "Without ageing, the order serves more than twice as many requests well as fcfs does, but the 5% without a "
            "cached prefix wait until a wave of load is over. With ageing, only requests that arrive less than "
            "`longest match / age_weight` after another are admitted before it, which is 32 s at the default 1,000 "
            "tokens a second and 8 s at 4,000. Prompts share steps, so a short one may end before a long one that was "
            "admitted earlier, by up to 2 s here, in fcfs too. The number of requests served well is greatest if the "
            "few starve; a bound has this cost."
        ),
        workload="hot-and-cold",
        num_requests=4000,
        rate=14,
        ways={
            "fcfs": Way(policy="fcfs"),
            "lpm, no ageing": Way(policy="lpm-unaged"),
            "lpm (1,000/s)": Way(policy="lpm"),
            "lpm (4,000/s)": _aged(4000),
        },
        columns=(
            ("hot TTFT p50, s", _tenants("hot", percentile="p50")),
            ("hot p99", _tenants("hot", percentile="p99")),
            ("cold p50", _tenants("cold", percentile="p50")),
            ("cold max", _tenants("cold", percentile="longest")),
            OVERTAKEN,
            GOODPUT,
        ),
    ),
    Case(
        name="turns",
        title="Conversations that outgrow the cache",
        finding=(
            "Serving requests with the same prefix together, before it is evicted, saves prefill: orders that read the "
            "cache beat those that do not, and the tree order beats the longest match."
        ),
        workload="multi-turn",
        num_requests=4000,
        rate=20,
        num_pages=3000,
        ways={name: Way(policy=name) for name in ("fcfs", "lpm", "dfs-weight")},
        columns=(*TTFT, HITS, GOODPUT),
    ),
    Case(
        name="tail",
        title="A few long prompts",
        finding=(
            "If lengths differ by a factor of 500, shortest first serves nearly all requests well, and the few longest "
            "wait seven times as long as in fcfs."
        ),
        workload="heavy-tailed",
        num_requests=4000,
        rate=45,
        ways={name: Way(policy=name) for name in ("fcfs", "shortest", "lof")},
        columns=(*TTFT, ("max", lambda summary: f"{summary.ttft.longest:.3g}"), OVERTAKEN, GOODPUT),
    ),
    Case(
        name="tenants",
        title="One tenant floods",
        finding=(
            "With fcfs, all tenants wait for the flood. Fair shares keep the services of waiting tenants within a "
            "bound of each other, so tenants with few requests are hardly delayed, and the flood gets all the rest. "
            "A quota protects the others as well, but leaves the machine idle when they send nothing."
        ),
        workload="noisy-tenant",
        num_requests=4000,
        rate=16,
        ways={
            "fcfs": Way(policy="fcfs"),
            "fcfs, quota of 32": Way(
                policy="fcfs",
                tune=lambda policies: replace(policies, quotas=Quotas({}, default=Quota(max_running=32))),
            ),
            "fair": Way(policy="fair"),
        },
        columns=(
            ("others' TTFT p50, s", _tenants(*QUIET, percentile="p50")),
            ("others' p99", _tenants(*QUIET, percentile="p99")),
            ("flood's p50", _tenants("mallory", percentile="p50")),
            ("service gap, 1,000 units", lambda summary: f"{summary.service_gap / 1e3:.3g}"),
            GOODPUT,
        ),
    ),
    Case(
        name="deadlines",
        title="Deadlines in a burst",
        finding=(
            "Earliest deadline first meets more deadlines than fcfs, until the load exceeds the machine: then it "
            "spends time on requests that are already late. Refusing on arrival what would be late leaves that time "
            "to the others."
        ),
        workload="deadlines",
        num_requests=4000,
        rate=40,
        ways={
            "fcfs": Way(policy="fcfs"),
            "edf": Way(policy="edf"),
            "edf, late refused": Way(
                policy="edf",
                tune=lambda policies: replace(
                    policies,
                    feasibility=Feasibility(
                        model=H100_8B.model, chunk_tokens=DEFAULT_BUDGET.max_step_tokens, output_ratio=0.7
                    ),
                ),
            ),
        },
        columns=(
            *TTFT,
            ("deadlines met", lambda summary: f"{summary.deadlines_met:.0%}"),
            ("refused", lambda summary: f"{summary.num_refused}"),
        ),
        wins_by="deadlines met",
        score=lambda summary: summary.deadlines_met,
    ),
    Case(
        name="fleet",
        title="64 replicas behind a router",
        finding=(
            "If conversations continue, sending them to the same replica is worth more than an even load: the "
            "prefix-aware router has a far higher hit rate, so all requests wait less."
        ),
        workload="multi-turn",
        num_requests=20_000,
        rate=900,
        num_pages=3000,
        num_replicas=64,
        ways={router: Way(policy="lpm", router=router) for router in CHOOSERS},
        columns=(*TTFT, HITS, ("busy", lambda summary: f"{summary.busy:.0%}"), GOODPUT),
        wins_by="median time to first token",
        score=lambda summary: -summary.ttft.p50,
    ),
)


def table_of(case: Case, runs: Mapping[str, Sequence[Observations]]) -> str:
    """Return the table of a case as Markdown, with the winner in bold."""
    summaries = {name: summarise(observed, Objective()) for name, observed in runs.items()}
    winner = max(summaries, key=lambda name: case.score(summaries[name]))
    lines = [("", *(heading for heading, _ in case.columns)), ("---",) * (len(case.columns) + 1)]
    for name, summary in summaries.items():
        cells = (format_cell(summary) for _, format_cell in case.columns)
        lines.append((f"**{name}**" if name == winner else name, *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section_of(case: Case, runs: Mapping[str, Sequence[Observations]]) -> str:
    """Return the section of a case as Markdown."""
    what = f"`{case.workload}`, {case.num_requests:,} requests at {case.rate:g}/s"
    return (
        f"## {case.title}\n\n{case.finding}\n\n{what}, {case.num_replicas} x {H100_8B.name}, "
        f"{case.num_pages:,} pages of 64 tokens; the best by {case.wins_by} is in bold:\n\n{table_of(case, runs)}\n\n"
        f"![{case.title}]({case.name}.png)\n"
    )


def main(arguments: Sequence[str]) -> int:
    """Write `README.md` and the pictures into a folder; return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m pagewood.schedpolicy.simulation.gallery FOLDER", file=sys.stderr)
        return 2
    from pagewood.schedpolicy.simulation import plots

    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    sections: list[str] = []
    for case in CASES:
        runs = case.run()
        sections.append(section_of(case, runs))
        figure, axes = plots.new_figure(case.title, 2)
        plots.draw_cdf(axes[0], runs, lambda record: record.first_token_after_s, "time to first token, s")
        plots.draw_timeline(axes[1], runs, lambda moment: moment.num_waiting, "waiting")
        plots.save(figure, folder / f"{case.name}.png")
    (folder / "README.md").write_text("\n".join([TITLE, *sections]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
