"""From a head to all that reads its logits.

Between a head and what reads its logits there may be *links*: operations that treat every row alike and keep the class
dimension whole and last.

- A link that moves or selects rows can be done to the hidden states instead, because the head works on each row by
  itself.
- A link that maps every logit alike (a scale, a softcap, a cast up) becomes the epilogue of the row statistics.
- log_softmax changes what the values mean: from there on a reader reads log-probabilities.

`head_of` walks from a reader back to its head, `spread` from a head to all places where its logits, or their
log-probabilities, stand in the graph; both refuse what they don't know.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.node import Node

from ..explain import Reason
from ..kernels import IDENTITY, Epilogue
from .graph import Refused, insert, name, same, value

_CASTS = {"float", "double", "half", "bfloat16", "to", "type", "type_as"}
_TRANSPOSES = {"t", "getattr T", "getattr mT", "transpose", "swapaxes", "permute"}
_SAME_ROWS = {*_CASTS, "contiguous", "clone", "detach", "view", "reshape", "flatten", "squeeze", "unsqueeze"}
_ROWS = {"getitem", "narrow", "select", "transpose", "swapaxes", "permute"}
# one name for each arithmetic operation; the in-place ones change logits that nobody else sees
_ARITHMETIC = {
    **{f: "mul" for f in (operator.mul, operator.imul, torch.mul, "mul", "mul_")},
    **{f: "div" for f in (operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_")},
    **{f: "add" for f in (operator.add, operator.iadd, torch.add, "add", "add_")},
    **{f: "sub" for f in (operator.sub, operator.isub, torch.sub, "sub", "sub_")},
    **{f: "neg" for f in (operator.neg, torch.neg, "neg")},
    **{f: "tanh" for f in (torch.tanh, F.tanh, "tanh", "tanh_")},
    **{f: "sigmoid" for f in (torch.sigmoid, F.sigmoid, "sigmoid", "sigmoid_")},
}
_LOG_SOFTMAX = {F.log_softmax, torch.log_softmax, "log_softmax"}
_SOFTMAX = {F.softmax, torch.softmax, "softmax"}
_EXP = {torch.exp, "exp"}


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

    def with_nodes(self, written: dict[Node, Node]) -> Head:
        """The same head after nodes of the graph were replaced."""
        hidden, weight, bias = (written.get(n, n) for n in (self.hidden, self.weight, self.bias))
        return dataclasses.replace(self, hidden=hidden, weight=weight, bias=bias)


@dataclasses.dataclass(frozen=True)
class Place:
    """A node that holds a head's logits, or what softmax makes of them.

    kind: "logits"; "logp", sign times the log-probabilities; or "p", the probabilities. links: the nodes from the head
    to here. rows: the last of them that selects or moves rows, or the head: places with
    the same one hold the same rows in the same order (and, as it also cuts classes off, the same classes). detached: no
    gradient comes back from here. factors: scalar tensors that multiply the logits. shift: a tensor
    [V] that is added to them (a bias that isn't the head's).
    """

    node: Node
    links: tuple[Node, ...] = ()
    rows: Node | None = None
    epilogue: Epilogue = IDENTITY
    factors: tuple[Node, ...] = ()
    shift: Node | None = None
    kind: str = "logits"
    sign: int = 1
    detached: bool = False

    @property
    def key(self) -> tuple:
        """Equal for places whose rows have the same statistics."""
        return self.rows, self.epilogue, self.factors, self.shift


def calls(node: Node, targets: set) -> bool:
    """Whether a node calls one of these functions, or methods of these names."""
    return node.op in ("call_function", "call_method") and node.target in targets


def reduced_dim(node: Node, position: int = 1) -> Any:
    """The argument dim of a reduction."""
    return node.args[position] if len(node.args) > position else node.kwargs.get("dim")


def is_last(dim: Any, tensor: torch.Tensor) -> bool:
    """Whether a dim argument names the last dimension alone."""
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    return type(dim) is int and dim % tensor.dim() == tensor.dim() - 1


_POINTWISE = {*_ARITHMETIC, *_LOG_SOFTMAX, *_SOFTMAX, *_EXP}


# ---- back to the head


def head_of(node: Node) -> Head:
    """The head behind a node that holds logits or log-probabilities, or refuse."""
    while True:
        if node.op in ("placeholder", "get_attr"):
            raise Refused(Reason.NO_HEAD)
        head = _head(node)
        if head is not None:
            return head
        if calls(node, _ARITHMETIC):
            node = _larger_operand(node)
        elif (name(node) in _SAME_ROWS | _ROWS or calls(node, _LOG_SOFTMAX)) and operand(node) is not None:
            node = operand(node)
        else:
            raise Refused(Reason.LINK, name(node))


def operand(node: Node) -> Node | None:
    """The tensor that a link or a reader works on."""
    given = node.args[0] if node.args else node.kwargs.get("input")
    return given if isinstance(given, Node) else None


def _larger_operand(node: Node) -> Node:
    """The logits of `2.0 * logits` and `scale * logits`."""
    operands = [n for n in (*node.args, *node.kwargs.values()) if isinstance(n, Node)]
    if not operands:
        raise Refused(Reason.LINK, name(node))
    return max(operands, key=lambda n: x.dim() if isinstance(x := n.meta.get("example_value"), torch.Tensor) else -1)


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


# ---- on to the readers


def follow(place: Place, node: Node) -> Place:
    """The place that node makes of its operand at `place`, or refuse."""
    called = name(node)
    before, after = value(place.node), value(node)
    if "out" in node.kwargs:
        raise Refused(Reason.LINK, f"{called} with out=")
    if before.dim() and not isinstance(before.shape[-1], int):
        raise Refused(Reason.UNKNOWN_SHAPE, "V is dynamic")
    whole = before.dim() > 0 and after.dim() > 0
    if whole:
        V, last = before.shape[-1], after.shape[-1]
        whole = isinstance(V, int) and isinstance(last, int) and last == V  # comparing symbols would add a guard
    if before.device == after.device:
        detached = place.detached or (before.requires_grad and not after.requires_grad)
        here = dataclasses.replace(place, node=node, links=(*place.links, node), detached=detached)
        if called == "getitem" and place.kind == "logits" and _cuts_classes(node.args[1], before.dim()):
            return dataclasses.replace(here, rows=node)
    if whole and before.device == after.device:
        widened = after.dtype == before.dtype or (before.dtype.itemsize == 2 and after.dtype == torch.float32)
        if calls(node, _LOG_SOFTMAX | _SOFTMAX) and place.kind == "logits" and widened:
            if is_last(reduced_dim(node), before):
                return dataclasses.replace(here, kind="logp" if calls(node, _LOG_SOFTMAX) else "p")
        elif calls(node, _EXP) and place.kind == "logp" and place.sign == 1:
            return dataclasses.replace(here, kind="p")
        elif calls(node, _ARITHMETIC):
            if not same(before.shape, after.shape):
                raise Refused(Reason.LINK, f"{called} of shapes {tuple(before.shape)} and {tuple(after.shape)}")
            return _arithmetic(here, place.node, node)
        if node.args and node.args[0] is place.node and _is_row_link(called, node, before, after):
            return dataclasses.replace(here, rows=node) if called in _ROWS else here
    raise Refused(Reason.LINK, called)


def _is_row_link(called: str, node: Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    dims, last = before.dim(), before.dim() - 1
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if called in _CASTS:
        # the head rounds the logits once; a narrower dtype behind it would round them again
        widened = before.dtype.itemsize == 2 and after.dtype == torch.float32
        return (after.dtype == before.dtype or widened) and before.shape == after.shape
    if called in ("contiguous", "clone", "flatten", "detach"):
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


def _cuts_classes(index: Any, dims: int) -> bool:
    """Whether indexing keeps only the first classes, as models with a padded vocabulary do, and all of the rest."""
    index = list(index) if isinstance(index, tuple) else [index]
    *rest, cut = index
    if type(cut) is not slice or cut.start not in (None, 0) or cut.step not in (None, 1) or type(cut.stop) is not int:
        return False
    if not all(i is Ellipsis or i == slice(None) for i in rest if i is not None) or None in rest:
        return False
    return rest.count(Ellipsis) == 1 or len(index) == dims


def _arithmetic(here: Place, operand: Node, node: Node) -> Place:
    """Compose a scale, shift or softcap into the epilogue cap * f(scale * (x + shift)), or refuse."""
    does = _ARITHMETIC[node.target]
    others = [a for a in node.args if a is not operand]
    refused = Refused(Reason.LINK, name(node))
    if node.kwargs or len(others) + (does not in ("neg", "tanh", "sigmoid")) > 2 or node.args.count(operand) != 1:
        raise refused
    if here.kind != "logits":
        if here.kind != "logp" or does != "neg":
            raise refused
        return dataclasses.replace(here, sign=-here.sign)
    function, scale, shift, cap = here.epilogue
    if does in ("tanh", "sigmoid"):
        if function or not others == []:
            raise refused
        # the identity's cap is folded into its scale
        return dataclasses.replace(here, epilogue=Epilogue(does, scale, shift, cap))
    if does == "neg":
        does, other = "mul", -1.0
    elif len(others) == 1:
        (other,) = others
    else:
        raise refused
    first = node.args[0] is operand or does in ("add", "mul")
    if isinstance(other, Node):
        return _tensor_operand(here, does, other, first, refused)
    if isinstance(other, bool) or not isinstance(other, (int, float)) or not math.isfinite(other) or not first:
        raise refused
    other = float(other)
    if does == "div":
        if other == 0:
            raise refused
        does, other = "mul", 1.0 / other
    if does == "mul":
        if not 1e-30 < abs(other * (cap if function else scale)) < 1e30:  # neither 0 nor infinite in float32
            raise refused
        changed = Epilogue(function, scale, shift, cap * other) if function else Epilogue("", scale * other, shift, cap)
        return dataclasses.replace(here, epilogue=changed)
    if function:
        raise refused
    shift += (other if does == "add" else -other) / scale
    if abs(shift) > 1e30:
        raise refused
    return dataclasses.replace(here, epilogue=Epilogue("", scale, shift, cap))


def _tensor_operand(here: Place, does: str, other: Node, first: bool, refused: Refused) -> Place:
    """A scalar tensor that multiplies the logits, or a vector [V] added to them."""
    tensor = value(other)
    untouched = here.epilogue == IDENTITY and here.shift is None
    if does in ("mul", "div") and first and tensor.dim() == 0 and tensor.is_floating_point() and untouched:
        # the hidden states are multiplied by it, and might overflow in float16 where the logits don't
        if does == "mul" and tensor.device == value(here.node).device and value(here.node).dtype != torch.float16:
            return dataclasses.replace(here, factors=(*here.factors, other))
        raise refused
    V = value(here.node).shape[-1]
    if (
        does == "add"
        and untouched
        and not here.factors
        and tensor.dim()
        and same(tensor.shape, [1] * (tensor.dim() - 1) + [V])
    ):
        return dataclasses.replace(here, shift=other)
    raise refused


def on_hidden(place: Place, head: Head) -> Node:
    """Insert the hidden states of the rows at a place, in the logits' dtype: [..., H], with place.node's rows.

    They are not multiplied by the place's factors yet.
    """
    h, dtype = head.hidden, value(head.node).dtype
    if value(h).dtype != dtype:  # autocast
        h = insert(head.node, "to", h, dtype)
    for link in place.links:
        called = name(link)
        if called in _CASTS or called in ("contiguous", "clone", "detach") or calls(link, _POINTWISE):
            continue
        if called in ("view", "reshape"):
            h = insert(link, "reshape", h, [*_flat(link.args[1:])[:-1], value(h).shape[-1]])
        elif called == "getitem" and _cuts_classes(link.args[1], value(link).dim()):
            continue  # done to the weight
        else:
            h = insert(link, link.target, h, *link.args[1:], **link.kwargs)
    return h
