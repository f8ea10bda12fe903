"""Pre-grad: find a loss, walk back to its head, decide, and emit row_stats.

anchors.py knows losses, chain.py what may stand between a loss and its head, graph.py how to read and write the graph.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F

from .. import chunking, config, ops
from ..explain import Reason, Site, record, where
from . import anchors
from .chain import Chain, walk
from .graph import Changes, Refused, backward_of, forward_mode, insert, same_grad_mode, value


def rewrite(graph: torch.fx.Graph) -> None:
    """Rewrite every head with its loss that can be proved safe; leave the others as they are, and say why."""
    losses = list(graph.find_nodes(op="call_function", target=F.cross_entropy))
    changes = Changes(graph) if losses else None
    for node in losses:
        site = Site(where(node), anchors.describe(node))
        try:
            loss = anchors.cross_entropy(node)
            chain = walk(loss.logits, node)
            _measure(site, chain)
            _check(loss, chain, changes)
        except Refused as refused:
            site.reason, site.detail = refused.reason, refused.detail
        else:
            _replace(loss, chain, site)
        record(site)
    graph.lint()


def _hint(size: int | torch.SymInt) -> int | None:
    """A size as a number where the graph knows one for now; None for one that only the data decides."""
    return size if isinstance(size, int) else size.node.hint


def _measure(site: Site, chain: Chain) -> None:
    """Fill in the report, and refuse a head that is too small to gain anything."""
    logits, settings = value(chain.head.node), config.current()
    *lead, V = logits.shape
    N = 1
    for size in lead:
        N = N * size
    site.N, site.H, site.V = str(N), str(value(chain.head.hidden).shape[-1]), str(V)
    site.dtype = str(logits.dtype).removeprefix("torch.")
    rows = _hint(N)
    if rows is not None:
        site.logits_bytes = rows * _hint(V) * logits.dtype.itemsize
        if site.logits_bytes < settings.min_logits_bytes:
            raise Refused(Reason.TOO_SMALL, f"{site.logits_bytes} bytes, min_logits_bytes={settings.min_logits_bytes}")


def _check(loss: anchors.Loss, chain: Chain, changes: Changes) -> None:
    """Refuse what the walk along the chain doesn't see: dtypes, modes, and memory that changes meanwhile."""
    head = chain.head
    inputs = [n for n in (head.hidden, head.weight, head.bias) if n is not None]
    logits, weight = value(head.node), value(head.weight)
    bias = None if head.bias is None else value(head.bias).dtype
    if not ops.dtypes_fit(logits.dtype, weight.dtype, bias):
        raise Refused(Reason.DTYPE, f"logits {logits.dtype}, weight {weight.dtype}, bias {bias}")
    if head.bias is not None and value(head.bias).shape != logits.shape[-1:]:
        raise Refused(Reason.LINK, f"a bias of shape {tuple(value(head.bias).shape)}")
    if not isinstance(weight.shape[0], int) or not isinstance(weight.shape[1], int):
        raise Refused(Reason.UNKNOWN_SHAPE, "H or V is dynamic")
    if len({value(n).device for n in [*inputs, loss.target]}) > 1:
        raise Refused(Reason.LINK, "tensors on several devices")
    # the example of a view made without gradients says that it requires them, so requires_grad alone isn't proof
    graded = [*head.seen, head.node, *chain.links, loss.node]
    if any(value(n).requires_grad for n in inputs) and not same_grad_mode(graded, loss.node.graph):
        raise Refused(Reason.GRAD_MODE)
    if forward_mode(loss.node.graph):
        raise Refused(Reason.SUBCLASS, "forward-mode differentiation")
    # the rewrite reads the head's inputs where the loss stands, so nothing may change them on the way there
    first = head.seen[-1] if head.seen else head.node
    changes.check([*inputs, *head.seen, head.node, *chain.links], first, loss.node)
    if logits.requires_grad:
        # it also saves all of them for the backward, of which linear would save fewer
        changes.check(inputs, loss.node, backward_of(loss.node))


def _replace(loss: anchors.Loss, chain: Chain, site: Site) -> None:
    """Emit row_stats and the reduction in torch ops, and take the head, the links and the loss out of the graph."""
    head, settings, dtype = chain.head, config.current(), value(loss.node).dtype
    logits = value(head.node)
    site.chunk_size = chunking.rows_per_chunk(
        logits.shape[-1],
        logits.dtype,
        logits.device,
        chunk_size=settings.chunk_size,
        max_slab_bytes=settings.max_slab_bytes,
    )
    h = chain.hidden()
    last = loss.node

    def emit(target, *args):
        nonlocal last
        last = insert(last, target, *args)
        return last

    weight = emit("t", head.weight) if head.transposed else head.weight
    rows = emit(
        torch.ops.flce_inductor.row_stats.default,
        *(h, weight, loss.target, head.bias, loss.ignore_index, site.chunk_size, settings.accum_dtype),
    )
    result = emit(operator.getitem, rows, 0)
    if loss.reduction != "none":
        result = emit(torch.sum, result)
    if loss.reduction == "mean":
        counted = emit(torch.ne, loss.target, loss.ignore_index)
        result = emit(torch.div, result, emit(torch.sum, counted))
    if value(result).dtype != dtype:
        result = emit("to", result, dtype)
    loss.node.replace_all_uses_with(result)
    for dead in [loss.node, *reversed(chain.links), head.node, *head.seen]:
        if not dead.users:
            dead.graph.erase_node(dead)
