"""Reading and writing Dynamo's graphs: example values, names of operations, who changes what, new nodes."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.fx.node import Node, map_arg
from torch.utils._pytree import tree_leaves

from ..explain import Reason


class Refused(Exception):
    """The graph is left as it is."""

    def __init__(self, reason: Reason, detail: str = ""):
        super().__init__(reason.text, detail)
        self.reason, self.detail = reason, detail


def example(node: Any) -> torch.Tensor:
    """The example value of a node that is a tensor of whatever type; refuses anything else."""
    found = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(found, torch.Tensor):
        raise Refused(Reason.UNKNOWN_SHAPE, str(node))
    return found


def value(node: Any) -> torch.Tensor:
    """The example value of a node that is a plain tensor; refuses anything else."""
    found = example(node)
    if type(found) not in (FakeTensor, torch.Tensor, torch.nn.Parameter):
        raise Refused(Reason.SUBCLASS, f"{node} is a {type(found).__name__}")
    if torch._C._functorch.is_functorch_wrapped_tensor(found):
        raise Refused(Reason.SUBCLASS, f"{node} is inside a transform")
    return found


def is_number(node: Node) -> bool:
    """Whether a node is a number: one that is not a constant of the graph."""
    return isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat, int, float))


# Only these functions have a short name: a user's function that is called "view" must not pass for torch's.
_NAMES = (
    "matmul mm addmm inner einsum reshape flatten squeeze unsqueeze t transpose swapaxes swapdims permute movedim"
    " moveaxis narrow select index_select split chunk tensor_split unbind"
)
_FUNCTIONS: dict[Any, str] = {
    operator.getitem: "getitem",
    operator.matmul: "matmul",
    torch._C._nn.linear: "linear",
    F.linear: "linear",
    torch.ops.aten.mT: "getattr mT",  # this and the next as torch 2.14 has them in the graph
    torch.ops.aten.numpy_T: "getattr T",
    **{getattr(torch, n): n for n in _NAMES.split()},
}
_OPERATORS = "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem delitem"
_IN_PLACE_OPERATORS = {getattr(operator, n) for n in _OPERATORS.split()}
_IN_PLACE = {f"__{n}__" for n in _OPERATORS.split()}
_UNCOUNTED = {"requires_grad_", "detach_"}  # these change a tensor, but not its version
_SWITCHES = {
    torch._C._set_grad_enabled,
    torch.autograd.grad_mode._enter_inference_mode,
    torch.autograd.grad_mode._exit_inference_mode,
}
_SAME_ORDER = {"view", "reshape", "flatten", "contiguous", "squeeze", "unsqueeze"}
# what is done to labels
_PURE = {
    *_SAME_ORDER,
    *("getitem", "narrow", "select", "t", "transpose", "to", "long", "clamp", "clamp_min", "clamp_max"),
    *("masked_fill", "clone", "eq", "ne", "__eq__", "__ne__"),  # the latter: == and != before torch 2.13
}
_PURE_FUNCTIONS = {F.pad, torch._C._nn.pad, torch.clamp, torch.where, torch.masked_fill, operator.eq, operator.ne}
_RUNNING_STATISTICS = {F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm}  # nor do these


def name(node: Node) -> str:
    """What a node calls, with one name for the method, the function and the operator."""
    if node.op == "call_method":
        return node.target
    if node.op != "call_function":
        return node.op
    if node.target is getattr:
        return f"getattr {node.args[1]}"  # no function is called that
    qualified = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', node.target)}"
    return _FUNCTIONS.get(node.target, qualified)


def _is_pure(node: Node) -> bool:
    """Whether a node is something that is done to labels, without any other effect."""
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    return name(node) in _PURE or node.target in _PURE_FUNCTIONS


def _subgraphs(node: Node) -> list[torch.fx.Graph]:
    """The graphs that a higher order operator (checkpoint, cond, ..) is given."""
    bodies = [getattr(node.graph.owning_module, n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    return [body.graph for body in bodies if isinstance(body, torch.fx.GraphModule)]


def _asks_in_place(node: Node) -> bool:
    """Whether a function with an argument `inplace` is given a true one, as in F.relu(x, True)."""
    if not inspect.isfunction(node.target):
        return False
    parameters = list(inspect.signature(node.target).parameters)
    position = parameters.index("inplace") if "inplace" in parameters else len(node.args)
    return bool(node.kwargs.get("inplace", position < len(node.args) and node.args[position]))


def mutated(node: Node) -> Iterator[Node]:
    """The nodes whose memory a node says it changes, or might change."""
    target, changed = node.target, [node.kwargs.get("out")]
    if isinstance(target, torch._ops.HigherOrderOperator):
        bodies = _subgraphs(node)
        if not bodies or any(any(mutated(inner)) for body in bodies for inner in body.nodes):
            changed = node.all_input_nodes
    elif isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = isinstance(target, torch._ops.OpOverloadPacket)
        overloads = [getattr(target, name) for name in target.overloads()] if packet else [target]
        for position, argument in [x for overload in overloads for x in enumerate(overload._schema.arguments)]:
            if argument.alias_info is not None and argument.alias_info.is_write:
                positional = node.args[position] if position < len(node.args) else None
                changed.append(node.kwargs.get(argument.name, positional))
    else:
        called = name(node)
        method_or_function = called.endswith("_") and not called.endswith("__")
        if method_or_function or called in _IN_PLACE or target in _IN_PLACE_OPERATORS or _asks_in_place(node):
            changed.append(node.args[0] if node.args else None)
        elif target in _RUNNING_STATISTICS:
            changed += [*node.args[1:], *node.kwargs.values()]
    for argument in changed:
        yield from (n for n in (argument if isinstance(argument, (list, tuple)) else [argument]) if isinstance(n, Node))


def _never_mutates(node: Node) -> bool:
    """Whether what a node calls changes nothing, whatever its arguments but `out` are."""
    target = node.target
    if isinstance(target, (torch._ops.HigherOrderOperator, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    if target in _IN_PLACE_OPERATORS or target in _RUNNING_STATISTICS or node.op == "call_module":
        return False
    if inspect.isfunction(target) and "inplace" in inspect.signature(target).parameters:
        return False
    return target is getattr or not name(node).endswith("_")


def _memories(node: Node) -> list[tuple[int, int]]:
    """For each tensor of a node's example value: the identity of its memory, which views share, and its version.

    Tensors that have no memory to tell are left out.
    """
    example = node.meta.get("example_value")
    found = []
    for x in [example] if isinstance(example, torch.Tensor) else tree_leaves(example):
        # behind those that torch.func's transforms wrap
        while isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        x = getattr(x, "_local_tensor", x)  # a DTensor's
        if isinstance(x, torch.Tensor) and x.layout == torch.strided:
            found.append((x.untyped_storage()._cdata, 0 if x.is_inference() else x._version))
    return found


def _is_new(example: Any) -> bool:
    """Whether an example value is a tensor that was never changed in place; false where that takes time to tell."""
    if type(example) is not FakeTensor:  # which neither torch.func's transforms nor DTensors are
        return example is None
    return not example.is_inference() and example._version == 0


def same(a: Any, b: Any, guard: bool = False) -> bool:
    """Whether sizes are equal for certain; with guard also if they are now: the graph is then for such sizes only."""
    known = guard_or_false if guard else statically_known_true
    a, b = list(a), list(b)
    return len(a) == len(b) and all(known(x == y) for x, y in zip(a, b, strict=True))


def switches_before(node: Node) -> Iterator[Node]:
    """The nodes before node that switch gradients on or off, the nearest first."""
    while (node := node.prev).op != "root":
        if node.op == "call_function" and node.target in _SWITCHES:
            yield node


def backward_of(loss: Node) -> Node:
    """The first backward behind a loss in the graph, or else the graph's end."""
    node = loss
    while node.op != "output" and node.target is not torch.autograd.grad:
        node = node.next
    return node


class Changes:
    """Where a graph changes memory in place, or the grad mode, and so what may stand elsewhere in it.

    Every change that torch makes counts up a version that the example values of a tensor and its views share. A
    version that the changes found by name don't add up to means one that was not recognised, so it could be anywhere.
    """

    def __init__(self, graph: torch.fx.Graph):
        self.position: dict[Node, float] = {}
        self._events: dict[int, list[Node]] = defaultdict(list)
        self._versions: dict[int, set[int]] = defaultdict(set)
        self._moved: dict[int, Node] = {}
        self._modes: dict[Node, tuple[bool, int, int]] = {}  # gradients on, inference modes, switches before
        self._start = grad, inference = torch.is_grad_enabled(), 0
        mode = grad, inference, 0
        known: Counter[tuple[int, int]] = Counter()
        self.forward_mode = False  # whether forward-mode differentiation takes place
        harmless: dict[Any, bool] = {}
        for position, node in enumerate(graph.nodes):
            self.position[node] = position
            self._modes[node] = mode
            if node.op == "call_function" and node.target in _SWITCHES:
                grad = node.args[0] if node.target is torch._C._set_grad_enabled else grad
                inference += node.target is torch.autograd.grad_mode._enter_inference_mode
                inference -= node.target is torch.autograd.grad_mode._exit_inference_mode
                mode = grad, inference, mode[2] + 1
            if not _is_new(node.meta.get("example_value")):
                for memory, version in _memories(node):
                    if version:
                        self._versions[memory].add(version)
            kind = node.op, node.target
            if kind not in harmless:
                harmless[kind] = _never_mutates(node)
                self.forward_mode |= getattr(node.target, "__name__", "") == "_make_dual"
            if harmless[kind] and "out" not in node.kwargs:
                continue
            for memory, version in [x for changed in mutated(node) for x in _memories(changed)]:
                known[memory, version] += name(node) not in _UNCOUNTED and node.target not in _RUNNING_STATISTICS
                self._events[memory].append(node)
                if name(node) == "set_":  # from here on the tensor has other memory, and the examples are the last
                    self._moved[memory] = node
        self._end = grad, inference
        self._unexplained = {
            memory for memory, versions in self._versions.items() if any(known[memory, v] != v for v in versions)
        }

    def same_grad_mode(self, nodes: Collection[Node]) -> bool:
        """Whether gradients are switched on or off alike where the nodes stand."""
        modes = [self._modes[node] for node in nodes]
        # where the graph doesn't end as it began, the mode at its begin isn't known (the body of a no_grad region, say)
        return len({*modes}) == 1 or (len({mode[:2] for mode in modes}) == 1 and self._end == self._start)

    def never(self, node: Node) -> bool:
        """Whether nothing changes a node's memory, at any time."""
        return not any(self._events[m] or m in self._unexplained or m in self._moved for m, _ in _memories(node))

    def check(self, nodes: Iterable[Node], first: Node, last: Node, but: Collection[Node] = ()) -> None:
        """Refuse if the memory of nodes may change between first and last, other than by the nodes in `but`."""
        start, stop = self.position[first], self.position[last]
        for memory in {memory for node in nodes for memory, _ in _memories(node)}:
            if memory in self._moved:
                raise Refused(Reason.MUTATION, name(self._moved[memory]))
            for event in self._events[memory]:
                if start < self.position[event] < stop and event not in but:
                    raise Refused(Reason.MUTATION, name(event))
            if memory in self._unexplained:
                raise Refused(Reason.MUTATION, "by an operation that is not recognised")

    def moves(self, node: Node, at: Node) -> list[Node] | None:
        """The nodes that must move in front of `at` for node's value to be known there, or None if they can't.

        Only integers move: they mean the same under every grad mode.
        """
        found, stack = set(), [node]
        while stack:
            node = stack.pop()
            if self.position[node] < self.position[at] or node in found:
                continue
            example = node.meta.get("example_value")
            integers = isinstance(example, torch.Tensor) and not example.dtype.is_floating_point
            if not integers or not _is_pure(node) or not all(map(self.never, (node, *node.all_input_nodes))):
                return None
            if any(isinstance(n.meta.get("example_value"), tuple) for n in node.all_input_nodes):
                return None  # the indices of a maximum of the logits, say, which the rewrite takes away
            found.add(node)
            stack += node.all_input_nodes
        return sorted(found, key=self.position.__getitem__)

    def ready(self, node: Node, at: Node) -> bool:
        """Whether node's value is known at `at`, or can be."""
        return self.moves(node, at) is not None

    def same_labels(self, a: Node, b: Node) -> bool:
        """Whether two label tensors hold the same numbers in the same order, whatever their shapes."""
        return a is b or self._equal(self._flat(a), self._flat(b))

    def _flat(self, node: Node) -> Node:
        while name(node) in _SAME_ORDER and node.args and self.never(node):
            if value(node).dtype != value(node.args[0]).dtype:
                break
            node = node.args[0]
        return node

    def _equal(self, a: Any, b: Any) -> bool:
        if isinstance(a, (tuple, list)):
            return type(a) is type(b) and len(a) == len(b) and all(map(self._equal, a, b))
        if not isinstance(a, Node) or not isinstance(b, Node):
            return type(a) is type(b) and a == b
        if not self.never(a) or not self.never(b):
            return False
        return a is b or (
            _is_pure(a)
            and (a.op, a.target) == (b.op, b.target)
            and self._equal([a.args, *a.kwargs.items()], [b.args, *b.kwargs.items()])
        )


def write(before: Node, code: Callable[..., Any], *args: Any, source: Node | None = None) -> Node:
    """Write ordinary torch code into the graph, in front of a node; args are nodes or constants of code.

    Only what the result needs is written. The new nodes have example values, as the passes and caches that follow
    expect, and the place in the user's code of `source`, or else of `before`.
    """
    graph = before.graph
    last = before.prev
    with graph.inserting_before(before):
        tracer = torch.fx.proxy.GraphAppendingTracer(graph)
        result = code(*map_arg(args, lambda n: torch.fx.Proxy(n, tracer))).node
    node = before.prev
    while node is not last:
        node = (unused := node).prev
        if unused is not result and not unused.users:
            graph.erase_node(unused)
    while (last := last.next) is not before:
        _set_example(last, source or before)
    return result


def insert(before: Node, source: Node, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
    """A new node in front of `before` that calls a function, or a method given by its name.

    It has an example value, as the passes and caches that follow expect, and `source`'s place in the user's code.
    """
    with before.graph.inserting_before(before):
        create = before.graph.call_method if isinstance(target, str) else before.graph.call_function
        node = create(target, args, kwargs)
    _set_example(node, source)
    return node


def _unhooked() -> contextlib.AbstractContextManager:
    """While open, the user's saved-tensor hooks (an eager checkpoint's, say) don't see what autograd saves here."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # there are none, and can't be
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def _set_example(node: Node, source: Node) -> None:
    examples: list[Any] = []
    target = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: examples.append(n.meta["example_value"]) or examples[-1])
    fake = next((x.fake_mode for x in tree_leaves(examples) if isinstance(x, FakeTensor)), contextlib.nullcontext())
    with fake, _unhooked():  # scalars become tensors of that mode, too
        node.meta["example_value"] = target(*args, **kwargs)
    node.meta["stack_trace"] = source.meta.get("stack_trace")
