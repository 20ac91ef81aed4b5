"""The forward passes that train and evaluate drafters equal the single steps that an engine computes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from drafting import draft_model_chains, head_chains, num_steps
from eagle import Head, unrolled
from export import load_head, save_head
from model import Llama, Shape
from train import greedy

TARGET = Shape(vocab=40, hidden=32, layers=4, heads=4, kv_heads=2, head_dim=16, intermediate=48)
HEAD = Shape(vocab=40, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=24)
LENGTH, DEPTH = 9, 4


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def target() -> Llama:
    torch.manual_seed(0)
    return Llama(TARGET)


@pytest.fixture
def head() -> Head:
    torch.manual_seed(1)
    return Head(HEAD, (0, 1, 3))


@pytest.fixture
def tokens_BT() -> Tensor:
    torch.manual_seed(2)
    return torch.randint(TARGET.vocab, (3, LENGTH))


class Cache:
    """The keys and values of one row of a head, one pair after the other, as an engine keeps them."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def turned(self, x: Tensor, position: int) -> Tensor:
        """Rotate [heads, K] by a position."""
        width = HEAD.head_dim
        angles = position * HEAD.rope_theta ** (-torch.arange(0, width, 2) / width)
        low, high = x[:, : width // 2], x[:, width // 2 :]
        return torch.cat(
            (low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1
        )  # fmt: skip

    def pair(self, embedded: Tensor, hidden: Tensor, position: int) -> Tensor:
        """Return the output of the pair at `position`; cached pairs from this position on are dropped."""
        layer = self.head.midlayer
        del self.keys[position:], self.values[position:]
        both = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)))
        attention = layer.self_attn
        self.keys.append(self.turned(attention.k_proj(both)[None], position)[0])
        self.values.append(attention.v_proj(both))
        q = self.turned(attention.q_proj(both).view(HEAD.heads, HEAD.head_dim), position)
        shares = torch.softmax(q @ torch.stack(self.keys).T / HEAD.head_dim**0.5, -1)
        hidden = hidden + attention.o_proj((shares @ torch.stack(self.values)).flatten())
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def test_the_unrolled_head_computes_what_single_steps_compute(target: Llama, head: Head, tokens_BT: Tensor) -> None:
    streams = target.streams(tokens_BT)
    outputs = unrolled(head, target, tokens_BT, streams, DEPTH)
    for row, tokens in enumerate(tokens_BT):
        cache = Cache(head)
        features = head.fc(torch.cat([streams[layer][row] for layer in head.captured], dim=-1))
        for first in range(LENGTH - DEPTH):
            hidden = features[first]
            for step in range(DEPTH):
                hidden = cache.pair(target.embed_tokens.weight[tokens[first + step + 1]], hidden, first + step)
                torch.testing.assert_close(outputs[step][row, first], hidden, atol=1e-5, rtol=1e-5)


def test_the_chains_of_a_head_are_its_own_greedy_steps(target: Llama, head: Head, tokens_BT: Tensor) -> None:
    streams = target.streams(tokens_BT)
    chains = head_chains(head, target, tokens_BT, DEPTH)
    assert (chains[:, 0] == -1).all()
    for row, tokens in enumerate(tokens_BT):
        cache = Cache(head)
        features = head.fc(torch.cat([streams[layer][row] for layer in head.captured], dim=-1))
        for known in range(1, LENGTH):
            hidden, token = features[known - 1], tokens[known]
            for step in range(DEPTH):
                hidden = cache.pair(target.embed_tokens.weight[token], hidden, known - 1 + step)
                token = target.logits(head.norm(hidden)).argmax()
                assert chains[row, known, step] == token


def test_the_chains_of_a_draft_model_are_greedy_continuations(target: Llama, tokens_BT: Tensor) -> None:
    chains = draft_model_chains(target, tokens_BT, DEPTH)
    for row, tokens in enumerate(tokens_BT):
        for known in range(LENGTH):
            prefix = tokens[: known + 1]
            for step in range(DEPTH):
                token = target.logits(target(prefix[None])[0, -1]).argmax()
                assert chains[row, known, step] == token
                prefix = torch.cat((prefix, token[None]))


def test_an_answer_is_the_targets_own_until_it_departs() -> None:
    is_answer = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1]]).bool()
    is_chosen = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1, 1, 0, 0, 1]]).bool()
    assert greedy(is_answer, is_chosen).int().tolist() == [[0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]]


def test_a_verification_accepts_the_leading_drafts_that_are_right() -> None:
    row = [7, 1, 2, 3, 4, 5, 6]
    right = [row[at + 1 : at + 4] for at in range(len(row))]
    wrong = [[0, 0, 0] for _ in row]
    assert num_steps(row, 1, right) == 2
    assert num_steps(row, 1, wrong) == 5
    assert num_steps(row, 1, [*wrong[:4], right[4], *wrong[5:]]) == 4
    assert num_steps(row, 1, [[], [2, 0, 4], [], [4, 5, 0], [], [], []]) == 2
    assert num_steps(row, 6, wrong) == 0


def test_a_stored_head_has_the_layout_of_eagle_3(head: Head, tmp_path: Path) -> None:
    save_head(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_hidden_layers"] == 1
    assert config["draft_vocab_size"] is None
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == {
        "fc.weight", "norm.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight",
        "midlayer.post_attention_layernorm.weight", "midlayer.self_attn.q_proj.weight",
        "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight",
        "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
    }  # fmt: skip
    assert stored["fc.weight"].shape == (32, 3 * 32)
    assert stored["midlayer.self_attn.q_proj.weight"].shape == (2 * 16, 2 * 32)
    again = load_head(tmp_path)
    assert (again.captured, again.shape) == (head.captured, head.shape)
    for name, value in again.named_parameters():
        assert value.equal(head.get_parameter(name).half().float())
