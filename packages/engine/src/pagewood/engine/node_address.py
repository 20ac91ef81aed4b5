"""Where node 0 listens for the other nodes of a group."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parsed(cls, text: str) -> Address:
        """Return the address that is written as HOST:PORT, or [HOST]:PORT with colons in HOST.

        Raises:
            ValueError: it is not.
        """
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            host = ""
        if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"master_addr must be like 10.0.0.1:29500 or [fd00::1]:29500, got {text!r}")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
