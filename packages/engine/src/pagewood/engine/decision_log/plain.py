"""Commands and configurations as plain values that msgpack can hold, with the tokens of clients renamed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from hashlib import blake2b
from typing import Any, cast, get_args

import msgspec
import numpy as np

from pagewood.engine import api
from pagewood.engine.api import (
    Command,
    Delta,
    EngineConfig,
    FinishReason,
    Grammar,
    Image,
    LogitsProcessor,
    PassOn,
    Refuse,
    Retain,
    SamplingParams,
    Submit,
)
from pagewood.engine.weight_commands import UNIQUE_ID_BYTES, JoinGroup, UpdateWeights

PROCESSOR = "logged"
"""Stands for any logits processor."""
_COMMANDS: dict[str, type[Any]] = {command.__name__: command for command in get_args(Command)}
_TYPE = "type"
"""Key of the name of a dataclass inside a command."""
_DROPPED = frozenset(
    {"grammar", "logits_processors", "logit_bias", "bad_words", "prompt", "tokens", "output", "pooling", "images"}
)
"""Parameters of a request that are not logged, or changed in the log. A request that is refused because of one of them
is logged as refused."""


class Renaming:
    """Gives tokens other ids and namespaces other names, so that equal ones stay equal.

    Decisions depend only on the equality of tokens. Neither the permutation nor the key is kept anywhere.

    Args:
        vocab_size: token ids are below it; others become `vocab_size`, so that they stay wrong.
        is_real: whether all tokens and namespaces keep their names.
        keeps_names: whether namespaces keep their names, because the order of requests compares them.
        known: namespaces that keep their names in any case, because the configuration names them.
    """

    __slots__ = ("_key", "_known", "_tokens", "is_real", "keeps_names", "vocab_size")

    def __init__(
        self, vocab_size: int, *, is_real: bool, keeps_names: bool, known: frozenset[str] = frozenset()
    ) -> None:
        self._known = known
        self.vocab_size = vocab_size
        self.is_real = is_real
        self.keeps_names = keeps_names or is_real
        seed = int.from_bytes(os.urandom(32), "little")
        order = np.arange(vocab_size) if is_real else np.random.Generator(np.random.PCG64(seed)).permutation(vocab_size)
        self._tokens = np.append(order, vocab_size).astype("<i4")
        self._key = os.urandom(32)

    def tokens(self, data: bytes) -> bytes:
        """Return tokens, int32 little-endian, under their new ids."""
        if self.is_real or len(data) % 4:
            return data
        found = np.frombuffer(data, "<i4")
        return self._tokens[np.where((found < 0) | (found >= self.vocab_size), self.vocab_size, found)].tobytes()

    def ids(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """Return the new ids of some tokens; impossible ids are left out."""
        return tuple(int(self._tokens[token]) for token in tokens if 0 <= token < self.vocab_size)

    def digest(self, digest: bytes) -> bytes:
        """Return the new digest of an image."""
        return digest if self.is_real else blake2b(digest, digest_size=16, key=self._key).digest()

    def namespace(self, name: str | None) -> str | None:
        """Return the new name of a namespace."""
        if name is None or self.keeps_names or name in self._known:
            return name
        return blake2b(name.encode(errors="surrogatepass"), digest_size=8, key=self._key).hexdigest()


def plain_command(command: Command, answer: Delta | None, renaming: Renaming) -> tuple[str, dict[str, Any]]:
    """Return a command without the text of its client; `answer` is its immediate answer, if there was one."""
    match command:
        case Submit():
            refusal = None if answer is None or answer.finish is not FinishReason.REFUSED else answer.refusal
            if refusal is not None and refusal.param in _DROPPED and refusal.code != "context_length_exceeded":
                refusal = replace(refusal, message="")
                return _plain_fields(Refuse(request_id=command.request_id, refusal=refusal))
            command = msgspec.structs.replace(
                command,
                tokens=renaming.tokens(command.tokens),
                output=renaming.tokens(command.output),
                sampling=_without_text(command.sampling, renaming),
                namespace=renaming.namespace(command.namespace),
                tenant=renaming.namespace(command.tenant),
                carry=b"",
                images=tuple(Image(pixels=b"", height=one.height, width=one.width) for one in command.images),
            )
        case Refuse():
            command = msgspec.structs.replace(command, refusal=replace(command.refusal, message=""))
        case PassOn():
            command = msgspec.structs.replace(command, carry=b"")
        case Retain():
            command = msgspec.structs.replace(
                command, tokens=renaming.tokens(command.tokens), namespace=renaming.namespace(command.namespace)
            )
        case UpdateWeights():
            command = msgspec.structs.replace(command, received=())
        case JoinGroup() if command.unique_id:
            command = msgspec.structs.replace(command, unique_id=bytes(UNIQUE_ID_BYTES))
        case _:
            pass
    return _plain_fields(command)


def command_of(name: str, values: Mapping[str, Any]) -> Command:
    """Return the command that `plain_command` has made plain.

    Raises:
        ValueError: there is no such command, or it has no such field.
    """
    if name not in _COMMANDS:
        raise ValueError(f"command must be one of {', '.join(sorted(_COMMANDS))}, got {name!r}")
    return _object_of(name, values)


def plain_config(config: EngineConfig) -> dict[str, Any]:
    """Return the fields of a configuration that differ from their defaults."""
    return {name: value for name, value in _plain_fields(config)[1].items() if not name.startswith("decision_log")}


def names_in(config: EngineConfig) -> frozenset[str]:
    """Return the texts in the lists of a configuration, such as the namespaces that have a weight."""
    found: set[str] = set()
    rest: list[Any] = [value for field in fields(config) if isinstance(value := getattr(config, field.name), tuple)]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            found.add(one)
        elif isinstance(one, tuple):
            rest += cast("tuple[Any, ...]", one)
    return frozenset(found)


def config_of(values: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration that `plain_config` has made plain.

    Raises:
        ValueError: a field is unknown, or out of its range.
    """
    quotas = tuple(api.TenantQuota(*one) for one in values.get("quotas", ()))
    return _object_of("EngineConfig", {**values, "quotas": quotas})


def _without_text(sampling: SamplingParams, renaming: Renaming) -> SamplingParams:
    """Return the fields of a result that decisions depend on."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        stop_token_ids=renaming.ids(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        kept_tokens=sampling.kept_tokens,
        prompt_logprobs=sampling.prompt_logprobs,
        prompt_logprobs_start=sampling.prompt_logprobs_start,
        routed_experts_from=sampling.routed_experts_from,
        hidden_states_from=sampling.hidden_states_from,
        grammar=None if sampling.grammar is None else Grammar(kind="regex", text="."),
        logits_processors=(LogitsProcessor(PROCESSOR),) if sampling.logits_processors else (),
    )


def _plain_fields(value: Any) -> tuple[str, dict[str, Any]]:
    found: dict[str, Any] = {}
    for name, default in _defaults(cast("type[Any]", type(value))).items():
        own = getattr(value, name)
        if own != (default() if callable(default) else default):
            found[name] = _plain(own)
    return type(value).__name__, found


def _defaults(made: type[Any]) -> Mapping[str, Any]:
    """Return the fields of a dataclass or a struct, each with its default or default factory."""
    if is_dataclass(made):
        return {
            one.name: one.default if one.default_factory is MISSING else one.default_factory for one in fields(made)
        }
    return {
        one.name: one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory
        for one in msgspec.structs.fields(made)
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value) or isinstance(value, msgspec.Struct):
        name, found = _plain_fields(value)
        return {_TYPE: name, **found}
    if isinstance(value, tuple):
        return [_plain(one) for one in cast("tuple[Any, ...]", value)]
    return value


def _object_of(name: str, values: Mapping[str, Any]) -> Any:
    made = _COMMANDS.get(name) or getattr(api, name, None)
    if not isinstance(made, type) or not (is_dataclass(made) or issubclass(made, msgspec.Struct)):
        raise ValueError(f"the log must have what this version knows, got {name!r}")
    if unknown := values.keys() - _defaults(cast("type[Any]", made)).keys():
        raise ValueError(f"{name} must have fields that this version knows, got {', '.join(sorted(unknown))}")
    return made(**{key: _value_of(value) for key, value in values.items()})


def _value_of(value: Any) -> Any:
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return _object_of(found[_TYPE], {key: one for key, one in found.items() if key != _TYPE})
    if isinstance(value, list):
        return tuple(_value_of(one) for one in cast("list[Any]", value))
    return value
