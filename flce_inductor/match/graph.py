"""Reading and writing Dynamo's graphs: example values, names of operations, who changes what, new nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Node, map_arg

from ..explain import Reason


class Refused(Exception):
    """The graph is left as it is."""

    def __init__(self, reason: Reason, detail: str = ""):
        super().__init__(reason.text, detail)
        self.reason, self.detail = reason, detail


def value(node: Any) -> torch.Tensor:
    """The example value of a node that is a plain tensor; refuses anything else."""
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(example, torch.Tensor):
        raise Refused(Reason.UNKNOWN_SHAPE, str(node))
    if type(example) not in (FakeTensor, torch.Tensor, torch.nn.Parameter):
        raise Refused(Reason.SUBCLASS, f"{node} is a {type(example).__name__}")
    return example


# Only these functions have a short name: a user's function that is called "view" must not pass for torch's.
_TORCH = "matmul mm reshape flatten squeeze unsqueeze t transpose swapaxes permute narrow select".split()
_FUNCTIONS: dict[Any, str] = {
    operator.getitem: "getitem",
    operator.matmul: "matmul",
    torch._C._nn.linear: "linear",
    F.linear: "linear",
    **{getattr(torch, n): n for n in _TORCH},
}
_IN_PLACE = "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem delitem"
_IN_PLACE_OPERATORS = {getattr(operator, n) for n in _IN_PLACE.split()}


def name(node: Node) -> str:
    """What a node calls, with one name for the method, the function and the operator."""
    if node.op == "call_method":
        return node.target
    if node.op != "call_function":
        return node.op
    if node.target is getattr:
        return f"getattr.{node.args[1]}"
    qualified = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', node.target)}"
    return _FUNCTIONS.get(node.target, qualified)


def mutated(node: Node) -> Iterator[Node]:
    """The nodes whose memory a node changes."""
    target, changed = node.target, [node.kwargs.get("out")]
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload):
        for position, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                positional = node.args[position] if position < len(node.args) else None
                changed.append(node.kwargs.get(argument.name, positional))
    else:
        called = name(node)
        method_or_function = called.endswith("_") and not called.endswith("__")
        if method_or_function or target in _IN_PLACE_OPERATORS or node.kwargs.get("inplace") is True:
            changed.append(node.args[0] if node.args else None)
    for argument in changed:
        yield from (n for n in (argument if isinstance(argument, (list, tuple)) else [argument]) if isinstance(n, Node))


def memory(node: Node) -> int:
    """The identity of the memory behind a node's example value; views share it."""
    return value(node).untyped_storage()._cdata


def insert(after: Node, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
    """A new node right behind `after` that calls a function, or a method given by its name.

    It has an example value, as the passes and caches that follow expect, and `after`'s place in the user's code.
    """

    def example(x: Any) -> Any:
        return map_arg(x, lambda n: n.meta["example_value"])

    with after.graph.inserting_after(after):
        if isinstance(target, str):
            node = after.graph.call_method(target, args, kwargs)
            target = getattr(torch.Tensor, target)
        else:
            node = after.graph.call_function(target, args, kwargs)
    node.meta["example_value"] = target(*example(args), **example(kwargs))
    node.meta["stack_trace"] = after.meta.get("stack_trace")
    return node
