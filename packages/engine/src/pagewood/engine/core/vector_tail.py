"""What a model does with the vector of a text behind its layers: dense modules, or the head that scores a pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


def _none(x: Float32) -> Float32:
    return x


def _relu(x: Float32) -> Float32:
    return np.maximum(x, np.float32(0))


def _gelu(x: Float32) -> Float32:
    erf = np.fromiter((math.erf(value / math.sqrt(2)) for value in x.tolist()), np.float32, len(x))
    return (x * (1 + erf) / 2).astype(np.float32)


def _sigmoid(x: Float32) -> Float32:
    return (1 / (1 + np.exp(-x))).astype(np.float32)


def _silu(x: Float32) -> Float32:
    return x * _sigmoid(x)


def _tanh(x: Float32) -> Float32:
    return np.tanh(x)


ACTIVATIONS: Mapping[str, Callable[[Float32], Float32]] = MappingProxyType(
    {"none": _none, "tanh": _tanh, "relu": _relu, "gelu": _gelu, "silu": _silu, "sigmoid": _sigmoid}
)
"""Functions of `[E] float32`, by name; gelu is the exact one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseLayer:
    """A product, its activation, and a norm."""

    weight: Float32
    """[out, in]"""
    bias: Float32 | None = None
    """[out]"""
    activation: str = "none"
    """A name in `ACTIVATIONS`."""
    norm: Float32 | None = None
    """[out], the weights of a centred norm behind the activation; None: there is no norm."""
    epsilon: float = 1e-5
    """Epsilon of the norm."""

    def __call__(self, x: Float32) -> Float32:
        """Return `[out]`, given `[in]`."""
        y = np.einsum("oi,i->o", self.weight, x)  # on this thread; a product by BLAS would wake its own
        if self.bias is not None:
            y = y + self.bias
        y = ACTIVATIONS[self.activation](y)
        if self.norm is None:
            return y
        centred = y - y.mean()
        return (centred / np.sqrt(np.square(centred).mean() + np.float32(self.epsilon)) * self.norm).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VectorTail:
    """Layers that follow the pooling of states. A vector is computed alone, so its bits do not depend on others."""

    layers: Sequence[DenseLayer]
    """At least one; each takes as many elements as the one before it makes."""

    @property
    def size(self) -> int:
        """Elements of a vector behind the last layer."""
        return self.layers[-1].weight.shape[0]

    def __call__(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the vector `[size]` behind the layers, given a pooled state `[E]`."""
        x = vector.astype(np.float32)
        for layer in self.layers:
            x = layer(x)
        return x.astype(np.float64)
