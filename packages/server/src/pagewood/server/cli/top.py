"""`pagewood top`: the live data of a server in the terminal."""

from __future__ import annotations

import argparse
import os
import select
import ssl
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import httpx
import msgspec

from pagewood.server.cli.options.page import Commands
from pagewood.server.cli.server_options import (
    ADMIN_VARIABLES,
    DIRECT,
    add_server_options,
    admin_server,
    trust_of,
    wants_admin,
)
from pagewood.server.cli.top_screen import Screen, plain
from pagewood.server.dashboard.live_data import Live

_EVENT = "data: "
_POLL_S = 0.1
_SILENT_S = 10.0
_NUM_FOR_RATES = 4
"""Messages until rates are known: nearly a second."""
_CLEAR = "\x1b[H\x1b[2J"


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "top",
        help="watch a server in the terminal",
        description="Watch a server in the terminal: requests, rates, KV memory, processes. q ends it. It looks better "
        "with rich (pip install 'pagewood-server[top]'). If the output is not a terminal, it is printed once.",
    )
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: %(default)s)"
    )
    add_server_options(parser, variables=ADMIN_VARIABLES)
    parser.add_argument("--model", metavar="NAME", help="which of several models to watch")
    parser.add_argument("--once", action="store_true", help="print the state once, and end")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the live data until q is pressed, or the server ends the stream."""
    feed = Feed(*admin_server(options.url, options), trust=trust_of(options), model=options.model)
    screen = Screen()
    if options.once or not sys.stdout.isatty():
        with feed:
            for _ in range(_NUM_FOR_RATES):
                screen.take(feed.next())
        print("\n".join(plain(screen, width=_columns())))
        return 0
    try:
        import rich  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError:
        show: Callable[[Feed, Screen], None] = _show_plain
    else:
        show = _show_rich
    with feed, _keys():
        screen.take(feed.next())
        show(feed, screen)
    return 0


class Feed:
    """The newest message of a server, read in a thread of its own. Enter it before use.

    Args:
        url: address of the server.
        key: API key; None: no key is sent.
        trust: trusted certificates; None: those of the system.
        model: which of several models it is about; None: the server has one.
    """

    __slots__ = ("_changed", "_client", "_failure", "_headers", "_is_over", "_newest", "_query", "_thread", "_url")

    def __init__(
        self, url: str, key: str | None, *, trust: ssl.SSLContext | None = None, model: str | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._query = {} if model is None else {"model": model}
        self._headers = {"accept": "text/event-stream", **({"authorization": f"Bearer {key}"} if key else {})}
        self._client = httpx.Client(timeout=httpx.Timeout(_SILENT_S), mounts=DIRECT, verify=trust or True)
        self._changed = threading.Condition()
        self._newest: Live | None = None  # written by: next, _read
        self._failure: str | None = None  # written by: _read
        self._is_over = False  # written by: __exit__
        self._thread = threading.Thread(target=self._read, name="feed", daemon=True)

    def __enter__(self) -> Feed:
        """Begin to read."""
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the server; the thread ends with its next message."""
        self._is_over = True

    def next(self, *, timeout_s: float | None = None) -> Live:
        """Wait for a message that was not returned before, and return it.

        Raises:
            ValueError: the server does not answer, refuses, or has gone.
            TimeoutError: none came in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._newest or self._failure, timeout_s):
                raise TimeoutError
            live, self._newest = self._newest, None
            if live is None:
                raise ValueError(self._failure)
            return live

    def _read(self) -> None:
        try:
            url = f"{self._url}/dashboard/events"
            with self._client, self._client.stream("GET", url, params=self._query, headers=self._headers) as found:
                if found.status_code != 200:
                    self._fail(_refusal(self._url, found))
                    return
                for line in found.iter_lines():
                    if self._is_over:
                        return
                    if line.startswith(_EVENT):
                        with self._changed:
                            self._newest = msgspec.json.decode(line.removeprefix(_EVENT), type=Live)
                            self._changed.notify_all()
            self._fail(f"the server at {self._url} has ended")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._fail(f"no server answers at {self._url}: {error}")
        except msgspec.ValidationError as error:
            self._fail(f"the server at {self._url} has another version: {error}")

    def _fail(self, why: str) -> None:
        with self._changed:
            self._failure = why
            self._changed.notify_all()


def _refusal(url: str, response: httpx.Response) -> str:
    if response.status_code in (401, 403):
        return wants_admin(url)
    return f"the server at {url} has no live data: status {response.status_code}"


def _show_plain(feed: Feed, screen: Screen) -> None:
    """Draw with nothing but two control sequences."""
    for live in _messages(feed, screen):
        screen.take(live)
        rows = os.get_terminal_size().lines
        print(_CLEAR + "\n".join(plain(screen, width=_columns())[: rows - 1]), flush=True)


def _show_rich(feed: Feed, screen: Screen) -> None:
    """Draw with rich, on a screen of its own."""
    from rich.live import Live as RichLive

    from pagewood.server.cli.top_rich import drawn

    with RichLive(drawn(screen), screen=True, auto_refresh=False) as display:
        for live in _messages(feed, screen):
            screen.take(live)
            display.update(drawn(screen), refresh=True)


def _messages(feed: Feed, screen: Screen) -> Iterator[Live]:
    """Yield messages until q is pressed; also the last one at once, so that something is drawn."""
    assert screen.live is not None
    yield screen.live
    while not _is_ended():
        try:
            yield feed.next(timeout_s=_POLL_S)
        except TimeoutError:
            continue


def _is_ended() -> bool:
    """Return whether q was pressed."""
    while sys.stdin.isatty() and select.select([sys.stdin], [], [], 0)[0]:
        if os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"\x03", b"\x04", b""):
            return True
    return False


@contextmanager
def _keys() -> Generator[None]:
    """Make keys readable one by one and without echo, if the input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _columns() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 100
