"""Weights that change on several replicas: on all of them or on none, and on those that are started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from pagewood.engine.api import FinishReason, Refusal
from pagewood.engine.weight_commands import (
    CheckWeights,
    DropUpdate,
    FinishUpdate,
    JoinGroup,
    LeaveGroup,
    NameVersion,
    UpdateWeights,
)
from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.messages import wire
from pagewood.server.replicas.replica import Replica
from pagewood.server.requests.weights import num_ranks

RETRY_S = 0.5
"""Seconds after which a replica that is busy is asked again to read the present weights."""

FleetCommand: TypeAlias = UpdateWeights | JoinGroup | LeaveGroup | CheckWeights | NameVersion
_Sent: TypeAlias = FleetCommand | FinishUpdate | DropUpdate
Outcome: TypeAlias = str | Refusal | ApiError
"""The version or the checksum that an answer has, or why a command was not carried out."""

_PREFIX = "weights-"
"""Begins the ids of all commands that `FleetWeights` sends."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A command that a replica has not answered."""

    command: _Sent
    answer: asyncio.Future[wire.Answer | None]
    """None: no answer will come."""


class FleetWeights:
    """The weights of several replicas.

    An update has two phases. First all replicas read it and make it ready, beside their steps; if one of them cannot,
    or ends, all forget it. Then all change. One that cannot change then gets no more requests.

    A process that is started later reads the folder of the last update first. If the present weights have come in
    another way, they are nowhere but in the other processes: it gets no requests before an update with all tensors.

    Invariant: a replica whose weights are not `version` is `outdated` in its status, and gets no requests, but for the
    moment in which all change.

    Args:
        replicas: by number.
        send: sends a message to a replica.
        changed: called with the number of a replica that may have become outdated, or is not any more.
        answered: called with a command and its outcome.
    """

    __slots__ = (
        "_answered", "_catching", "_changed", "_groups", "_num_asked", "_num_updates", "_open", "_parts", "_replicas",
        "_send", "_source", "_task", "_why_gone", "version",
    )  # fmt: skip

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        send: Callable[[int, wire.ToEngine], None],
        changed: Callable[[int], None],
        answered: Callable[[FleetCommand, Outcome], None],
    ) -> None:
        self._replicas = replicas
        self._send, self._changed, self._answered = send, changed, answered
        self.version = ""
        """The name of the weights; empty: those of the model's folder."""  # written by: FleetWeights
        self._why_gone = ""
        """Why no new process can have the present weights; empty: it can."""  # written by: FleetWeights
        self._source: UpdateWeights | NameVersion | None = None
        """What brings a new process to the present weights; None: nothing is needed, or nothing does."""
        # written by: FleetWeights
        self._num_updates = 0  # written by: FleetWeights
        self._groups: dict[str, dict[int, int | None]] = {}
        """By the name of a trainer's group, the processes in it: incarnation by replica."""
        # contents written by: FleetWeights
        self._parts: dict[int, int | None] | None = None
        """The processes that have all parts of an update so far; None: there is no part."""
        # written by: FleetWeights
        self._open: dict[tuple[int, str], _Question] = {}
        """By replica and id of the command."""  # contents written by: FleetWeights
        self._num_asked = 0  # written by: FleetWeights
        self._task: asyncio.Task[None] | None = None
        """Carries out the command of a client."""  # written by: FleetWeights
        self._catching: dict[int, asyncio.Task[None]] = {}
        """Brings replicas to the present weights."""  # contents written by: FleetWeights

    @property
    def is_changing(self) -> bool:
        """Whether a command is being carried out."""
        return self._task is not None

    @property
    def why_kept(self) -> str:
        """Why a new process would not have the present weights; empty: it would, as far as is known."""
        failed = (
            one.status.outdated
            for number, one in enumerate(self._replicas)
            if one.is_joined and number not in self._catching and not self.is_changing
        )
        return self._why_gone or next(filter(None, failed), "")

    def begin(self, command: FleetCommand) -> None:
        """Begin to carry out a command; `answered` says how it ended."""
        self._task = asyncio.create_task(self._carry_out(command))

    def take(self, answer: wire.Answer, number: int) -> bool:
        """Take the answer of a replica; return whether it is one to a question of this object."""
        question = self._open.pop((number, answer.request_id), None)
        if question is not None and not question.answer.done():
            question.answer.set_result(answer)
        return answer.request_id.startswith(_PREFIX)

    def joined(self, number: int) -> None:
        """A process has begun to work. The caller has it get requests only if it is not outdated."""
        if self.is_changing or self._source is not None or self._why_gone:
            self._note(number, "it waits for the end of an update" if self.is_changing else self._reason)
            self.settle()

    def lost(self, number: int) -> None:
        """A process has ended: it answers nothing more."""
        self._give_up(key for key in self._open if key[0] == number)
        if (task := self._catching.pop(number, None)) is not None:
            task.cancel()

    def relay_lost(self) -> None:
        """Answers may be lost. What may be asked twice is asked again when the next relay works."""
        again = FinishUpdate | NameVersion
        self._give_up(key for key, one in self._open.items() if not isinstance(one.command, again))

    def relay_changed(self, number: int) -> None:
        """Answers of a replica come again."""
        for (replica, _), one in self._open.items():
            if replica == number:
                self._send(number, one.command)
        self.settle()

    def dropped(self) -> None:
        """All replicas have forgotten their weights, and so will those that join."""
        self._source, self._why_gone = None, ""
        self.settle()

    def settle(self) -> None:
        """Begin to bring outdated replicas to the present weights, as far as that can be."""
        for number, replica in enumerate(self._replicas) if self._task is None else ():
            if not replica.is_joined or not replica.status.outdated or number in self._catching:
                continue
            if self._source is None:
                self._note(number, self._why_gone)
                continue
            self._note(number, self._reason)
            self._catching[number] = asyncio.create_task(self._catch_up(number, self._source))

    @property
    def _reason(self) -> str:
        return self._why_gone or f"it reads the weights of version '{self.version}'"

    def _is_of(self, number: int, incarnation: int | None) -> bool:
        return self._replicas[number].is_joined and self._replicas[number].incarnation == incarnation

    def _note(self, number: int, reason: str) -> None:
        """Note why a replica gets no requests; empty: it may get some."""
        status = self._replicas[number].status
        if status.outdated != reason:
            status.outdated = reason
            if reason:
                _log.warning("replica %d gets no requests: %s", number, reason)
            else:
                _log.info("replica %d has the weights of version '%s'", number, self.version)
            self._changed(number)

    async def _catch_up(self, number: int, source: UpdateWeights | NameVersion) -> None:
        try:
            await self._read(number, source)
        finally:
            if self._catching.get(number) is asyncio.current_task():
                del self._catching[number]

    async def _read(self, number: int, source: UpdateWeights | NameVersion) -> None:
        while (answer := (await self._ask({number: source}))[number]) is not None:
            if answer.refusal is None:
                self._note(number, "")
                return
            self._note(number, f"it cannot read the weights of version '{self.version}': {answer.refusal.message}")
            if answer.refusal.code != "weights_busy":
                return
            await asyncio.sleep(RETRY_S)

    def _new_id(self) -> str:
        self._num_asked += 1
        return f"{_PREFIX}{self._num_asked}"

    async def _ask(self, commands: Mapping[int, _Sent], *, name: str | None = None) -> dict[int, wire.Answer | None]:
        """Send replicas commands under one id; return their answers, None where none will come."""
        name = name or self._new_id()
        asked: list[asyncio.Future[wire.Answer | None]] = []
        for number, command in commands.items():
            command = replace(command, request_id=name)
            asked.append(asyncio.get_running_loop().create_future())
            self._open[number, name] = _Question(command=command, answer=asked[-1])
            self._send(number, command)
        return dict(zip(commands, await asyncio.gather(*asked), strict=True))

    def _give_up(self, keys: Iterable[tuple[int, str]]) -> None:
        for key in list(keys):
            question = self._open.pop(key)
            if not question.answer.done():
                question.answer.set_result(None)

    async def _carry_out(self, command: FleetCommand) -> None:
        if self._catching:
            await asyncio.wait(self._catching.values())
        try:
            outcome = await self._outcome(command)
        except Exception as error:
            _log.exception("a command for the weights of all replicas failed")
            outcome = ApiError(f"The command failed: {error!r}.", status=500, type="server_error", code="engine_error")
        self._task = None
        self.settle()
        self._answered(command, outcome)

    async def _outcome(self, command: FleetCommand) -> Outcome:
        joined = [number for number, one in enumerate(self._replicas) if one.is_joined]
        current = [number for number in joined if not self._replicas[number].status.outdated]
        if not joined:
            return unavailable("No replica works at the moment.", code="not_ready")
        match command:
            case UpdateWeights():
                return await self._update(command, joined, current or joined)
            case JoinGroup():
                return await self._join(command, joined)
            case LeaveGroup():
                known = self._groups.pop(command.name, None)
                members = joined if known is None else [one for one in known if self._is_of(one, known[one])]
                return _joint(await self._ask(dict.fromkeys(members, command)))
            case CheckWeights():
                return _joint(await self._ask(dict.fromkeys(current or joined, command)), must_agree=True)
            case NameVersion():
                return await self._name(command, current)

    async def _name(self, command: NameVersion, current: Sequence[int]) -> Outcome:
        self.version = command.version
        if isinstance(self._source, UpdateWeights):
            self._source = replace(self._source, version=command.version)
        elif not self._why_gone:
            self._source = command
        await self._ask(dict.fromkeys(current, command))  # a process that ends meanwhile is renamed at its start
        return self.version

    async def _join(self, command: JoinGroup, joined: Sequence[int]) -> Outcome:
        away = [number for number in range(len(self._replicas)) if number not in joined]
        if away:
            return unavailable(f"Replica {away[0]} does not work, and could not join the group.", code="not_ready")
        if command.name in self._groups and not command.is_transfer:
            return _refused(f"name must not be that of a group that exists, got {command.name!r}", "weights_invalid")
        each = num_ranks(self._replicas[0].status.model)
        least = command.first_rank + each * len(joined)
        if command.world_size < least:
            return _refused(
                f"world_size must be at least {least}, as {len(joined)} replicas have {each} ranks each, "
                f"got {command.world_size}",
                "weights_invalid",
                param="world_size",
            )
        self._groups.pop(command.name, None)
        commands = {one: replace(command, first_rank=command.first_rank + each * one) for one in joined}
        answers = await self._ask(commands)
        outcome = _joint(answers)
        if isinstance(outcome, str):
            self._groups[command.name] = {one: self._replicas[one].incarnation for one in joined}
        else:
            leaving = LeaveGroup(request_id="", name=command.name)
            await self._ask({one: leaving for one, answer in answers.items() if _is_done(answer)})
        return outcome

    async def _update(self, command: UpdateWeights, joined: Sequence[int], members: Sequence[int]) -> Outcome:
        """Let all replicas change; of those that are not `members`, which are outdated, those that can."""
        takers = {one: self._replicas[one].incarnation for one in joined}
        if command.group in self._groups:
            in_group = self._groups[command.group]
            away = [one for one in {*in_group, *members} if one not in in_group or not self._is_of(one, in_group[one])]
            if away:
                if self._parts is not None:
                    await self._forget(joined)
                message = f"the group {command.group} must be joined again: it has no process of replica {away[0]}"
                return _refused(message, "group_failed")
            takers = {one: takers[one] for one in in_group}
        if self._parts is not None and command.folder is None:
            parts = self._parts
            away = [one for one in members if takers[one] != parts.get(one, -1)]
            if away:
                await self._forget(joined)
                return unavailable(
                    f"Replica {away[0]} was started again behind a part of the update, which all have forgotten; "
                    "send it again from its first part.",
                    code="weights_lost",
                )
            takers = {one: number for one, number in takers.items() if number == parts.get(one, -1)}
        version = command.version or str(self._num_updates + 1)
        if command.is_last:
            command = replace(command, version=version, waits=True)
        name = self._new_id()
        answers = await self._ask(
            {one: replace(command, is_whole=bool(self._replicas[one].status.outdated)) for one in takers}, name=name
        )
        ready = {one: answer if self._is_of(one, takers[one]) else None for one, answer in answers.items()}
        outcome = _joint({one: ready[one] for one in members})
        if not isinstance(outcome, str):
            await self._forget(joined)
            return outcome
        able = [one for one, answer in ready.items() if _is_done(answer)]
        if not command.is_last:
            self._parts = {one: takers[one] for one in able}
            return self.version
        return await self._finish(command, FinishUpdate(request_id="", update=name), able, joined)

    async def _forget(self, joined: Iterable[int]) -> None:
        """Let all replicas forget what they have of an update."""
        self._parts = None
        drop = DropUpdate(request_id="")
        await self._ask({one: drop for one in joined if self._replicas[one].is_joined})

    async def _finish(
        self, command: UpdateWeights, finish: FinishUpdate, able: Sequence[int], joined: Sequence[int]
    ) -> Outcome:
        """Let the replicas that have made an update ready change."""
        answers = await self._ask(dict.fromkeys(able, finish))
        self._parts = None
        done = [one for one, answer in answers.items() if _is_done(answer)]
        if not done:
            return _joint(answers)
        assert command.version is not None
        self.version = command.version
        self._num_updates += 1
        self._why_gone, self._source = "", None
        if command.folder is not None:
            self._source = replace(command, waits=False, is_whole=False, old_kv="drop")
        else:
            self._why_gone = (
                f"the weights of version '{self.version}' are in other processes only, because no update from a folder "
                "has brought them; it waits for an update with all tensors"
            )
        for one in joined:
            if self._replicas[one].is_joined and one not in done:
                answer = answers.get(one)
                refusal = None if answer is None else answer.refusal
                self._note(one, self._reason if refusal is None else f"it could not change: {refusal.message}")
        for one in done:
            self._note(one, "")
        return self.version


def _is_done(answer: wire.Answer | None) -> bool:
    return answer is not None and answer.finish is FinishReason.STOP


def _refused(message: str, code: str, *, param: str | None = None) -> Refusal:
    return Refusal(message=message, code=code, param=param)


def _joint(answers: Mapping[int, wire.Answer | None], *, must_agree: bool = False) -> Outcome:
    """Return what replicas say together: that of one of them if all have done it, and why one has not otherwise."""
    failed = [one for one, answer in answers.items() if not _is_done(answer)]
    for one in failed:
        answer = answers[one]
        if answer is not None and answer.refusal is not None:
            refusal = answer.refusal
            if len(failed) == len(answers):
                return refusal
            return _refused(f"replica {one}: {refusal.message}", refusal.code or "weights_failed", param=refusal.param)
    if failed:
        return unavailable(f"Replica {failed[0]} has ended meanwhile; the old weights stay.", code="engine_lost")
    said = {
        one: answer.computed[0] if answer is not None and answer.computed else "" for one, answer in answers.items()
    }
    if must_agree and len({*said.values()}) > 1:
        each = ", ".join(f"{text} in replica {one}" for one, text in said.items())
        return _refused(f"the weights of all replicas must be the same, got {each}", "weights_differ")
    return next(iter(said.values()), "")
