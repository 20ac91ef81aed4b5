"""Options for the address of the server, and for the requests that it accepts."""

from __future__ import annotations

import argparse

from pagewood.server.cli.options.page import Group, Page
from pagewood.server.keys.file import ADMIN_VARIABLE, KEY_VARIABLE


def add_address_options(page: Page) -> None:
    """Add the groups."""
    address = page.group("address and keys")
    address.setting("--host", metavar="NAME", help="address to listen on (default: %(default)s)")
    address.setting(
        "--port",
        metavar="N",
        help="port to listen on; 0: any free port (default: %(default)s)",
    )
    _add_keys(address)
    address.setting("--tls-cert", metavar="FILE", help="serve HTTPS with this certificate chain, PEM (default: HTTP)")
    address.setting("--tls-key", metavar="FILE", help="private key of the certificate, PEM")
    _add_proxies(address)
    _add_http_limits(address)


def _add_keys(address: Group) -> None:
    address.setting(
        "--api-key-file",
        metavar="FILE",
        help="let in only requests with a key of this file (default: no keys)",
        more="It has a key on each line (plain, sha256:DIGEST, or a JSON object with tenant and limits), or is a JSON "
        f"array of such objects. SIGHUP reads it again. {KEY_VARIABLE} and {ADMIN_VARIABLE} in the environment are "
        "keys, too.",
    )
    address.add(
        "--insecure-no-keys",
        action="store_true",
        help="allow a --host beyond this machine without keys",
        more="Every client that reaches the port can then use the model. Admin routes need the key that the server "
        "makes for its run.",
    )


def _add_proxies(address: Group) -> None:
    address.add(
        "--allowed-host",
        action="append",
        default=[],
        dest="allowed_hosts",
        metavar="NAME",
        help="host name by which clients reach the server; repeatable",
        more="Needed for the name of a reverse proxy. *.example.com allows all names below it, * every name. IP "
        "addresses, localhost and this machine's name are always allowed.",
    )
    address.add(
        "--allowed-origin",
        action="append",
        default=[],
        dest="allowed_origins",
        metavar="ORIGIN",
        help="web page that may call the server from a browser; repeatable",
        more="Such as https://chat.example.com; * allows every page. Without it no page of another origin may.",
    )
    address.add(
        "--trusted-proxy",
        action="append",
        default=[],
        dest="trusted_proxies",
        metavar="ADDRESS",
        help="proxy whose X-Forwarded-For and -Proto count; repeatable",
        more="An address or a network, such as 127.0.0.1 or 10.0.0.0/8. Without it these headers are ignored.",
    )
    address.setting(
        "--root-path",
        metavar="PATH",
        help="path prefix of a reverse proxy, such as /llm (default: none)",
        more="The proxy may remove or keep it.",
    )
    address.add(
        "--gateway-headers",
        action="store_true",
        help="heed the headers of llm-d's gateway",
        more="x-llm-d-slo-ttft-ms and -slo-tpot-ms become the deadline (for the order edf), -inference-fairness-id the "
        "tenant (for the order fair and --quota), -inference-objective the priority. What the body says comes first. "
        "Only for servers that clients reach through the gateway alone: a client could write these headers itself.",
    )
    address.add(
        "--inference-objective",
        action="append",
        type=_objective,
        default=[],
        dest="inference_objectives",
        metavar="NAME=PRIORITY",
        help="priority of an InferenceObjective; repeatable",
        more="With --gateway-headers. Objectives without it have priority 0.",
    )


def _add_http_limits(address: Group) -> None:
    address.setting(
        "--max-body-bytes",
        metavar="N",
        help="longest request body; a longer one gets 413 (default: %(default)s)",
    )
    address.setting(
        "--max-connections",
        metavar="N",
        help="open connections (default: what `ulimit -n` allows, at most 8192)",
        more="Beyond it the connection that was idle longest is closed, or requests get 503. With --http-processes, of "
        "each process.",
    )
    address.setting(
        "--http-processes",
        metavar="N",
        help="processes that take connections (default: %(default)s)",
        more="All listen on the port (SO_REUSEPORT). Those beyond the first have connections, TLS, the parsing of HTTP "
        "and what slow clients have not read; the first one answers the requests of all, so everything else exists "
        "once. If one of the others dies, its connections end, and it is started again.",
    )
    address.add(
        "--dashboard-text",
        action="store_true",
        help="show the beginnings of cached prompts in /dashboard",
        more="Without it, only their lengths: prompts belong to clients.",
    )


def _objective(text: str) -> tuple[str, int]:
    name, _, priority = text.rpartition("=")
    try:
        return name, int(priority)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be NAME=PRIORITY, got {text!r}") from None
