"""`pagewood generate`: answers to prompts, without a server."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pagewood.engine.api import SamplingParams
from pagewood.server.cli.engine_options import add_engine_options, engine_config

if TYPE_CHECKING:
    from argparse import _SubParsersAction  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="answer prompts without a server",
        description="Answer prompts without a server, all of them at the same time.",
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="what a person says to the model")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--raw", action="store_true", help="continue the prompts as they are, without chat template")
    answers.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
    answers.add_argument("--max-tokens", type=int, metavar="TOKENS", help="longest answer (default: what fits)")
    answers.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's)")
    answers.add_argument("--top-k", type=int, metavar="N", help="only the N likeliest tokens (default: the model's)")
    answers.add_argument("--top-p", type=float, metavar="P", help="only the likeliest, up to P (default: the model's)")
    answers.add_argument(
        "--min-p", type=float, metavar="P", help="none below P of the likeliest (default: the model's)"
    )
    answers.add_argument("--seed", type=int, metavar="N", help="decides all answers (default: --random-seed)")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one answer per prompt; the exit code is 1 if there is none to one of them."""
    config = asdict(engine_config(options))
    from pagewood.engine.offline.llm import LLM  # takes seconds: not before the options are known to be right

    with LLM(config.pop("model"), **config) as llm:
        sampling = _sampling(options, llm.default_sampling)
        if options.raw or not llm.tokenizer.has_chat_template:
            completions = llm.generate(options.prompts, sampling, stop=options.stop)
        else:
            conversations = [[{"role": "user", "content": prompt}] for prompt in options.prompts]
            completions = llm.chat(conversations, sampling, stop=options.stop)
    for completion in completions:
        if completion.refusal is None:
            print(completion.text)
        else:
            print(f"pagewood: error: {completion.refusal.message}", file=sys.stderr)
    return 1 if any(completion.refusal is not None for completion in completions) else 0


def _sampling(options: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """Return what the model's folder advises, but for what the options say."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replace(defaults, max_tokens=options.max_tokens, **given)
