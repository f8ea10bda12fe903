"""What others offer for the mean cross entropy of a linear head, each as (h, weight, target, bias=None) -> loss [].

h [N, H], weight [V, H], target [N] int64 with -100 for rows that don't count, bias [V].
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[..., Tensor]


class Missing(Exception):
    """A peer can't be measured here; the text says why."""


def eager(h: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
    """What users write."""
    return F.cross_entropy(F.linear(h, weight, bias), target)


def native() -> Loss:
    """torch's own F.linear_cross_entropy (2.13 and later)."""
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Missing(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    return lambda h, weight, target, bias=None: function(h, weight, target, linear_bias=bias)


def liger() -> Loss:
    """liger-kernel's fused linear cross entropy."""
    if not torch.cuda.is_available():
        raise Missing("liger-kernel runs on a GPU")
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise Missing(f"liger-kernel can't be imported: {error}") from None
    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda h, weight, target, bias=None: loss(weight, h, target, bias)


_PEERS = {"eager": lambda: eager, "compile": lambda: torch.compile(eager), "native": native, "liger": liger}


def peer(name: str) -> tuple[Loss | None, dict[str, Any]]:
    """The loss of that name, and what a result line says of it: its version, or why it is missing."""
    try:
        loss = _PEERS[name]()
    except Missing as why:
        return None, {"missing": str(why)}
    return loss, {"version": importlib.metadata.version("liger_kernel")} if name == "liger" else {}
