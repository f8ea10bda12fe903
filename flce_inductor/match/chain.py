"""The walk from the logits that a loss reads back to the head that made them.

Between the two there may be *links*: operations that treat every row alike and keep the class dimension whole and
last. A link that moves or selects rows can be done to the hidden states instead, because the head works on each row by
itself. `walk` proves that all links are of that kind; `Chain.hidden` then does them to the hidden states.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx.node import Node

from ..explain import Reason
from .graph import Refused, insert, name, value

_CASTS = {"float", "double", "half", "bfloat16", "to", "type", "type_as"}
_TRANSPOSES = {"t", "getattr T", "getattr mT", "transpose", "swapaxes", "permute"}


@dataclasses.dataclass(frozen=True)
class Head:
    """logits = hidden @ weight.T + bias: hidden [..., H]; weight [V, H], or [H, V] if transposed; bias [V] or None.

    weight is the parameter behind transposes and a cast to the logits' dtype, and `seen` the nodes of those.
    """

    node: Node
    hidden: Node
    weight: Node
    transposed: bool
    bias: Node | None
    seen: list[Node]


@dataclasses.dataclass(frozen=True)
class Chain:
    """A head, and the links from it to the loss in order."""

    head: Head
    links: list[Node]

    def hidden(self) -> Node:
        """Insert the hidden states [N, H] of the rows that reach the loss, in the logits' dtype."""
        h, dtype = self.head.hidden, value(self.head.node).dtype
        if value(h).dtype != dtype:  # autocast
            h = insert(self.head.node, "to", h, dtype)
        for link in self.links:
            h = _on_hidden(link, h)
        return h


def walk(logits: Node, loss: Node) -> Chain:
    """Find the head behind logits, or refuse. Nothing in the graph is changed."""
    links: list[Node] = []
    node, reader = logits, loss
    while True:
        if node.op in ("placeholder", "get_attr"):
            raise Refused(Reason.NO_HEAD)
        for user in node.users:
            if user.op == "output":
                raise Refused(Reason.RETURNED)
            if user is not reader:
                raise Refused(Reason.READER, name(user))
        head = _head(node)
        if head is not None:
            return Chain(head, links[::-1])
        _check_link(node)
        links.append(node)
        node, reader = node.args[0], node


def _head(node: Node) -> Head | None:
    called = name(node)
    parameters = {"linear": ("input", "weight", "bias"), "matmul": ("input", "other"), "mm": ("input", "mat2")}
    if called not in parameters:
        return None
    given = dict(zip(parameters[called], node.args, strict=False)) | node.kwargs
    if not set(given) <= set(parameters[called]) or len(node.args) > len(parameters[called]):
        raise Refused(Reason.LINK, f"{called} with {len(node.args)} arguments and {', '.join(node.kwargs)}")
    hidden, weight, bias = given["input"], given[parameters[called][1]], given.get("bias")
    if value(weight).dim() != 2 or value(hidden).dim() < 2:
        raise Refused(Reason.LINK, f"{called} of {value(hidden).dim()} and {value(weight).dim()} dimensions")
    transposed, seen = called != "linear", []
    while isinstance(inner := next(iter(weight.args), None), Node):
        if _swaps_both(weight):
            transposed = not transposed
        elif not _casts_down(weight, value(node).dtype):
            break
        seen.append(weight)
        weight = inner
    return Head(node, hidden, weight, transposed, bias, seen)


def _swaps_both(node: Node) -> bool:
    """Whether a node swaps the two dimensions of a matrix."""
    if name(node) not in _TRANSPOSES or value(node.args[0]).dim() != 2 or node.kwargs:
        return False
    if value(node).requires_grad != value(node.args[0]).requires_grad:
        return False
    if name(node) in ("t", "getattr T", "getattr mT"):
        return True
    dims = [d % 2 for d in _flat(node.args[1:]) if isinstance(d, int)]
    return dims == [1, 0] or (dims == [0, 1] and name(node) != "permute")


def _casts_down(node: Node, dtype: torch.dtype) -> bool:
    """Whether a node casts a float32 parameter to the logits' dtype, so that dweight can go straight to it."""
    if name(node) not in _CASTS:
        return False
    parameter, cast = value(node.args[0]), value(node)
    down = parameter.dtype == torch.float32 and cast.dtype == dtype and dtype.itemsize == 2
    return down and parameter.device == cast.device and parameter.requires_grad == cast.requires_grad


def _flat(args: Any) -> list[Any]:
    """Sizes or dimensions, whether given one by one or as one sequence."""
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        return list(args[0])
    return list(args)


def _check_link(node: Node) -> None:
    """Refuse unless node is known to keep rows apart and the class dimension whole and last."""
    called = name(node)
    if not node.args or not isinstance(node.args[0], Node):
        raise Refused(Reason.LINK, called)
    if called == "getitem" and not isinstance(node.args[0].meta.get("example_value"), torch.Tensor):
        raise Refused(Reason.LINK, name(node.args[0]))  # one of several results
    before, after = value(node.args[0]), value(node)
    whole = before.dim() > 0 and after.dim() > 0
    if whole:
        V, last = before.shape[-1], after.shape[-1]
        whole = isinstance(V, int) and isinstance(last, int) and last == V  # comparing symbols would add a guard
    alike = before.device == after.device and before.requires_grad == after.requires_grad
    if not (whole and alike and _is_link(called, node, before, after)):
        raise Refused(Reason.LINK, called)


def _is_link(called: str, node: Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    dims, last = before.dim(), before.dim() - 1
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if called in _CASTS:
        # the head rounds the logits once; a narrower dtype behind it would round them again
        widened = before.dtype.itemsize == 2 and after.dtype == torch.float32
        return (after.dtype == before.dtype or widened) and before.shape == after.shape
    if called in ("contiguous", "flatten"):
        return True  # rows keep their order when both shapes end in V
    if called in ("view", "reshape"):
        return not node.kwargs and len(_flat(node.args[1:])) == after.dim()  # no dtype, no size as one object
    if called == "getitem":
        return _keeps_last(node.args[1], dims)
    if called in ("narrow", "select", "squeeze"):
        return isinstance(dim, int) and dim % dims != last
    if called == "unsqueeze":
        return isinstance(dim, int) and dim % (dims + 1) <= last
    if called in ("transpose", "swapaxes"):
        return not node.kwargs and all(isinstance(d, int) and d % dims != last for d in node.args[1:])
    if called == "permute":
        return not node.kwargs and _flat(node.args[1:])[-1] % dims == last
    return False


def _keeps_last(index: Any, dims: int) -> bool:
    """Whether indexing a tensor of `dims` dimensions leaves the last one whole and last."""
    index = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
        return False
    before = index[: index.index(Ellipsis)] if Ellipsis in index else index
    after = index[len(before) + 1 :]
    if after:
        return after[-1] == slice(None)
    consumed = sum(i is not None for i in before)
    return consumed < dims or (Ellipsis not in index and before[-1] == slice(None))


def _on_hidden(link: Node, h: Node) -> Node:
    """Insert what the link does to the logits, done to h."""
    called = name(link)
    if called in _CASTS or called == "contiguous":
        return h
    if called in ("view", "reshape"):
        return insert(link, "reshape", h, [*_flat(link.args[1:])[:-1], value(h).shape[-1]])
    return insert(link, link.target, h, *link.args[1:], **link.kwargs)
