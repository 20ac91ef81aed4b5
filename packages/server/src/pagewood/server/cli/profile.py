"""`pagewood profile`: the work of a running server's engine, as a file for Perfetto."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import httpx

from pagewood.server.cli.options.page import Commands
from pagewood.server.cli.server_options import (
    ADMIN_VARIABLES,
    DIRECT,
    add_server_options,
    admin_server,
    trust_of,
    wants_admin,
)

_ANSWER_S = 180.0
"""How long the server may take behind the last second that it records, for a large trace."""
_LONGEST_S = 60.0


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "profile",
        help="record the work of a server's engine as a trace",
        description="Record the stages of the engine and the instructions of its device, of all ranks and stages of a "
        "model, in one trace for https://ui.perfetto.dev. Steps are slower meanwhile; answers stay the same. The "
        "server records only what it computes, so let it have requests. With replicas, it is the first that works.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="which of several models to record")
    add_server_options(parser, variables=ADMIN_VARIABLES)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, metavar="S", help="how long to record, at most 60 (default: 1)")
    length.add_argument("--steps", type=int, metavar="N", help="end when as many steps have begun, or after 60 s")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file of the trace, such as trace.json")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Record, write the file, and print what is in it."""
    out: Path = options.out
    if out.exists() and not options.overwrite:
        raise ValueError(f"--out must not exist without --overwrite, got {out}")
    if not out.parent.is_dir():
        raise ValueError(f"--out must be in a folder that exists, got {out}")
    url, key = admin_server(options.url, options)
    body = {name: value for name in ("seconds", "steps") if (value := getattr(options, name)) is not None}
    longest_s = options.seconds or _LONGEST_S
    timeout = httpx.Timeout(10.0, read=longest_s + _ANSWER_S)
    with httpx.Client(timeout=timeout, mounts=DIRECT, verify=trust_of(options) or True) as client:
        try:
            response = client.post(
                f"{url.rstrip('/')}/profile",
                json=body,
                params={} if options.model is None else {"model": options.model},
                headers={} if key is None else {"Authorization": f"Bearer {key}"},
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"no server answers at {url}: {error}") from error
    if response.status_code in (401, 403):
        raise ValueError(wants_admin(url))
    if response.is_error:
        raise ValueError(f"the server at {url} takes no profile (status {response.status_code}): {response.text}")
    try:
        trace: dict[str, Any] = response.json()
        events: list[dict[str, Any]] = trace["traceEvents"]
        said: dict[str, Any] = trace["otherData"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"the server at {url} has sent no trace, so {out} is not written") from error
    try:
        out.write_bytes(response.content)
    except OSError as error:
        raise ValueError(f"--out cannot be written, got {out}: {error}") from error
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    num_spans = sum(one["ph"] == "X" for one in events)
    print(f"{out}: {num_spans} spans in {said['seconds']:.2f} s, of {'; '.join(names)}")
    if said["dropped_spans"]:
        print(f"{said['dropped_spans']} spans did not fit; record less", file=sys.stderr)
    return 0
