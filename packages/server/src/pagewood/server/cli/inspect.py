"""`pagewood inspect`: the form and memory of a model on disk, and the errors from rounding its weights."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, get_args

from pagewood.engine.api import ActivationFormat, EngineConfig, WeightFormat
from pagewood.server.cli.options.page import Commands

if TYPE_CHECKING:
    from pagewood.engine.assembly.transformers.inspection import TransformersInspection
    from pagewood.engine.model_folder.inspection import Inspection, TokenizerSummary
    from pagewood.engine.models.config import ModelConfig
    from pagewood.engine.models.parts.choice import WithPages


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "inspect",
        help="show what a model is, and what rounding its weights changes",
        description="Show what a folder or a GGUF file holds, what it is loaded as, and its memory on a CPU.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or GGUF file (default: the model inside this package)"
    )
    parser.add_argument(
        "--weights",
        choices=get_args(WeightFormat),
        metavar="FORM",
        help="round every matrix to this form, and show the errors of weights and outputs, worst first; one of "
        "%(choices)s",
    )
    parser.add_argument(
        "--activations",
        choices=get_args(ActivationFormat),
        default="auto",
        help="with --weights: what inputs of products are rounded to, as in serve (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="show the memory of each of N ranks that divide the model, as in serve (default: %(default)s)",
    )
    parser.add_argument(
        "--expert-parallel",
        "--enable-expert-parallel",
        action="store_true",
        help="the ranks divide experts as wholes, as in serve",
    )
    parser.add_argument(
        "--expert-map", metavar="FILE", help="JSON file that says which ranks have which experts, as in serve"
    )
    parser.add_argument("--json", action="store_true", help="write everything as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        ValueError: `transformers` computes the model, and errors from rounding are wanted.
    """
    from pagewood.engine.assembly.transformers.choice import reason_for_transformers
    from pagewood.engine.model_folder.inspection import inspect_model  # imports torch, which takes seconds

    reason = reason_for_transformers(EngineConfig(model=options.model))
    if reason is not None:
        from pagewood.engine.assembly.transformers.inspection import inspect_with_transformers

        if options.weights is not None:
            raise ValueError(f"weights must be absent for a model that transformers computes, got {options.weights}")
        other = inspect_with_transformers(options.model, reason)
        print(json.dumps(asdict(other), indent=2) if options.json else _described_of_transformers(other))
        return 0
    found = inspect_model(
        options.model,
        form=options.weights,
        activations=options.activations,
        tensor_parallel_size=options.tensor_parallel_size,
        expert_parallel=options.expert_parallel,
        expert_map=options.expert_map,
        progress=_show if sys.stderr.isatty() else None,
    )
    print(json.dumps(asdict(found), indent=2) if options.json else _described(found))
    return 0


def _show(what: str, done: int, total: int) -> None:
    print(f"{what}: {done} of {total}", end="\n" if done == total else "\r", file=sys.stderr, flush=True)


def _heads(attention: WithPages) -> str:
    from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig

    if isinstance(attention, LatentAttentionConfig):
        shape = attention.shape
        of_heads = shape.num_heads * (shape.plain_dim + shape.rope_dim + shape.value_dim)
        return (
            f"{shape.num_heads} heads over latents of {shape.latent_size} numbers (their keys and values would be "
            f"{of_heads:,})"
        )
    return f"{attention.num_heads} heads of {attention.head_dim} ({attention.num_kv_heads} for keys and values)"


def _described(found: Inspection) -> str:
    """Return the report for a reader."""
    model = found.model
    windows = {window for window in model.windows if window is not None}
    sizes = [layer.feed_forward.size for layer in model.layers]
    shape = (
        f"{model.num_layers} layers, hidden size {model.hidden_size}, inner size {next(filter(None, sizes), 0)}, "
        f"{_heads(model.paged[0]) if model.paged else 'no attention'}, "
        f"{model.vocab_size} tokens"
    )
    if model.is_encoder:
        shape += "; an encoder, which makes vectors and no text"
    elif model.tied_embeddings:
        shape += ", tied embeddings"
    size = f"{found.num_parameters / 1e6:.1f} million parameters"
    if found.num_active_parameters < found.num_parameters:
        size += f", {found.num_active_parameters / 1e6:.1f} million for each token"
    lines = [
        f"{found.name}: {found.kind}, {model.architecture}, {size}",
        f"  shape: {shape}",
        *_experts(model),
        *_recurrent(model),
        f"  longest text: {model.max_position} tokens" + (f", windows of {max(windows)}" if windows else ""),
        f"  files: {', '.join(f'{name} {size / 1e6:.1f} MB' for name, size in found.files)}",
        "  matrices:",
    ]
    for one in found.matrices:
        why = f" ({one.why})" if one.why else ""
        lines.append(f"    {one.count} of {one.stored}, loaded as {one.loaded}{why}")
    if found.tensor_parallel_size > 1:
        lines.append(f"  divided among {found.tensor_parallel_size} ranks, the first with:")
    memory = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in found.weights_bytes.items())
    lines.append(f"  memory of the weights on a CPU: {memory}")
    kv = ", ".join(f"{dtype} {size:,} bytes" for dtype, size in found.kv_bytes_per_token.items())
    lines.append(f"  memory of a token's keys and values: {kv}")
    longest = ", ".join(f"{dtype} {size / 1e6:.1f} MB" for dtype, size in found.kv_bytes_of_longest.items())
    lines.append(f"  memory of those of the longest text: {longest}")
    lines += _tokenizer(found.tokenizer)
    if found.form is not None:
        inputs = "" if found.activations == "auto" else f" and {found.activations} activations"
        lines += ["", f"relative errors with {found.form}{inputs}, worst outputs first:", "  weights  outputs"]
        lines += [f"  {one.weight_error:7.3%}  {one.output_error:7.3%}  {one.name}" for one in found.errors]
    return "\n".join(lines)


def _described_of_transformers(found: TransformersInspection) -> str:
    """Return the report of a model that `transformers` computes."""
    way = (
        "over a cache, for one request after the other"
        if found.has_own_attention
        else "through its attention interface"
    )
    memory = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in found.weights_bytes.items())
    kv = ", ".join(f"{dtype} {size:,} bytes" for dtype, size in found.kv_bytes_per_token.items())
    return "\n".join(
        [
            f"{found.name}: folder, {found.architecture}, {found.num_parameters / 1e6:.1f} million parameters",
            f"  computed by: transformers, {way} ({found.reason})",
            f"  shape: hidden size {found.hidden_size}, {found.vocab_size} tokens; keys and values of "
            f"{found.num_layers} layers, at most {found.num_kv_heads} heads of {found.head_dim}",
            f"  longest text: {found.max_position} tokens",
            f"  files: {', '.join(f'{name} {size / 1e6:.1f} MB' for name, size in found.files)}",
            f"  memory of the weights on a CPU: {memory}",
            f"  memory of a token's keys and values: {kv}",
            *_tokenizer(found.tokenizer),
        ]
    )


def _tokenizer(found: TokenizerSummary | None) -> list[str]:
    """Return the lines about a tokenizer."""
    if found is None:
        return ["  tokenizer: none"]
    return [
        f"  tokenizer: {found.kind}, {found.num_tokens} tokens, {found.num_special} of them special; "
        f"answers end with {', '.join(found.end_tokens) or 'no token'}",
        f"  chat template: {_yes(found.has_chat_template)}; response template: {_yes(found.has_response_template)}",
    ]


def _experts(model: ModelConfig) -> list[str]:
    """Return a line about the experts of a model, if it has any."""
    from pagewood.engine.models.parts.experts import ExpertsConfig  # imports numpy

    found = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, ExpertsConfig)]
    if not found:
        return []
    own = found[0]
    shared = "" if own.shared is None else f", beside shared ones of inner size {own.shared.size}"
    lines = [
        f"  experts: {own.router.num_experts} of inner size {own.size} in {len(found)} of {model.num_layers} layers, "
        f"{own.router.num_chosen} for each token{shared}"
    ]
    placements = [one.placement for one in found if one.placement is not None]
    if placements:
        num_copies = sum(one.num_placed - len(one.ranks) for one in placements)
        counts = [
            {len(one.experts_of(rank)) for one in placements} for rank in range(placements[0].num_ranks)
        ]  # of each rank, in any layer
        shown = ", ".join(f"{min(own)}" if len(own) == 1 else f"{min(own)} to {max(own)}" for own in counts)
        copies = f"; {num_copies} are copies" if num_copies else ""
        lines.append(f"  experts of a layer on ranks 0 to {len(counts) - 1}: {shown}{copies}")
    return lines


def _recurrent(model: ModelConfig) -> list[str]:
    """Return a line about the recurrent layers of a model, if it has any."""
    states = model.states
    if states is None:
        return []
    return [
        f"  recurrent layers: {states.num_layers} of {model.num_layers}, with a state of "
        f"{states.bytes_per_page / 1e6:.1f} MB for each request and each prefix that is kept with one"
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
