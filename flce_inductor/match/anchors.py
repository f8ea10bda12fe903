"""What reads logits, in whatever spelling, and what it is in terms of row statistics."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.node import Node, map_arg

from ..explain import Reason
from ..losses import REDUCTIONS, Loss
from ..runtime import Want
from .chain import (
    EXP,
    LOG,
    LOG_SOFTMAX,
    LOGSUMEXP,
    SOFTMAX,
    Place,
    adds_dimensions,
    calls,
    first_input,
    operand,
    passes_on,
    reduced_dim,
    same_or_wider,
)
from .graph import Refused, name, same, value

NO_LABEL = -(2**62)  # an ignore_index that no label has


@dataclasses.dataclass(frozen=True)
class Rows:
    """The row statistics that a reader's code is given, each [N], as torch values; V classes."""

    nll: Tensor
    max: Tensor
    logsum: Tensor
    zsum: Tensor
    pz: Tensor
    argmax: Tensor
    target: Tensor | None
    class_weight: Tensor | None
    V: int

    @property
    def lse(self) -> Tensor:
        return self.max + self.logsum


@dataclasses.dataclass(frozen=True)
class Reader:
    """A node whose value follows from row statistics.

    code: torch code for it: a scalar, or [N], which takes the node's shape. wraps: labels count from the end where they
    are negative. inner: nodes between the place and node that have no other use. fixed: nodes that the reader takes for
    what they were made as, so nothing may change them.
    """

    node: Node
    place: Place
    says: str
    code: Callable[[Rows], Tensor]
    target: Node | None = None
    class_weight: Node | None = None
    ignore_index: int = NO_LABEL
    wraps: bool = False
    want: Want = Want()  # noqa: RUF009
    inner: tuple[Node, ...] = ()
    fixed: tuple[Node, ...] = ()
    scalar: bool = False


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_NLL_LOSS = inspect.signature(F.nll_loss)
_ARGMAX = {torch.argmax, "argmax"}
_MAX = {torch.max, "max"}
_AMAX = {torch.amax, "amax"}
_GATHER = {torch.gather, "gather"}
_TAKE = {torch.take_along_dim, "take_along_dim"}
_SUM = {torch.sum, "sum"}
_MUL = {operator.mul, torch.mul, "mul"}
_MEAN = {torch.mean, "mean"}
# where a search for heads begins
_LOSSES = {F.cross_entropy, *LOG_SOFTMAX, *LOGSUMEXP}
_EXPONENTIALS = {*SOFTMAX, *EXP}


def _arguments(signature: inspect.Signature, node: Node) -> dict[str, Any]:
    """A call's arguments by name: users call losses positionally, by keyword, and mixed."""
    call = signature.bind(*node.args, **node.kwargs)
    call.apply_defaults()
    return call.arguments


def arguments_of(loss: Node) -> dict[str, Any]:
    """The arguments of a cross_entropy by name."""
    return _arguments(_CROSS_ENTROPY, loss)


def is_loss(node: Node) -> bool:
    """Whether a search for heads begins at a node."""
    return calls(node, _LOSSES) or is_by_hand(node)


def is_by_hand(node: Node) -> bool:
    """Whether a node is the logarithm of what softmax or exp makes."""
    return calls(node, LOG) and _exponentials(node) is not None


def _exponentials(log: Node) -> Node | None:
    """The softmax or exp whose values a logarithm is taken of, be it of all, of the labels', or of their sum."""
    node = first_input(log)
    while node is not None and not calls(node, _EXPONENTIALS):
        node = first_input(node) if passes_on(node) or calls(node, _SUM | _GATHER | _TAKE) else None
    return node


def logits_of(node: Node) -> Any:
    """What a loss reads."""
    if calls(node, LOG):
        node = _exponentials(node)
    logits = _arguments(_CROSS_ENTROPY, node)["input"] if node.target is F.cross_entropy else operand(node)
    if not isinstance(logits, Node):
        raise Refused(Reason.NO_HEAD)
    return logits


def describe(node: Node) -> str:
    """A loss in the words of the report."""
    if node.target is F.cross_entropy:
        return f"cross_entropy({_arguments(_CROSS_ENTROPY, node)['reduction']})"
    called = node.target if isinstance(node.target, str) else node.target.__name__
    return f"log of {describe(_exponentials(node))}" if calls(node, LOG) else called


def read(place: Place, user: Node) -> list[Reader]:
    """The readers that a user of place is, none if it is none; refuses a reader that isn't supported."""
    if user.target is F.cross_entropy and user.op == "call_function":
        args = _arguments(_CROSS_ENTROPY, user)
        if args["input"] is not place.node:
            raise Refused(Reason.CLASS_PROBABILITIES)
        return [_loss(user, place, args)] if place.kind == "logits" else []
    if calls(user, {F.nll_loss}) and place.sign == 1 and (place.kind == "logp" or place.after):
        args = _arguments(_NLL_LOSS, user)
        return [_loss(user, place, {**args, "label_smoothing": 0.0})]
    if not user.args or user.args[0] is not place.node or "out" in user.kwargs:
        return []
    if place.after:
        return _of_labels(user, place)
    over_classes = place.over_classes(reduced_dim(user))
    if calls(user, LOGSUMEXP) and place.kind == "logits" and over_classes:
        return [Reader(user, place, "logsumexp", lambda r: r.lse)]
    if calls(user, _ARGMAX) and place.sign == 1 and over_classes:
        return [_argmax(user, place)]
    if calls(user, _MAX) and place.sign == 1 and over_classes:
        if any(name(x) != "getitem" or x.args[1] not in (0, 1) for x in user.users):
            return []
        return [_argmax(x, place, user) if x.args[1] else _largest(x, place, user) for x in user.users]
    if calls(user, _AMAX) and place.sign == 1 and over_classes:
        return [_largest(user, place)]
    totals = calls(user, _SUM | _MEAN) and place.kind == "logp" and over_classes
    if totals and same_or_wider(value(place.node).dtype, value(user).dtype):
        sign = place.sign
        if calls(user, _SUM):
            return [Reader(user, place, "sum", lambda r: sign * (r.zsum - r.V * r.lse), want=Want(zsum=True))]
        return [Reader(user, place, "mean", lambda r: sign * (r.zsum / r.V - r.lse), want=Want(zsum=True))]
    return _of_labels(user, place)


def _of_labels(user: Node, place: Place) -> list[Reader]:
    """The reader of one element in each row that a user is, or none."""
    index = _gathered(user, place)
    if index is not None:
        return [_at_label(user, place, index, wraps=False)]
    index = _indexed(user, place)
    if index is not None:
        fixed = tuple(n for n in user.args[1][:-1] if isinstance(n, Node))
        return [_at_label(user, place, index, wraps=True, fixed=fixed)]
    return []


def _argmax(node: Node, place: Place, *inner: Node) -> Reader:
    return Reader(node, place, "argmax", lambda r: r.argmax, want=Want(argmax=True), inner=inner)


def _largest(node: Node, place: Place, *inner: Node) -> Reader:
    """The largest logit of each row, or its log-probability, or its probability."""
    if value(node).requires_grad and not place.detached:
        raise Refused(Reason.READER, f"{name(node)} of logits that take a gradient through it; detach them first")

    def logits(r: Rows) -> Tensor:
        # lse is what max isn't: NaN, or -inf
        return torch.where(r.logsum.isfinite() | r.max.isinf(), r.max, r.lse)

    def logp(r: Rows) -> Tensor:
        return torch.where(r.logsum.isinf(), float("nan"), -r.logsum)

    code = {"logits": logits, "logp": logp, "p": lambda r: logp(r).exp()}[place.kind]
    return Reader(node, place, "max", code, inner=inner)


def _loss(node: Node, place: Place, args: dict[str, Any]) -> Reader:
    """cross_entropy or nll_loss over labels."""
    check_arguments(args, value(place.node), value(args["target"]), place.classes)
    class_weight = args["weight"]
    if class_weight is not None and (
        value(class_weight).requires_grad or not same(value(class_weight).shape, [place.V])
    ):
        raise Refused(Reason.CLASS_WEIGHT)
    loss = Loss(args["reduction"], args["ignore_index"], float(args["label_smoothing"]))

    def nll(r: Rows) -> Tensor:
        if not place.after:
            return r.nll
        valid = torch.ne(r.target, loss.ignore_index)
        # an ignored row's nll is 0, of a probability of 1, where not everything has a finite derivative
        return torch.where(valid, -_at(place, torch.where(valid, r.nll, 1.0)), 0.0)

    return Reader(
        node,
        place,
        f"{node.target.__name__}({loss.reduction})",
        lambda r: loss(nll(r), r.lse, r.zsum, r.target, r.class_weight, r.V),
        target=args["target"],
        class_weight=class_weight,
        ignore_index=loss.ignore_index,
        want=Want(zsum=loss.label_smoothing != 0),
        scalar=loss.reduction != "none",
    )


def check_arguments(args: dict[str, Any], logits: Tensor, target: Tensor, classes: int = -1) -> None:
    """Refuse a loss over labels whose arguments, but for class weights, say what the ops don't compute."""
    if args["size_average"] is not None or args["reduce"] is not None:
        raise Refused(Reason.LEGACY_REDUCTION)
    if target.is_floating_point():
        raise Refused(Reason.CLASS_PROBABILITIES)
    if target.dtype != torch.int64:
        raise Refused(Reason.TARGET_DTYPE, str(target.dtype))
    if logits.dim() + classes != 1 or target.dim() != logits.dim() - 1:
        raise Refused(Reason.LOGITS_SHAPE, f"logits {tuple(logits.shape)}, labels {tuple(target.shape)}")
    index, smoothing = args["ignore_index"], args["label_smoothing"]
    if args["reduction"] not in REDUCTIONS or not isinstance(index, int) or not isinstance(smoothing, (int, float)):
        raise Refused(Reason.UNKNOWN_SHAPE, f"reduction={args['reduction']}, {(index, smoothing)}")


def _gathered(node: Node, place: Place) -> Node | None:
    """The labels, with a dimension of 1 for the classes, of gather(logits, -1, labels.unsqueeze(-1)) and its like."""
    if not calls(node, _GATHER | _TAKE):
        return None
    parameters = ("input", "dim", "index") if calls(node, _GATHER) else ("input", "indices", "dim")
    given = dict(zip(parameters, node.args, strict=False)) | node.kwargs
    index = given.get("index", given.get("indices"))
    if set(given) != {*parameters} or not isinstance(index, Node) or not place.over_classes(given["dim"]):
        return None
    one = list(value(place.node).shape)
    one[place.classes] = 1
    return index if same(value(index).shape, one, guard=True) else None


def _indexed(node: Node, place: Place) -> Node | None:
    """The labels of logits[torch.arange(N), labels], or the same with more dimensions."""
    if name(node) != "getitem" or not isinstance(node.args[1], tuple) or place.classes != -1:
        return None
    *positions, index = node.args[1]
    lead = value(place.node).shape[:-1]
    if len(positions) != len(lead) or not isinstance(index, Node) or not same(value(index).shape, lead, guard=True):
        return None
    return index if all(_counts(x, lead, i) for i, x in enumerate(positions)) else None


def _counts(index: Any, lead: Any, dim: int) -> bool:
    """Whether an index is 0, 1, .. along one dimension of rows of sizes `lead`, and the same along the others."""
    if isinstance(index, range):
        return len(lead) == 1 and type(lead[0]) is int and index == range(lead[0])
    if not isinstance(index, Node):
        return False
    shape = [1] * (len(lead) - value(index).dim()) + list(value(index).shape)
    if len(shape) != len(lead) or not same(shape, [n if i == dim else 1 for i, n in enumerate(lead)], guard=True):
        return False
    if value(index).dtype != torch.int64:  # a mask, say
        return False
    while name(index) in ("view", "reshape", "unsqueeze", "getitem") and index.args:
        if name(index) == "getitem" and not adds_dimensions(index):
            return False
        index = index.args[0]
    given = index.kwargs.keys() - {"device", "dtype"}
    start, step = (index.args[0], index.args[2:]) if len(index.args) > 1 else (0, ())
    return index.target is torch.arange and not given and start == 0 and step in ((), (1,)) and len(index.args) > 0


def _at_label(node: Node, place: Place, index: Node, wraps: bool, fixed: tuple[Node, ...] = ()) -> Reader:
    """The logit at a label of each row, or its log-probability, or its probability."""
    if value(index).dtype != torch.int64:
        raise Refused(Reason.TARGET_DTYPE, str(value(index).dtype))
    if place.kind == "logits":
        return Reader(node, place, "logits of labels", lambda r: r.lse - r.nll, target=index, wraps=wraps, fixed=fixed)
    says = "log-probabilities of labels" if place.kind == "logp" else "probabilities of labels"
    return Reader(node, place, says, lambda r: _at(place, r.nll), target=index, wraps=wraps, fixed=fixed)


def _at(place: Place, nll: Tensor) -> Tensor:
    """What a place that holds (log-)probabilities has at the label of each row, from the label's nll."""
    x = -place.sign * nll if place.kind == "logp" else torch.exp(-nll)
    for node in place.after:
        # in the dtype that it had there: what underflows has an infinite logarithm
        x = x.to(value(first_input(node)).dtype)
        args, kwargs = map_arg((node.args, node.kwargs), lambda _, x=x: x)
        x = node.target(*args, **kwargs) if node.op == "call_function" else getattr(x, node.target)(*args[1:], **kwargs)
    return x


def entropy(user: Node, places: dict[Node, Place]) -> Reader | None:
    """sum(p * z) or sum(p * log p) over the classes, for p = softmax of the same logits.

    Not for the logarithm of softmax: 0 log 0 is NaN, and the statistics don't tell whether a probability is 0.
    """
    if not calls(user, _MUL) or len(user.args) != 2 or user.kwargs or not all(a in places for a in user.args):
        return None
    p, other = sorted((places[a] for a in user.args), key=lambda place: place.kind != "p")
    if p.kind != "p" or other.kind == "p" or p.key != other.key or p.classes != other.classes or len(user.users) != 1:
        return None
    # of the same rows, but not every row with every other, and with a gradient through both factors or none
    if not same(value(p.node).shape, value(other.node).shape) or p.detached != other.detached:
        return None
    if p.after or other.after:
        return None
    (total,) = user.users
    if not calls(total, _SUM) or not other.over_classes(reduced_dim(total)) or "dtype" in total.kwargs:
        return None
    sign = other.sign
    code = (lambda r: r.max + r.pz) if other.kind == "logits" else (lambda r: sign * (r.pz - r.logsum))
    return Reader(total, other, "sum of p log p", code, want=Want(pz=True), inner=(*p.links, user))
