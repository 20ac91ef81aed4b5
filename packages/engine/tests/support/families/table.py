"""The table of all families, beside their modules, made from the families and from the cases that tests compare.

`PYTHONPATH=packages/engine/tests/support python -m families.table` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

README = Path(__file__).parents[3] / "src/pagewood/engine/models/families/README.md"
_NO_CASE = "no case of its own"
BEGIN, END = "<!-- families: made by tests/support/families/table.py -->", "<!-- end of families -->"
_KNOWN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "LlamaForCausalLM": ("Llama 1 to 3.3, and many others", "linear, dynamic, yarn and llama3 ropes; biases"),
        "MistralForCausalLM": ("Mistral 7B, Nemo, Small", "windows in all layers or in those of `layer_types`"),
        "Qwen2ForCausalLM": ("Qwen 1.5, 2, 2.5", "biases of q, k and v; windows in some layers"),
        "Qwen3ForCausalLM": ("Qwen 3", "norms of q and k"),
        "Olmo2ForCausalLM": ("OLMo 2", "norms behind the parts, of q and k over all heads together"),
        "Gemma3ForCausalLM": ("Gemma 3 1B", "four norms a layer; windows, with a rope of their own"),
        "Gemma3ForConditionalGeneration": ("Gemma 3 4B to 27B", "text and images"),
        "Gemma4ForCausalLM": (
            "Gemma 4, text alone",
            "two sizes of heads; keys and values of an earlier layer, inputs of layers; or experts beside a "
            "feed-forward. On CUDA heads of 512 elements exclude `batch_invariant` and fp8 KV",
        ),
        "Gemma4ForConditionalGeneration": ("Gemma 4 E2B, E4B, 26B-A4B, 31B", "the text model alone"),
        "Gemma4UnifiedForCausalLM": ("Gemma 4 12B, text alone", "two sizes of heads, values that are keys"),
        "Gemma4UnifiedForConditionalGeneration": ("Gemma 4 12B", "the text model alone"),
        "Ministral3ForCausalLM": ("Ministral 3", "queries times a factor that grows with their position"),
        "Mistral3ForConditionalGeneration": ("Mistral Small 3.1, Ministral 3", "the text model alone"),
        "Qwen2_5_VLForConditionalGeneration": ("Qwen 2.5 VL", "text and images"),
        "Qwen3VLForConditionalGeneration": ("Qwen 3 VL", "text and images"),
        "Qwen3VLMoeForConditionalGeneration": ("Qwen 3 VL 30B-A3B, 235B-A22B", "the text model alone"),
        "SmolLM3ForCausalLM": ("SmolLM 3", "no rotation in each fourth layer"),
        "SeedOssForCausalLM": ("Seed-OSS 36B", "biases of q, k and v"),
        "Olmo3ForCausalLM": ("OLMo 3", "windows in three of four layers, and yarn in the fourth"),
        "Exaone4ForCausalLM": ("EXAONE 4", "windows in three of four layers, and no rotation in the fourth"),
        "GlmForCausalLM": ("GLM-4 9B", "rotation of neighbours, in half of a head"),
        "Glm4ForCausalLM": ("GLM-4 0414", "rotation of neighbours, in half of a head; norms behind the parts too"),
        "Glm4MoeForCausalLM": ("GLM-4.5, 4.6", "experts, dense layers first; rotation of half of a head"),
        "Ernie4_5_MoeForCausalLM": ("Ernie 4.5 with experts", "experts; rotation of neighbours"),
        "MiniMaxM2ForCausalLM": ("MiniMax M2", "experts; rotation of a part of a head"),
        "Llama4ForCausalLM": ("Llama 4", "experts; attention within chunks, on CUDA in requests of at most a chunk"),
        "Llama4ForConditionalGeneration": ("Llama 4 Scout, Maverick", "the text model alone"),
        "Ernie4_5ForCausalLM": ("Ernie 4.5 0.3B", "rotation of neighbours"),
        "Phi3ForCausalLM": ("Phi-3, Phi-4", "fused projections, rotation of a part of a head, longrope"),
        "HunYuanDenseV1ForCausalLM": ("HunYuan dense", "norms of q and k behind the rotation"),
        "GemmaForCausalLM": ("Gemma 1", "gelu, embeddings times the root of their size"),
        "OlmoForCausalLM": ("OLMo 1", "norms without weights; with `clip_qkv` in `transformers`"),
        "GraniteMoeSharedForCausalLM": ("Granite 4 tiny previews", "experts and a shared one; Granite's multipliers"),
        "GraniteMoeHybridForCausalLM": (
            "Granite 4",
            "Granite's multipliers; Mamba 2 in most layers of H models, experts in some",
        ),
        "Gemma2ForCausalLM": ("Gemma 2", "soft caps of scores and logits; windows in every other layer"),
        "GptOssForCausalLM": ("gpt-oss 20B and 120B", "experts, sinks; windows in every other layer"),
        "Qwen3MoeForCausalLM": ("Qwen 3 30B-A3B, 235B-A22B", "experts"),
        "Qwen2MoeForCausalLM": ("Qwen 1.5 and 2 with experts", "experts, and a shared one with a gate"),
        "MixtralForCausalLM": ("Mixtral 8x7B, 8x22B", "experts"),
        "OlmoeForCausalLM": ("OLMoE", "experts"),
        "GraniteMoeForCausalLM": ("Granite 3 with experts", "experts; Granite's multipliers"),
        "MiMoForCausalLM": (
            "MiMo 7B",
            "Qwen2's decoder, not in `transformers`; its layer for multi-token prediction drafts",
        ),
        "GraniteForCausalLM": ("Granite 3", "multipliers of embeddings, residuals, attention and logits"),
        "Starcoder2ForCausalLM": ("StarCoder 2", "feed-forwards without a gate, norms with a bias"),
        "ApertusForCausalLM": ("Apertus", "xIELU without a gate"),
        "CohereForCausalLM": (
            "Command R",
            "attention and feed-forward beside each other, scaled logits; with QK norm in `transformers`",
        ),
        "Cohere2ForCausalLM": ("Command R7B and A", "as Command R; windows, and rotation in layers with a window only"),
        "GPTNeoXForCausalLM": ("GPT-NeoX, Pythia", "attention and feed-forward beside each other or in turn"),
        "GPT2LMHeadModel": ("GPT-2", "learned positions"),
        "NemotronHForCausalLM": (
            "Nemotron-H, Nemotron Nano 2 and 3",
            "each layer a Mamba 2, an attention without rotation, a feed-forward or experts alone",
        ),
        "Mamba2ForCausalLM": ("Mamba 2, Codestral Mamba 7B", "no attention: pages index tokens only"),
        "BambaForCausalLM": ("Bamba", "Mamba 2 in most layers; half of each head rotated in the others"),
        "FalconH1ForCausalLM": ("Falcon-H1", "attention and Mamba 2 beside each other in each layer; multipliers"),
        "OlmoHybridForCausalLM": ("OLMo Hybrid", "gated delta nets, whose strength goes to 2; OLMo 2's other layers"),
        "KimiLinearForCausalLM": (
            "Kimi Linear 48B-A3B",
            "delta rules with a decay for each channel; latent attention without rotation, experts",
        ),
        "Lfm2ForCausalLM": ("LFM2 350M to 2.6B", "short convolutions in most layers"),
        "Lfm2MoeForCausalLM": ("LFM2 8B-A1B", "short convolutions in most layers; experts, dense layers first"),
        "Qwen3NextForCausalLM": ("Qwen 3 Next 80B-A3B", "gated delta nets in three of four layers; experts"),
        "Qwen3_5ForCausalLM": ("Qwen 3.5, text alone", "gated delta nets in three of four layers"),
        "Qwen3_5ForConditionalGeneration": ("Qwen 3.5", "the text model alone"),
        "Qwen3_5MoeForCausalLM": ("Qwen 3.5 with experts, text alone", "gated delta nets; experts"),
        "Qwen3_5MoeForConditionalGeneration": ("Qwen 3.5 with experts", "the text model alone"),
        "NemotronForCausalLM": ("Nemotron-4, Minitron", "squared relu, a half of each head rotated"),
        "Glm4MoeLiteForCausalLM": ("GLM-4.7 Flash", "latent attention; experts, dense layers first"),
        "DeepseekV2ForCausalLM": ("DeepSeek V2", "latent attention; experts, dense layers first"),
        "DeepseekV3ForCausalLM": ("DeepSeek V3, R1, Kimi K2", "latent attention; experts, dense layers first"),
        "DeepseekV32ForCausalLM": ("DeepSeek V3.2", "texts up to `index_topk`, where attention sees all tokens"),
    }
)
"""Checkpoints, and remarks, by class; a class that is not here has neither in the table."""


def markdown() -> str:
    """Return the table."""
    from families import causal
    from families.registry import CASES
    from pagewood.engine.models.families.registry import FAMILIES
    from pagewood.engine.weights.gguf.architectures import ARCHITECTURES

    compared = {one.architecture for one in CASES.values()}
    gguf: dict[str, list[str]] = {}
    for name, architecture in ARCHITECTURES.items():
        for kind in (architecture.family, *architecture.others):
            gguf.setdefault(kind, []).append(f"`{name}`")
    lines = ["| architecture | checkpoints | CPU | CUDA (stand-in) | GGUF | remarks |", "|---|---|---|---|---|---|"]
    for kind in sorted(name for name, family in FAMILIES.items() if not family.is_encoder):
        checkpoints, remarks = _KNOWN.get(kind, ("", ""))
        cells = (
            f"`{kind}`",
            checkpoints,
            *["compared" if kind in compared else _NO_CASE] * 2,
            ", ".join(gguf.get(kind, ())),
            remarks,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", causal.summary()])


def written() -> str:
    """Return the table that the README of the families has."""
    return _parts()[1].strip()


def write() -> None:
    """Write the table to it."""
    before, _, after = _parts()
    README.write_text(f"{before}{BEGIN}\n{markdown()}\n{END}{after}")


def _parts() -> tuple[str, str, str]:
    before, _, rest = README.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    return before, table, after


if __name__ == "__main__":
    write()
