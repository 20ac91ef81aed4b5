"""A logits processor whose module hangs when a rank other than 0 imports it."""

import sys
from threading import Event

import torch

if sys.argv[0].endswith("rank_process.py"):
    Event().wait()


def nothing(tokens: torch.Tensor, logits: torch.Tensor) -> None:
    """Change nothing."""
