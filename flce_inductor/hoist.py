"""The hoist: gradients in the forward where the joint graph allows it, 6 NVH instead of 8.

In the joint graph a row_stats node and its row_stats_backward node stand side by side. The cotangent of a real loss is
one scalar tangent times row weights that the forward knows (mask / n_valid, token weights, 1 / num_items), or that are
an elementwise function of the same row's statistics (z-loss, exp(-nll), clipped ratios):

    find    each row_stats with its row_stats_backward
    factor  prove that the cotangent is linear in one scalar tangent; its value at tangent = 1 is the row weights
    trace   where these depend on the statistics, write that down as a program that the op runs for each chunk of rows
    choose  one node per weight: sites that share weight and tangent become one, others keep recomputing
    emit    row_stats_with_grads(row weights) in the forward, gradients * tangent in the backward

What can't be proved stays as it is: row_stats_backward is right for every cotangent.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor_config
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from . import _compat, chunking, config, kernels, ops  # noqa: F401  ops registers the three operators
from .explain import Reason, record_pass, record_skip
from .runtime import ROW_OPS, ROW_STATISTICS, Plan, RowProgram

aten, prims = torch.ops.aten, torch.ops.prims
_STATS = torch.ops.flce_inductor.row_stats.default
_BACKWARD = torch.ops.flce_inductor.row_stats_backward.default
_SCALE = torch.ops.flce_inductor.scale.default
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
# The same numbers in the same order if there are as many as before (and a permutation moves sizes of 1 only):
_IN_ORDER = _MOVES.difference([prims.convert_element_type.default]).union(
    [aten.expand.default, aten.select.int, aten.slice.Tensor, aten.squeeze.default, aten.sum.dim_IntList]
)
# The gradients of such selections, which overwrite all of their first argument:
_OVERWRITE = {aten.select_scatter.default, aten.slice_scatter.default}
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_TOLERABLE_DELAY = 0.01  # of a head's time, when no label is ignored, for not computing those that are


class _Recompute(Exception):
    """(reason, detail): this site keeps its row_stats_backward."""


class _RowInput(NamedTuple):
    """A vector of one number per row that a row program reads."""

    value: Node | bool | int | float  # N numbers in the order of rows, or one; of a cone: at tangent = 1
    dtype: torch.dtype
    shape: tuple[int | Node | tuple[Node, int], ...] | None = None  # expanded to it first; (node, dim): a size of node

    @property
    def nodes(self) -> list[Node]:
        sizes = [size[0] if isinstance(size, tuple) else size for size in self.shape or ()]
        return [n for n in (self.value, *sizes) if isinstance(n, Node)]


@dataclasses.dataclass(eq=False)
class _Site:
    """A row_stats node whose gradients can be computed in the forward."""

    stats: Node
    backward: Node
    tangent: Node | None  # None: the cotangent is known in the forward (autograd.grad inside the graph)
    cone: list[Node]  # what lies between the tangent and the cotangents, in the graph's order; without what depends on
    # the statistics, if that is what the program computes:
    program: str = ""  # a RowProgram that computes the cotangents at tangent = 1
    row_inputs: tuple[_RowInput, ...] = ()

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
        return [None if g is None or _is_zero(g) else g for g in self.backward.args[8:12]]

    @property
    def rows(self) -> int | torch.SymInt:
        return self.h.meta["val"].shape[0]

    def inputs(self) -> set[Node]:
        """What the hoisted node needs to have been computed."""
        read = {n for node in self.cone for n in node.all_input_nodes}
        if self.program:
            read.update(n for x in self.row_inputs for n in x.nodes)
        else:
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
    by_hand = graph.find_nodes(op="call_function", target=_WITH_GRADS)
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
    for node in by_hand:
        hoisted |= _count_rows_of(graph, node)
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
        saved_max = _origin(node.args[5])
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
    if _statistics_first(stats):
        raise _Recompute(Reason.SMALL_CHUNKS, f"{stats.args[6]} rows")
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


def _statistics_first(stats: Node) -> bool:
    """Whether a site, its chunks being as small as memory asks for, is faster without the hoist."""
    settings, h, V, rows = (
        config.current(),
        stats.args[0].meta["val"],
        stats.args[1].meta["val"].shape[0],
        stats.args[6],
    )
    chosen = chunking.rows_per_chunk(V, h.dtype, h.device, max_slab_bytes=settings.max_slab_bytes)
    by_user = settings.chunk_size is not None or rows != chosen
    return not by_user and chunking.statistics_first(rows, h.dtype, h.device)


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
    return _constant(arg) == 0


def _constant(arg: Any) -> bool | int | float | None:
    """The number that a number or a node is everywhere, None if the graph doesn't say so."""
    if not isinstance(arg, Node):
        return arg if isinstance(arg, (int, float)) else None
    if arg.target in _FILL:
        number = _constant(arg.args[_FILL[arg.target]])
    elif arg.target in _MOVES or arg.target is aten.expand.default:
        number = _constant(arg.args[0])
    else:
        return None
    if number is None:
        return None
    wide = torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)
    return wide.to(arg.meta["val"].dtype).item()


def _origin(node: Node) -> Node:
    """The node whose numbers these are: looks through views, permutations and casts."""
    while node.target in _MOVES or node.target is aten.slice.Tensor:
        node = node.args[0]
    return node


# ---- trace


def _trace(site: _Site, reached: set[Node]) -> None:
    """Give site a row program for its cotangents, which depend on its own statistics (reached), or raise _Recompute."""
    if site.h.meta["val"].dtype == torch.float16:
        raise _Recompute(Reason.OWN_OUTPUT, "float16 gradients take their scale from row weights known up front")
    trace = _Trace(site, reached)
    site.program, site.row_inputs = trace.program(site.cotangents), tuple(trace.inputs)
    site.cone = [node for node in site.cone if node not in reached]


class _Trace:
    """Writes nodes between the statistics of a site and its cotangents as steps of a row program.

    Every tensor that depends on the statistics holds N numbers in the order of rows: operators keep it that way, or
    raise _Recompute. A register is a list ["r", number] that steps share, numbered when the row inputs are known.
    """

    def __init__(self, site: _Site, reached: set[Node]):
        self.site, self.reached = site, reached
        self.registers: dict[Node, list[Any]] = {}
        self.inputs: dict[_RowInput, list[Any]] = {}
        self.steps: list[list[Any]] = []
        self.results: list[list[Any]] = []

    def program(self, cotangents: list[Node | None]) -> str:
        registers = [None if g is None else self.cotangent(g) for g in cotangents]
        for number, register in enumerate([*self.inputs.values(), *self.results], len(ROW_STATISTICS)):
            register[1] = number
        return RowProgram(self.steps, [None if r is None else r[1] for r in registers]).text()

    def cotangent(self, g: Node) -> list[Any]:
        stack = [g] if self.depends(g) else []
        while stack:
            node = stack[-1]
            op, *operands = self.spelled(node)
            if missing := [x for x in operands if self.depends(x) and x not in self.registers]:
                stack += reversed(missing)
            else:
                self.registers[stack.pop()] = self.register(node, op, operands)
        return self.registers[g] if self.depends(g) else self.inputs.setdefault(self.input(g, g), ["r", None])

    def depends(self, arg: Any) -> bool:
        return isinstance(arg, Node) and arg in self.reached and _constant(arg) is None

    def has_rows(self, size: int | torch.SymInt) -> bool:
        return statically_known_true(size == self.site.rows)

    def is_row_wise(self, node: Node) -> bool:
        """Whether node has one number per row, or is an operator with several outputs."""
        val = node.meta["val"]
        return self.has_rows(val.numel()) if isinstance(val, torch.Tensor) else isinstance(val, (tuple, list))

    def spelled(self, node: Node) -> list[Any]:
        """[op, *operands] of a step, "statistic" with its register's number, or "same" as another node."""
        val = node.meta["val"]
        if not self.is_row_wise(node):
            while wider := [n for n in node.all_input_nodes if self.depends(n) and not self.is_row_wise(n)]:
                node = wider[0]  # closer to the statistics
            raise _Recompute(Reason.OWN_OUTPUT, f"{node.target} is not one number per row")
        if node.target is operator.getitem and node.args[0] is self.site.stats and node.args[1] < len(ROW_STATISTICS):
            return ["statistic", node.args[1]]
        if node.target in _IN_ORDER and _keeps_order(node) and val.dtype == node.args[0].meta["val"].dtype:
            return ["same", node.args[0]]
        if node.target in _OVERWRITE and self.depends(node.args[1]):
            return ["same", node.args[1]]
        if node.target is prims.convert_element_type.default:
            return ["to", node.args[0], _dtype_name(node.args[1])]
        name = _row_op(node.target)
        plain = all(arg is None or isinstance(arg, (Node, bool, int, float)) for arg in node.args)
        if name is None or not plain or not node.kwargs.keys() <= {"alpha"} or val.dtype.is_complex:
            culprit = node.args[0] if node.target is operator.getitem else node
            raise _Recompute(Reason.OWN_OUTPUT, f"{culprit.target} is not an operator of row programs")
        return [name, *node.args]

    def register(self, node: Node, op: str, operands: list[Any]) -> list[Any]:
        """The register that holds node's numbers, in node's dtype."""
        if op == "statistic":
            return ["r", operands[0]]
        if op == "same":
            return self.registers[operands[0]]
        if op == "to":
            return self.step(op, self.registers[operands[0]], operands[1])
        dtype = node.meta["val"].dtype
        # constants as numbers where the operator takes them and, other than tensors, they don't change its dtype
        for constants in (True, False):
            values, like = zip(*(self.operand(x, node, constants) for x in operands), strict=True)
            try:
                result = ROW_OPS[op](*like).dtype
            except (RuntimeError, TypeError, AttributeError):  # takes no number there, or is a number
                continue
            if result == dtype or not constants:
                break
        else:
            raise _Recompute(Reason.OWN_OUTPUT, f"{node.target} of a number")
        if (alpha := node.kwargs.get("alpha", 1)) != 1:
            factor = values[1]
            values = [values[0], self.step("mul", factor, alpha) if isinstance(factor, list) else factor * alpha]
        register = self.step(op, *values)
        return register if result == dtype else self.step("to", register, _dtype_name(dtype))

    def step(self, *step: Any) -> list[Any]:
        self.steps.append(list(step))
        self.results.append(["r", None])
        return self.results[-1]

    def operand(self, arg: Any, node: Node, constants: bool) -> tuple[Any, Any]:
        """What a step of node takes for its argument, and something like it without data."""
        if not isinstance(arg, Node):
            return arg, arg
        number = _constant(arg)
        if constants and number is not None:
            return number, number
        if self.depends(arg):
            register, dtype = self.registers[arg], arg.meta["val"].dtype
        else:
            source = self.input(arg, node)
            register, dtype = self.inputs.setdefault(source, ["r", None]), source.dtype
        return register, torch.empty(1, dtype=dtype, device="meta")

    def input(self, arg: Node, node: Node) -> _RowInput:
        """What doesn't depend on the statistics, broadcast to the shape of node, which reads it."""
        val, out, number = arg.meta["val"], node.meta["val"], _constant(arg)
        if not isinstance(val, torch.Tensor):  # a size, or a number computed from sizes
            integral = isinstance(val, (int, torch.SymInt)) and not out.is_floating_point()
            return _RowInput(arg, torch.int64 if integral else _wide(out.dtype))
        if number is not None:
            return _RowInput(number, val.dtype)
        if statically_known_true(val.numel() == 1):
            return _RowInput(arg, _promoted(val, node))
        if self.has_rows(val.numel()):
            return _RowInput(arg, val.dtype)
        return _RowInput(arg, val.dtype, tuple(map(self.size, out.shape)))

    def size(self, size: int | torch.SymInt) -> int | tuple[Node, int] | Node:
        """Where the forward has a size of something that depends on the statistics."""
        if isinstance(size, int):
            return size
        late: set[Node] = set(self.reached)
        for node in self.site.stats.graph.nodes:
            if node.op == "placeholder" and "tangents" in str(node.target):
                late.add(node)
            if node in late or not late.isdisjoint(node.all_input_nodes):
                late.add(node)
                continue
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt) and statically_known_true(val == size):
                return node
            for dim, other in enumerate(val.shape if isinstance(val, torch.Tensor) else ()):
                if isinstance(other, torch.SymInt) and statically_known_true(other == size):
                    return node, dim
        raise _Recompute(Reason.OWN_OUTPUT, f"a shape with {size} that the forward doesn't have")


def _row_op(target: Any) -> str | None:
    """What row programs call an operator, None if they don't have it."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target.overloadpacket.__name__
    return name if name in ROW_OPS else None


def _keeps_order(node: Node) -> bool:
    """Whether one of _IN_ORDER with as many numbers as before has them in the same order."""
    if node.target is not aten.permute.default:
        return True
    shape = node.args[0].meta["val"].shape
    dims = [dim % len(shape) for dim in node.args[1]]
    moved = [dim for dim in dims if not statically_known_true(shape[dim] == 1)]
    return moved == sorted(moved)


def _promoted(val: torch.Tensor, node: Node) -> torch.dtype:
    """The dtype in which a binary operator computes with val, one number: without dimensions it rarely decides that."""
    vals = [x.meta["val"] for x in node.args if isinstance(x, Node)]
    if len(vals) != 2 or not all(isinstance(v, torch.Tensor) for v in vals):
        return val.dtype
    return torch.result_type(*(torch.empty([1] * v.dim(), dtype=v.dtype, device="meta") for v in vals))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.float64


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- choose


def _choose(sites: list[_Site]) -> list[_Site]:
    """Those of the sites over one weight that become one node; what becomes of each is recorded.

    Each hoisted node holds a [V, H] gradient from the forward to the backward, so there is one per weight: the largest
    set of sites that can share it, by rows.
    """
    candidates: list[list[_Site]] = []
    depends: dict[_Site, tuple[set[Node], set[Node]]] = {}
    for site in sites:
        reached = site.reached()
        try:
            if not site.inputs().isdisjoint(reached):
                _trace(site, reached)
        except _Recompute as refusal:
            record_pass(site.stats, *refusal.args)
            continue
        depends[site] = inputs, reached = site.inputs(), reached
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
        and a.program == b.program
        and [x.dtype for x in a.row_inputs] == [x.dtype for x in b.row_inputs]
        and a.stats.args[5:] == b.stats.args[5:]
        and a.h.meta["val"].dtype == b.h.meta["val"].dtype
        and _same(a.weight, b.weight)
        and _same(a.stats.args[3], b.stats.args[3])
        and _same(a.stats.args[4], b.stats.args[4])
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

    None of row_stats's `recompute` and `ac_graph_id` above all: in a checkpointed region it has them, and a node that
    computes gradients would run in the forward and again in the backward, silently.
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

    def filled(self, shape: list[Any], number: Any, like: torch.Tensor, dtype: torch.dtype | None = None) -> Node:
        return self(
            aten.full.default,
            shape,
            number,
            dtype=dtype or like.dtype,
            layout=torch.strided,
            device=like.device,
            pin_memory=False,
        )


def _emit(graph: Graph, members: list[_Site]) -> None:
    """One row_stats_with_grads for all members, over their rows one after the other."""
    first = members[0]
    new = _Writer(graph, first.stats)
    _, weight, _, bias, class_weight, *how, want = first.stats.args

    with graph.inserting_before(first.stats):
        rows = [m.rows if isinstance(m.rows, int) else new(aten.sym_size.int, m.h, 0) for m in members]
        h = _cat(new, [m.h for m in members])
        target = _cat(new, [m.stats.args[2] for m in members])
        at_one = _at_one(new, members)
        g = [[at_one.get(g, g) for g in m.cotangents] for m in members] if not first.program else []
        cotangents = [_fill(new, parts, rows) for parts in zip(*g, strict=True)] or [None] * 4
        row_inputs = [
            _cat(new, [_spread(new, x, at_one, n) for x, n in zip(parts, rows, strict=True)])
            for parts in zip(*(m.row_inputs for m in members), strict=True)
        ]
        program = (row_inputs, first.program)
        counted, reason = _counted(
            new, first.stats, target, how, all(map(_reads_nll_alone, members)), learns_bias=first.needs[2]
        )
        if counted is not None or reason is not None:
            for member in members:
                record_skip(member.stats, reason)
        last = (list(first.needs), *([] if counted is None else [*Plan(), counted]))
        fused = new(_WITH_GRADS, h, weight, target, bias, class_weight, *cotangents, *program, *how, want, *last)
        if _compat.partitioner_takes_tuples():
            fused.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        *stats, dh, dweight, dbias, unscale = (new(operator.getitem, fused, i) for i in range(10))
        for i, statistic in enumerate(stats):
            if i >= 3 and not want[i - 3]:
                continue  # empty
            for member, part in zip(members, _split(new, statistic, rows), strict=True):
                _replace(member.stats, i, part)

    with graph.inserting_before(first.backward):
        factor = unscale if first.tangent is None else _times(new, unscale, first.tangent)
        dh, dweight = (new(_SCALE, x, _scalar(new, factor)) for x in (dh, dweight))  # mostly times 1
        if first.needs[0]:
            for member, part in zip(members, _split(new, dh, rows), strict=True):
                _replace(member.backward, 0, part)
        for i, gradient in ((1, dweight), (2, _times(new, dbias, factor))):
            if first.needs[i]:
                for member in members[1:]:
                    _drop(member.gradient(i))
                _replace(first.backward, i, gradient)


def _count_rows_of(graph: Graph, node: Node) -> bool:
    """Let a row_stats_with_grads of linear_cross_entropy leave ignored rows out; whether it may."""
    operands, (program, *how), (want, needs, *more) = node.args[:10], node.args[10:18], node.args[18:]
    if more:
        return False
    new = _Writer(graph, node)
    read = {user.args[1] for user in node.users if user.users}
    nll_alone = not program and not any(want) and all(g is None for g in operands[6:9]) and read.isdisjoint(range(1, 6))
    with graph.inserting_before(node):
        counted, reason = _counted(new, node, operands[2], how, nll_alone, learns_bias=needs[2])
    if counted is not None or reason is not None:
        record_skip(node, reason)
    if counted is not None:
        _compat.set_arguments(node, *node.args, *Plan(), counted)
    return counted is not None


def _counted(
    new: _Writer, loop: Node, target: Node, how: list[Any], nll_alone: bool, learns_bias: bool
) -> tuple[Node | None, Reason | None]:
    """How many rows have a label, if those that don't may be left out, or why not; neither if nobody wants to.

    loop: the node in front of which the count is wanted, with h and weight as its first arguments. how: ignore_index,
    rows per chunk, ...
    """
    setting, (ignore_index, rows, *_) = config.current().skip_ignored, how
    if setting is False:
        return None, None
    early, labels = _ancestors_of_labels(target), target.meta["val"]
    cuda = labels.device.type == "cuda"
    reason, on_device = None, False
    if not nll_alone:
        reason = Reason.ALL_ROWS
    elif cuda and inductor_config.triton.cudagraphs:
        on_device = setting is True and kernels.can_gemm("cuda", loop.args[0].meta["val"].dtype) and not learns_bias
        reason = None if on_device else Reason.CUDA_GRAPHS
    elif cuda and setting == "auto" and early is None:
        reason = Reason.LATE_COUNT
    elif cuda and setting == "auto" and _delay(loop, labels.shape[0], rows) > _TOLERABLE_DELAY:
        reason = Reason.LATE_LAUNCHES
    if reason is not None:
        return None, reason
    if on_device:
        return new(aten.sum.default, new(aten.ne.Scalar, target, ignore_index)), None
    counted = new(torch.ops.flce_inductor.count_rows.default, target, ignore_index)
    at = next(n for n in new.graph.nodes if n.op != "placeholder")
    for node in [*(early or ()), counted] if early is not None else ():
        if node is at:
            at = at.next
        else:
            at.prepend(node)
    return counted, None


def _delay(loop: Node, N: int | torch.SymInt, rows: int) -> float:
    """chunking.delay of a head of N rows, at the sizes that the graph was traced with."""
    before = 0
    for node in loop.graph.nodes:
        if node is loop:
            break
        if node.target in _PRODUCTS:
            sizes = node.meta["val"].numel(), node.args[-1].meta["val"].shape[-2]
            before += 2 * math.prod(_compat.size_hint(size) or 0 for size in sizes)
    h, weight = (node.meta["val"] for node in loop.args[:2])
    N, (V, H) = _compat.size_hint(N) or 0, map(_compat.size_hint, weight.shape)
    return chunking.delay(6 * N * H * V, before, rows, N, h.dtype, chunking.card(h.device))


def _reads_nll_alone(site: _Site) -> bool:
    """Whether the graph reads no statistic of an ignored row: such a row's nll is 0, whatever its logits are."""
    *_, want = site.stats.args
    cotangents = RowProgram.parse(site.program).cotangents if site.program else site.cotangents
    stack, readers = [n for n in site.stats.users if n.args[1] != 0], set()
    while stack:
        for user in stack.pop().users:
            if _origin(user) is user:
                readers.add(user)
            else:
                stack.append(user)
    return not any(want) and readers <= {site.backward} and all(g is None for g in cotangents[1:])


def _ancestors_of_labels(target: Node, most: int = 64) -> list[Node] | None:
    """The operations that make the labels of the graph's inputs, in order; None if the model has a part in them, or
    chance has, whose numbers depend on the order of draws."""
    found, stack = set(), [target]
    while stack:
        node = stack.pop()
        if node.op == "placeholder" or node in found:
            continue
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or len(found) == most:
            return None
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        if any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in tree_leaves(node.meta.get("val"))):
            return None
        found.add(node)
        stack += node.all_input_nodes
    return [n for n in target.graph.nodes if n in found]


def _at_one(new: _Writer, members: list[_Site]) -> dict[Node, Node]:
    """What stands for the nodes of the members' cones at tangent = 1, in the forward."""
    at_one: dict[Node, Node] = {}
    tangent = members[0].tangent
    if tangent is not None:
        at_one[tangent] = new.filled([1] * tangent.meta["val"].dim(), 1, tangent.meta["val"])
    for node in (n for member in members for n in member.cone):
        if node not in at_one:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: at_one.get(n, n))
            at_one[node] = new(node.target, *args, **kwargs)
    return at_one


def _spread(new: _Writer, source: _RowInput, at_one: dict[Node, Node], rows: Any) -> Node:
    """A row input as a vector [rows] on the device of the statistics."""
    like, value = new.like.meta["val"][0], source.value
    if not isinstance(value, Node) or not isinstance(value.meta["val"], torch.Tensor):
        return new.filled([rows], value, like, source.dtype)
    value = at_one.get(value, value)
    if value.meta["val"].device != like.device:
        value = new(prims.device_put.default, value, like.device)
    value = new.cast(value, source.dtype)
    if source.shape is not None:
        sizes = [new(aten.sym_size.int, *size) if isinstance(size, tuple) else size for size in source.shape]
        value = new(aten.expand.default, value, sizes)
    one = source.shape is None and statically_known_true(value.meta["val"].numel() == 1)
    if value.meta["val"].dim() > 1:
        value = new(aten.reshape.default, value, [-1])
    return new(aten.expand.default, value, [rows]) if one else value


def _fill(new: _Writer, g: tuple[Node | None, ...], rows: list[Any]) -> Node | None:
    """The members' row weights one after the other, 0 for those that have none."""
    if all(part is None for part in g):
        return None
    like = new.like.meta["val"][0]
    return _cat(new, [new.filled([n], 0, like) if part is None else part for part, n in zip(g, rows, strict=True)])


def _scalar(new: _Writer, factor: Node) -> Node:
    return new(aten.view.default, factor, []) if factor.meta["val"].dim() else factor


def _times(new: _Writer, x: Node, factor: Node) -> Node:
    """x * factor (of one element) in the dtype and shape of x, computed in float32 for a 16-bit x."""
    factor = _scalar(new, factor)
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
