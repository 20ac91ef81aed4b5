"""A remote tier on a server of the Redis protocol, such as Redis or Valkey."""

import re
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from queue import Empty, LifoQueue

import numpy as np

from pagewood.kvpool.arrays import check_at_least_one
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.keys import check_sizes
from pagewood.kvpool.tiers.stores.checksum import CHECKSUM_BYTES, FORM, checksum
from pagewood.kvpool.tiers.stores.place_url import PlaceUrl
from pagewood.kvpool.tiers.stores.resp import RespConnection

_BATCH_BYTES = 8 * 1024 * 1024
"""Bytes of pages that are sent or asked for before answers are read, at most, but at least one page."""
_BATCH_KEYS = 512
_MAX_VALUE_BYTES = 512 * 1024 * 1024
"""Longest value of Redis."""
_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_FORM = "redis://HOST:PORT/DATABASE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisPlace:
    """Where a server is, and how to log in."""

    host: str
    port: int = 6379
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    """None: the server asks for none."""
    timeout_s: float = 2.0
    """Seconds after which one batch of at most 8 MiB has failed, the connection included."""

    @classmethod
    def parse(cls, url: str) -> "RedisPlace":
        """Return the place that `redis://HOST[:PORT][/DATABASE][?user=..&password_file=..&timeout_s=..]` names.

        The password is the first line of a file, so that it is in no list of processes and no log.

        Raises:
            ValueError: A part is wrong, unknown, or missing, or the file cannot be read. It does not repeat a password.
        """
        parts = PlaceUrl.parse(url, form=_FORM, options=("user", "password_file"))
        database, options = parts.path or "0", parts.options
        if not (database.isascii() and database.isdigit()):
            raise ValueError(f"a redis URL must be {_FORM}, got {url!r}")
        if "user" in options and "password_file" not in options:
            raise ValueError(f"user of a redis URL must come with password_file, got {url!r}")
        password = None
        if "password_file" in options:
            try:
                password = Path(options["password_file"]).read_text().partition("\n")[0]
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"password_file of a redis URL must be a text file that can be read: {error}"
                ) from None
        return cls(
            host=parts.host,
            port=6379 if parts.port is None else parts.port,
            database=int(database),
            user=options.get("user"),
            password=password,
            timeout_s=parts.timeout_s,
        )

    def __str__(self) -> str:
        """Return the place without what is needed to log in."""
        return f"redis://{self.host}:{self.port}/{self.database}"


class RedisStore:
    """A `PageStore` on a server of the Redis protocol. Thread-safe.

    Invariant: a connection is used by one call at a time, and never again after a call on it has failed.

    The server decides which pages it forgets: give it `maxmemory` and `maxmemory-policy allkeys-lru`. A server without
    room for a page is no error. Each page is stored with a checksum, so a damaged one, or one of another length, counts
    as absent. A call that fails raises OSError after `timeout_s` for each batch at the latest; nothing is tried twice.
    """

    __slots__ = ("_idle", "_num_batch", "_page_bytes", "_place", "_prefix")

    def __init__(
        self, place: RedisPlace, *, page_bytes: int, fingerprint: bytes = b"", max_connections: int = 4
    ) -> None:
        """Make the store; the server need not answer yet.

        Args:
            place: Where it is.
            page_bytes: Size of a page image, in bytes.
            fingerprint: Identifies the content of pages: model, dtype, layout. Pages of different fingerprints are kept
                apart.
            max_connections: Calls at the same time; further ones wait for one of these, within their time.

        Raises:
            ValueError: A number is less than 1, or a page is longer than a value of Redis.
        """
        check_at_least_one(page_bytes=page_bytes, max_connections=max_connections)
        if page_bytes + CHECKSUM_BYTES > _MAX_VALUE_BYTES:
            raise ValueError(f"page_bytes must be at most {_MAX_VALUE_BYTES - CHECKSUM_BYTES}, got {page_bytes}")
        self._place = place
        self._page_bytes = page_bytes
        self._num_batch = max(1, min(_BATCH_KEYS, _BATCH_BYTES // page_bytes))
        name = blake2b(fingerprint, digest_size=16).hexdigest()
        self._prefix = f"pagewood-{FORM}-{name}-{page_bytes}-".encode()
        # A place for each connection; None: not connected.
        self._idle: LifoQueue[RespConnection | None] = LifoQueue()
        for _ in range(max_connections):
            self._idle.put(None)

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store the pages that are not stored.

        Raises:
            OSError: The server did not answer, or refused.
            ValueError: A page or a key has the wrong size. Nothing is stored.
        """
        check_sizes(keys, pages, self._page_bytes)
        missing = [index for index, is_stored in enumerate(self.exists(keys)) if not is_stored]
        for start in range(0, len(missing), self._num_batch):
            some = missing[start : start + self._num_batch]
            # One argument of three parts would be copied; an appended checksum is a second command that may be lost.
            values = [np.concatenate((pages[i], np.frombuffer(checksum(keys[i], pages[i]), np.uint8))) for i in some]
            with self._connection() as (connection, until_s):
                commands = [(b"SET", self._prefix + keys[i], value.data) for i, value in zip(some, values, strict=True)]
                connection.send(commands, until_s=until_s)
                for _ in some:
                    answer = connection.line(until_s=until_s)
                    if answer != b"+OK" and not answer.startswith(b"-OOM"):
                        raise _unexpected("SET", answer)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch and verify pages.

        Raises:
            OSError: The server did not answer, or refused.
        """
        found: list[bool] = []
        for start in range(0, len(keys), self._num_batch):
            some, rows = keys[start : start + self._num_batch], pages[start : start + self._num_batch]
            with self._connection() as (connection, until_s):
                connection.send([(b"GET", self._prefix + key) for key in some], until_s=until_s)
                sums = [self._read(connection, row, until_s) for row in rows]
            found += [
                sum_of is not None and checksum(key, row) == sum_of
                for key, row, sum_of in zip(some, rows, sums, strict=True)
            ]
        return found

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages are stored.

        Raises:
            OSError: The server did not answer, or refused.
        """
        found: list[bool] = []
        for start in range(0, len(keys), _BATCH_KEYS):
            some = keys[start : start + _BATCH_KEYS]
            with self._connection() as (connection, until_s):
                connection.send([(b"EXISTS", self._prefix + key) for key in some], until_s=until_s)
                found += [_number("EXISTS", b":", connection.line(until_s=until_s)) == 1 for _ in some]
        return found

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget pages, if they are stored.

        Raises:
            OSError: The server did not answer, or refused.
        """
        for start in range(0, len(keys), _BATCH_KEYS):
            some = keys[start : start + _BATCH_KEYS]
            with self._connection() as (connection, until_s):
                connection.send([(b"DEL", *(self._prefix + key for key in some))], until_s=until_s)
                _number("DEL", b":", connection.line(until_s=until_s))

    def close(self) -> None:
        """Disconnect."""
        while True:
            try:
                connection = self._idle.get_nowait()
            except Empty:
                return
            if connection is not None:
                connection.close()

    def _read(self, connection: RespConnection, page: Bytes, until_s: float) -> bytes | None:
        """Read the answer to GET into a page; return the checksum that it came with, or None if there is no page."""
        num_bytes = _number("GET", b"$", connection.line(until_s=until_s))
        if num_bytes == -1:
            return None
        if not 0 <= num_bytes <= _MAX_VALUE_BYTES:
            raise OSError(f"the server answered GET with a value of {num_bytes} bytes")
        sum_of = None
        if num_bytes == self._page_bytes + CHECKSUM_BYTES:
            connection.read_into(page.data.cast("B"), until_s=until_s)
            read = bytearray(CHECKSUM_BYTES)
            connection.read_into(memoryview(read), until_s=until_s)
            sum_of = bytes(read)
        else:
            connection.skip(num_bytes, until_s=until_s)
        if connection.line(until_s=until_s):
            raise OSError("the server sent more than it said")
        return sum_of

    @contextmanager
    def _connection(self) -> Generator[tuple[RespConnection, float]]:
        """Lend a connection, and say until when it may be used."""
        until_s = time.monotonic() + self._place.timeout_s
        try:
            connection = self._idle.get(timeout=self._place.timeout_s)
        except Empty:
            raise TimeoutError(f"all connections to {self._place} are in use") from None
        try:
            if connection is not None and connection.is_stale:
                connection.close()
                connection = None
            if connection is None:
                connection = self._connect(until_s)
            yield connection, until_s
        except BaseException:
            if connection is not None:
                connection.close()
                connection = None
            raise
        finally:
            self._idle.put(connection)

    def _connect(self, until_s: float) -> RespConnection:
        place = self._place
        connection = RespConnection(place.host, place.port, until_s=until_s)
        commands: list[tuple[bytes, ...]] = []
        if place.password is not None:
            user = () if place.user is None else (place.user.encode(),)
            commands.append((b"AUTH", *user, place.password.encode()))
        if place.database:
            commands.append((b"SELECT", b"%d" % place.database))
        try:
            connection.send(commands, until_s=until_s)
            for command in commands:
                answer = connection.line(until_s=until_s)
                if answer != b"+OK":
                    raise _unexpected(command[0].decode(), answer)
        except BaseException:
            connection.close()
            raise
        return connection


def _number(command: str, kind: bytes, line: bytes) -> int:
    """Return the number of an answer.

    Raises:
        OSError: It is another kind of answer.
    """
    if line[:1] != kind or not _NUMBER.fullmatch(line, 1):
        raise _unexpected(command, line)
    return int(line[1:])


def _unexpected(command: str, answer: bytes) -> OSError:
    return OSError(f"the server answered {command} with {answer[:200].decode(errors='replace')!r}")
