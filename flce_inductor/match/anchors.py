"""Which calls are a loss over logits, whatever the spelling of their arguments."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.node import Node

from ..explain import Reason
from .graph import Refused, value


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss node, the logits [N, V] and labels [N] that it reads, and how it reduces the losses of the labels."""

    node: Node
    logits: Node
    target: Node
    reduction: str
    ignore_index: int


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


def _arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by name: users call cross_entropy positionally, by keyword, and mixed."""
    call = _CROSS_ENTROPY.bind(*node.args, **node.kwargs)
    call.apply_defaults()
    return call.arguments


def describe(node: Node) -> str:
    """A loss in the words of the report."""
    return f"cross_entropy({_arguments(node)['reduction']})"


def cross_entropy(node: Node) -> Loss:
    """F.cross_entropy over labels, which nn.CrossEntropyLoss calls too; refuses what isn't supported."""
    args = _arguments(node)
    if args["size_average"] is not None or args["reduce"] is not None:
        raise Refused(Reason.LEGACY_REDUCTION)
    if args["weight"] is not None:
        raise Refused(Reason.CLASS_WEIGHT)
    if args["label_smoothing"] != 0:
        raise Refused(Reason.LABEL_SMOOTHING)
    logits, target = value(args["input"]), value(args["target"])
    if target.is_floating_point():
        raise Refused(Reason.CLASS_PROBABILITIES)
    if target.dtype != torch.int64:
        raise Refused(Reason.TARGET_DTYPE, str(target.dtype))
    if logits.dim() != 2 or target.dim() != 1:
        raise Refused(Reason.LOGITS_SHAPE, f"logits {tuple(logits.shape)}, labels {tuple(target.shape)}")
    if not isinstance(logits.shape[1], int):
        raise Refused(Reason.UNKNOWN_SHAPE, "V is dynamic")
    if args["reduction"] not in ("mean", "sum", "none") or not isinstance(args["ignore_index"], int):
        raise Refused(Reason.UNKNOWN_SHAPE, f"reduction={args['reduction']}, ignore_index={args['ignore_index']}")
    return Loss(node, args["input"], args["target"], args["reduction"], args["ignore_index"])
