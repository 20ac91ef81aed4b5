"""Drafting heads against implementations made of the modules of `transformers`, with tiny random weights.

EAGLE-3 heads, which `transformers` does not have, are composed here of its attention, MLP, norm, rotary embedding and
cache. Layers for multi-token prediction are compared with its `MtpModel`.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from pagewood.engine.model_folder.load import load_head, load_model
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.head import Head
from pagewood.engine.models.parts.output import OutputConfig
from pagewood.engine.models.shard import WHOLE, Shard
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.torch_recurrence import WholeTextStates
from pagewood.engine.runner.cuda.ops import CUDAOps
from rank_threads import ThreadExchange, on_ranks
from stand_ins import flashinfer_torch
from stand_ins.torch_decoding import SequenceAttention, rotations_at, torch_ops

NUM_TOKENS = 11
NUM_DRAFTS = 5
NUM_LAYERS = 6
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
}


class EagleLayer(nn.Module):
    """A layer of an EAGLE-3 head; the first one reads tokens and hidden states side by side."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.is_first = index == 0
        self.self_attn = LlamaAttention(config, index)
        if self.is_first:
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            for name in ("q_proj", "k_proj", "v_proj"):
                size = getattr(self.self_attn, name).out_features
                setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, size, bias=False))
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: Any, cache: Any, *, normed_residual: bool) -> Tensor:
        if self.is_first:
            normed = self.hidden_norm(hidden)
            x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            residual = normed if normed_residual else hidden
        else:
            x, residual = self.input_layernorm(hidden), hidden
        length = x.shape[1]
        end = cache.get_seq_length(self.self_attn.layer_idx) + length
        mask = torch.full((length, end), -torch.inf).triu(end - length + 1)
        out, _ = self.self_attn(x, position_embeddings=rotary, attention_mask=mask[None, None], past_key_values=cache)
        x = residual + out
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle:
    """A kind of EAGLE-3 head: what its config.json says, and how its tensors are named."""

    config: dict[str, Any] = field(default_factory=dict)
    eagle_config: dict[str, Any] = field(default_factory=dict)
    first_layer: str = "layers.0"
    states: tuple[int, ...]
    """Indices in `hidden_states` of `transformers`, which counts the embeddings as the first."""
    feature_norms: tuple[str, ...] = ()
    num_layers: int = 1
    own_embedding: bool = False
    draft_vocab_size: int | None = None
    speculators: bool = False
    normed_residual: bool = False
    feeds_norm: bool = False


EAGLE = {
    "midlayer": Eagle(first_layer="midlayer", states=(2, 3, 3), draft_vocab_size=40),
    "the target's vocabulary": Eagle(states=(2, 3, 3)),
    "explicit layers": Eagle(states=(1, 3, 6), eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}),
    "explicit layers beside": Eagle(states=(2, 4), config={"eagle_aux_hidden_state_layer_ids": [1, 3]}),
    "norm of all states": Eagle(
        states=(2, 3, 3),
        eagle_config={"norm_before_fc": True},
        feature_norms=("input_norm",),
        config={"norm_before_residual": True},
        normed_residual=True,
    ),
    "a norm for each state": Eagle(
        states=(1, 2, 3, 6),
        config={"num_aux_hidden_states": 4, "fc_norm": True, "norm_output": True},
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 5]},
        feature_norms=("fc_norm.0", "fc_norm.1", "fc_norm.2", "fc_norm.3"),
        feeds_norm=True,
    ),
    "old names of norms": Eagle(
        first_layer="midlayer", states=(2, 3, 3), feature_norms=("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    ),
    "another hidden size": Eagle(
        states=(2, 3, 3),
        config={"hidden_size": 24, "intermediate_size": 40, "head_dim": 12, "target_hidden_size": 32},
        own_embedding=True,
        draft_vocab_size=40,
    ),
    "two layers, another rope": Eagle(states=(2, 3, 3), num_layers=2, config={"rope_theta": 500.0}),
    "speculators": Eagle(
        states=(1, 3, 4),
        config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        speculators=True,
        normed_residual=True,
        draft_vocab_size=40,
    ),
}


class EagleHead(nn.Module):
    """A head of `case`, whose parameters have the names of a checkpoint with `layers.0`."""

    def __init__(self, case: Eagle, target: Any) -> None:
        super().__init__()
        values = {**SMALL, **case.config, "num_hidden_layers": case.num_layers}
        config = transformers.LlamaConfig(**{"rms_norm_eps": 1e-5, **values})
        config._attn_implementation = "eager"
        size, states = config.hidden_size, len(case.states) * target.config.hidden_size
        self.case, self.config = case, config
        self.layers = nn.ModuleList(EagleLayer(config, i) for i in range(case.num_layers))
        self.fc = nn.Linear(states, size, bias=False)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)
        norm_size = states // (1 if len(case.feature_norms) == 1 else len(case.states))
        self.feature_norms = nn.ModuleList(LlamaRMSNorm(norm_size, config.rms_norm_eps) for _ in case.feature_norms)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if case.own_embedding else None
        self.lm_head = nn.Linear(size, case.draft_vocab_size, bias=False) if case.draft_vocab_size else None
        self.shared = [target.get_input_embeddings(), target.lm_head]  # in a list, so that they are not parameters
        self.token_ids = torch.arange(config.vocab_size)
        if case.draft_vocab_size:
            self.token_ids = torch.randperm(config.vocab_size)[: case.draft_vocab_size].sort().values
        _randomise(self)
        self.cache = transformers.DynamicCache(config=config)

    def features(self, states: list[Tensor]) -> Tensor:
        if len(self.feature_norms) > 1:
            states = [norm(state) for norm, state in zip(self.feature_norms, states, strict=True)]
        joined = torch.cat(states, dim=-1)
        return self.fc(self.feature_norms[0](joined) if len(self.feature_norms) == 1 else joined)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embedded = (self.embed_tokens or self.shared[0])(tokens)[None]
        x = hidden[None]
        rotary = self.rotary(x, positions[None])
        for layer in self.layers:
            x = layer(embedded, x, rotary, self.cache, normed_residual=self.case.normed_residual)
        normed = self.norm(x)
        logits = (self.lm_head or self.shared[1])(normed)[0]
        return logits, (normed if self.case.feeds_norm else x)[0]

    def save(self, folder: Path) -> None:
        norms = zip(self.case.feature_norms, self.feature_norms, strict=True)
        tensors: dict[str, Any] = {f"{name}.weight": norm.weight for name, norm in norms}
        for name, parameter in self.named_parameters():
            if not name.startswith("feature_norms"):
                tensors[name.replace("layers.0", self.case.first_layer)] = parameter
        values = {**SMALL, **self.case.config, "num_hidden_layers": self.case.num_layers, "rms_norm_eps": 1e-5}
        extra: dict[str, Any] = {"draft_vocab_size": self.case.draft_vocab_size, "eagle_config": self.case.eagle_config}
        if self.case.draft_vocab_size:
            tensors["d2t"] = self.token_ids - torch.arange(len(self.token_ids))
            tensors["t2d"] = torch.zeros(SMALL["vocab_size"], dtype=torch.bool).index_fill(0, self.token_ids, True)
        if self.case.speculators:
            ids = values.pop("eagle_aux_hidden_state_layer_ids")
            extra |= {"eagle_aux_hidden_state_layer_ids": ids, "speculators_model_type": "eagle3"}
            values = {"transformer_layer_config": values}
        saved: dict[str, Tensor] = {name: x.detach().contiguous() for name, x in tensors.items()}
        save_file(saved, folder / "model.safetensors")
        (folder / "config.json").write_text(
            json.dumps({**values, **extra, "architectures": ["LlamaForCausalLMEagle3"]})
        )


def _randomise(module: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:  # a test would not see norms of ones and biases of zeros swapped
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            else:
                parameter.normal_(0.0, 0.12)


def _target(folder: Path, kind: str = "Llama", config_kind: str = "", **extra: Any) -> Any:
    torch.manual_seed(5)
    config = getattr(transformers, config_kind or f"{kind}Config")(**{**SMALL, **extra})
    config._attn_implementation = "eager"
    target = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    _randomise(target)
    target.save_pretrained(folder)
    return target


def _states(target: Any, tokens: Tensor) -> list[Tensor]:
    """Return the states in the numbering of `Decoder.states`."""
    streams: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0][0]))
    out = target.model(tokens[None], output_hidden_states=True)
    hook.remove()
    return [*(state[0] for state in out.hidden_states[:-1]), streams[0], out.last_hidden_state[0]]


TOKENS = torch.tensor([5, 31, 90, 2, 2, 64, 17, 8, 55, 3, 29])


@dataclass(slots=True)
class Drafting:
    """A head and its target, at work on one sequence."""

    target: Decoder[Tensor]
    head: Head[Tensor]
    attention: SequenceAttention

    def states(self, captured: tuple[int, ...]) -> list[Tensor]:
        positions = list(range(NUM_TOKENS))
        attention = SequenceAttention.of(self.target.config).at(positions)
        wanted = torch.tensor([NUM_TOKENS - 1])
        rotation = rotations_at(self.target.ropes, positions)
        return self.target.states(
            TOKENS, rotation, attention, wanted, recurrence=WholeTextStates(NUM_TOKENS), captured=captured
        )[1]

    def step(self, tokens: Tensor, hidden: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
        wanted = torch.arange(len(positions))
        rotation = rotations_at(self.head.ropes, positions)
        attention = self.attention.at(positions)
        logits, state = self.head(tokens, hidden.clone(), rotation, attention, wanted)
        assert self.head.advance(tokens, hidden.clone(), rotation, attention, wanted).equal(state)
        torch.testing.assert_close(self.head.logits(state.clone()), logits, atol=1e-5, rtol=1e-5)
        return logits, state


def _load(target_folder: Path, head_folder: Path, shard: Shard = WHOLE, ops: CUDAOps | None = None) -> Drafting:
    ops = ops or torch_ops()
    target = load_model(target_folder, ops, shard=shard)
    head = load_head(head_folder, target, ops)
    return Drafting(target, head, SequenceAttention.of(head.config.layer))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("target", "head"):
        (tmp_path / name).mkdir()
    return tmp_path / "target", tmp_path / "head"


@torch.inference_mode()
@pytest.mark.parametrize("name", EAGLE)
def test_eagle_logits_of_a_prompt_in_chunks_and_of_drafts(folders: tuple[Path, Path], name: str) -> None:
    target = _target(folders[0])
    oracle = EagleHead(EAGLE[name], target).eval()
    oracle.save(folders[1])
    ours = _load(*folders)
    assert ours.head.config.captured == oracle.case.states
    states = _states(target, TOKENS)
    hidden = oracle.features([states[i] for i in oracle.case.states])
    own = ours.head.features(ours.states(ours.head.config.captured))
    torch.testing.assert_close(own, hidden, atol=1e-4, rtol=0)

    pairs = NUM_TOKENS - 1
    expected, expected_hidden = oracle(TOKENS[1:], hidden[:pairs], torch.arange(pairs))
    parts = [
        ours.step(
            TOKENS[1 + start : 1 + start + 4], own[start : min(start + 4, pairs)], [*range(pairs)][start : start + 4]
        )
        for start in range(0, pairs, 4)
    ]
    torch.testing.assert_close(torch.cat([logits for logits, _ in parts]), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat([state for _, state in parts]), expected_hidden, atol=1e-4, rtol=0)

    ids = oracle.token_ids
    assert (
        torch.arange(SMALL["vocab_size"]).equal(ids) if ours.head.token_map is None else ours.head.token_map.equal(ids)
    )
    logits, state, own_state = expected[-1:], expected_hidden[-1:], parts[-1][1][-1:]
    for position in range(pairs, pairs + NUM_DRAFTS):
        token = ids[logits.argmax(-1)]
        logits, state = oracle(token, state, torch.tensor([position]))
        own_logits, own_state = ours.step(token, own_state, [position])
        torch.testing.assert_close(own_logits, logits, atol=1e-4, rtol=0)


def _drafted(drafting: Drafting) -> Tensor:
    """Return logits of a prompt, and of drafts after it."""
    hidden, pairs = drafting.head.features(drafting.states(drafting.head.config.captured)), NUM_TOKENS - 1
    logits, state = drafting.step(TOKENS[1:], hidden[:pairs], list(range(pairs)))
    found, token_map = [logits], drafting.head.token_map
    for position in range(pairs, pairs + NUM_DRAFTS):
        token = found[-1][-1:].argmax(-1)
        logits, state = drafting.step(token if token_map is None else token_map[token], state[-1:], [position])
        found.append(logits)
    return torch.cat(found)


@torch.inference_mode()
def _check_ranks(target_folder: Path, head_folder: Path, count: int) -> None:
    """Compare what ranks draft with what one rank does."""

    def work(shard: Shard, exchange: Callable[[Tensor], list[Tensor]]) -> Tensor:
        with torch.inference_mode():
            return _drafted(
                _load(target_folder, head_folder, shard, CUDAOps(flashinfer_torch, exchange=ThreadExchange(exchange)))
            )

    whole, parts = _drafted(_load(target_folder, head_folder)), on_ranks(count, work)
    assert all(torch.equal(part, parts[0]) for part in parts)
    torch.testing.assert_close(parts[0], whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", EAGLE)
def test_ranks_draft_what_one_rank_does(folders: tuple[Path, Path], name: str, count: int) -> None:
    target = _target(folders[0])
    EagleHead(EAGLE[name], target).eval().save(folders[1])
    _check_ranks(*folders, count)


@torch.inference_mode()
def test_all_states_of_a_target(tmp_path: Path) -> None:
    target = _target(tmp_path)
    decoder = load_model(tmp_path, torch_ops())
    positions = list(range(NUM_TOKENS))
    rotation, wanted = rotations_at(decoder.ropes, positions), torch.tensor([3, 10])
    attention = SequenceAttention(head_dim=decoder.config.attentions[0].head_dim).at(positions)
    expected = _states(target, TOKENS)
    for captured in (range(NUM_LAYERS + 2), (0, NUM_LAYERS - 1), (NUM_LAYERS,), (4, 2, 4)):
        last, states = decoder.states(TOKENS, rotation, attention, wanted, captured=captured)
        logits = decoder.head(last)
        for state, index in zip(states, captured, strict=True):
            torch.testing.assert_close(state, expected[index], atol=1e-4, rtol=0)
        torch.testing.assert_close(logits, target(TOKENS[None]).logits[0, [3, 10]], atol=1e-4, rtol=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """A naming of layers for multi-token prediction."""

    kind: str = "Llama"
    config: str = ""
    """Class of the configuration; by default that of `kind`."""
    extra: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str]
    offset: float = 0.0
    """What is taken off the weights of norms in the checkpoint."""
    clears_first: bool = True
    copies: tuple[str, ...] = ()
    """Tensors of the checkpoint that repeat the target's embedding, or are not read."""


_LAYER = f"model.layers.{NUM_LAYERS}"
_NEXTN: dict[str, Any] = {
    "names": {
        "enorm": f"{_LAYER}.enorm", "hnorm": f"{_LAYER}.hnorm", "eh_proj": f"{_LAYER}.eh_proj",
        "post_norm": f"{_LAYER}.shared_head.norm", "mtp_block": _LAYER,
    },
    "copies": (f"{_LAYER}.embed_tokens.weight", f"{_LAYER}.shared_head.head.weight"),
}  # fmt: skip
_EXPERTS = {
    "num_nextn_predict_layers": 1, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "first_k_dense_replace": NUM_LAYERS - 1, "routed_scaling_factor": 1.5, "n_group": 2,
    "topk_group": 1,
}  # fmt: skip
_LATENTS = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
_QWEN_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm", "mtp_block": "mtp.layers.0",
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 12, "linear_value_head_dim": 20, "mtp_layer_types": ["full_attention"],
}  # fmt: skip
MTP = {
    "deepseek": Mtp(extra={"num_nextn_predict_layers": 1}, **_NEXTN),
    "deepseek 3": Mtp(kind="DeepseekV3", extra={**_EXPERTS, **_LATENTS}, **_NEXTN),
    "deepseek 3.2": Mtp(  # `MtpModel` does not know it; up to `index_topk` tokens it is the same
        kind="DeepseekV3",
        extra={**_EXPERTS, **_LATENTS, "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 160},
        names=_NEXTN["names"],
        copies=(*_NEXTN["copies"], f"{_LAYER}.self_attn.indexer.wk.weight"),
    ),
    "glm 4.5": Mtp(kind="Glm4Moe", extra={**_EXPERTS, "head_dim": 16, "use_qk_norm": True}, **_NEXTN),
    "glm 4.7 lite": Mtp(
        kind="Glm4MoeLite", extra={**_EXPERTS, **_LATENTS, "mtp_mlp_layer_types": ["sparse"]}, **_NEXTN
    ),
    "qwen": Mtp(
        kind="Qwen3",
        extra={"head_dim": 16, "mtp_layer_types": ["full_attention"]},
        names=_QWEN_NAMES,
        offset=1.0,
        clears_first=False,
    ),
    "qwen3-next": Mtp(
        kind="Qwen3Next",
        extra={
            **_DELTA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 20,
        },
        names=_QWEN_NAMES,
        clears_first=False,
    ),
    "qwen3.5": Mtp(
        kind="Qwen3_5", config="Qwen3_5TextConfig", extra=_DELTA, names=_QWEN_NAMES, clears_first=False
    ),
    "mimo": Mtp(
        kind="Qwen2",
        extra={
            "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "mtp_hidden_states_first": True,
            "mtp_layer_types": ["full_attention"],
        },
        names={
            "enorm": "model.mtp_layers.0.token_layernorm", "hnorm": "model.mtp_layers.0.hidden_layernorm",
            "eh_proj": "model.mtp_layers.0.input_proj", "post_norm": "model.mtp_layers.0.final_layernorm",
            "mtp_block": "model.mtp_layers.0",
        },
    ),
}  # fmt: skip


def _as_stored(name: str, x: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors of a checkpoint, which has one of each expert, for a parameter of `transformers`."""
    if ".experts." not in name:
        return [(name, x)]
    kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    prefix = name.rpartition(".")[0]
    return [
        (f"{prefix}.{i}.{kind}.weight", part.contiguous())
        for i, expert in enumerate(x)
        for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True)
    ]


def _target_of(folder: Path, case: Mtp) -> Any:
    extra = {name: value for name, value in case.extra.items() if name != "architectures"}
    return _target(folder, case.kind, case.config, **extra)


def _add_mtp(target: Any, case: Mtp, folder: Path) -> Any:
    """Make layers for multi-token prediction, write them beside the target's own tensors, and return them."""
    target.config.num_mtp_layers = 1
    model = MtpModel(target, 1).eval()
    _randomise(model.layers)
    tensors = load_file(folder / "model.safetensors")
    buffers = [one for one in model.layers[0].named_buffers() if one[0].endswith("e_score_correction_bias")]
    for _, bias in buffers:
        bias.normal_(0.0, 0.2)
    for name, parameter in [*model.layers[0].named_parameters(), *buffers]:
        first, rest = name.split(".", 1)
        is_norm = parameter.ndim == 1 and not name.endswith("bias")
        for own, part in _as_stored(rest, parameter.detach()):
            tensors[f"{case.names[first]}.{own}"] = part - (case.offset if is_norm else 0.0)
    for name in case.copies:
        original = "model.embed_tokens.weight" if "embed" in name else "lm_head.weight"
        tensors[name] = tensors[original].clone()
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **case.extra}))
    return model


@torch.inference_mode()
@pytest.mark.parametrize("name", MTP)
def test_logits_of_multi_token_prediction(tmp_path: Path, name: str) -> None:
    case = MTP[name]
    target = _target_of(tmp_path, case)
    oracle = _add_mtp(target, case, tmp_path)
    ours = _load(tmp_path, tmp_path)
    hidden = _states(target, TOKENS)[-1]
    own = ours.head.features(ours.states(ours.head.config.captured))
    torch.testing.assert_close(own, hidden, atol=1e-4, rtol=0)
    cache = MtpCache(config=target.config.get_mtp_config())

    def step(tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embedded = oracle.embed_tokens(tokens)
        if case.clears_first:
            embedded = embedded * (positions > 0)[:, None]
        out = oracle.forward_layer(0, hidden[None], positions[None], cache, inputs_embeds=embedded[None])
        return oracle._project_to_logits(out)[0], out[0]

    pairs = NUM_TOKENS - 1
    expected, state = step(TOKENS[1:], hidden[:pairs], torch.arange(pairs))
    logits, own_state = ours.step(TOKENS[1:], own[:pairs], list(range(pairs)))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    state, own_state = state[-1:], own_state[-1:]
    for position in range(pairs, pairs + NUM_DRAFTS):
        token = expected[-1:].argmax(-1)
        expected, state = step(token, state, torch.tensor([position]))
        logits, own_state = ours.step(token, own_state, [position])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", [name for name in MTP if "linear_num_key_heads" not in MTP[name].extra])
def test_ranks_predict_what_one_rank_does(tmp_path: Path, name: str, count: int) -> None:
    case = MTP[name]
    target = _target_of(tmp_path, case)
    with torch.inference_mode():
        _add_mtp(target, case, tmp_path)
    _check_ranks(tmp_path, tmp_path, count)


@torch.inference_mode()
def test_a_head_leaves_what_is_shared_unchanged(folders: tuple[Path, Path]) -> None:
    target = _target(folders[0])
    oracle = EagleHead(EAGLE["norm of all states"], target).eval()
    oracle.save(folders[1])
    ours = _load(*folders)
    states = ours.states(ours.head.config.captured)
    before = copy.deepcopy(states)
    first = ours.head.features(states)
    ours.step(TOKENS[1:], first[:-1], list(range(NUM_TOKENS - 1)))
    assert all(a.equal(b) for a, b in zip(states, before, strict=True))
    assert ours.head.features(states).equal(first)


@torch.inference_mode()
def test_a_head_that_shares_the_output_of_its_target_has_logits_like_it(tmp_path: Path) -> None:
    """Scaled and capped: drafts are compared with the target's distribution."""
    case = MTP["deepseek"]
    _add_mtp(_target(tmp_path, case.kind, **case.extra), case, tmp_path)
    plain, ops = _load(tmp_path, tmp_path), torch_ops()
    output = OutputConfig(multiplier=0.5, soft_cap=0.3)
    weights = Checkpoint(tmp_path, dtype=torch.float32)
    target = Decoder(replace(plain.target.config, output=output), weights, ops, device=torch.device("cpu"))
    head, state = load_head(tmp_path, target, ops), torch.randn(3, SMALL["hidden_size"])
    for own, other in ((target.head, plain.target.head), (head.logits, plain.head.logits)):
        torch.testing.assert_close(own(state.clone()), 0.3 * torch.tanh(0.5 * other(state.clone()) / 0.3))
