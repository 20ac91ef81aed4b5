"""Muon: momentum with orthogonalized updates, for the matrices of the layers.

Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


class Muon:
    """Keeps one momentum per matrix; matrices of the same shape are orthogonalized together."""

    def __init__(self, matrices: list[Tensor], *, momentum: float = 0.95) -> None:
        shapes = sorted({tuple(matrix.shape) for matrix in matrices})
        self.groups = [[matrix for matrix in matrices if tuple(matrix.shape) == shape] for shape in shapes]
        self.momenta = [torch.zeros(len(group), *group[0].shape) for group in self.groups]
        self.momentum = momentum

    @torch.no_grad()
    def step(self, rate: float, pool: ThreadPoolExecutor) -> None:
        """Update every matrix with learning rate `rate`; the workers of the pool share the groups."""
        for _ in pool.map(self._step_group, range(len(self.groups)), [rate] * len(self.groups)):
            pass

    @torch.no_grad()
    def _step_group(self, at: int, rate: float) -> None:
        torch.set_num_threads(1)
        group, momenta = self.groups[at], self.momenta[at]
        gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
        momenta.lerp_(gradients, 1 - self.momentum)
        updates = orthogonal(gradients.lerp(momenta, self.momentum))
        rows, columns = group[0].shape
        for matrix, update in zip(group, updates, strict=True):
            matrix.add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)


def orthogonal(x_NRC: Tensor) -> Tensor:
    """Move every singular value towards 1 with five quintic Newton-Schulz steps in 16 bits."""
    x = x_NRC.bfloat16()
    flip = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if flip else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = torch.bmm(x, x.mT)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return (x.mT if flip else x).float()
