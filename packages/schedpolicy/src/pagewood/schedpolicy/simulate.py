"""Compares policies on a trace: `python -m pagewood.schedpolicy.simulate TRACE.jsonl --policy lpm,fcfs,fair`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from pagewood.schedpolicy.admission.deadlines import Feasibility
from pagewood.schedpolicy.admission.quotas import Quota, Quotas
from pagewood.schedpolicy.orders.names import ORDERS
from pagewood.schedpolicy.routing.autoscaler import Autoscaler
from pagewood.schedpolicy.routing.router import Router
from pagewood.schedpolicy.simulation.choosers import CHOOSERS, chooser_named
from pagewood.schedpolicy.simulation.fleet import Fleet, simulate
from pagewood.schedpolicy.simulation.machine import Machine, load_machine
from pagewood.schedpolicy.simulation.metrics import Observations
from pagewood.schedpolicy.simulation.operations import Failures, Operations, Scaling
from pagewood.schedpolicy.simulation.policies import (
    EXTRAS,
    SGLANG_ORDERS,
    VICTIMS,
    Policies,
    check_policy,
    policies_named,
)
from pagewood.schedpolicy.simulation.presets import PRESETS, preset_named
from pagewood.schedpolicy.simulation.report import Objective, Summary, json_of, row_of, summarise, table_of
from pagewood.schedpolicy.simulation.routed import FleetObservations, default_router, simulate_routed
from pagewood.schedpolicy.simulation.routed_request import RoutedSimRequest
from pagewood.schedpolicy.simulation.trace import Trace, scaled
from pagewood.schedpolicy.simulation.trace_file import MOONCAKE_BLOCK_SIZE, load_trace, save_trace
from pagewood.schedpolicy.simulation.workloads import WORKLOADS, generate
from pagewood.schedpolicy.steps.budget import MIXINGS, Budget, budget_named

_DEFAULT_REQUESTS = 1000
_DEFAULT_RATE = 4.0
_FLEET = "fleet"
"""The router of this package; the others are `CHOOSERS`."""
_OF_FLEET = ("places", "prefill_replicas", "mean_life", "restart_after", "restart_every", "autoscale", "startup")
"""Options that need `--router fleet`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, which is 2 with a line on stderr if the input is wrong."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except (ValueError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    if options.plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install pagewood-schedpolicy[sim]")
    if options.requests is not None and options.requests < 1:
        raise ValueError(f"--requests must be >= 1, got {options.requests}")
    trace = _trace(options)
    machine = _machine(options.step_model)
    fleet = Fleet(
        machine=machine,
        num_pages=_num_pages(options, machine),
        page_size=options.page_size,
        num_replicas=options.replicas,
        overlaps=options.overlap,
    )
    _check_fleet_options(options)
    objective = Objective(first_token_s=options.slo_ttft, per_token_s=options.slo_itl)
    budget = _budget(options)
    feasibility = Feasibility(model=machine.model, chunk_tokens=options.step_tokens) if options.refuse_late else None

    def policies(name: str, replica: int) -> Policies:
        limited = options.max_running_per_tenant
        return policies_named(
            name,
            page_size=options.page_size,
            budget=budget,
            victim=options.victim,
            quotas=None if limited is None or options.router == _FLEET else _quotas(limited),
            feasibility=feasibility,
            seed=options.seed + replica,
        )

    names = _names(options.policy)
    if options.save_trace is not None:
        save_trace(trace, options.save_trace)
    observed: dict[str, list[Observations]] = {}
    fleets: dict[str, FleetObservations] = {}
    for name in names:
        if options.router == _FLEET:
            fleets[name] = simulate_routed(
                trace,
                fleet,
                _operations(options),
                make_policies=lambda replica, name=name: policies(name, replica),
                router=_router(options),
            )
            observed[name] = fleets[name].replicas
        else:
            observed[name] = simulate(
                trace,
                fleet,
                make_policies=lambda replica, name=name: policies(name, replica),
                router=chooser_named(options.router, seed=options.seed),
            )
    summaries = {name: summarise(observations, objective) for name, observations in observed.items()}
    if options.json:
        run: dict[str, object] = {
            "trace": trace.name,
            "num_requests": len(trace.requests),
            "machine": machine.name,
            "num_replicas": fleet.num_replicas,
            "num_pages": fleet.num_pages,
            "page_size": fleet.page_size,
            "router": options.router,
            "seed": options.seed,
        }
        if fleets:
            run["fleets"] = {name: _counts_of(fleets[name]) for name in names}
        print(json_of(run, summaries), end="")
    else:
        _print_table(trace, fleet, options.router, summaries)
        for name, one in fleets.items():
            print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in _counts_of(one).items()))
    if options.plot is not None:
        from pagewood.schedpolicy.simulation.plots import draw

        draw(options.plot, observed, num_pages=fleet.num_pages, title=trace.name)


def _quotas(max_running: int) -> Quotas:
    return Quotas({}, default=Quota(max_running=max_running))


def _check_fleet_options(options: argparse.Namespace) -> None:
    if options.router != _FLEET:
        for name in _OF_FLEET:
            if getattr(options, name) is not None:
                raise ValueError(f"--router must be {_FLEET} with --{name.replace('_', '-')}, got {options.router}")
    if options.mean_life is None and options.restart_after is not None:
        raise ValueError("--mean-life must be given with --restart-after")
    if options.autoscale is None and options.startup is not None:
        raise ValueError("--autoscale must be given with --startup")


def _operations(options: argparse.Namespace) -> Operations:
    num_places = options.max_running if options.places is None else options.places
    failures, scaling = None, None
    if options.mean_life is not None:
        restart_s = 30.0 if options.restart_after is None else options.restart_after
        failures = Failures(mean_s=options.mean_life, restart_s=restart_s)
    if options.autoscale is not None:
        least, most = options.autoscale
        autoscaler = Autoscaler(min_replicas=least, max_replicas=most, num_places=num_places)
        scaling = Scaling(autoscaler=autoscaler, startup_s=60.0 if options.startup is None else options.startup)
    return Operations(
        num_places=num_places,
        num_prefill=options.prefill_replicas or 0,
        failures=failures,
        restart_every_s=options.restart_every,
        scaling=scaling,
        seed=options.seed,
    )


def _router(options: argparse.Namespace) -> Router[RoutedSimRequest] | None:
    if options.max_running_per_tenant is None:
        return None
    return default_router(options.page_size, options.seed, quotas=_quotas(options.max_running_per_tenant))


def _counts_of(observed: FleetObservations) -> dict[str, float]:
    return {field.name: getattr(observed, field.name) for field in fields(observed) if field.name != "replicas"}


def _budget(options: argparse.Namespace) -> Budget:
    if options.schedule_preset is None:
        return Budget(
            max_running=options.max_running,
            max_step_tokens=options.step_tokens,
            max_chunk_tokens=options.chunk_tokens,
            max_prefills=options.max_prefills,
            prefill_first=options.prefill_first,
            joint_prefill_tokens=options.joint_prefill_tokens,
        )
    if options.prefill_first or options.chunk_tokens is not None:
        raise ValueError("--schedule-preset must be given without --prefill-first and --chunk-tokens")
    return budget_named(
        options.schedule_preset,
        max_running=options.max_running,
        max_prefill_tokens=options.step_tokens,
        max_prefills=options.max_prefills,
        joint_prefill_tokens=options.joint_prefill_tokens,
    )


def _print_table(trace: Trace, fleet: Fleet, router: str, summaries: dict[str, Summary]) -> None:
    behind = f" behind {router}" if fleet.num_replicas > 1 else ""
    print(
        f"{trace.name}: {len(trace.requests)} requests in {trace.requests[-1].arrived_s:.0f} s on {fleet.num_replicas} "
        f"x {fleet.machine.name}{behind}, {fleet.num_pages} pages of {fleet.page_size} tokens each"
    )
    print(table_of([row_of(name, summary) for name, summary in summaries.items()]))


def _trace(options: argparse.Namespace) -> Trace:
    if (options.trace is None) == (options.workload is None):
        raise ValueError("give either a TRACE file or --workload")
    if options.workload is not None:
        num_requests = _DEFAULT_REQUESTS if options.requests is None else options.requests
        trace = generate(options.workload, num_requests=num_requests, rate=options.rate, seed=options.seed)
    else:
        trace = load_trace(options.trace, block_size=options.block_size)
        if options.requests is not None:
            trace = Trace(name=trace.name, requests=trace.requests[: options.requests], block_size=trace.block_size)
    return scaled(trace, rate=options.speed)


def _machine(name: str) -> Machine:
    if any(name == preset.name for preset in PRESETS):
        return preset_named(name)
    path = Path(name)
    if not path.exists():
        raise ValueError(f"--step-model must be a file or one of {', '.join(p.name for p in PRESETS)}, got {name!r}")
    return load_machine(path)


def _num_pages(options: argparse.Namespace, machine: Machine) -> int:
    if options.cache_pages is not None:
        return options.cache_pages
    if not machine.kv_tokens:
        raise ValueError(f"--cache-pages must be given, since {machine.name} has no kv_tokens")
    return machine.kv_tokens // max(1, options.page_size)


def _names(policies: str) -> list[str]:
    names = [name.strip().replace("_", "-") for name in policies.split(",")]
    for name in names:
        check_policy(name)
    return list(dict.fromkeys(names))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagewood.schedpolicy.simulate",
        description="Run scheduling policies over a trace, in virtual time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    what = parser.add_argument_group("trace")
    what.add_argument("trace", metavar="TRACE", nargs="?", type=Path, help="JSON lines: Mooncake, or OpenAI requests")
    what.add_argument(
        "--workload", choices=[name for name, _ in WORKLOADS], help="generate a trace instead of reading a file"
    )
    what.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="number of requests: the first N of a file; default 1,000 if generated",
    )
    what.add_argument("--rate", type=float, default=_DEFAULT_RATE, metavar="R", help="requests/s of a generated trace")
    what.add_argument("--speed", type=float, default=1.0, metavar="X", help="speed-up of the trace")
    what.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    what.add_argument(
        "--block-size", type=int, default=MOONCAKE_BLOCK_SIZE, metavar="T", help="tokens per hash id in the file"
    )
    what.add_argument("--save-trace", type=Path, metavar="FILE", help="also write the trace as Mooncake lines")
    where = parser.add_argument_group("replicas")
    where.add_argument("--step-model", default=PRESETS[0].name, metavar="FILE", help="a file, h100-8b or h100-70b")
    where.add_argument(
        "--cache-pages", type=int, metavar="P", help="pages of KV per replica; default: from the step model"
    )
    where.add_argument("--page-size", type=int, default=64, metavar="T", help="tokens per page")
    where.add_argument("--replicas", type=int, default=1, metavar="N", help="1 to 1,000")
    where.add_argument("--overlap", action="store_true", help="each step is decided while the one before it runs")
    where.add_argument(
        "--router",
        choices=(*CHOOSERS, _FLEET),
        default=CHOOSERS[0],
        help=f"how to choose a replica; {_FLEET} is the router of this package, the next options are for it",
    )
    where.add_argument("--places", type=int, metavar="N", help="requests of a replica at once; default: --max-running")
    where.add_argument("--prefill-replicas", type=int, metavar="N", help="replicas that only compute prompts")
    where.add_argument("--mean-life", type=float, metavar="S", help="replicas die, after S on average")
    where.add_argument("--restart-after", type=float, metavar="S", help="another starts after S; default: 30")
    where.add_argument("--restart-every", type=float, metavar="S", help="the oldest replica is replaced every S")
    where.add_argument(
        "--autoscale", type=int, nargs=2, metavar=("MIN", "MAX"), help="the number of replicas follows the load"
    )
    where.add_argument("--startup", type=float, metavar="S", help="a new replica takes S to start; default: 60")
    policy = parser.add_argument_group("policies")
    orders = ", ".join((*ORDERS, *SGLANG_ORDERS))
    policy.add_argument(
        "--policy",
        default="lpm,fcfs",
        metavar="A,B",
        help=f"one or more of {orders}; each with +{', +'.join(EXTRAS)}",
    )
    policy.add_argument("--max-running", type=int, default=256, metavar="N", help="requests that run at once")
    policy.add_argument("--step-tokens", type=int, default=2048, metavar="T", help="tokens of one step")
    policy.add_argument("--chunk-tokens", type=int, metavar="T", help="prompt tokens of one request in one step")
    policy.add_argument("--max-prefills", type=int, default=8, metavar="N", help="prompts computed in one step")
    policy.add_argument(
        "--joint-prefill-tokens",
        type=int,
        metavar="N",
        help="a step gets no further prompt when those that end in it have this many tokens together (default: none)",
    )
    policy.add_argument("--prefill-first", action="store_true", help="steps with prompts do not decode")
    policy.add_argument(
        "--schedule-preset",
        choices=MIXINGS,
        help="how prompts and decodes share steps, as in pagewood-engine; --step-tokens is its chunked_prefill_size",
    )
    policy.add_argument(
        "--victim", choices=VICTIMS, default=VICTIMS[0], help="which request to preempt when memory runs out"
    )
    policy.add_argument(
        "--max-running-per-tenant",
        type=int,
        metavar="N",
        help="quota of every tenant: on each replica, or with --router fleet on all together",
    )
    policy.add_argument("--refuse-late", action="store_true", help="refuse requests that would miss their deadline")
    out = parser.add_argument_group("results")
    out.add_argument("--slo-ttft", type=float, default=2.0, metavar="S", help="served well: first token within")
    out.add_argument("--slo-itl", type=float, default=0.1, metavar="S", help="served well: mean time between tokens")
    out.add_argument("--json", action="store_true", help="print all results as JSON")
    out.add_argument("--plot", type=Path, metavar="DIR", help="draw CDFs and a timeline there; needs matplotlib")
    return parser


if __name__ == "__main__":
    sys.exit(main())
