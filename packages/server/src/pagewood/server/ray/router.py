# pyright: basic, reportMissingImports=false
# (Ray is a dependency of the extra only)
"""Ray Serve's router of calls to engines: it carries out what the router of requests has decided."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pagewood.server.ray.calls import IsWatchedError, ReplicaLeftError, ReplicaWatch


class ChosenReplicaRouter(RequestRouter):
    """Sends each call to the replica that it names.

    `schedpolicy.routing.Router`, the object of `pagewood serve --replicas` and of the simulator, has decided before: it
    orders requests that wait and displaces those that run, which is impossible here.

    Invariant: no call goes to another replica than the one that it names, and none waits while there are replicas.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Start without a watch."""
        self._watches: list[ReplicaWatch] = []  # contents written by: choose_replicas

    @property
    def supports_rejection_protocol(self) -> bool:
        """Whether replicas may refuse calls: a replica has places for all that it gets."""
        return False

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over which replicas there are."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica of a call; all if it names none; a call whose replica has left ends with an error."""
        assert pending_request is not None
        watch: ReplicaWatch | None = pending_request.kwargs.get("watch")
        name: str | None = pending_request.kwargs.get("replica")
        found = [one for one in candidate_replicas if name in (None, one.replica_id.unique_id)]
        if watch is not None:
            self._watches.append(watch)
            self._publish()
        if not pending_request.future.done() and (watch is not None or not found):
            pending_request.future.set_exception(ReplicaLeftError(name) if watch is None else IsWatchedError())
        return [found or candidate_replicas]

    def _publish(self) -> None:
        names = sorted(one.unique_id for one in self.curr_replicas)
        for watch in self._watches:
            watch.publish(names)
