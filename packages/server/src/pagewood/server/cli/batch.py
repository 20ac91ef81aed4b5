"""`pagewood batch`: the requests of a file are answered into another one, by a server of its own or one that runs."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO

import httpx
import msgspec

from pagewood.server.cli.options.page import Commands
from pagewood.server.cli.server_options import add_server_options, key_of, trust_of
from pagewood.server.jobs.lines import Line, Result, counted_tokens, keep_results, read_lines
from pagewood.server.jobs.sending import send_all
from pagewood.server.keys.file import KEY_VARIABLE

_CONCURRENCY = 64
_PATIENCE_S = 600.0
_SHOWN_S, _LOGGED_S = 0.5, 10.0  # between two looks at the progress, on a terminal and in a log
_MOST_SHOWN = 5
_ENDING_S = 30.0
_OK = 200
_STOPPED = 130
_VARIABLES = (KEY_VARIABLE, "OPENAI_API_KEY")


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "batch",
        help="answer the requests of a file",
        usage="%(prog)s IN OUT [OPTION ...] [-- OPTION OF serve ...]",
        description="Answer the requests of a file in the form of OpenAI's batches, one JSON object a line with "
        "custom_id, url (of chat completions, completions, embeddings or responses) and body. Results are written as "
        "they come. After Ctrl-C or a kill the same command goes on where it was. Exits with 1 if a request was not "
        "answered.",
        epilog="Example: pagewood batch in.jsonl out.jsonl --model FOLDER -- --weights int8",
    )
    parser.add_argument("requests", type=Path, metavar="IN", help="file with the requests")
    parser.add_argument("results", type=Path, metavar="OUT", help="file for the results; those that it has are kept")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of `pagewood serve`, for a server of its own")
    parser.add_argument("--url", help="a server that runs (default: one is started for the job, and ended)")
    parser.add_argument("--model", metavar="MODEL", help="of the server that is started (default: the embedded model)")
    parser.add_argument(
        "--concurrency", type=int, default=_CONCURRENCY, metavar="N", help="requests at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=_PATIENCE_S,
        metavar="S",
        help="seconds for which a request is sent again while a server is busy or away (default: %(default)g)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_server_options(parser, variables=_VARIABLES)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answer the requests; return 1 if some were not answered.

    Raises:
        FileNotFoundError: there is no file of requests.
        ValueError: options contradict each other, a line is wrong, or the server does not start.
    """
    if options.concurrency < 1:
        raise ValueError(f"--concurrency must be >= 1, got {options.concurrency}")
    if options.url is not None and (options.model is not None or options.options):
        given = "--model" if options.model is not None else options.options[0]
        raise ValueError(f"--url must not be given with options of a server that is started, got {given}")
    lines = read_lines(options.requests)
    done = keep_results(options.results)
    left = [line for line in lines if line.custom_id not in done]
    kept = [done[line.custom_id] for line in lines if line.custom_id in done]
    job = _Job(num_lines=len(lines), num_kept=len(kept), num_refused=len(kept) - kept.count(_OK))
    if not options.quiet and kept:
        print(f"{len(kept)} of {len(lines)} requests have results already", file=sys.stderr)
    if left:
        try:
            with options.results.open("ab") as out, _server(options) as (url, key):
                asyncio.run(_answer(options, url, key, left, job, out))
        except KeyboardInterrupt:
            print(f"\nstopped at {job.line()}; the same command goes on", file=sys.stderr)
            return _STOPPED
    if not options.quiet:
        print(job.summary(), file=sys.stderr)
    return 1 if job.num_refused + job.num_failed else 0


@dataclass(slots=True, kw_only=True)
class _Job:
    """What has become of a job so far."""

    num_lines: int
    num_kept: int
    """Results that were there before."""
    num_refused: int
    """Those of them that are no answers."""
    start_s: float = field(default_factory=monotonic)
    num_answered: int = 0  # written by: note
    num_failed: int = 0  # written by: note
    num_prompt: int = 0  # written by: note
    num_output: int = 0  # written by: note
    failures: list[str] = field(default_factory=list[str])  # written by: note

    def note(self, result: Result) -> None:
        """Count a result."""
        response = result.response
        if response is not None and response.status_code == _OK:
            self.num_answered += 1
            prompt, output = counted_tokens(response)
            self.num_prompt += prompt
            self.num_output += output
            return
        self.num_failed += 1
        if len(self.failures) < _MOST_SHOWN:
            assert response is not None or result.error is not None
            why = result.error.message if result.error else f"{response.status_code}: {bytes(response.body).decode()}"  # pyright: ignore[reportOptionalMemberAccess]
            self.failures.append(f"{result.custom_id}: {why}")

    def line(self) -> str:
        """Return the progress."""
        passed_s = monotonic() - self.start_s
        num_failed = self.num_refused + self.num_failed
        failed = f", {num_failed} failed" if num_failed else ""
        return (
            f"{self.num_kept + self.num_answered + self.num_failed} of {self.num_lines} requests{failed}, "
            f"{self.num_output / max(passed_s, 1e-9):,.0f} output tokens/s"
        )

    def summary(self) -> str:
        """Return the end, with the first failures."""
        passed_s = monotonic() - self.start_s
        lines = [
            f"{self.line()}; {self.num_prompt:,} prompt and {self.num_output:,} output tokens in {passed_s:.1f} s",
            *(f"  not answered: {one}" for one in self.failures),
        ]
        if self.num_failed > len(self.failures):
            lines.append(f"  and {self.num_failed - len(self.failures)} more")
        return "\n".join(lines)


async def _answer(
    options: argparse.Namespace, url: str, key: str | None, lines: Sequence[Line], job: _Job, out: IO[bytes]
) -> None:
    def write(result: Result) -> None:
        out.write(msgspec.json.encode(result) + b"\n")
        out.flush()
        job.note(result)

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    showing = None if options.quiet else asyncio.create_task(_show(job))
    async with httpx.AsyncClient(
        base_url=url.removesuffix("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx.Timeout(10.0, read=None, pool=None),
        limits=httpx.Limits(max_connections=options.concurrency, max_keepalive_connections=options.concurrency),
        verify=trust_of(options) or True,
    ) as client:
        try:
            await send_all(client, lines, write, concurrency=options.concurrency, patience_s=options.patience)
        finally:
            if showing is not None:
                showing.cancel()
                print("\r\x1b[K" if sys.stderr.isatty() else "", end="", file=sys.stderr)


async def _show(job: _Job) -> None:
    """Keep one line on a terminal up to date; elsewhere write one now and then."""
    is_terminal = sys.stderr.isatty()
    while True:
        await asyncio.sleep(_SHOWN_S if is_terminal else _LOGGED_S)
        print(f"\r\x1b[K{job.line()}" if is_terminal else job.line(), end="" if is_terminal else "\n", file=sys.stderr)
        sys.stderr.flush()


@contextmanager
def _server(options: argparse.Namespace) -> Generator[tuple[str, str | None]]:
    """Provide the address of a server, and a key for it.

    Raises:
        ValueError: one is started, and ends before it is ready.
    """
    if options.url is not None:
        yield options.url, key_of(options, variables=_VARIABLES)
        return
    key = secrets.token_hex()
    model = [] if options.model is None else ["--model", options.model]
    command = [sys.executable, "-m", "pagewood.server", "serve", *model, "--port", "0", "--log-level", "warning"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *options.options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, KEY_VARIABLE: key},
        )
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("Pagewood serves")), None)
            if line is None:
                log.seek(0)
                raise ValueError(f"the server did not start:\n{log.read().strip()}")
            yield line.partition(" at ")[2].split()[0], key
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_S)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
