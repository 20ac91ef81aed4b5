"""The socket on which clients connect."""

from __future__ import annotations

import socket

BACKLOG = 2048


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a listening socket. This comes first, so that no process is started for an address that is taken.

    Args:
        host: address or name.
        port: 0: any free one.
        is_shared: whether several processes of this server listen there; the system divides connections among them.

    Raises:
        ValueError: the address cannot be used.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if host == "::":  # all addresses, those of IPv4, too, whatever the system's default is
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listening


def bind_first(host: str, port: int) -> socket.socket:
    """Return the first of several sockets of an address that no other server has, whether it would share it or not.

    Raises:
        ValueError: the address cannot be used.
    """
    bind(host, port).close()
    return bind(host, port, is_shared=True)
