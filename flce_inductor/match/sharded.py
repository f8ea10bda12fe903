"""Heads that are sharded over the vocabulary: DTensors, as ColwiseParallel makes them, with or without loss_parallel.

Between such a head and its loss there may be what only changes how the logits are laid out: `redistribute` and
`to_local`, views of the rows, and a cast up. The loss becomes one call, which computes it from the DTensors that the
head is given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.node import Node

from .. import _compat, chunking, config, ops, parallel
from ..explain import Reason
from . import anchors
from .chain import operand, same_or_wider
from .graph import Changes, Refused, backward_of, example, name, same

_LAYOUTS = {"redistribute", "to_local"}
_VIEWS = {"view", "reshape", "flatten", "contiguous"}
_CASTS = {"float", "to"}


@dataclasses.dataclass(frozen=True)
class Head:
    """path: the nodes from what the loss reads back to the linear; hidden [..., H], weight [V, H], bias [V] or None."""

    path: list[Node]
    hidden: Node
    weight: Node
    bias: Node | None


def path_of(loss: Node) -> list[Node]:
    """The nodes from what a loss reads back to where a DTensor is made of others; empty if there is no DTensor."""
    node = anchors.logits_of(loss)
    path = [node]
    while _call(node)[0] in _LAYOUTS | _VIEWS | _CASTS and operand(node) is not None:
        path.append(node := operand(node))
    return path if any(parallel.is_dtensor(n.meta.get("example_value")) for n in path) else []


def _call(node: Node) -> tuple[str, list[Any]]:
    """What a node calls, and what it is given beside its operand."""
    return _compat.dtensor_method(node.target) or (name(node), [*node.args[1:], *node.kwargs.values()])


def head_of(loss: Node, path: list[Node]) -> Head:
    """The head at the end of a path, if all on it is known."""
    from torch.distributed.tensor import Shard

    *links, linear = path
    if loss.target is not F.cross_entropy:
        raise Refused(Reason.SHARDED, f"{anchors.describe(loss)} of a DTensor")
    if name(linear) != "linear" or linear.kwargs:
        raise Refused(Reason.SHARDED, f"logits of {_call(linear)[0]} {', '.join(linear.kwargs)}")
    head = Head(path, *linear.args, *[None] * (3 - len(linear.args)))
    for x, called in ((head.weight, "weight"), (head.bias, "bias")):
        if x is not None and tuple(getattr(example(x), "placements", ())) != (Shard(0),):
            raise Refused(Reason.SHARDED, f"the {called} is {getattr(example(x), 'placements', 'no DTensor')}")
    for link in links:
        _check_link(link, example(head.weight).shape[0], example(linear))
    return head


def rewrite(loss: Node, head: Head, changes: Changes) -> int:
    """Replace a loss, its head and what is between them, or refuse. Returns the rows per chunk."""
    for node, user in zip(head.path, [loss, *head.path], strict=False):
        if len(node.users) != 1:
            raise Refused(Reason.READER, name(next(n for n in node.users if n is not user)))
    args = anchors.arguments_of(loss)
    anchors.check_arguments(args, example(head.path[0]), example(args["target"]))
    if args["weight"] is not None:
        raise Refused(Reason.SHARDED, "with class weights")
    logits, inputs = example(head.path[-1]), [n for n in (head.hidden, head.weight, head.bias) if n is not None]
    dtypes = {example(n).dtype for n in inputs}
    if dtypes != {logits.dtype} or not ops.dtypes_fit(logits.dtype, logits.dtype, None):
        raise Refused(Reason.DTYPE, f"logits {logits.dtype}, hidden states, weight and bias {dtypes}")
    inputs.append(args["target"])
    changes.check([*inputs, *head.path], head.path[-1], loss)
    changes.check(inputs, loss, backward_of(loss))
    if not changes.same_grad_mode([*head.path, loss]):
        raise Refused(Reason.GRAD_MODE)

    how = (args["reduction"], args["ignore_index"], float(args["label_smoothing"]), example(loss).dtype)
    with loss.graph.inserting_before(loss):
        given = (head.hidden, head.weight, head.bias, args["target"], *how, parallel.is_dtensor(example(loss)))
        call = loss.graph.call_function(_cross_entropy, given)
    call.meta |= {k: loss.meta[k] for k in ("example_value", "stack_trace") if k in loss.meta}
    loss.replace_all_uses_with(call)
    changes.position[call] = changes.position[loss]
    for node in (loss, *head.path):
        loss.graph.erase_node(node)
    weight, settings = example(head.weight), config.current()
    sizes = {"chunk_size": settings.chunk_size, "max_slab_bytes": settings.max_slab_bytes}
    width = -(-weight.shape[0] // weight.device_mesh.size())
    return chunking.rows_per_chunk(width, logits.dtype, logits.device, **sizes)


def _cross_entropy(h, weight, bias, target, reduction, ignore_index, label_smoothing, dtype, wrap):
    """What a loss becomes: all of h [..., H] and target [N] on each rank, in its order of rows."""
    from torch.distributed.tensor import DTensor, Replicate

    from ..functional import linear_cross_entropy

    mesh = weight.device_mesh
    loss = linear_cross_entropy(
        parallel.whole(h).flatten(0, -2),
        weight,
        parallel.whole(target),
        linear_bias=bias,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        loss_dtype=dtype,
        process_group=mesh.get_group(),
    )
    return DTensor.from_local(loss, mesh, [Replicate()], run_check=False) if wrap else loss


def _check_link(link: Node, V: int, logits: torch.Tensor) -> None:
    """Refuse a link that does something to the values, or whose gradient is another."""
    before, after, (called, given) = example(operand(link)), example(link), _call(link)
    if after.dim() < 1 or not same(after.shape[-1:], [V]) or after.requires_grad != logits.requires_grad:
        raise Refused(Reason.SHARDED, called)
    if called == "to_local" and (given or any(p.is_shard() for p in before.placements)):
        raise Refused(Reason.SHARDED, "to_local of some of the logits, or with placements of its own")
    if called == "redistribute" and any(p.is_partial() for p in after.placements):
        raise Refused(Reason.SHARDED, "redistribute to a partial sum")
    if not same_or_wider(before.dtype, after.dtype) or before.device != after.device:
        raise Refused(Reason.SHARDED, f"{called} to {after.dtype}")
