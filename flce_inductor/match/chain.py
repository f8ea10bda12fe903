"""From a head to all that reads its logits.

Between a head and what reads its logits there may be *links*: operations that treat every row alike and keep the class
dimension whole and last.

- A link that moves or selects rows can be done to the hidden states instead, because the head works on each row by
  itself.
- The class dimension may move, as cross_entropy takes [B, V, T]: the hidden states' last dimension moves with it.
- A link that maps every logit alike (a scale, a softcap, a cast up) becomes the epilogue of the row statistics.
- log_softmax changes what the values mean: from there on a reader reads log-probabilities.
- What is done to each probability by itself (log(p + eps)) is done to the label's alone, if no other is read.

`head_of` walks from a reader back to its head, `follow` from a place where the logits, or what softmax makes of them,
stand in the graph to the next; both refuse what they don't know.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.node import Node, map_arg

from ..explain import Reason, where
from ..kernels import IDENTITY, Epilogue
from .graph import Refused, insert, is_number, mutated, name, same, value

# the parameters of what a head may call, in their order
_HEADS = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "inner": ("input", "other"),
    "addmm": ("input", "mat1", "mat2"),
}
_CASTS = {"float", "double", "half", "bfloat16", "to", "type", "type_as"}
_TRANSPOSES = {"t", "getattr T", "getattr mT", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"}
_SPLITS = {"split", "chunk", "tensor_split", "unbind"}
_SAME_ROWS = {*_CASTS, "contiguous", "clone", "detach", "view", "reshape", "flatten", "squeeze", "unsqueeze"}
_ROWS = {"getitem", "index_select", "narrow", "select", *_TRANSPOSES, *_SPLITS}
# one name for each arithmetic operation; the in-place ones change logits that nobody else sees
_ARITHMETIC = {
    **{f: "mul" for f in (operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "multiply", "mul_")},
    **{f: "div" for f in (operator.truediv, operator.itruediv, torch.div, torch.divide, "div", "divide", "div_")},
    **{f: "div" for f in (torch.true_divide, "true_divide")},
    **{f: "add" for f in (operator.add, operator.iadd, torch.add, "add", "add_")},
    **{f: "sub" for f in (operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "subtract", "sub_")},
    **{f: "neg" for f in (operator.neg, torch.neg, torch.negative, "neg", "negative")},
    **{f: "tanh" for f in (torch.tanh, F.tanh, "tanh", "tanh_")},
    **{f: "sigmoid" for f in (torch.sigmoid, F.sigmoid, "sigmoid", "sigmoid_")},
}
LOG_SOFTMAX = {F.log_softmax, torch.log_softmax, torch.special.log_softmax, "log_softmax"}
SOFTMAX = {F.softmax, torch.softmax, torch.special.softmax, "softmax"}
EXP = {torch.exp, "exp"}
LOG = {torch.log, "log"}
LOGSUMEXP = {torch.logsumexp, torch.special.logsumexp, "logsumexp"}
_CLAMPS = {torch.clamp, torch.clip, torch.clamp_min, "clamp", "clip", "clamp_min"}


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
    to here. steps: the calls (link, target, args, kwargs) that make the hidden states of these rows from the head's.
    rows: what selected or moved rows, or cut classes off; places with equal ones hold the same rows in the same order.
    classes: which dimension the classes are, counted from the end. detached: no gradient comes back from here. factors:
    scalar tensors, or numbers that are no constants, which multiply the logits, or divide them if True stands with
    them. shift: a tensor [V] that is added to them (a bias that isn't the head's), times shift_scale, before the
    factors. after: links that change each (log-)probability by itself, all of which follow those that give it. pieces:
    whether the node is a tuple of pieces of the rows.
    """

    node: Node
    links: tuple[Node, ...] = ()
    steps: tuple[tuple[Node, Any, tuple, dict], ...] = ()
    rows: tuple = ()
    classes: int = -1
    epilogue: Epilogue = IDENTITY
    factors: tuple[tuple[Node, bool], ...] = ()
    shift: Node | None = None
    shift_scale: float = 1.0
    kind: str = "logits"
    sign: int = 1
    detached: bool = False
    after: tuple[Node, ...] = ()
    pieces: bool = False

    @property
    def key(self) -> tuple:
        """Equal for places whose rows have the same statistics."""
        return self.rows, self.epilogue, self.factors, self.shift, self.shift_scale

    @property
    def V(self) -> int | torch.SymInt:
        """The number of classes."""
        return value(self.node).shape[self.classes]

    @property
    def inputs(self) -> list[Node]:
        """What must be known, beside the head's inputs, to compute the statistics of these rows."""
        sizes: list[Node] = []
        map_arg([step[2:] for step in self.steps], sizes.append)
        return [*sizes, *(factor for factor, _ in self.factors), *([] if self.shift is None else [self.shift])]

    def over_classes(self, dim: Any) -> bool:
        """Whether a dim argument names the classes' dimension alone."""
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        dims = value(self.node).dim()
        return type(dim) is int and dim % dims == dims + self.classes


def first_input(node: Node) -> Node | None:
    """The first tensor among a call's arguments."""
    return next(iter(node.all_input_nodes), None)


def passes_on(node: Node) -> bool:
    """Whether a node is a link, as far as its name says: its first input is what it works on."""
    return name(node) in _SAME_ROWS | _ROWS or calls(node, {*_ARITHMETIC, *_CLAMPS})


def same_or_wider(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether values keep all their digits, in a dtype that is no more exact than the statistics."""
    return after == before or (before.itemsize == 2 and after == torch.float32)


def calls(node: Node, targets: set) -> bool:
    """Whether a node calls one of these functions, or methods of these names."""
    return node.op in ("call_function", "call_method") and node.target in targets


def reduced_dim(node: Node, position: int = 1) -> Any:
    """The argument dim of a reduction."""
    return node.args[position] if len(node.args) > position else node.kwargs.get("dim")


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
        elif (name(node) in _SAME_ROWS | _ROWS or calls(node, LOG_SOFTMAX | SOFTMAX)) and operand(node) is not None:
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

    def size(operand: Node) -> tuple[int, int]:
        example = operand.meta.get("example_value")
        if not isinstance(example, torch.Tensor):
            return -1, 0
        return example.dim(), sum(type(size) is not int or size != 1 for size in example.shape)

    return max(operands, key=size)


def _head(node: Node) -> Head | None:
    called = name(node)
    if called == "einsum":
        hidden, weight, transposed = _einsum(node)
        bias = None
    elif called in _HEADS:
        parameters, kwargs = _HEADS[called], dict(node.kwargs)
        if called == "addmm":
            kwargs = {k: v for k, v in kwargs.items() if k not in ("alpha", "beta") or v != 1}
        given = dict(zip(parameters, node.args, strict=False)) | kwargs
        if not set(given) <= set(parameters) or len(node.args) > len(parameters):
            raise Refused(Reason.LINK, f"{called} with {len(node.args)} arguments and {', '.join(kwargs)}")
        if called == "addmm":
            bias, hidden, weight = (given[p] for p in parameters)
        else:
            hidden, weight, bias = given["input"], given[parameters[1]], given.get("bias")
        transposed = called not in ("linear", "inner")
    else:
        return None
    if value(weight).dim() != 2 or value(hidden).dim() < 2:
        raise Refused(Reason.LINK, f"{called} of {value(hidden).dim()} and {value(weight).dim()} dimensions")
    seen = []
    while isinstance(inner := next(iter(weight.args), None), Node):
        if _swaps_both(weight):
            transposed = not transposed
        elif not _casts_down(weight, value(node).dtype):
            break
        seen.append(weight)
        weight = inner
    return Head(node, hidden, weight, transposed, bias, seen)


def _einsum(node: Node) -> tuple[Node, Node, bool]:
    """The hidden states, weight [V, H], or [H, V] if True, of an einsum such as "bth,vh->btv"."""
    equation, *operands = node.args
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    refused = Refused(Reason.LINK, f"einsum {equation!r}")
    if not isinstance(equation, str) or len(operands) != 2 or node.kwargs:
        raise refused
    terms, _, result = equation.replace(" ", "").partition("->")
    terms = terms.split(",")
    for i, j in ((0, 1), (1, 0)):
        lead, summed, weight = terms[i][:-1], terms[i][-1:], terms[j]
        classes = weight.replace(summed, "")
        letters = [*lead.replace("...", "", 1), summed, classes]
        if len(weight) != 2 or len(classes) != 1 or len({*letters}) != len(letters) or result != lead + classes:
            continue
        if not all(map(str.isalpha, letters)):
            continue
        hidden, transposed = value(operands[i]), weight[0] == summed
        # unlike matmul, einsum takes sizes of 1 for any size
        if same(hidden.shape[-1:], [value(operands[j]).shape[0 if transposed else 1]]):
            return operands[i], operands[j], transposed
    raise refused


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
    if place.pieces:
        return _piece(place, node)
    before = value(place.node)
    if called in _SPLITS and node.args and node.args[0] is place.node:
        return _pieces(place, called, node)
    after = value(node)
    if "out" in node.kwargs:
        raise Refused(Reason.LINK, f"{called} with out=")
    if before.device != after.device or not before.dim() or not after.dim():
        raise Refused(Reason.LINK, called)
    detached = place.detached or (before.requires_grad and not after.requires_grad)
    here = dataclasses.replace(place, node=node, links=(*place.links, node), detached=detached)
    # the head rounds the logits once; a narrower dtype behind it would round them again
    widened = same_or_wider(before.dtype, after.dtype)
    if calls(node, LOG_SOFTMAX | SOFTMAX):
        if place.kind == "logits" and widened and place.over_classes(reduced_dim(node)):
            return dataclasses.replace(here, kind="logp" if calls(node, LOG_SOFTMAX) else "p")
    elif calls(node, EXP):
        if place.kind == "logp" and place.sign == 1 and not place.after:
            return dataclasses.replace(here, kind="p")
    elif calls(node, _ARITHMETIC):
        if not same(before.shape, after.shape):
            raise Refused(Reason.LINK, f"{called} of shapes {tuple(before.shape)} and {tuple(after.shape)}")
        lse = _own_lse(place, node)
        if lse is not None:
            return dataclasses.replace(here, links=(*place.links, *lse, node), kind="logp")
        return _arithmetic(here, place.node, node)
    elif calls(node, LOG | _CLAMPS):
        if place.kind != "logits" and node.all_input_nodes == [place.node] and after.dtype == before.dtype:
            return dataclasses.replace(here, after=(*place.after, node))
    elif node.args and node.args[0] is place.node:
        if called in _CASTS:
            if widened and same(before.shape, after.shape):
                return here
        elif after.dtype == before.dtype:
            moved = _follow_rows(here, called, node, before, after)
            if moved is not None:
                return moved
    raise Refused(Reason.LINK, called)


def _pieces(place: Place, called: str, node: Node) -> Place:
    """The place of a node that splits the rows."""
    dim = reduced_dim(node, 1 if called == "unbind" else 2)
    if not isinstance(dim, (int, type(None))) or place.over_classes(dim or 0):
        raise Refused(Reason.LINK, f"{called} of the classes")
    if not all(is_number(n) for n in node.all_input_nodes if n is not place.node):
        raise Refused(Reason.LINK, f"{called} at a tensor of indices")
    step = (node, node.target, node.args[1:], node.kwargs)
    return dataclasses.replace(place, node=node, links=(*place.links, node), steps=(*place.steps, step), pieces=True)


def _piece(place: Place, node: Node) -> Place:
    """The place of one of the pieces that a node split rows into."""
    split = place.node
    (_, _, args, kwargs), before, after = place.steps[-1], value(split.args[0]), value(node)
    if name(node) != "getitem" or type(node.args[1]) is not int:
        raise Refused(Reason.LINK, name(node))
    classes = place.classes
    if after.dim() < before.dim():  # unbind
        classes += (args[0] if args else kwargs.get("dim", 0)) % before.dim() > before.dim() + classes
    moved = f"{name(split)} {args} {kwargs} {node.args[1]}", f"{[*before.shape]}", place.classes
    return dataclasses.replace(
        place,
        node=node,
        links=(*place.links, node),
        steps=(*place.steps, (node, operator.getitem, (node.args[1],), {})),
        rows=(*place.rows, moved),
        classes=classes,
        detached=place.detached or (before.requires_grad and not after.requires_grad),
        pieces=False,
    )


def _follow_rows(here: Place, called: str, node: Node, before: torch.Tensor, after: torch.Tensor) -> Place | None:
    """The place behind a node that views, selects or moves rows, or None if it does something else to the classes."""
    dims, classes = before.dim(), here.classes
    position = dims + classes  # of the classes
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    target, args, kwargs, cut = node.target, node.args[1:], node.kwargs, False
    moved = None  # how, in words that are equal for equal moves
    if called in ("contiguous", "clone", "detach"):
        target = None
    elif called in ("view", "reshape", "flatten") and classes == -1:
        # rows keep their order when both shapes end in V
        if called != "flatten":
            target, args = "reshape", tuple(_flat(args)[:-1])
            if kwargs or len(args) + 1 != after.dim():  # a dtype, or a size as one object
                return None
    elif called == "getitem" and classes == -1 and _selects_rows(dim, dims):
        moved = f"{dim}"
    elif called == "index_select" and type(dim) is int and dim % dims != position:
        moved = f"{called} {args} {kwargs}"
    elif called == "getitem" and (index := full_index(dim, dims)) is not None:
        at = [i for i, entry in enumerate(index) if entry is not None][position]
        cut = _cuts(index[at])
        if cut:
            if here.kind != "logits" or type(before.shape[position]) is not int:
                return None
            moved, index[at] = f"{index}", slice(None)
            args = (tuple(index),)
        elif any(entry not in (None, slice(None)) for entry in index):
            moved = f"{index}"
        if index[at] != slice(None):
            return None
        classes = -1 - sum(type(entry) is not int for entry in index[at + 1 :])
    elif called == "squeeze" and dim is None:
        # the hidden states' last dimension may be 1, so it is said which
        ones = tuple(d for d, size in enumerate(before.shape) if type(size) is int and size == 1 and d != position)
        if len(ones) != dims - after.dim():
            return None
        args = (ones,)
        classes += sum(d > position for d in ones)
    elif called in ("narrow", "select", "squeeze") and type(dim) is int and dim % dims != position:
        moved = None if called == "squeeze" else f"{called} {args} {kwargs}"
        classes += (dims - after.dim()) * (dim % dims > position)
    elif called == "unsqueeze" and type(dim) is int:
        classes -= dim % (dims + 1) > position
    elif called in _TRANSPOSES and (order := _order(called, node, dims)) is not None:
        classes = order.index(position) - dims
        order.remove(position)
        moved = f"order {order}" if order != sorted(order) else None
    else:
        return None
    if after.shape[classes] == 0 if cut else not same([before.shape[position]], [after.shape[classes]]):
        return None
    rows = here.rows if moved is None else (*here.rows, (moved, f"{[*before.shape]}", here.classes))
    steps = here.steps if target is None else (*here.steps, (node, target, args, kwargs))
    return dataclasses.replace(here, classes=classes, rows=rows, steps=steps)


def _selects_rows(index: Any, dims: int) -> bool:
    """Whether an index has tensors of positions in it, and leaves the last dimension alone.

    No masks: the graph asks the logits for the number of rows that they select.
    """
    index = index if isinstance(index, tuple) else (index,)
    tensors = [i for i in index if isinstance(i, Node)]
    if not tensors or not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index if i not in tensors):
        return False
    if any(is_number(i) or value(i).dtype != torch.int64 for i in tensors):
        return False
    used = sum(i is not None and i is not Ellipsis for i in index)
    if used < dims and (Ellipsis not in index or index[-1] is Ellipsis):
        return True
    return used <= dims and index[-1] == slice(None)


def _order(called: str, node: Node, dims: int) -> list[int] | None:
    """The order in which a node puts the dimensions of its operand."""
    if called in ("t", "getattr T", "getattr mT"):
        return [*range(dims - 2), dims - 1, dims - 2] if dims == 2 or called == "getattr mT" else None
    given = _flat(node.args[1:])
    if node.kwargs or not all(type(d) is int for d in given):
        return None
    given = [d % dims for d in given]
    if called == "permute":
        return given
    order = list(range(dims))
    i, j = given
    if called in ("movedim", "moveaxis"):
        order.insert(j, order.pop(i))
    else:
        order[i], order[j] = order[j], order[i]
    return order


def full_index(index: Any, dims: int) -> list[Any] | None:
    """An index of a tensor of `dims` dimensions with one entry for each, and None for each new one.

    None for an index with anything but numbers, slices, None and Ellipsis.
    """
    index = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
        return None
    rest = [slice(None)] * (dims - sum(i is not None and i is not Ellipsis for i in index))
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    return [*index[:at], *rest, *index[at + 1 :]]


def _cuts(entry: Any) -> bool:
    """Whether an entry of an index keeps only the first classes, as models with a padded vocabulary do."""
    if type(entry) is not slice or type(entry.stop) is not int:
        return False
    return entry.start in (None, 0) and entry.step in (None, 1)


def _arithmetic(here: Place, operand: Node, node: Node) -> Place:
    """Compose a scale, shift or softcap into the epilogue cap * f(scale * (x + shift)), or refuse."""
    does = _ARITHMETIC[node.target]
    others = [a for a in node.args if a is not operand]
    refused = Refused(Reason.LINK, name(node))
    if node.kwargs or len(others) + (does not in ("neg", "tanh", "sigmoid")) > 2 or node.args.count(operand) != 1:
        raise refused
    if here.kind != "logits":
        if here.kind == "logp" and does == "neg" and not here.after:
            return dataclasses.replace(here, sign=-here.sign)
        if does in ("tanh", "sigmoid") or any(isinstance(other, Node) for other in others) or any(mutated(node)):
            raise refused
        return dataclasses.replace(here, after=(*here.after, node))
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
    if isinstance(other, Node) and is_number(other):
        if does not in ("mul", "div") or function or shift or not first or value(operand).dtype == torch.float16:
            raise Refused(Reason.SYMBOLIC_NUMBER, f"{name(node)}, {where(node)}")
        return dataclasses.replace(here, factors=(*here.factors, (other, does == "div")))
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


def _own_lse(place: Place, node: Node) -> list[Node] | None:
    """The nodes that make lse in `logits - lse(logits)`, which is log_softmax, or None if a node is something else."""
    if _ARITHMETIC[node.target] != "sub" or len(node.args) != 2 or node.kwargs or place.kind != "logits":
        return None
    if node.args[0] is not place.node or not isinstance(lse := node.args[1], Node):
        return None
    one = list(value(place.node).shape)
    one[place.classes] = 1
    made = [lse]
    if name(lse) == "unsqueeze" or (name(lse) == "getitem" and adds_dimensions(lse)):
        made.append(lse := operand(lse))
    if lse is None or not calls(lse, LOGSUMEXP) or operand(lse) is not place.node:
        return None
    fits = place.over_classes(reduced_dim(lse)) and same(value(made[0]).shape, one)
    return made if fits and value(made[0]).requires_grad == value(place.node).requires_grad else None


def adds_dimensions(node: Node) -> bool:
    """Whether an index does nothing but add dimensions of size 1."""
    index = full_index(node.args[1], value(node.args[0]).dim())
    return index is not None and all(entry in (None, slice(None)) for entry in index)


def _tensor_operand(here: Place, does: str, other: Node, first: bool, refused: Refused) -> Place:
    """A scalar tensor that multiplies or divides the logits, or a vector [V] added to them."""
    tensor, logits = value(other), value(here.node)
    function, scale, shift, _ = here.epilogue
    if function or not tensor.is_floating_point() or tensor.device != logits.device or not first:
        raise refused
    if does in ("mul", "div") and all(type(size) is int and size == 1 for size in tensor.shape):
        # a factor and a scale are one product, in whatever order.
        # the hidden states are multiplied by it, and might overflow in float16 where the logits don't
        if shift or logits.dtype == torch.float16:
            raise refused
        return dataclasses.replace(here, factors=(*here.factors, (other, does == "div")))
    if does in ("add", "sub") and here.shift is None and not here.factors:
        dims = tensor.dim()
        vector = [1] * dims
        if dims >= -here.classes:
            vector[here.classes] = logits.shape[here.classes]
            if same(tensor.shape, vector):
                return dataclasses.replace(here, shift=other, shift_scale=(1 if does == "add" else -1) / scale)
    if does in ("add", "sub") and same(tensor.shape, logits.shape) and _is_head(other):
        raise Refused(Reason.ADAPTER)
    raise refused


def _is_head(node: Node) -> bool:
    try:
        return value(head_of(node).node).dim() > 1
    except Refused:
        return False


def on_hidden(place: Place, head: Head, before: Node) -> Node:
    """Insert, in front of a node, the hidden states of the rows at a place, in the logits' dtype: [..., H].

    They are not multiplied by the place's factors yet.
    """
    h, dtype = head.hidden, value(head.node).dtype
    if value(h).dtype != dtype:  # autocast
        h = insert(before, head.node, "to", h, dtype)
    for link, target, args, kwargs in place.steps:
        if target == "reshape":
            H = value(h).shape[-1]
            args = [[*args, H if isinstance(H, int) else insert(before, link, "size", h, -1)]]
        h = insert(before, link, target, h, *args, **kwargs)
    return h if place.classes == -1 else insert(before, place.node, "movedim", h, place.classes, -1)
