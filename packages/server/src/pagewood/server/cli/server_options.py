"""The options by which terminal programs reach a server: its key, and the trusted certificate."""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path

from pagewood.server.keys.file import ADMIN_VARIABLE, KEY_VARIABLE
from pagewood.server.keys.run_key import LOCAL_HOSTS, find_run_key

ADMIN_VARIABLES = (ADMIN_VARIABLE, KEY_VARIABLE)
"""Variables of the environment with keys for commands of admins."""
DIRECT = dict.fromkeys(f"all://{host}" for host in LOCAL_HOSTS)
"""Routes of httpx without a proxy, which would get the keys of servers on this machine."""


def add_server_options(group: argparse._ActionsContainer, *, variables: tuple[str, ...] = (KEY_VARIABLE,)) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the options; the help names `variables` of the environment that may hold the key, the first that is set."""
    names = ", then ".join(variables)
    group.add_argument("--api-key", metavar="KEY", help=f"key for the server (default: {names} of the environment)")
    group.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="certificate that is trusted, PEM: that of the server, or of its authority (default: those of the system)",
    )


def key_of(options: argparse.Namespace, *, variables: tuple[str, ...] = (KEY_VARIABLE,)) -> str | None:
    """Return the key for the server; None: no key was given."""
    return options.api_key or next((os.environ[name] for name in variables if os.environ.get(name)), None)


def admin_server(url: str, options: argparse.Namespace) -> tuple[str, str | None]:
    """Return the address of a server and the key for it: an admin key, the key of its run, or another one."""
    key = key_of(options, variables=(ADMIN_VARIABLE,))
    if not key and (found := find_run_key(url)) is not None:
        return found.url, found.key
    return url, key or key_of(options, variables=ADMIN_VARIABLES)


def wants_admin(url: str) -> str:
    """Return an error for a server that has refused a key."""
    return (
        f"the server at {url} wants an admin key: give one with --api-key or {ADMIN_VARIABLE}. A server without "
        "one has made one, which is found only by the same user, on the same machine, by a loopback address; its "
        "start message names the file"
    )


def trust_of(options: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the trusted certificates; None: those of the system.

    Raises:
        ValueError: the file cannot be read.
    """
    if options.ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=options.ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"--ca-file cannot be used ({options.ca_file}): {error}") from error
