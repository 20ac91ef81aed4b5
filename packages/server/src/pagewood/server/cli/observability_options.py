"""Options of `pagewood serve` that say how it shows what it does."""

from __future__ import annotations

import argparse
from typing import Any

from pagewood.server.metrics.metrics import COMPAT
from pagewood.server.observe import logs


def add_observability_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("metrics, traces and logs")
    group.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        default="text",
        help="one line of text, or one JSON object, for each record of the log (default: %(default)s)",
    )
    group.add_argument("--no-metrics", action="store_true", help="measure nothing, and do not serve /metrics")
    group.add_argument(
        "--metrics-compat",
        action="append",
        choices=COMPAT,
        default=[],
        help="show the series of /metrics under the names of another server, too, with its labels and buckets; "
        "repeatable (default: only under pagewood_)",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send traces to this OTLP receiver over HTTP, such as http://localhost:4318; needs the extra "
        "pagewood-server[otel] (default: no traces)",
    )


def observability(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `ServeConfig` that these options set."""
    return {
        "log_format": options.log_format,
        "metrics": not options.no_metrics,
        "otlp_endpoint": options.otlp_endpoint,
        "metrics_compat": tuple(dict.fromkeys(options.metrics_compat)),
    }
