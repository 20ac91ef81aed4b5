"""`pagewood bench`: how fast any server with OpenAI's API answers a load."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pagewood.server.bench import arrivals, report, workloads
from pagewood.server.bench.client import PATHS, Sender
from pagewood.server.bench.http_client import HttpClient, HttpError
from pagewood.server.bench.records import Record, parse_objective, parse_seconds, summarise
from pagewood.server.bench.run import Progress, run
from pagewood.server.bench.workloads import Conversation, History, Lengths, Maker, Turn, Words, ids_below, words_of
from pagewood.server.cli.options.page import Commands
from pagewood.server.cli.server_options import add_server_options, key_of, trust_of
from pagewood.server.keys.file import KEY_VARIABLE

_SHORT, _LONG = 24, 120  # words of the two prompts that measure the tokens per word
_REFRESH_S = 0.5
_VARIABLES = (KEY_VARIABLE, "OPENAI_API_KEY")
_WARM_UP_TOKENS = 4


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="measure how fast a server answers a load",
        description="Send a load to any server with OpenAI's API and report how fast it answers. Without --rate, a "
        "number of requests is under way at any time; with it, requests come at their own times.",
    )
    parser.add_argument("url", metavar="URL", help="address of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: the server's first)")
    parser.add_argument("--endpoint", choices=tuple(PATHS), default="chat", help="what is sent (default: %(default)s)")
    add_server_options(parser, variables=_VARIABLES)
    what = parser.add_argument_group("what is sent")
    what.add_argument(
        "--workload",
        choices=("random", "shared-prefix", "conversations"),
        default="random",
        help="prompts with nothing in common, with common prefixes, or turns of conversations (default: %(default)s)",
    )
    what.add_argument("--file", type=Path, metavar="FILE", help="send the requests of a file: prompts, or a trace")
    what.add_argument(
        "--speed", type=float, default=1.0, metavar="F", help="play the times of the file F times as fast"
    )
    what.add_argument("--input-tokens", type=int, default=256, metavar="N", help="of a prompt (default: %(default)s)")
    what.add_argument("--output-tokens", type=int, default=64, metavar="N", help="of an answer (default: %(default)s)")
    what.add_argument(
        "--spread", type=float, default=0.0, metavar="S", help="lengths are uniform in (1 - S) n to (1 + S) n"
    )
    what.add_argument("--prefix-tokens", type=int, default=1024, metavar="N", help="of a common prefix (default: 1024)")
    what.add_argument("--prefixes", type=int, default=8, metavar="N", help="number of prefixes (default: %(default)s)")
    what.add_argument("--turns", type=int, default=4, metavar="N", help="of a conversation (default: %(default)s)")
    what.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="send ids below N, so that lengths are exact (completions only); otherwise words are sent, whose tokens "
        "are measured with the server's counts",
    )
    what.add_argument("--until-stop", action="store_true", help="let the model end its answers (default: it may not)")
    what.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: %(default)s)")
    what.add_argument("--extra-body", metavar="JSON", help="further fields of every request")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: %(default)s)")
    load = parser.add_argument_group("how much")
    load.add_argument("--requests", type=int, metavar="N", help="requests, or conversations (default: 100)")
    load.add_argument("--duration", type=parse_seconds, metavar="TIME", help="begin none after this time, such as 60s")
    load.add_argument("--concurrency", type=int, metavar="N", help="most under way (default: 8, with --rate no limit)")
    load.add_argument("--rate", type=float, metavar="R", help="requests per second, at times of a Poisson process")
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="below 1: in bursts; above 1: more even (with --rate)",
    )
    load.add_argument("--steady", action="store_true", help="the same time between all requests (with --rate)")
    load.add_argument(
        "--timeout", type=parse_seconds, default=600.0, metavar="TIME", help="of an answer (default: 600s)"
    )
    load.add_argument("--no-warm-up", action="store_true", help="send no request before the measured ones")
    shown = parser.add_argument_group("what is reported")
    shown.add_argument(
        "--slo", type=parse_objective, metavar="LIMITS", help="such as ttft=200ms,tpot=50ms; also itl and e2e: goodput"
    )
    shown.add_argument("--json", type=Path, metavar="FILE", help="write settings, summary and all requests")
    shown.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (needs matplotlib)")
    shown.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=run_bench)


def run_bench(options: argparse.Namespace) -> int:
    """Print the report; exits with 1 if any request failed."""
    if options.vocab_size is not None and options.endpoint != "completions":
        raise ValueError("--vocab-size sends token ids, which only --endpoint completions takes")
    if options.requests is not None and options.requests < 1:
        raise ValueError(f"--requests must be >= 1, got {options.requests}")
    if options.concurrency is not None and options.concurrency < 1:
        raise ValueError(f"--concurrency must be >= 1, got {options.concurrency}")
    if (options.steady or options.burstiness != 1.0) and options.rate is None:
        raise ValueError("--steady and --burstiness need --rate")
    try:
        progress = asyncio.run(_measure(options))
    except HttpError as error:
        print(f"pagewood: error: {error}", file=sys.stderr)
        return 1
    records = [record for record in progress.records if record.ended_s > 0]
    if not records:
        raise ValueError("no request was sent")
    summary = summarise(records, options.slo)
    print(report.table(summary, lag_s=progress.lag_s))
    if options.json is not None:
        settings = {name: _plain(value) for name, value in vars(options).items() if name not in ("run", "api_key")}
        options.json.write_bytes(report.document(summary, settings, lag_s=progress.lag_s, records=records))
    if options.plot is not None:
        report.plot(records, options.plot)
    return 1 if summary.errors else 0


async def _measure(options: argparse.Namespace) -> Progress:
    """Query the server for its model and key check, warm it up, and run."""
    key, trust = key_of(options, variables=_VARIABLES), trust_of(options)
    client = HttpClient(options.url.removesuffix("/").removesuffix("/v1"), api_key=key, trust=trust)
    try:
        model = options.model or await _first_model(client)
        fields: dict[str, Any] = {"temperature": options.temperature}
        if not options.until_stop:
            fields["ignore_eos"] = True
        if options.extra_body is not None:
            extra = msgspec.json.decode(options.extra_body)
            if not isinstance(extra, dict):
                raise ValueError(f"--extra-body must be a JSON object, got {options.extra_body}")
            fields |= extra
        sender = Sender(client, endpoint=options.endpoint, model=model, fields=fields, limit_s=options.timeout)
        make = await _maker(sender, options)
        if not options.no_warm_up:
            await _ask(sender, make(min(options.input_tokens, 64), workloads.random.Random(0)), _WARM_UP_TOKENS)
        return await _run(sender, _conversations(options, make), options)
    finally:
        client.close()


async def _run(sender: Sender, given: Iterator[Conversation], options: argparse.Namespace) -> Progress:
    """Run, and show the progress; the first Ctrl-C ends the run and reports the results so far."""
    gaps = None
    if options.rate is not None:
        gaps = (
            arrivals.steady(options.rate)
            if options.steady
            else arrivals.irregular(options.rate, burstiness=options.burstiness, seed=options.seed)
        )
    count = options.requests
    if count is None and options.duration is None and options.file is None:
        count = 100
    concurrency = options.concurrency
    if concurrency is None and gaps is None:
        concurrency = None if options.file is not None else 8
    progress = Progress()
    running = asyncio.ensure_future(
        run(
            sender,
            given,
            num_conversations=count,
            duration_s=options.duration,
            concurrency=concurrency,
            gaps=gaps,
            progress=progress,
        )
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, running.cancel)
    showing = asyncio.create_task(_show(progress, count)) if not options.quiet else None
    try:
        await running
    except asyncio.CancelledError:
        if not running.cancelled():
            raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if showing is not None:
            showing.cancel()
            print("\r\x1b[K" if sys.stderr.isatty() else "", end="", file=sys.stderr)
    return progress


async def _show(progress: Progress, count: int | None) -> None:
    """Keep one line on the terminal up to date."""
    if not sys.stderr.isatty():
        return
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    while True:
        await asyncio.sleep(_REFRESH_S)
        passed_s = loop.time() - start_s
        begun = len(progress.records)
        of = f" of {count}" if count is not None else ""
        failed = f", {progress.num_failed} failed" if progress.num_failed else ""
        line = (
            f"{passed_s:6.1f} s  {progress.num_ended}{of} answered{failed}, {begun - progress.num_ended} under way, "
            f"{progress.num_tokens / passed_s:,.0f} output tokens/s"
        )
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _conversations(options: argparse.Namespace, make: Maker) -> Iterator[Conversation]:
    lengths = Lengths(num_prompt=options.input_tokens, num_output=options.output_tokens, spread=options.spread)
    if options.file is not None:
        return workloads.from_file(options.file, make, num_output=options.output_tokens, speed=options.speed)
    match options.workload:
        case "shared-prefix":
            return workloads.shared_prefixes(
                make, lengths, num_groups=options.prefixes, num_prefix=options.prefix_tokens, seed=options.seed
            )
        case "conversations":
            return workloads.conversations(make, lengths, num_turns=options.turns, seed=options.seed)
        case _:
            return workloads.random_prompts(make, lengths, seed=options.seed)


async def _maker(sender: Sender, options: argparse.Namespace) -> Maker:
    """Return a maker of prompts with a given length: of ids, or of words whose tokens the server has counted."""
    if options.vocab_size is not None:
        return ids_below(options.vocab_size)
    counts = [(words, (await _ask(sender, words_of(words), 1)).num_prompt) for words in (_SHORT, _LONG)]
    return Words.calibrated(*counts).text


async def _ask(sender: Sender, prompt: str | tuple[int, ...], max_tokens: int) -> Record:
    """Send one request before the run, and return its record.

    Raises:
        HttpError: it failed.
    """
    record, history = Record(planned_s=0.0), History()
    history.say(Turn(prompt=prompt, max_tokens=max_tokens))
    await sender.send(history, max_tokens, record)
    if record.error is not None:
        raise HttpError(record.error, f"a request before the run failed: {record.error} {record.text}".rstrip())
    return record


async def _first_model(client: HttpClient) -> str:
    status, body = await client.json("GET", "/v1/models")
    try:
        if status == 200:
            return msgspec.json.decode(body)["data"][0]["id"]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        pass
    if status in (401, 403):
        names = " or ".join(_VARIABLES)
        raise HttpError(
            str(status), f"the server refuses the key (status {status}); give one with --api-key or {names}"
        )
    raise HttpError(str(status), f"the server does not list its models (status {status}); give --model")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
