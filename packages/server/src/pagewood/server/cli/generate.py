"""`pagewood generate`: answers prompts without a server."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

from pagewood.engine.api import SAMPLING_PARAMETERS, Grammar, SamplingParams
from pagewood.server.cli.options.engine import engine_config
from pagewood.server.cli.options.logs import add_log_options
from pagewood.server.cli.options.memory import add_memory_options
from pagewood.server.cli.options.model import add_model_options
from pagewood.server.cli.options.page import FORMATTER, Commands, Page
from pagewood.server.cli.options.sampling import add_sampling_options
from pagewood.server.cli.options.work import add_work_options

TAKEN = frozenset({
    "--model", "--device", "--threads", "--tensor-parallel-size", "--pipeline-parallel-size", "--weights",
    "--activations", "--dtype", "--kv-cache-dtype", "--batch-invariant", "--max-length", "--max-total-tokens",
    "--mem-fraction", "--max-running-requests", "--chunked-prefill-size", "--speculative", "--speculative-model",
    "--speculative-num-tokens", "--speculative-control", "--speculative-verify", "--grammar-backend",
    "--grammar-timeout", "--random-seed", "--decision-log",
})  # fmt: skip
"""First names of the options of `serve` that matter to one batch in one process."""


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="answer prompts without a server",
        description="Answer prompts without a server, all in one batch.",
        usage="%(prog)s PROMPT [PROMPT ...] [OPTION ...]",
        formatter_class=FORMATTER,
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="message to the model")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--raw", action="store_true", help="continue the prompts without the model's chat template")
    answers.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop string, which ends an answer; repeatable"
    )
    answers.add_argument("--max-tokens", type=int, metavar="TOKENS", help="longest answer (default: as long as fits)")
    answers.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: that of the model)")
    answers.add_argument(
        "--top-k", type=int, metavar="N", help="sample from the N most likely tokens (default: that of the model)"
    )
    answers.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P (default: that of the model)",
    )
    answers.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="leave out tokens below P times the highest probability (default: that of the model)",
    )
    answers.add_argument(
        "--top-n-sigma",
        type=float,
        metavar="N",
        help="leave out tokens whose logit is N standard deviations below the largest (default: all are left in)",
    )
    answers.add_argument(
        "--seed", type=int, dest="answer_seed", metavar="N", help="seed of all answers (default: --random-seed)"
    )
    form = answers.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="file with a JSON schema; answers are JSON that follows it")
    form.add_argument("--regex", metavar="EXPR", help="expression that the whole answer matches, in Rust's syntax")
    page = Page(parser=parser, only=TAKEN)
    add_model_options(page)
    add_memory_options(page)
    add_work_options(page)
    add_sampling_options(page)
    add_log_options(page)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one answer per prompt; exits with 1 if any prompt got no answer."""
    models: list[str] = options.model or []
    if len(models) > 1:
        raise ValueError(f"--model must be given once, got {', '.join(models)}")
    config = asdict(engine_config(options, model=models[0] if models else None))
    grammar = _grammar(options)
    from pagewood.engine.offline.llm import LLM  # imported after the options are checked: it takes seconds

    with LLM(config.pop("model"), **config) as llm:
        sampling = replace(_sampling(options, llm.default_sampling), grammar=grammar)
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
    """Return the defaults of the model's folder, with the options in place of theirs."""
    names = {name: name for name in SAMPLING_PARAMETERS if hasattr(options, name)} | {"seed": "answer_seed"}
    given = {name: value for name, option in names.items() if (value := getattr(options, option)) is not None}
    return replace(defaults, max_tokens=options.max_tokens, **given)


def _grammar(options: argparse.Namespace) -> Grammar | None:
    """Return the grammar of the answers; None: no restriction.

    Raises:
        ValueError: the text is empty, or the file is not text.
        FileNotFoundError: there is no such file.
    """
    if options.json_schema is not None:
        return Grammar.json_schema(Path(options.json_schema).read_text(encoding="utf-8"))
    return None if options.regex is None else Grammar.regex(options.regex)
