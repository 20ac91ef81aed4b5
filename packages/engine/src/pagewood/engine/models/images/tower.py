"""The towers of models that see images, in plain torch: from the pixels of a picture to rows in place of embeddings.

Legend: N patches, h and w patches from top to bottom and from left to right, D elements of a patch, H heads, E
elements of a row.
Source: Dosovitskiy et al., ViT, 2020; Zhai et al., SigLIP, 2023; Bai et al., Qwen2.5-VL, 2025; Meng et al., DeepStack,
2024.
"""

# pyright: basic
# torch's functions have no types in part.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.images.recipe import Colours
from pagewood.engine.models.images.config import TowerConfig
from pagewood.engine.models.images.tower_weights import TowerWeights

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    """A projection."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weights: TowerWeights, name: str, outputs: int, inputs: int, *, has_bias: bool = True) -> _Linear:
        return cls(
            weight=weights.read(f"{name}.weight", outputs, inputs),
            bias=weights.read(f"{name}.bias", outputs) if has_bias else None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """A norm around the mean if it has a bias, otherwise of the root of the mean of squares."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float

    @classmethod
    def of(cls, weights: TowerWeights, name: str, size: int, epsilon: float, *, has_bias: bool = True) -> _Norm:
        return cls(
            weight=weights.read(f"{name}.weight", size),
            bias=weights.read(f"{name}.bias", size) if has_bias else None,
            epsilon=epsilon,
        )

    def __call__(self, x: Tensor) -> Tensor:
        size = tuple(self.weight.shape)
        if self.bias is None:
            return functional.rms_norm(x, size, self.weight, self.epsilon)
        return functional.layer_norm(x, size, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """What the blocks know of a picture."""

    rotations: tuple[Tensor, Tensor] | None
    """Cosines and sines `[N, D / H / 2]`; None: nothing is rotated."""
    windows: tuple[Tensor, ...]
    """The patches `[n, k]` of n windows of k patches each, windows of each size together."""


class _Block:
    """A block of the tower."""

    __slots__ = ("_act", "_before", "_behind", "_down", "_gate", "_is_whole", "_num_heads", "_output", "_qkv", "_up")

    def __init__(self, config: TowerConfig, weights: TowerWeights, index: int) -> None:
        names, size, inner = _NAMES[config.kind], config.hidden_size, config.intermediate_size
        prefix = names.block.format(index)
        is_centred = config.kind != "qwen2.5"

        def norm(name: str) -> _Norm:
            return _Norm.of(weights, f"{prefix}.{name}", size, config.epsilon, has_bias=is_centred)

        def linear(name: str, outputs: int, inputs: int) -> _Linear:
            return _Linear.of(weights, f"{prefix}.{name}", outputs, inputs)

        self._num_heads = config.num_heads
        self._is_whole = config.window is None or index in config.whole_blocks
        self._before, self._behind = norm(names.norms[0]), norm(names.norms[1])
        if len(names.qkv) == 1:
            self._qkv = linear(names.qkv[0], 3 * size, size)
        else:
            parts = [linear(name, size, size) for name in names.qkv]
            biases = [part.bias for part in parts if part.bias is not None]
            self._qkv = _Linear(weight=torch.cat([part.weight for part in parts]), bias=torch.cat(biases))
        self._output = linear(names.output, size, size)
        self._act = _ACTIVATIONS[config.activation]
        self._gate = None if names.gate is None else linear(names.gate, inner, size)
        self._up, self._down = linear(names.up, inner, size), linear(names.down, size, inner)

    def __call__(self, x: Tensor, picture: _Picture) -> Tensor:
        """Return `[N, D]` of `[N, D]`."""
        x = x + self._attended(self._before(x), picture)
        y = self._behind(x)
        inner = self._up(y) * self._act(self._gate(y)) if self._gate is not None else self._act(self._up(y))
        return x + self._down(inner)

    def _attended(self, x: Tensor, picture: _Picture) -> Tensor:
        num, size = x.shape
        q, k, v = self._qkv(x).view(num, 3, self._num_heads, -1).unbind(1)
        if picture.rotations is not None:
            q, k = (_rotated(one, *picture.rotations) for one in (q, k))
        if self._is_whole:
            out = _attend(q[None], k[None], v[None])[0]
        else:
            out = torch.empty_like(q)
            for patches in picture.windows:
                out[patches] = _attend(q[patches], k[patches], v[patches])
        return self._output(out.reshape(num, size))


class Tower:
    """A tower with its parameters, on one device. Invariant: a picture's rows depend on that picture only.

    Args:
        config: of the tower.
        weights: source of the parameters.
        colours: how colours become numbers.

    Raises:
        ValueError: a tensor is missing, or has another shape; or the activation is unknown.
    """

    __slots__ = ("_blocks", "_colours", "_config", "_deep", "_merger", "_patches", "_positions")

    def __init__(self, config: TowerConfig, weights: TowerWeights, colours: Colours) -> None:
        if config.activation not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ValueError(f"hidden_act of a tower must be one of {known}, got {config.activation!r}")
        names, size, patch = _NAMES[config.kind], config.hidden_size, config.patch_size
        self._config = config
        self._colours = colours
        frames = (config.num_frames,) if config.num_frames > 1 else ()
        cut = weights.read(f"{names.patches}.weight", size, 3, *frames, patch, patch)
        cut = cut.sum(2) if frames else cut  # all frames of a still picture are the same
        self._patches = _Linear(
            weight=cut.reshape(size, -1).contiguous(),
            bias=None if config.kind == "qwen2.5" else weights.read(f"{names.patches}.bias", size),
        )
        self._positions: Tensor | None = None
        if config.num_positions:
            self._positions = weights.read(f"{names.positions}.weight", config.num_positions, size)
        self._blocks = [_Block(config, weights, index) for index in range(config.num_blocks)]
        self._merger: _Mean | _Network
        if config.kind == "siglip":
            self._merger = _Mean(config, weights)
            self._deep: list[_Network] = []
        else:
            self._merger = _Network(config, weights, "merger", norms_squares=False)
            self._deep = [
                _Network(config, weights, f"deepstack_merger_list.{index}", norms_squares=True)
                for index in range(len(config.deep_blocks))
            ]

    def __call__(self, picture: Tensor) -> Tensor:
        """Return `[n, E (1 + levels)] float32`, the rows of a picture `[height, width, 3] uint8`, line by line.

        Behind each row are those for the first layers of the decoder, one after the other.
        """
        config = self._config
        rows, columns = config.grid(picture.shape[0], picture.shape[1])
        h, w = rows * config.merge, columns * config.merge
        weight = self._patches.weight
        x = self._patches(self._cut(picture.to(weight.device), h, w).to(weight.dtype))
        if self._positions is not None:
            x = x + self._placed(h, w)
        own = _Picture(
            rotations=None if config.kind == "siglip" else self._rotations(h, w, weight.device),
            windows=() if config.window is None else self._windows(rows, columns, weight.device),
        )
        parts: list[Tensor] = []
        for index, block in enumerate(self._blocks):
            x = block(x, own)
            if index in config.deep_blocks:
                parts.append(self._deep[config.deep_blocks.index(index)](x))
        return torch.cat([self._merger(x), *parts], 1).float()

    def _squares(self, x: Tensor, h: int, w: int) -> Tensor:
        """Return `x` `[h, w, *]` in the order of patches, `[N, *]`: square by square, line by line in each."""
        m = self._config.merge
        return x.reshape(h // m, m, w // m, m, *x.shape[2:]).transpose(1, 2).reshape(h * w, *x.shape[2:])

    def _cut(self, picture: Tensor, h: int, w: int) -> Tensor:
        """Return the patches `[N, 3 p p]` of a picture."""
        p = self._config.patch_size
        own = self._colours
        means, deviations = (torch.tensor(three, device=picture.device) for three in (own.means, own.deviations))
        numbers = (picture.to(torch.float32) * own.factor - means) / deviations
        x = numbers.reshape(h, p, w, p, 3).permute(0, 2, 4, 1, 3)
        return self._squares(x, h, w).reshape(h * w, 3 * p * p)

    def _placed(self, h: int, w: int) -> Tensor:
        """Return the learned positions `[N, D]` of h x w patches; between those of the table they are interpolated."""
        assert self._positions is not None
        side = round(len(self._positions) ** 0.5)
        table = self._positions.reshape(1, side, side, -1)
        if (h, w) != (side, side):
            table = functional.interpolate(table.permute(0, 3, 1, 2), (h, w), mode="bilinear", align_corners=True)
            table = table.permute(0, 2, 3, 1)
        return self._squares(table[0], h, w)

    def _rotations(self, h: int, w: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rotations of patches: the first half of the frequencies turns by the line, the other by column."""
        config = self._config
        half = config.hidden_size // config.num_heads // 2
        frequencies = 1.0 / config.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        lines, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        places = self._squares(torch.stack([lines, columns], -1), h, w)
        angles = (places[..., None] * frequencies).flatten(1)
        return angles.cos().to(device), angles.sin().to(device)

    def _windows(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the windows of a picture, see `_Picture`; those at its right and lower edge may be smaller."""
        config, by_size = self._config, dict[int, list[Tensor]]()
        assert config.window is not None
        unit = config.merge**2
        numbers = torch.arange(rows * columns * unit).reshape(rows, columns, unit)
        for line in numbers.split(config.window, 0):
            for window in line.split(config.window, 1):
                by_size.setdefault(window.numel(), []).append(window.flatten())
        return tuple(torch.stack(windows).to(device) for windows in by_size.values())


class _Network:
    """Merges the patches of a square by a network of two layers, behind a norm of each patch, or of the square."""

    __slots__ = ("_first", "_norm", "_second", "_size", "_squares")

    def __init__(self, config: TowerConfig, weights: TowerWeights, prefix: str, *, norms_squares: bool) -> None:
        names = [f"{prefix}.{name}" for name in _MERGERS[config.kind]]
        self._squares = norms_squares
        self._size = size = config.hidden_size * config.merge**2
        normed, is_centred = size if norms_squares else config.hidden_size, config.kind != "qwen2.5"
        self._norm = _Norm.of(weights, names[0], normed, config.epsilon, has_bias=is_centred)
        self._first = _Linear.of(weights, names[1], size, size)
        self._second = _Linear.of(weights, names[2], config.out_size, size)

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[n, E]` of `[N, D]`."""
        x = self._norm(x.view(-1, self._size)) if self._squares else self._norm(x).view(-1, self._size)
        return self._second(functional.gelu(self._first(x)))


class _Mean:
    """Merges the patches of a square by their mean, which is normed and projected."""

    __slots__ = ("_last", "_norm", "_projection", "_unit")

    def __init__(self, config: TowerConfig, weights: TowerWeights) -> None:
        size = config.hidden_size
        self._unit = config.merge**2
        self._last = _Norm.of(weights, "post_layernorm", size, config.epsilon)
        scale = 1 + weights.read("multi_modal_projector.mm_soft_emb_norm.weight", size)
        self._norm = _Norm(weight=scale, bias=None, epsilon=config.epsilon)
        projection = weights.read("multi_modal_projector.mm_input_projection_weight", size, config.out_size)
        self._projection = _Linear(weight=projection.T.contiguous(), bias=None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[n, E]` of `[N, D]`."""
        means = self._last(x).view(-1, self._unit, x.shape[1]).mean(1)
        return self._projection(self._norm(means))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """How a family calls the modules of its tower; those of a block follow its prefix."""

    patches: str
    positions: str = ""
    block: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    output: str
    gate: str | None = None
    up: str
    down: str


_QWEN = _Names(
    patches="patch_embed.proj",
    positions="pos_embed",
    block="blocks.{}",
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    output="attn.proj",
    up="mlp.linear_fc1",
    down="mlp.linear_fc2",
)
_NAMES: Mapping[str, _Names] = MappingProxyType(
    {
        "siglip": _Names(
            patches="embeddings.patch_embedding",
            positions="embeddings.position_embedding",
            block="encoder.layers.{}",
            norms=("layer_norm1", "layer_norm2"),
            qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            output="self_attn.out_proj",
            up="mlp.fc1",
            down="mlp.fc2",
        ),
        "qwen2.5": replace(_QWEN, gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj"),
        "qwen3": _QWEN,
    }
)
_MERGERS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {"qwen2.5": ("ln_q", "mlp.0", "mlp.2"), "qwen3": ("norm", "linear_fc1", "linear_fc2")}
)
"""Names of the norm and the two layers of the network that merges."""


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return what patches attend to, `[windows, patches, H, D / H]`, as all arguments are."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the two halves of each head of `x` `[N, H, D / H]`."""
    first, second = x.chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(x.dtype)
