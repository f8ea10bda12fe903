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
from torch.fx.node import Node

from ..explain import Reason
from ..losses import REDUCTIONS, Loss
from ..runtime import Want
from .chain import Place, calls, is_last, operand, reduced_dim
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

    code: torch code for it: a scalar, or [N], which takes the node's shape. inner: nodes between the place and node
    that have no other use.
    """

    node: Node
    place: Place
    says: str
    code: Callable[[Rows], Tensor]
    target: Node | None = None
    class_weight: Node | None = None
    ignore_index: int = NO_LABEL
    want: Want = Want()  # noqa: RUF009
    inner: tuple[Node, ...] = ()
    scalar: bool = False


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_NLL_LOSS = inspect.signature(F.nll_loss)
_LOGSUMEXP = {torch.logsumexp, "logsumexp"}
_ARGMAX = {torch.argmax, "argmax"}
_GATHER = {torch.gather, "gather"}
_SUM = {torch.sum, "sum"}
_MUL = {operator.mul, torch.mul, "mul"}
# where a search for heads begins
LOSSES = {F.cross_entropy, F.log_softmax, torch.log_softmax, "log_softmax", *_LOGSUMEXP}


def _arguments(signature: inspect.Signature, node: Node) -> dict[str, Any]:
    """A call's arguments by name: users call losses positionally, by keyword, and mixed."""
    call = signature.bind(*node.args, **node.kwargs)
    call.apply_defaults()
    return call.arguments


def logits_of(node: Node) -> Any:
    """What one of LOSSES reads."""
    logits = _arguments(_CROSS_ENTROPY, node)["input"] if node.target is F.cross_entropy else operand(node)
    if not isinstance(logits, Node):
        raise Refused(Reason.NO_HEAD)
    return logits


def describe(node: Node) -> str:
    """A loss in the words of the report."""
    if node.target is F.cross_entropy:
        return f"cross_entropy({_arguments(_CROSS_ENTROPY, node)['reduction']})"
    return node.target if isinstance(node.target, str) else node.target.__name__


def read(place: Place, user: Node) -> Reader | None:
    """The reader that a user of place is, None if it is none; refuses a reader that isn't supported."""
    if user.target is F.cross_entropy and user.op == "call_function":
        args = _arguments(_CROSS_ENTROPY, user)
        if args["input"] is not place.node:
            raise Refused(Reason.CLASS_PROBABILITIES)
        return _loss(user, place, args, rows_last=True) if place.kind == "logits" else None
    if user.target is F.nll_loss and user.op == "call_function" and place.kind == "logp" and place.sign == 1:
        args = _arguments(_NLL_LOSS, user)
        return _loss(user, place, {**args, "label_smoothing": 0.0}, rows_last=True)
    if _moves_classes(user, value(place.node)) and len(user.users) == 1:
        (loss,) = user.users
        if loss.target is F.cross_entropy and place.kind == "logits":
            args = _arguments(_CROSS_ENTROPY, loss)
            return _loss(loss, place, args, rows_last=False, inner=(user,)) if args["input"] is user else None
    if not user.args or user.args[0] is not place.node or "out" in user.kwargs:
        return None
    before = value(place.node)
    if calls(user, _LOGSUMEXP) and place.kind == "logits" and is_last(reduced_dim(user), before):
        return Reader(user, place, "logsumexp", lambda r: r.lse)
    if calls(user, _ARGMAX) and place.kind != "p" and place.sign == 1 and is_last(reduced_dim(user), before):
        return Reader(user, place, "argmax", lambda r: r.argmax, want=Want(argmax=True))
    if calls(user, _GATHER) and place.kind != "p":
        return _gather(user, place)
    if calls(user, _SUM) and place.kind == "logp" and is_last(reduced_dim(user), before) and "dtype" not in user.kwargs:
        sign = place.sign
        return Reader(user, place, "sum of log_softmax", lambda r: sign * (r.zsum - r.V * r.lse), want=Want(zsum=True))
    return None


def _loss(node: Node, place: Place, args: dict[str, Any], rows_last: bool, inner: tuple[Node, ...] = ()) -> Reader:
    """cross_entropy or nll_loss over labels."""
    if args["size_average"] is not None or args["reduce"] is not None:
        raise Refused(Reason.LEGACY_REDUCTION)
    logits, target = value(place.node), value(args["target"])
    if target.is_floating_point():
        raise Refused(Reason.CLASS_PROBABILITIES)
    if target.dtype != torch.int64:
        raise Refused(Reason.TARGET_DTYPE, str(target.dtype))
    if (logits.dim() != 2 and rows_last) or target.dim() != logits.dim() - 1:
        raise Refused(Reason.LOGITS_SHAPE, f"logits {tuple(logits.shape)}, labels {tuple(target.shape)}")
    numbers = (args["ignore_index"], args["label_smoothing"])
    if (
        args["reduction"] not in REDUCTIONS
        or not isinstance(numbers[0], int)
        or not isinstance(numbers[1], (int, float))
    ):
        raise Refused(Reason.UNKNOWN_SHAPE, f"reduction={args['reduction']}, {numbers}")
    class_weight = args["weight"]
    if class_weight is not None and (
        value(class_weight).requires_grad or value(class_weight).shape != logits.shape[-1:]
    ):
        raise Refused(Reason.CLASS_WEIGHT)
    loss = Loss(args["reduction"], args["ignore_index"], float(args["label_smoothing"]))
    return Reader(
        node,
        place,
        f"{node.target.__name__}({loss.reduction})",
        lambda r: loss(r.nll, r.lse, r.zsum, r.target, r.class_weight, r.V),
        target=args["target"],
        class_weight=class_weight,
        ignore_index=loss.ignore_index,
        want=Want(zsum=loss.label_smoothing != 0),
        inner=inner,
        scalar=loss.reduction != "none",
    )


def _moves_classes(node: Node, before: Tensor) -> bool:
    """Whether a node moves the last dimension to the second place, as cross_entropy takes it, and keeps the others."""
    dims = before.dim()
    if name(node) in ("transpose", "swapaxes") and dims == 3 and not node.kwargs:
        return sorted(d % 3 for d in node.args[1:] if isinstance(d, int)) == [1, 2]
    if name(node) == "permute" and not node.kwargs:
        order = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
        return [d % dims for d in order] == [0, dims - 1, *range(1, dims - 1)] and dims > 2
    return False


def _gather(node: Node, place: Place) -> Reader | None:
    """The value at a label of each row: gather(logits, -1, labels.unsqueeze(-1))."""
    given = dict(zip(("input", "dim", "index"), node.args, strict=False)) | node.kwargs
    if set(given) != {"input", "dim", "index"} or not isinstance(given["index"], Node):
        return None
    before, index = value(place.node), value(given["index"])
    if not is_last(given["dim"], before) or index.dtype != torch.int64:
        return None
    lead = list(before.shape[:-1])
    if not same(index.shape, [*lead, 1], guard=True):
        return None
    sign = place.sign
    if place.kind == "logp":
        return Reader(node, place, "log-probabilities of labels", lambda r: -sign * r.nll, target=given["index"])
    return Reader(node, place, "logits of labels", lambda r: r.lse - r.nll, target=given["index"])


def entropy(user: Node, places: dict[Node, Place]) -> Reader | None:
    """sum(p * z) or sum(p * log p) over the classes, for p = softmax of the same logits."""
    if not calls(user, _MUL) or len(user.args) != 2 or user.kwargs or not all(a in places for a in user.args):
        return None
    p, other = sorted((places[a] for a in user.args), key=lambda place: place.kind != "p")
    if p.kind != "p" or other.kind == "p" or p.key != other.key or len(user.users) != 1:
        return None
    # of the same rows, but not every row with every other, and with a gradient through both factors or none
    if not same(value(p.node).shape, value(other.node).shape) or p.detached != other.detached:
        return None
    (total,) = user.users
    if not calls(total, _SUM) or not is_last(reduced_dim(total), value(user)) or "dtype" in total.kwargs:
        return None
    sign = other.sign
    code = (lambda r: r.max + r.pz) if other.kind == "logits" else (lambda r: sign * (r.pz - r.logsum))
    return Reader(total, other, "sum of p log p", code, want=Want(pz=True), inner=(*p.links, user))
