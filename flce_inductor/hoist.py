"""The hoist: gradients in the forward where the joint graph allows it, 6 NVH instead of 8.

In the joint graph a row_stats node and its row_stats_backward node stand side by side. The cotangent of a real loss is
one scalar tangent times row weights that the forward knows (mask / n_valid, token weights, 1 / num_items):

    find    each row_stats with its row_stats_backward
    factor  prove that the cotangent is linear in one scalar tangent; its value at tangent = 1 is the row weights
    choose  one node per weight: sites that share weight and tangent become one, others keep recomputing
    emit    row_stats_with_grads(row weights) in the forward, gradients * tangent in the backward

What can't be proved stays as it is: row_stats_backward is right for every cotangent.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from . import ops  # noqa: F401  registers the three operators
from .explain import Reason, record_pass

aten, prims = torch.ops.aten, torch.ops.prims
_STATS = torch.ops.flce_inductor.row_stats.default
_BACKWARD = torch.ops.flce_inductor.row_stats_backward.default
_WITH_GRADS = torch.ops.flce_inductor.row_stats_with_grads.default

# Inductor has decomposed most operators by now; these are what is left of cotangents.
# Same numbers in another shape, order or precision:
_MOVES = {
    aten.alias.default,
    aten.clone.default,
    aten.permute.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view.default,
    prims.convert_element_type.default,
}
_OF_FIRST = (
    aten.cat.default,
    aten.cumsum.default,
    aten.div.Scalar,
    aten.div.Tensor,
    aten.expand.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.mul.Scalar,
    aten.neg.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.sum.default,
    aten.sum.dim_IntList,
    prims.rev.default,
)
# operator -> groups of argument positions: with all others held fixed it is linear and homogeneous in a group's
# arguments together. add is so in both of its arguments at once; mul in either, but not in both.
_LINEAR: dict[Any, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys((*_MOVES, *_OF_FIRST), ((0,),)),
    **dict.fromkeys((aten.mul.Tensor, aten.mm.default, aten.bmm.default), ((0,), (1,))),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), ((0, 1),)),
    **dict.fromkeys((aten.slice_scatter.default, aten.select_scatter.default), ((0, 1),)),
    aten.scatter_add.default: ((0, 3),),
    aten.index_put.default: ((0, 2),),
    aten.constant_pad_nd.default: ((0, 2),),
    aten.where.self: ((1, 2),),
}
# operator -> position of the number that it fills a tensor with
_FILL = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0}


class _Recompute(Exception):
    """(reason, detail): this site keeps its row_stats_backward."""


@dataclasses.dataclass(eq=False)
class _Site:
    """A row_stats node whose gradients can be computed in the forward."""

    stats: Node
    backward: Node
    tangent: Node | None  # None: the cotangent is known in the forward (autograd.grad inside the graph)
    cone: list[Node]  # what lies between the tangent and the cotangents, in the graph's order

    @property
    def h(self) -> Node:
        return self.stats.args[0]

    @property
    def weight(self) -> Node:
        return self.stats.args[1]

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        return tuple(self.backward.args[-1])

    @property
    def cotangents(self) -> list[Node | None]:
        return [None if g is None or _is_zero(g) else g for g in self.backward.args[6:8]]

    @property
    def rows(self) -> int | torch.SymInt:
        return self.h.meta["val"].shape[0]

    def inputs(self) -> set[Node]:
        """What the hoisted node needs to have been computed."""
        read = {n for node in self.cone for n in node.all_input_nodes}
        read.update(g for g in self.cotangents if g is not None)
        return read.difference(self.cone, [self.tangent]).union(self.stats.all_input_nodes)

    def reached(self) -> set[Node]:
        """What depends on the row statistics."""
        seen, stack = {self.stats}, [self.stats]
        while stack:
            new = stack.pop().users.keys() - seen
            seen |= new
            stack += new
        return seen

    def gradient(self, index: int) -> Node | None:
        """The node that takes dh (0), dweight (1) or dbias (2) out of row_stats_backward."""
        return next((n for n in self.backward.users if n.args[1] == index), None)


def hoist(graph: Graph) -> None:
    """Replace row_stats and its backward by one row_stats_with_grads wherever that is legal; record each decision."""
    by_weight: dict[Node, list[_Site]] = {}
    for site in _find(graph):
        # a site that needs no dweight holds nothing large until the backward: it is alone
        by_weight.setdefault(_origin(site.weight) if site.needs[1] else site.stats, []).append(site)
    hoisted = False
    for sites in by_weight.values():
        # chosen one weight at a time: what is emitted for one decides what the next may depend on
        if members := _choose(sites):
            _emit(graph, members)
            hoisted = True
    if hoisted:
        stable_topological_sort(graph)
        graph.eliminate_dead_code()
        graph.lint()


# ---- find and factor


def _find(graph: Graph) -> Iterator[_Site]:
    """The sites that pass every test that concerns them alone, except OWN_OUTPUT; the others are recorded."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    # node -> the tangents that it depends on, where there are any
    tangents: dict[Node, set[Node]] = {}
    for node in order:
        if node.op == "placeholder" and "tangents" in str(node.target):
            tangents[node] = {node}
        elif incoming := [tangents[n] for n in node.all_input_nodes if n in tangents]:
            tangents[node] = incoming[0] if all(s == incoming[0] for s in incoming) else set().union(*incoming)

    backwards: dict[Node, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        saved_max = _origin(node.args[4])
        if saved_max.target is operator.getitem:
            backwards.setdefault(saved_max.args[0], []).append(node)

    for stats in graph.find_nodes(op="call_function", target=_STATS):
        try:
            site = _factor(stats, backwards.get(stats, []), tangents, order)
        except _Recompute as refusal:
            record_pass(stats, *refusal.args)
        else:
            yield site


def _factor(stats: Node, backwards: list[Node], tangents: dict[Node, set[Node]], order: dict[Node, int]) -> _Site:
    """Prove that the cotangents of stats are linear and homogeneous in one scalar tangent, or raise _Recompute."""
    if not backwards:
        raise _Recompute(Reason.NO_BACKWARD)
    if len(backwards) > 1:
        raise _Recompute(Reason.TWO_BACKWARDS)
    site = _Site(stats, backwards[0], None, [])
    cotangents = [g for g in site.cotangents if g is not None]
    upstream = set().union(*(tangents.get(g, ()) for g in cotangents))
    if not upstream:
        return site
    if len(upstream) > 1:
        raise _Recompute(Reason.TANGENTS, ", ".join(sorted(n.name for n in upstream)))
    (site.tangent,) = upstream
    shape = site.tangent.meta["val"].shape
    if any(not isinstance(size, int) or size != 1 for size in shape):
        raise _Recompute(Reason.VECTOR_TANGENT, str(tuple(shape)))

    cone, stack = set(), list(cotangents)
    while stack:
        node = stack.pop()
        if node in tangents and node is not site.tangent and node not in cone:
            cone.add(node)
            stack += node.all_input_nodes
    site.cone = sorted(cone, key=order.__getitem__)
    device = stats.args[0].meta["val"].device
    for node in [site.tangent, *site.cone]:
        vals = tree_leaves(node.meta["val"])
        plain = all(isinstance(v, torch.Tensor) and v.is_floating_point() and v.device == device for v in vals)
        if not plain or (node is not site.tangent and not _is_linear(node, tangents)):
            raise _Recompute(Reason.NOT_LINEAR, str(node.target))
    for g in cotangents:
        if g not in tangents:  # and isn't zero: a constant beside the linear part
            raise _Recompute(Reason.NOT_LINEAR, str(g.target))
    return site


def _is_linear(node: Node, tangents: dict[Node, set[Node]]) -> bool:
    """Whether node is linear and homogeneous in those of its inputs that depend on the tangent, all at once."""

    def carries(arg: Any) -> bool:
        found = []
        map_arg(arg, lambda n: found.append(n in tangents))
        return any(found)

    def homogeneous(arg: Any) -> bool:
        if isinstance(arg, (list, tuple)):
            return all(map(homogeneous, arg))
        return (isinstance(arg, Node) and arg in tangents) or _is_zero(arg)

    carriers = {i for i, arg in enumerate(node.args) if carries(arg)}
    return not carries(node.kwargs) and any(
        carriers.issubset(group)
        and all(homogeneous(arg) for arg in (node.args[i] for i in group if i < len(node.args)))
        for group in _LINEAR.get(node.target, ())
    )


def _is_zero(arg: Any) -> bool:
    """Whether a number or a node is zero everywhere, as far as the graph says so."""
    if not isinstance(arg, Node):
        return isinstance(arg, (int, float)) and arg == 0
    if arg.target in _MOVES or arg.target is aten.expand.default:
        return _is_zero(arg.args[0])
    return arg.target in _FILL and _is_zero(arg.args[_FILL[arg.target]])


def _origin(node: Node) -> Node:
    """The node whose numbers these are: looks through views, permutations and casts."""
    while node.target in _MOVES or node.target is aten.slice.Tensor:
        node = node.args[0]
    return node


# ---- choose


def _choose(sites: list[_Site]) -> list[_Site]:
    """Those of the sites over one weight that become one node; what becomes of each is recorded.

    Each hoisted node holds a [V, H] gradient from the forward to the backward, so there is one per weight: the largest
    set of sites that can share it, by rows.
    """
    candidates: list[list[_Site]] = []
    depends: dict[_Site, tuple[set[Node], set[Node]]] = {}
    for site in sites:
        depends[site] = inputs, reached = site.inputs(), site.reached()
        if not inputs.isdisjoint(reached):
            record_pass(site.stats, Reason.OWN_OUTPUT)
            continue
        for members in candidates:
            apart = all(inputs.isdisjoint(depends[m][1]) and depends[m][0].isdisjoint(reached) for m in members)
            if apart and _mergeable(members[0], site):
                members.append(site)
                break
        else:
            candidates.append([site])
    # rows that aren't known count for nothing; the first of equals wins
    chosen = max(candidates, key=lambda c: sum(s.rows for s in c if isinstance(s.rows, int)), default=[])
    for site in (s for members in candidates for s in members):
        record_pass(site.stats, None if site in chosen else Reason.SHARED_WEIGHT)
    return chosen


def _mergeable(a: _Site, b: _Site) -> bool:
    """Whether one node can serve both: the same head, settings and tangent, and gradients that end in one sum."""
    return (
        a.tangent is b.tangent
        and a.needs == b.needs
        and a.stats.args[4:] == b.stats.args[4:]
        and a.h.meta["val"].dtype == b.h.meta["val"].dtype
        and _same(a.weight, b.weight)
        and _same(a.stats.args[3], b.stats.args[3])
        and all(_meet(a.gradient(i), b.gradient(i)) for i in (1, 2) if a.needs[i])
    )


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same node, or the same views and casts of one."""
    if not isinstance(a, Node) or not isinstance(b, Node) or a is b:
        return a is b or (not isinstance(a, Node) and not isinstance(b, Node) and a == b)
    return (
        a.target in _MOVES
        and a.target is b.target
        and len(a.args) == len(b.args)
        and a.kwargs == b.kwargs
        and all(map(_same, a.args, b.args))
    )


def _sums(gradient: Node | None) -> dict[Node, list[Any]]:
    """The sums that a gradient disappears into one after the other -> the views and casts that it took up to there.

    Equal weights aren't enough to add up two gradients: a torch.autograd.Function may be the identity in the forward
    and scale the gradient in the backward.
    """
    sums, moves = {}, []
    while gradient is not None and len(gradient.users) == 1:
        (user,) = gradient.users
        if user.target is aten.add.Tensor and not user.kwargs and _other(user, gradient) is not None:
            sums[user] = list(moves)
        elif user.target in _MOVES:
            moves.append((user.target, user.args[1:], user.kwargs))
        else:
            break
        gradient = user
    return sums


def _other(total: Node, term: Node) -> Node | None:
    """What is added to term in total, if it is a tensor like the total."""
    others = [arg for arg in total.args if arg is not term]
    if len(others) != 1 or not isinstance(others[0], Node):
        return None
    val, other = total.meta["val"], others[0].meta["val"]
    return others[0] if (val.shape, val.dtype) == (other.shape, other.dtype) else None


def _meet(a: Node | None, b: Node | None) -> bool:
    sums_a, sums_b = _sums(a), _sums(b)
    return any(node in sums_a and sums_a[node] == moves for node, moves in sums_b.items())


def _drop(gradient: Node) -> None:
    """Take a gradient out of the first sum that it goes into (see _sums)."""
    total = next(iter(_sums(gradient)))
    while total not in gradient.users:
        (gradient,) = gradient.users
    total.replace_all_uses_with(_other(total, gradient))
    total.graph.erase_node(total)  # else the other term would seem to be used twice


# ---- emit


@dataclasses.dataclass
class _Writer:
    """Adds nodes with the meta["val"] and stack_trace that later passes expect, and with no other meta.

    No `recompute` and no `ac_graph_id` above all: in a checkpointed region row_stats has them, and a node that computes
    gradients would run in the forward and again in the backward, silently.
    """

    graph: Graph
    like: Node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.like.meta["val"][0].fake_mode, torch.no_grad():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        if "stack_trace" in self.like.meta:
            node.meta["stack_trace"] = self.like.meta["stack_trace"]
        return node

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        return node if node.meta["val"].dtype == dtype else self(prims.convert_element_type.default, node, dtype)

    def filled(self, shape: list[Any], number: int, like: torch.Tensor) -> Node:
        return self(
            aten.full.default,
            shape,
            number,
            dtype=like.dtype,
            layout=torch.strided,
            device=like.device,
            pin_memory=False,
        )


def _emit(graph: Graph, members: list[_Site]) -> None:
    """One row_stats_with_grads for all members, over their rows one after the other."""
    first = members[0]
    new = _Writer(graph, first.stats)
    _, weight, _, bias, *how = first.stats.args

    with graph.inserting_before(first.stats):
        rows = [m.rows if isinstance(m.rows, int) else new(aten.sym_size.int, m.h, 0) for m in members]
        h = _cat(new, [m.h for m in members])
        target = _cat(new, [m.stats.args[2] for m in members])
        g_nll, g_lse = (_fill(new, g, rows) for g in zip(*_row_weights(new, members), strict=True))
        fused = new(_WITH_GRADS, h, weight, target, bias, g_nll, g_lse, *how, list(first.needs))
        *stats, dh, dweight, dbias, unscale = (new(operator.getitem, fused, i) for i in range(7))
        for i, statistic in enumerate(stats):
            for member, part in zip(members, _split(new, statistic, rows), strict=True):
                _replace(member.stats, i, part)

    with graph.inserting_before(first.backward):
        factor = unscale if first.tangent is None else _times(new, unscale, first.tangent)
        if first.needs[0]:
            for member, part in zip(members, _split(new, _times(new, dh, factor), rows), strict=True):
                _replace(member.backward, 0, part)
        for i, gradient in enumerate((dweight, dbias), 1):
            if first.needs[i]:
                for member in members[1:]:
                    _drop(member.gradient(i))
                _replace(first.backward, i, _times(new, gradient, factor))


def _row_weights(new: _Writer, members: list[_Site]) -> Iterator[list[Node | None]]:
    """The cotangents of each member at tangent = 1, from nodes of the forward."""
    at_one: dict[Node, Node] = {}
    tangent = members[0].tangent
    if tangent is not None:
        at_one[tangent] = new.filled([1] * tangent.meta["val"].dim(), 1, tangent.meta["val"])
    for member in members:
        for node in member.cone:
            if node not in at_one:
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: at_one.get(n, n))
                at_one[node] = new(node.target, *args, **kwargs)
        yield [at_one.get(g, g) for g in member.cotangents]


def _fill(new: _Writer, g: tuple[Node | None, ...], rows: list[Any]) -> Node | None:
    """The members' row weights one after the other, 0 for those that have none."""
    if all(part is None for part in g):
        return None
    like = new.like.meta["val"][0]
    return _cat(new, [new.filled([n], 0, like) if part is None else part for part, n in zip(g, rows, strict=True)])


def _times(new: _Writer, x: Node, factor: Node) -> Node:
    """x * factor (of one element) in the dtype and shape of x, computed in float32 for a 16-bit x."""
    if factor.meta["val"].dim():
        factor = new(aten.view.default, factor, [])
    dtype = x.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    return new.cast(new(aten.mul.Tensor, new.cast(x, wide), new.cast(factor, wide)), dtype)


def _cat(new: _Writer, parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else new(aten.cat.default, parts)


def _split(new: _Writer, whole: Node, rows: list[Any]) -> list[Node]:
    if len(rows) == 1:
        return [whole]
    parts = new(aten.split_with_sizes.default, whole, rows)
    return [new(operator.getitem, parts, i) for i in range(len(rows))]


def _replace(node: Node, index: int, by: Node) -> None:
    """Let `by` stand for the output `index` of an operator with several."""
    for output in [n for n in node.users if n.args[1] == index]:
        output.replace_all_uses_with(by)
