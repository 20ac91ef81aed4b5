"""`pagewood quantize`: writes a folder whose weights are int8 or int4."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from pagewood.engine.model_folder.folder import model_folder
from pagewood.server.cli.options.page import Commands

if TYPE_CHECKING:
    from pagewood.engine.quantise import Summary

_NUM_SHOWN = 5


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "quantize",
        help="write a folder with weights of int8 or int4",
        description="Write a folder of compressed-tensors, which other engines load too, with the projections of all "
        "layers in int8 (a scale for each output) or int4 (a scale for each group of inputs). Embeddings, output "
        "projection and norms stay as they are.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="folder of a Hugging Face model, or a GGUF file of plain numbers"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="new or empty folder")
    parser.add_argument("--format", choices=("int8", "int4"), required=True, help="numbers of the weights")
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="inputs that share a scale in int4: 32, 64 or 128 (default: 32)"
    )
    parser.add_argument(
        "--method",
        choices=("nearest", "gptq"),
        default="nearest",
        help="nearest: round each weight by itself; gptq: later weights make up for the errors of earlier ones, by the "
        "inputs of a calibration text, in minutes for 1B parameters (default: %(default)s)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help='for gptq: a text, or *.jsonl whose lines have "messages" (and "tools") or "text" (default: the '
        "documentation that ships with Python)",
    )
    parser.add_argument(
        "--calibration-tokens", type=int, default=16384, metavar="N", help="tokens of it (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the folder, and print the report."""
    from pagewood.engine.models.config import ModelConfig
    from pagewood.engine.quantise import Scheme, quantise_model, read_calibration  # imports torch, which takes seconds

    scheme = Scheme(format=options.format, group_size=options.group_size, method=options.method)
    if options.calibration is not None and scheme.method != "gptq":
        raise ValueError(f"--calibration must not be given for --method {scheme.method}, got {options.calibration}")
    folder = model_folder(options.model)
    calibration = None
    if scheme.method == "gptq":
        config = ModelConfig.from_folder(folder)
        calibration = read_calibration(
            folder,
            options.calibration,
            num_tokens=options.calibration_tokens,
            vocab_size=config.vocab_size,
            max_position=config.max_position,
        )
        texts, length = calibration.tokens.shape
        print(f"calibration: {texts} texts of {length} tokens from {calibration.source}", file=sys.stderr)
    started = time.monotonic()
    summary = quantise_model(folder, options.out, scheme, calibration=calibration, progress=_show)
    print(_described(summary, options, seconds=time.monotonic() - started))
    return 0


def _show(what: str, done: int, total: int) -> None:
    end = "\n" if done == total else "\r"
    print(f"{what}: {done} of {total}", end=end, file=sys.stderr, flush=True)


def _described(summary: Summary, options: argparse.Namespace, *, seconds: float) -> str:
    """Return the report: sizes, mean errors, and the matrices with the largest errors."""
    matrices, ignored = summary.matrices, summary.ignored
    lines = [
        f"{options.out}: {len(matrices)} matrices in {options.format} by {options.method}, "
        f"{summary.num_bytes_before / 1e6:.1f} MB became {summary.num_bytes_after / 1e6:.1f} MB, in {seconds:.0f} s",
        f"not quantised: {', '.join(ignored[:_NUM_SHOWN])}"
        + (f" and {len(ignored) - _NUM_SHOWN} others" if len(ignored) > _NUM_SHOWN else ""),
    ]
    if not matrices:
        return "\n".join(lines)
    lines.append(f"relative error of the weights: {mean(one.weight_error for one in matrices):.3%} in the mean")
    outputs = [one.output_error for one in matrices if one.output_error is not None]
    if outputs:
        lines.append(f"relative error of outputs for the calibration: {mean(outputs):.3%} in the mean")
    lines.append("largest:")
    worst = sorted(matrices, key=lambda one: one.output_error or one.weight_error, reverse=True)
    for one in worst[:_NUM_SHOWN]:
        of_outputs = "" if one.output_error is None else f", outputs {one.output_error:.3%}"
        lines.append(f"  {one.name}: weights {one.weight_error:.3%}{of_outputs}")
    return "\n".join(lines)
