"""Helpers of the tests: run a function compiled, beside the same function in float64 eager mode."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.utils._pytree import tree_flatten, tree_map

import flce_inductor
from flce_inductor.backend import tracing_backend
from flce_inductor.explain import Reason, Site, collect

assert flce_inductor.__version__  # imported for its effect on Inductor's configuration

TRACING = tracing_backend  # the passes and AOTAutograd as in the product, then eager kernels: a tenth of a second
INDUCTOR = "flce_inductor"  # the product: seconds for each graph


@contextlib.contextmanager
def fresh(**keys: Any) -> Iterator[None]:
    """No compiled code, counters or cached graphs from before; every head is large enough unless keys say else."""
    torch._dynamo.reset()
    counters.clear()
    keys = {"min_logits_bytes": 0, "min_vocab_size": 0} | keys
    with inductor_config.patch({f"flce_inductor.{k}": v for k, v in keys.items()}):
        yield
    torch._dynamo.reset()


def leaves(args: Any) -> list[Tensor]:
    """The tensors among args, and the parameters of modules among them, that take a gradient."""
    found = []
    for x in tree_flatten(args)[0]:
        tensors = x.parameters() if isinstance(x, nn.Module) else [x] if isinstance(x, Tensor) else []
        found += [p for p in tensors if p.requires_grad]
    return found


def copied(args: Any, dtype: torch.dtype | None = None) -> Any:
    """Copies of tensors and modules, with floating ones converted; tensors keep strides and requires_grad."""

    def one(x):
        if isinstance(x, nn.Module):
            return copy.deepcopy(x).to(dtype)
        if not isinstance(x, Tensor):
            return x
        floating = dtype is not None and x.is_floating_point()
        storage = x.detach().untyped_storage()
        whole = torch.empty(0, dtype=x.dtype).set_(storage).clone()
        whole = whole.to(dtype) if floating else whole
        whole = whole.as_strided(x.shape, x.stride(), x.storage_offset())
        return (
            nn.Parameter(whole, x.requires_grad)
            if isinstance(x, nn.Parameter)
            else whole.requires_grad_(x.requires_grad)
        )

    return tree_map(one, args)


@dataclasses.dataclass
class Outcome:
    """What a function returned, and the gradients of its leaves (None where it gives none)."""

    outputs: list[Tensor]
    grads: list[Tensor | None]
    sites: list[Site] = dataclasses.field(default_factory=list)

    @property
    def reasons(self) -> list[Reason | None]:
        return [site.reason for site in self.sites]


def outcome_of(fn: Callable, args: Any) -> Outcome:
    """fn(*args), and its leaves' gradients for an incoming gradient that differs from element to element."""
    with torch.set_grad_enabled(torch.is_grad_enabled()):  # fn may leave another mode behind
        outputs = [x for x in tree_flatten(fn(*args))[0] if isinstance(x, Tensor)]
    inputs = leaves(args)
    grads: list[Tensor | None] = [None] * len(inputs)
    differentiable = [x for x in outputs if x.requires_grad]
    if differentiable and inputs:
        upstream = [
            torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).reshape(x.shape).to(x.dtype) * (i + 1)
            for i, x in enumerate(differentiable)
        ]
        grads = list(torch.autograd.grad(differentiable, inputs, upstream, allow_unused=True))
    return Outcome([x.detach() for x in outputs], grads)


def eager(fn: Callable, *args: Any, dtype: torch.dtype | None = torch.float64) -> Outcome:
    """fn in eager mode on copies of args in dtype (None: as they are)."""
    return outcome_of(fn, copied(args, dtype))


def compiled(fn: Callable, *args: Any, backend: Any = TRACING, fullgraph: bool = True, **how: Any) -> Outcome:
    """fn compiled on copies of args, with the decisions about its losses; see fresh() for what must be open."""
    with collect() as sites:
        outcome = outcome_of(torch.compile(fn, backend=backend, fullgraph=fullgraph, **how), copied(args))
    outcome.sites = sites
    return outcome


_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def assert_same(actual: Outcome, expected: Outcome, tolerance: float | None = None) -> None:
    """Outputs and gradients are equal up to the rounding of their dtype; a missing gradient is missing in both."""
    assert len(actual.outputs) == len(expected.outputs)
    assert [g is None for g in actual.grads] == [g is None for g in expected.grads], "gradients are missing"
    pairs = zip([*actual.outputs, *actual.grads], [*expected.outputs, *expected.grads], strict=True)
    for i, (a, e) in enumerate(pairs):
        if a is None:
            continue
        assert a.shape == e.shape, f"tensor {i}: {a.shape} instead of {e.shape}"
        limit = tolerance or _TOLERANCE.get(a.dtype, 0)
        scale = max(1.0, e[e.isfinite()].abs().max().item()) if e.isfinite().any() else 1.0
        torch.testing.assert_close(
            a.double(), e.double(), rtol=0, atol=limit * scale, equal_nan=True, msg=lambda m, i=i: f"tensor {i}: {m}"
        )


def check(
    fn: Callable,
    *args: Any,
    reasons: Any = None,
    backend: Any = TRACING,
    fullgraph: bool = True,
    tolerance: float | None = None,
    keys: dict[str, Any] | None = None,
    **how: Any,
) -> Outcome:
    """fn compiled equals fn in float64 eager, and its losses are decided on as expected.

    reasons: that of each loss in the order of the graph, None for a rewritten one; a single one stands for [reasons].
    """
    expected = eager(fn, *args)
    plain = eager(fn, *args, dtype=None)
    with fresh(**(keys or {})):
        actual = compiled(fn, *args, backend=backend, fullgraph=fullgraph, **how)
    assert_same(actual, expected, tolerance)
    assert [x.dtype for x in actual.outputs] == [x.dtype for x in plain.outputs], "dtypes differ from eager's"
    assert [g is not None and g.dtype for g in actual.grads] == [g is not None and g.dtype for g in plain.grads]
    wanted = reasons if isinstance(reasons, list) else [reasons]
    assert actual.reasons == wanted, "\n".join(map(str, actual.sites)) or "no loss was found"
    return actual


__all__ = [
    "INDUCTOR",
    "TRACING",
    "CompileCounterWithBackend",
    "Outcome",
    "Reason",
    "assert_same",
    "check",
    "collect",
    "compiled",
    "copied",
    "counters",
    "eager",
    "fresh",
    "fresh_cache",
    "leaves",
    "outcome_of",
]
