"""The weights of several replicas as one: answers that are lost, and deaths at the end of an update."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagewood.engine.api import FinishReason, Refusal
from pagewood.engine.weight_commands import CheckWeights, DropUpdate, FinishUpdate, NameVersion, UpdateWeights
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.replicas import fleet_weights
from pagewood.server.replicas.fleet_weights import FleetCommand, FleetWeights, Outcome
from pagewood.server.replicas.replica import Replica

pytestmark = pytest.mark.anyio

FOLDER = UpdateWeights(request_id="folder", folder="/weights", version="7")
FILES = UpdateWeights(request_id="files", files=("/weights",), version="7")


class NoSender:
    """Sends nothing."""

    def send(self, frame: bytes) -> None:
        """Do nothing."""


class Fleet:
    """Two replicas that answer when the test says so."""

    def __init__(self) -> None:
        self.replicas = [Replica(sender=NoSender(), is_joined=True) for _ in range(2)]
        self.asked: list[list[Any]] = [[], []]
        """Commands that each replica has not answered."""
        self.outcomes: list[Outcome] = []
        self.weights = FleetWeights(
            self.replicas, send=self._send, changed=lambda number: None, answered=self._answered
        )

    def _send(self, number: int, message: wire.ToEngine) -> None:
        self.asked[number].append(message)

    def _answered(self, command: FleetCommand, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    async def until_asked(self, number: int, kind: type[Any]) -> Any:
        """Wait until a replica has a command of a kind, and nothing else."""
        for _ in range(200):
            if self.asked[number]:
                break
            await asyncio.sleep(0.001)
        [command] = self.asked[number]
        assert isinstance(command, kind)
        return command

    async def answer(self, number: int, kind: type[Any], *, refusal: Refusal | None = None, said: str = "7") -> None:
        """Wait for a command of a kind, and answer it."""
        command = await self.until_asked(number, kind)
        self.asked[number].clear()
        finish = FinishReason.STOP if refusal is None else FinishReason.REFUSED
        answer = wire.Answer(command.request_id, "", finish, True, refusal, 0, 0, 0, computed=(said, 0))
        assert self.weights.take(answer, number)

    async def ended(self) -> Outcome:
        """Wait for the outcome of the command, and return it."""
        for _ in range(200):
            if self.outcomes:
                break
            await asyncio.sleep(0.001)
        return self.outcomes.pop()

    def die(self, number: int) -> None:
        """Let a process end; the next one is known by its incarnation."""
        replica = self.replicas[number]
        assert replica.incarnation is not None
        replica.is_joined, replica.incarnation = False, replica.incarnation + 1
        replica.status.lost(next_incarnation=replica.incarnation)
        self.asked[number].clear()
        self.weights.lost(number)

    def join(self, number: int) -> None:
        """Let the next process begin to work."""
        self.replicas[number].is_joined = True
        self.weights.joined(number)

    @property
    def takers(self) -> list[bool]:
        """Which replicas take requests."""
        return [one.takes_requests for one in self.replicas]


async def test_answers_that_are_lost_before_the_end_of_an_update() -> None:
    fleet = Fleet()
    fleet.weights.begin(FOLDER)
    await fleet.until_asked(1, UpdateWeights)
    await fleet.answer(0, UpdateWeights)
    fleet.asked[1].clear()
    fleet.weights.relay_lost()
    for number in (0, 1):
        await fleet.until_asked(number, DropUpdate)
    fleet.weights.relay_lost()  # nothing waits for the answer to what needs none
    outcome = await fleet.ended()
    assert isinstance(outcome, ApiError)
    assert (outcome.code, fleet.weights.version) == ("engine_lost", "")
    assert fleet.takers == [True, True]


async def test_answers_that_are_lost_at_the_end_of_an_update() -> None:
    """Replicas are asked again, because those that have changed cannot go back."""
    fleet = Fleet()
    fleet.weights.begin(FOLDER)
    for number in (0, 1):
        await fleet.answer(number, UpdateWeights)
    await fleet.until_asked(1, FinishUpdate)
    await fleet.answer(0, FinishUpdate)
    fleet.weights.relay_lost()
    lost = fleet.asked[1].pop()
    fleet.weights.relay_changed(0)
    assert not fleet.asked[0]
    fleet.weights.relay_changed(1)
    assert await fleet.until_asked(1, FinishUpdate) == lost
    assert not fleet.outcomes
    await fleet.answer(1, FinishUpdate)
    assert await fleet.ended() == fleet.weights.version == "7"


@pytest.mark.parametrize("command", [FOLDER, FILES])
async def test_deaths_at_the_end_of_an_update(command: UpdateWeights) -> None:
    fleet = Fleet()
    fleet.weights.begin(command)
    for number in (0, 1):
        await fleet.answer(number, UpdateWeights)
    await fleet.until_asked(1, FinishUpdate)
    fleet.die(1)
    fleet.join(1)
    assert fleet.takers == [True, False]
    await fleet.answer(0, FinishUpdate)
    assert await fleet.ended() == "7"
    if command is FILES:
        assert fleet.takers == [True, False]
        assert "other processes only" in fleet.replicas[1].status.outdated
        return
    again = await fleet.until_asked(1, UpdateWeights)
    assert (again.folder, again.version, again.waits) == ("/weights", "7", False)
    await fleet.answer(1, UpdateWeights)
    await asyncio.sleep(0.01)
    assert fleet.takers == [True, True]


async def test_if_all_die_at_the_end_of_an_update_it_has_failed() -> None:
    fleet = Fleet()
    fleet.weights.begin(FILES)
    for number in (0, 1):
        await fleet.answer(number, UpdateWeights)
    await fleet.until_asked(1, FinishUpdate)
    for number in (0, 1):
        fleet.die(number)
        fleet.join(number)
    assert isinstance(await fleet.ended(), ApiError)
    assert (fleet.weights.version, fleet.takers) == ("", [True, True])


async def test_a_replica_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an update that comes meanwhile waits until it has the weights."""
    monkeypatch.setattr(fleet_weights, "RETRY_S", 0.001)
    fleet = Fleet()
    fleet.weights.begin(FOLDER)
    for kind in (UpdateWeights, FinishUpdate):
        for number in (0, 1):
            await fleet.answer(number, kind)
    await fleet.ended()
    fleet.die(0)
    fleet.join(0)
    await fleet.answer(0, UpdateWeights, refusal=Refusal(message="it sleeps soon", code="weights_busy"))
    fleet.weights.begin(FILES)
    await fleet.until_asked(0, UpdateWeights)
    assert not fleet.asked[1]
    await fleet.answer(0, UpdateWeights)
    await fleet.until_asked(1, UpdateWeights)
    assert fleet.takers == [True, True]
    fleet.die(0)
    await fleet.answer(1, UpdateWeights)
    await fleet.answer(1, DropUpdate)
    assert isinstance(await fleet.ended(), ApiError)
    fleet.join(0)
    await fleet.answer(0, UpdateWeights, refusal=Refusal(message="no such folder", code="weights_missing"))
    await asyncio.sleep(0.01)
    assert "cannot read the weights of version '7': no such folder" in fleet.replicas[0].status.outdated
    fleet.weights.settle()
    await fleet.answer(0, UpdateWeights)
    await asyncio.sleep(0.01)
    assert fleet.takers == [True, True]


async def test_names_and_checksums() -> None:
    fleet = Fleet()
    fleet.weights.begin(NameVersion(request_id="name", version="b"))
    await fleet.answer(1, NameVersion)
    fleet.die(0)
    assert await fleet.ended() == "b"
    fleet.join(0)
    assert (await fleet.until_asked(0, NameVersion)).version == "b"
    await fleet.answer(0, NameVersion)
    for sums in (("x", "x"), ("x", "y")):
        fleet.weights.begin(CheckWeights(request_id="check"))
        for number, said in enumerate(sums):
            await fleet.answer(number, CheckWeights, said=said)
        outcome = await fleet.ended()
        if sums == ("x", "x"):
            assert outcome == "x"
        else:
            assert isinstance(outcome, Refusal)
            assert (outcome.code, outcome.message.endswith("x in replica 0, y in replica 1")) == (
                "weights_differ",
                True,
            )
