"""What a node says of itself, and what all nodes of a group must have in common."""

from __future__ import annotations

from dataclasses import dataclass

from pagewood.engine.node_address import Address
from pagewood.engine.runner.ranks.hosts.messages import Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A node of a group."""

    node: int
    num_nodes: int
    address: Address
    """Address of node 0."""
    secret: bytes
    version: str
    """See `Hello`; the same on all nodes, and so are the following ones."""
    model: str
    config: dict[str, str]

    def hello(self, *, generation: int | None, port: int = 0) -> Hello:
        """Return the first message of a connection that this node dials."""
        return Hello(
            node=self.node,
            num_nodes=self.num_nodes,
            version=self.version,
            generation=generation,
            port=port,
            model=self.model,
            config=self.config,
        )

    def objection(self, hello: Hello) -> str | None:
        """Return why a node cannot be a part of this node's group; None: it can."""
        where = f"on node {hello.node}"
        if hello.num_nodes != self.num_nodes:
            return f"nnodes must be {self.num_nodes} on all nodes, got {hello.num_nodes} {where}"
        if hello.node == self.node or not 0 <= hello.node < self.num_nodes:
            return f"node_rank must be another one than {self.node}, below {self.num_nodes}, got {hello.node}"
        if hello.version != self.version:
            return f"pagewood-engine must be {self.version} on all nodes, got {hello.version} {where}"
        for name in sorted({*self.config, *hello.config}):
            own, other = self.config.get(name), hello.config.get(name)
            if own != other:
                return f"{name} must be {own} as on node {self.node}, got {other} {where}"
        if hello.model != self.model:
            return f"model must have the same files on all nodes, got {hello.model:.12} {where}, not {self.model:.12}"
        return None
