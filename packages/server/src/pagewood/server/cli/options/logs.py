"""Options for logs, metrics and traces of the server, and for its reaction to a failed process."""

from __future__ import annotations

from pagewood.server.cli.options.page import Group, Page
from pagewood.server.metrics.metrics import COMPAT
from pagewood.server.observe import logs


def add_log_options(page: Page) -> None:
    """Add the groups."""
    group = page.group("logs, metrics, events")
    group.setting(
        "--log-level",
        choices=logs.LEVELS,
        metavar="LEVEL",
        help="debug, info, warning or error (default: %(default)s)",
    )
    group.setting(
        "--log-format",
        help="lines of text, or JSON objects (default: %(default)s)",
    )
    group.add("--no-metrics", action="store_false", dest="metrics", help="measure nothing, and do not serve /metrics")
    group.add(
        "--metrics-compat",
        action="append",
        choices=COMPAT,
        default=[],
        help="serve /metrics under these names, too; repeatable",
        more="They have the labels and buckets of that server. Without it, names begin with pagewood_.",
    )
    group.add(
        "--otlp-endpoint",
        metavar="URL",
        help="send traces to this OTLP receiver over HTTP (default: none)",
        more="Such as http://localhost:4318; needs pagewood-server[otel].",
    )
    _add_decision_log(group)
    _add_kv_events(group)


def _add_decision_log(group: Group) -> None:
    group.add(
        "--decision-log",
        metavar="FILE",
        help="every decision, for `pagewood why` and `replay` (default: none)",
        more="Tokens are renamed. An existing file gets .1 behind its name.",
    )
    group.setting(
        "--decision-log-mb",
        metavar="MB",
        help="most space of that file and of FILE.1 together (default: %(default)s)",
        more="Above 0; an MB is 1e6 bytes.",
    )
    group.add(
        "--decision-log-tokens",
        action="store_true",
        help="write the real tokens and namespaces of requests to it",
    )


def _add_kv_events(group: Group) -> None:
    group.add(
        "--kv-events",
        metavar="ADDRESS",
        help="publish cache changes for routers over ZeroMQ (default: none)",
        more="At an address such as tcp://*:5557, as vLLM does. Events contain the tokens of prompts.",
    )
    group.add(
        "--kv-events-replay",
        metavar="ADDRESS",
        help="repeat what a subscriber has lost (default: none)",
        more="At an address such as tcp://*:5558.",
    )
    group.setting(
        "--kv-events-form",
        help="vLLM's maps, or arrays for older readers (default: %(default)s)",
    )
    group.setting(
        "--kv-events-topic",
        metavar="TOPIC",
        help="first frame of each message (default: empty)",
        more="llm-d's router reads only kv@POD@MODEL, with the pod's name or address and the served model's name.",
    )


def add_failure_options(page: Page) -> None:
    """Add the group."""
    group = page.group("stopping and failures")
    group.setting(
        "--drain-seconds",
        dest="drain_s",
        metavar="S",
        help="time for running requests when it is stopped (default: %(default)s)",
        more="After SIGINT (Ctrl-C) or SIGTERM. A second signal ends them at once.",
    )
    group.setting(
        "--watchdog-seconds",
        dest="watchdog_s",
        metavar="S",
        help="restart an engine that is stuck for this long (default: never)",
        more="It is stuck if its device, loop or admission makes no progress, or if it is silent. 3 or more, and "
        "longer than any step takes. Without it, it is reported with the stacks of all processes.",
    )
    group.setting(
        "--max-retries",
        metavar="N",
        help="times a request is sent again if a process dies (default: %(default)s)",
        more="It goes on behind what its client has, which notices a pause. The number is that of deaths in a row in "
        "which it has not got on; after two, such requests run one by one. 0: a death ends it with an error.",
    )
    group.setting(
        "--restart-order",
        help="when an engine that is replaced ends (default: %(default)s)",
        more="By POST /restart_engine, or SIGHUP without a key file. new-first: the next one loads beside it, and "
        "takes its requests over; old-first: it ends first, as there need not be memory for two. auto: new-first, "
        "unless cache events, a disk cache or a decision log can belong to one engine only.",
    )
    group.setting(
        "--max-restarts",
        dest="max_quick_deaths",
        metavar="N",
        help="quick deaths of one process before the server ends (default: %(default)s)",
        more="In a row, each within 10 s; the exit code is then 3.",
    )
