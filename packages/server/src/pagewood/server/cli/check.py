"""`pagewood check`: compares a model on disk, as it is computed here, with `transformers`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pagewood.server.cli.options.page import Commands

if TYPE_CHECKING:
    from pagewood.engine.assembly.model_check import ModelCheck

DIFFERS = 1
"""The exit code if the model differs from its reference."""


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "check",
        help="compare a model, as it is computed here, with transformers",
        description="Compute a text with a model of a folder or a GGUF file and with transformers, and show where they "
        "differ first, and by how much. Exits with 1 if they differ.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or GGUF file (default: the model inside this package)"
    )
    parser.add_argument(
        "--reference", metavar="FOLDER", help="what transformers reads, as the source of a GGUF file (default: MODEL)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where both compute (default: cpu)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        metavar="FORMAT",
        help="what the runner computes in: float32, bfloat16, float16 (default: float32 on a CPU, bfloat16 on CUDA); "
        "the reference is computed in float32",
    )
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="the text (default: random tokens)")
    text.add_argument("--tokens", type=_tokens, metavar="ID,ID", help="the tokens of the text")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="the largest relative error that is no difference (default: 0.001 for float32, 0.1 for bfloat16, 0.03 for "
        "float16)",
    )
    parser.add_argument("--json", action="store_true", help="write everything as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if the model differs from its reference."""
    from pagewood.engine.assembly.model_check import check_model  # imports torch, which takes seconds

    tokens: Sequence[int] | None = options.tokens
    if options.prompt is not None:
        from pagewood.engine.model_folder.folder import model_folder
        from pagewood.engine.text.tokenizer import Tokenizer

        tokens = Tokenizer.from_folder(model_folder(options.model)).encode(options.prompt).tolist()
    found = check_model(
        options.model,
        reference=options.reference,
        device=options.device,
        dtype=options.dtype or ("float32" if options.device == "cpu" else "bfloat16"),
        tokens=tokens,
        tolerance=options.tolerance,
    )
    first = found.first
    if options.json:
        print(json.dumps({**asdict(found), "first": None if first is None else first.what}, indent=2))
    else:
        print(_described(found))
    return 0 if first is None else DIFFERS


def _tokens(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from None


def _described(found: ModelCheck) -> str:
    """Return the report for a reader."""
    lines = [
        f"{found.name}: {found.num_tokens} tokens by {found.computed_by} in {found.dtype}",
        f"  reference: transformers, {found.reference}",
        "  largest relative error of a token, after",
    ]
    for one in (*found.states, found.logits):
        mark = "  <- differs" if one.is_different else ""
        lines.append(f"    {one.error:9.2e}  {one.what} (token {one.token}){mark}")
    lines.append(f"  largest difference of a logit: {found.largest:.2e}")
    lines.append(f"  the same most probable token after {found.num_equal} of {found.num_tokens}")
    first = found.first
    lines.append(
        f"the same, with a tolerance of {found.logits.tolerance:g}"
        if first is None
        else f"differs first in {first.what}, by {first.error:.2%} at token {first.token}"
    )
    return "\n".join(lines)
