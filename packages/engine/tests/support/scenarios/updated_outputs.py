"""What the answers of a scenario may be whose weights change: every token is that of weights and of KV that it may see.

The KV of a request is that of the weights with which its positions were computed. A request that does not run while
weights change begins with KV of the new ones only; one that runs goes on behind what it has, or begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from pagewood.engine.api import Delta, SamplingParams
from pagewood.engine.core.request import Request
from pagewood.engine.testing.echo import oracle_kv, oracle_token
from scenarios.scenario import VOCAB_SIZE, Update


@dataclass(slots=True)
class _Answer:
    """The answer to a request so far."""

    contents: list[int] = field(default_factory=list[int])
    """By token: what its version says that the weights were."""  # written by: updated_outputs
    changes: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Changes while it had a row: tokens that it had then, and contents before and after."""
    # written by: updated_outputs
    restarts: list[int] = field(default_factory=list[int])
    """Tokens that it had when its KV was given up to be computed again."""  # written by: updated_outputs


class UpdatedOutputs:
    """Follows the answers of a scenario, and compares them with an oracle."""

    def __init__(self) -> None:
        self._content = 0
        self._rows: set[str] = set()
        self._answers: dict[str, _Answer] = {}

    def note_rows(self, holders: Iterable[Request]) -> None:
        """Note which requests have a row before a step."""
        self._rows = {request.request_id for request in holders if request.finish is None}

    def changed(self, update: Update) -> None:
        """Note that the weights have changed, behind all answers so far."""
        for name in self._rows if update.content != self._content else ():
            answer = self._answers.setdefault(name, _Answer())
            if update.old_kv == "recompute":
                answer.restarts.append(len(answer.contents))
            else:
                answer.changes.append((len(answer.contents), self._content, update.content))
        self._content = update.content

    def add(self, delta: Delta) -> None:
        """Note the tokens of a step, whose version must be the present one."""
        content = int(delta.weights or 0)
        assert content == self._content, f"request {delta.request_id}: version {content} while {self._content} computes"
        answer = self._answers.setdefault(delta.request_id, _Answer())
        answer.contents += [content] * len(delta.tokens)

    def check(self, name: str, prompt: Sequence[int], sampling: SamplingParams, output: Sequence[int]) -> None:
        """Every token must be that of its weights, and of KV that the request may have."""
        answer = self._answers.get(name, _Answer())

        @cache
        def kv_at(position: int, content: int) -> int:
            return oracle_kv(known[position], position, content)

        def is_right(kv: tuple[int, ...]) -> bool:
            total = sum(kv_at(position, content) for position, content in enumerate(kv))
            return oracle_token(total, len(known), answer.contents[index], sampling, vocab_size=VOCAB_SIZE) == token

        known, possible = list(prompt), set[tuple[int, ...]]()
        for index, (token, content) in enumerate(zip(output, answer.contents, strict=True)):
            size = len(known)
            # Behind the token before, of these weights alone after a preemption, or of those during its prefill.
            found: set[tuple[int, ...]] = {
                (*kv, content) for kv in possible if len(kv) == size - 1 and index not in answer.restarts
            }
            found.add((content,) * size)
            changes = [(old, new) for at, old, new in answer.changes if at == index]
            for old, new in changes:
                found |= {(*(old,) * end, *(new,) * (size - end)) for end in range(size)}
            if len(changes) > 1:  # the last ones may have come during its prefill
                first, second = changes[-2:]
                found |= {
                    (*(first[0],) * one, *(first[1],) * (two - one), *(second[1],) * (size - two))
                    for two in range(size)
                    for one in range(two + 1)
                }
            possible = {kv for kv in found if is_right(kv)}
            assert possible, f"request {name}: token {index} is {token}, which no KV of weights {content} yields"
            known.append(token)
