"""Pre-grad: find a head whose logits are read by losses only, decide, and emit row_stats.

chain.py knows what may stand between a head and what reads its logits, anchors.py what the readers are in terms of row
statistics, graph.py how to read and write the graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable

import torch
from torch.fx.node import Node
from torch.utils._pytree import tree_leaves

from .. import _compat, chunking, config, ops
from ..explain import Reason, Site, frames, given_by, given_to, record, record_graph, where
from ..runtime import Want
from . import anchors, sharded
from .anchors import NO_LABEL, Reader, Rows
from .chain import EXP, Head, Place, calls, follow, head_of, on_hidden
from .graph import (
    Changes,
    Refused,
    backward_of,
    example,
    insert,
    is_number,
    name,
    same,
    switches_before,
    value,
    write,
)


@dataclasses.dataclass
class _Group:
    """Readers that one row_stats serves, for the rows of place; it stands before the node `at`: the first reader, or
    the switch to no_grad in front of that.
    """

    place: Place
    at: Node
    readers: list[Reader]
    target: Node | None
    class_weight: Node | None
    ignore_index: int
    wraps: bool
    want: Want

    def add(self, reader: Reader, changes: Changes) -> bool:
        """Let the group serve reader too, if it can."""
        if reader.place.key != self.place.key:
            return False
        if self.class_weight is not reader.class_weight and self.want.zsum + reader.want.zsum:
            return False  # zsum is weighted or not
        kind = (self.class_weight, self.ignore_index, self.wraps)
        if reader.target is not None:
            theirs = (reader.class_weight, reader.ignore_index, reader.wraps)
            if self.target is None:
                if not all(n is None or changes.ready(n, self.at) for n in (reader.target, reader.class_weight)):
                    return False
                self.target, kind = reader.target, theirs
            elif kind != theirs or not changes.same_labels(self.target, reader.target):
                return False
        self.class_weight, self.ignore_index, self.wraps = kind
        self.want = Want(*map(max, self.want, reader.want))
        self.readers.append(reader)
        return True


def rewrite(graph: torch.fx.Graph) -> None:
    """Rewrite every head that can be proved safe; leave the others as they are, and say why."""
    sites: list[Site] = []
    heads: dict[Node, tuple[Head, list[Site]]] = {}
    over_shards: list[tuple[Node, sharded.Head, Site]] = []
    for node in graph.nodes:
        if anchors.is_loss(node):
            sites.append(site := Site(where(node), anchors.describe(node), frames=frames(node)))
            try:
                if path := sharded.path_of(node):
                    over_shards.append((node, sharded.head_of(node, path), site))
                    continue
                head = head_of(anchors.logits_of(node))
            except Refused as refused:
                site.reason, site.detail = refused.reason, refused.detail
                if refused.reason is Reason.NO_HEAD:
                    site.detail = f"they come {given_by(node)}"
            else:
                heads.setdefault(head.node, (head, []))[1].append(site)
    changes = Changes(graph) if heads or over_shards else None
    for loss, head, site in over_shards:
        try:
            _measure(site, example(head.hidden), example(head.path[-1]))
            site.chunk_size = sharded.rewrite(loss, head, changes)
        except Refused as refused:
            site.reason, site.detail = refused.reason, refused.detail
    written: dict[Node, Node] = {}  # what became of readers
    for head, losses in heads.values():
        head = head.with_nodes(written)
        try:
            for site in losses:
                _measure(site, value(head.hidden), value(head.node))
            groups, returned, places = _groups(head, changes)
            _check(head, groups, changes)
            _check_returned(head, groups, returned, changes)
        except Refused as refused:
            for site in losses:
                site.reason, site.detail = refused.reason, refused.detail
        else:
            _return_nan(head, returned)
            chunk_size = _replace(head, groups, places, changes, written)
            for site in losses:
                site.chunk_size, site.returns_nan = chunk_size, bool(returned)
    for site in sites:
        record(site)
    record_graph(graph, len(sites))


def _measure(site: Site, hidden: torch.Tensor, logits: torch.Tensor) -> None:
    """Fill in the report, and refuse a head that is too small to gain anything."""
    settings = config.current()
    *lead, V = logits.shape
    N = 1
    for size in lead:
        N = N * size
    site.N, site.H, site.V = str(N), str(hidden.shape[-1]), str(V)
    site.dtype = str(logits.dtype).removeprefix("torch.")
    rows, classes = _compat.size_hint(N), _compat.size_hint(V)
    if classes is not None and classes < settings.min_vocab_size:
        raise Refused(Reason.TOO_SMALL, f"{classes} classes, min_vocab_size={settings.min_vocab_size}")
    if rows is not None and classes is not None:
        site.logits_bytes = rows * classes * logits.dtype.itemsize
        if site.logits_bytes < settings.min_logits_bytes:
            raise Refused(Reason.TOO_SMALL, f"{site.logits_bytes} bytes, min_logits_bytes={settings.min_logits_bytes}")


def _groups(head: Head, changes: Changes) -> tuple[list[_Group], list[Place], list[Place]]:
    """All that reads the logits, in groups that a row_stats can serve each; the places that are returned; all places.

    Refuses what isn't understood.
    """
    places = {head.node: Place(head.node)}
    readers: dict[Node, Reader] = {}
    returned: list[Place] = []
    unknown: list[tuple[Node, Place, Refused]] = []
    for node in (waiting := [head.node]):
        for user in node.users:
            if user.op == "output":
                if config.current().unused_logits == "keep":
                    raise Refused(Reason.RETURNED, given_to(head.node))
                returned.append(places[node])
                continue
            place = places[node]
            try:
                if not place.pieces and (found := anchors.read(place, user)):
                    readers |= {reader.node: reader for reader in found}
                    continue
                places[user] = follow(place, user)
                waiting.append(user)
            except Refused as refused:
                unknown.append((user, place, refused))
    refusals = []
    for user, place, refused in unknown:
        reader = anchors.entropy(user, places)
        if reader is not None:
            readers[reader.node] = reader
        elif (
            # READER: the maximum of logits that take a gradient, which is subtracted before exp
            (place.kind == "p" or calls(user, EXP) or refused.reason is Reason.READER)
            and (place.after or _leads_to(user, anchors.is_by_hand))
        ):
            refusals.append(Refused(Reason.BY_HAND, f"{name(user)}, {where(user)}"))
        elif refused.reason not in (Reason.LINK, Reason.UNKNOWN_SHAPE) or _leads_to(user, anchors.is_loss):
            refusals.append(refused)
        else:
            refusals.append(Refused(Reason.READER, f"{name(user)}, {where(user)}"))
    if refusals:
        raise next((refused for refused in refusals if refused.reason is Reason.BY_HAND), refusals[0])

    groups: list[_Group] = []
    for reader in sorted(readers.values(), key=lambda r: changes.position[r.node]):
        if not any(group.add(reader, changes) for group in groups):
            kind = (reader.target, reader.class_weight, reader.ignore_index, reader.wraps)
            groups.append(_Group(reader.place, reader.node, [reader], *kind, reader.want))
    return groups, returned, list(places.values())


def _leads_to(node: Node, loss: Callable[[Node], bool]) -> bool:
    """Whether a loss reads what a node makes: then the node stands in the way, else it is a reader of its own."""
    seen, stack = set(), [node]
    while stack:
        user = stack.pop()
        if loss(user):
            return True
        seen.add(user)
        stack += user.users.keys() - seen
    return False


def _check(head: Head, groups: list[_Group], changes: Changes) -> None:
    """Refuse what following the logits doesn't see: dtypes, modes, and memory that changes meanwhile."""
    places = [reader.place for group in groups for reader in group.readers]
    shifts = [place.shift for place in places if place.shift is not None]
    inputs = [n for n in (head.hidden, head.weight, head.bias, *shifts) if n is not None]
    inputs += [factor for place in places for factor, _ in place.factors if not is_number(factor)]
    others = [n for group in groups for n in (group.target, group.class_weight) if n is not None]
    logits, weight = value(head.node), value(head.weight)
    biases = {value(n).dtype for n in (head.bias, *shifts) if n is not None} or {None}
    if not all(ops.dtypes_fit(logits.dtype, weight.dtype, bias) for bias in biases):
        raise Refused(Reason.DTYPE, f"logits {logits.dtype}, weight {weight.dtype}, bias {biases}")
    if head.bias is not None and not same(value(head.bias).shape, logits.shape[-1:]):
        raise Refused(Reason.LINK, f"a bias of shape {tuple(value(head.bias).shape)}")
    if _compat.size_hint(logits.shape[-1]) is None:
        raise Refused(Reason.UNKNOWN_SHAPE, "only the data decides V")
    if len({value(n).device for n in [*inputs, *others]}) > 1:
        raise Refused(Reason.LINK, "tensors on several devices")
    if changes.forward_mode:
        raise Refused(Reason.SUBCLASS, "forward-mode differentiation")
    first = head.seen[-1] if head.seen else head.node
    requires_grad = any(value(n).requires_grad for n in inputs)
    for group in groups:
        if requires_grad:
            _check_grad_mode(head, group, changes)
        others = [n for n in (group.target, group.class_weight) if n is not None]
        for reader in group.readers:
            indices = [n for n in reader.place.inputs if not is_number(n)]
            nodes = [*inputs, *indices, *head.seen, head.node, *reader.place.links, *reader.inner]
            # row_stats reads the head's inputs where the first reader stands, so nothing may change them on the way
            changes.check(nodes, first, reader.node, but=_in_place_links(head, reader.place))
            changes.check(others, group.at, reader.node)
            if not all(map(changes.never, reader.fixed)):
                raise Refused(Reason.MUTATION, f"{reader.fixed} of {reader.node}")
        if logits.requires_grad:
            # it also saves all of them for the backward, of which linear would save fewer
            changes.check([*inputs, *others], group.at, backward_of(group.at))


def _check_grad_mode(head: Head, group: _Group, changes: Changes) -> None:
    """Refuse what changes the grad mode on the way to a reader that gives a gradient; place row_stats in the head's.

    The example of a view made without gradients says that it requires them, so requires_grad isn't proof.
    """
    graded = [reader for reader in group.readers if not _detached(reader)]
    if not graded:
        return  # its results are detached
    nodes = [*head.seen, head.node, *(n for r in graded for n in (*r.place.links, *r.inner, r.node))]
    if not changes.same_grad_mode(nodes):
        raise Refused(Reason.GRAD_MODE)
    for at in itertools.chain([group.at], switches_before(group.at)):
        if changes.position[at] < changes.position[head.node]:
            break
        if not changes.same_grad_mode([head.node, at]):
            continue
        labels = [n for n in (group.target, group.class_weight) if n is not None]
        for place in (reader.place for reader in group.readers):
            before = [head.node, *place.inputs]
            if all(changes.position[n] < changes.position[at] for n in before) and all(
                changes.ready(n, at) for n in labels
            ):
                group.place, group.at = place, at
                return
    raise Refused(Reason.GRAD_MODE)


def _detached(reader: Reader) -> bool:
    """Whether no gradient comes back from a reader, though one might."""
    return reader.place.detached or not value(reader.node).requires_grad


def _check_returned(head: Head, groups: list[_Group], returned: list[Place], changes: Changes) -> None:
    """Refuse to return NaN for logits that may be what the function is called for, or that others may read."""
    if not returned:
        return
    if not _compat.is_whole(head.node.graph):
        raise Refused(Reason.RETURNED, "to another part of the same function, which may read them")
    if any(place.kind != "logits" for place in returned):
        raise Refused(Reason.RETURNED, "as what softmax or log_softmax makes of them")
    # without labels it isn't the loss that the logits are made for
    losses = [r.node for group in groups for r in group.readers if r.target is not None and not _detached(r)]
    if not _trains(losses):
        raise Refused(Reason.RETURNED, "and the function gives no gradient of the loss")
    if not all(changes.never(place.node) for place in returned):
        raise Refused(Reason.MUTATION, "logits that are returned")


def _trains(losses: list[Node]) -> bool:
    """Whether a gradient can come back to one of the nodes from the graph's outputs, or from a backward within it."""
    seen, stack = set(losses), list(losses)
    while stack:
        for user in stack.pop().users.keys() - seen:
            if user.op == "output" or user.target is torch.autograd.grad:
                return True
            seen.add(user)
            tensors = tree_leaves(user.meta.get("example_value"))
            if any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
                stack.append(user)
    return False


def _return_nan(head: Head, returned: list[Place]) -> None:
    """Return a NaN, expanded to the shape of the logits, in place of each of the returned."""
    output = head.node.graph.output_node()
    for place in returned:
        logits = value(place.node)
        lead = [i for i in range(logits.dim()) if i != logits.dim() + place.classes]
        fixed = all(isinstance(logits.shape[i], int) for i in lead)

        def nan(rows, weight, logits=logits, place=place, lead=lead):
            sizes = list(logits.shape)
            for row_dim, dim in enumerate(lead):
                sizes[dim] = sizes[dim] if isinstance(sizes[dim], int) else rows.size(row_dim)
            if not isinstance(place.V, int):
                sizes[place.classes] = weight.size(1 if head.transposed else 0)
            return rows.new_full([], float("nan"), dtype=logits.dtype).expand(sizes)

        # new nodes at the very end: whatever followed, a cast or a copy, would give it memory
        rows = head.hidden if fixed else on_hidden(place, head, output)
        output.replace_input_with(place.node, write(output, nan, rows, head.weight, source=place.node))


def _in_place_links(head: Head, place: Place) -> set[Node]:
    """The links that change logits in place which nothing else reads before or after."""
    links = set()
    for operand, link in zip((head.node, *place.links), place.links, strict=False):
        if len(operand.users) > 1:
            break
        links.add(link)
    return links


def _replace(head: Head, groups: list[_Group], places: list[Place], changes: Changes, written: dict[Node, Node]) -> int:
    """Write row_stats and what the readers make of it, and take the head and all behind it out of the graph.

    Returns the rows per chunk; what became of each reader is added to written.
    """
    logits, settings = value(head.node), config.current()
    chunk_size = chunking.rows_per_chunk(
        logits.shape[-1],
        logits.dtype,
        logits.device,
        chunk_size=settings.chunk_size,
        max_slab_bytes=settings.max_slab_bytes,
    )
    dead = [head.node, *head.seen, *(n for place in places for n in place.links)]
    for group in groups:
        _write(head, group, (chunk_size, settings.accum_dtype), changes, written)
        dead += [n for reader in group.readers for n in (*reader.inner, reader.node)]
    for node in sorted(set(dead), key=changes.position.__getitem__, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
    return chunk_size


def _write(head: Head, group: _Group, how: tuple[int, str], changes: Changes, written: dict[Node, Node]) -> None:
    target, class_weight = group.target, group.class_weight
    for label in (target, class_weight):
        for node in changes.moves(label, group.at) if label is not None else ():
            group.at.prepend(node)
            changes.position[node] = changes.position[group.at] - 0.5
    # they may be what another reader (an argmax) made
    place, target, class_weight = group.place, written.get(target, target), written.get(class_weight, class_weight)
    shift, factors = written.get(place.shift, place.shift), [written.get(n, n) for n, _ in place.factors]
    factors = [n if is_number(n) or not value(n).dim() else insert(group.at, n, "reshape", n, ()) for n in factors]
    h = on_hidden(place, head, group.at)
    dims, V, dtype = value(h).dim(), value(head.node).shape[-1], value(head.node).dtype
    source = group.readers[0].node
    if target is not None and value(target).dim() != 1:
        target = insert(group.at, source, "flatten", target)

    def statistics(h, weight, bias, shift, factors, target, class_weight):
        if dims != 2:
            h = h.unsqueeze(0) if dims == 1 else h.flatten(0, -2)
        weight = weight.t() if head.transposed else weight
        # not by type: a size that became a number after the head was traced is one only in what follows the head
        cut = not same([place.V], [V])
        if cut:
            weight, bias = weight[: place.V], None if bias is None else bias[: place.V]
        if shift is not None:
            shift = shift.flatten()[: place.V] if cut else shift.flatten()
            shift = shift if place.shift_scale == 1 else shift * place.shift_scale
            bias = shift if bias is None else bias + shift
        for factor, (_, divides) in zip(factors, place.factors, strict=True):
            h = (h / factor if divides else h * factor).to(dtype)
            bias = None if bias is None else bias / factor if divides else bias * factor
        if target is None:
            target = torch.full_like(h.select(-1, 0), NO_LABEL, dtype=torch.int64)
        elif group.wraps:
            target = torch.where(target < 0, target + weight.size(0), target)
        options = (group.ignore_index, *how, *place.epilogue, list(map(bool, group.want)))
        return torch.ops.flce_inductor.row_stats.default(h, weight, target, bias, class_weight, *options)

    inputs = (h, head.weight, head.bias, shift, factors, target, class_weight)
    stats = write(group.at, statistics, *inputs, source=source)
    # the examples of new nodes don't say it: they are made in the grad mode that the pass runs in
    graded = [head.hidden, head.weight, head.bias, place.shift, *(n for n in factors if not is_number(n))]
    requires_grad = any(n is not None and value(n).requires_grad for n in graded)
    for reader in group.readers:
        shape = value(reader.node).shape
        # a size that isn't a number is read from the hidden states of the rows
        fixed = all(isinstance(size, int) for size in shape)
        rows = h if fixed else on_hidden(reader.place, head, reader.node)
        made = (stats, target, class_weight, rows, head.weight)
        copy = not changes.never(reader.node)
        result = _write_reader(reader, *made, head.transposed, requires_grad and _detached(reader), copy)
        reader.node.replace_all_uses_with(result)
        # of the same memory, for what is known about its changes
        result.meta["example_value"] = reader.node.meta["example_value"]
        written[reader.node] = result
        changes.position[result] = changes.position[reader.node]


def _write_reader(
    reader: Reader,
    stats: Node,
    target: Node | None,
    class_weight: Node | None,
    h: Node,
    weight: Node,
    transposed: bool,
    detach: bool,
    copy: bool,
) -> Node:
    """Write what a reader makes of row statistics: detached, or a copy of them, if it is changed in place later."""
    shape, dtype, V = value(reader.node).shape, value(reader.node).dtype, reader.place.V
    keepdim = len(shape) == value(reader.place.node).dim()
    fixed = all(isinstance(size, int) for size in shape)
    differs = dtype not in (stats.meta["example_value"][0].dtype, torch.int64)

    def code(stats, target, class_weight, h, weight):
        nll, top, logsum, zsum, pz, argmax = (operator.getitem(stats, i) for i in range(6))
        classes = V if isinstance(V, int) else weight.size(1 if transposed else 0)
        result = reader.code(Rows(nll, top, logsum, zsum, pz, argmax, target, class_weight, classes))
        if not reader.scalar and len(shape) != 1 and fixed:
            result = result.reshape(list(shape))
        elif len(shape) > 1:
            rows = result.view_as(h.select(-1, 0))
            result = rows.unsqueeze(reader.place.classes) if keepdim else rows
        result = result.to(dtype) if differs else result
        if detach and dtype.is_floating_point:
            result = result.detach()
        return result.clone() if copy else result

    return write(reader.node, code, stats, target, class_weight, h, weight)
