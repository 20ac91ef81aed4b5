"""The options by which terminal programs reach a server: its key, and the trusted certificate."""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path

from pagewood.server.keys.file import KEY_VARIABLE


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
