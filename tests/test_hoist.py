"""The hoist: what moves into the forward, what must not, and that gradients are right either way.

A loss is a function loss(rows, h, w, t), where rows(h, w, t) gives (nll, lse): by the op in the compiled function, by
F.linear and F.cross_entropy in float64 in the reference.
"""

import contextlib
import logging
import random
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flce_inductor import hoist, runtime
from flce_inductor.backend import tracing_backend
from flce_inductor.explain import Reason

N, H, V = 48, 8, 40
INDUCTOR = dict(backend="inductor", options={"flce_inductor.enable": True})
TRACING = dict(backend=tracing_backend)  # the same passes and partition, run without code generation


def fused(h, w, t, bias=None):
    nll, top, logsum = torch.ops.flce_inductor.row_stats(h, w, t, bias, -100, 16, "auto")
    return nll, top + logsum


def reference(h, w, t, bias=None):
    z = F.linear(h, w, bias)
    return F.cross_entropy(z, t, reduction="none"), z.logsumexp(-1)


def inputs(dtype=torch.float32, n=N, ignored=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(n, H, generator=g, dtype=torch.float32).to(dtype).requires_grad_()
    w = torch.randn(V, H, generator=g, dtype=torch.float32).to(dtype).requires_grad_()
    t = torch.randint(0, V, (n,), generator=g)
    t[::ignored] = -100
    return h, w, t


def double(x):
    if not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def gradients(outputs, leaves, tangent):
    """Outputs and the leaves' gradients; the incoming gradient is tangent, 2 tangent, .. for the outputs."""
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    upstream = [torch.full_like(out, tangent * (i + 1)) for i, out in enumerate(outputs)]
    return outputs, torch.autograd.grad(outputs, [x for x in leaves if x.requires_grad], upstream)


@contextlib.contextmanager
def fresh():
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def decisions():
    """The reasons that the hoist records, None for hoisted."""
    log = []
    record = hoist.record_pass

    def spy(node, reason, detail=""):
        log.append(reason)
        record(node, reason, detail)

    with mock.patch.object(hoist, "record_pass", spy):
        yield log


@contextlib.contextmanager
def executions():
    """The runs of the chunk loop by what they compute."""
    log = []
    run = runtime.run

    def spy(*args, **kwargs):
        if kwargs.get("saved") is not None:
            log.append("backward")
        else:
            log.append("with_grads" if any(kwargs.get("needs", ())) else "stats")
        return run(*args, **kwargs)

    with mock.patch.object(runtime, "run", spy):
        yield log


def close(actual, expected, rtol):
    expected = expected.double()
    assert actual.shape == expected.shape
    scale = expected.abs().nan_to_num(0.0).max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol * scale, equal_nan=True)


def check(loss, *reasons, leaves=None, how=INDUCTOR, rtol=1e-5, tangent=-1.7):
    """The compiled loss agrees with float64 eager's, and its sites were decided as told (None: hoisted)."""
    leaves = inputs() if leaves is None else leaves
    exact = [double(x) for x in leaves]
    with fresh(), decisions() as log, executions() as ran:
        compiled = torch.compile(lambda *xs: loss(fused, *xs), **how)
        actual = gradients(compiled(*leaves), leaves, tangent)
    expected = gradients(loss(reference, *exact), exact, tangent)
    for a, e in zip([*actual[0], *actual[1]], [*expected[0], *expected[1]], strict=True):
        close(a, e, rtol)
    assert log == list(reasons)
    assert counters["inductor"]["flce_hoisted"] == reasons.count(None)
    if all(reason is None for reason in reasons):
        assert set(ran) == {"with_grads"}
    return actual, ran


def mean(rows, h, w, t):
    return rows(h, w, t)[0].sum() / (t != -100).sum()


def squared(rows, h, w, t):
    return (rows(h, w, t)[0] ** 2).sum()


# ---- losses that are linear in the per-token losses


def test_mean():
    _, ran = check(mean, None)
    assert ran == ["with_grads"]


def test_sum():
    check(lambda rows, h, w, t: rows(h, w, t)[0].sum(), None)


@pytest.mark.parametrize("num_items", [37, torch.tensor(37)], ids=["int", "tensor"])
def test_sum_over_num_items(num_items):
    check(lambda rows, h, w, t: rows(h, w, t)[0].sum() / num_items, None)


def test_masked_mean():
    mask = torch.arange(N) % 3 == 0

    def loss(rows, h, w, t):
        nll, _ = rows(h, w, t)
        return (nll * mask).sum() / mask.sum()

    check(loss, None)


def test_token_weights():
    weights = torch.rand(N)
    check(lambda rows, h, w, t: (rows(h, w, t)[0] * weights).sum(), None)


def test_token_weights_times_mean():
    weights, alpha = torch.rand(N), torch.tensor(0.3)

    def loss(rows, h, w, t):
        nll, _ = rows(h, w, t)
        return alpha * ((nll * weights).mean() - 2 * (-nll.view(6, 8).sum(1)).mean())

    check(loss, None)


def test_z_loss_with_a_known_coefficient_per_row():
    """The linear part of the z-loss: the cotangent of lse takes the same way as that of nll."""
    coefficient = torch.rand(N)

    def loss(rows, h, w, t):
        nll, lse = rows(h, w, t)
        return nll.mean() + (coefficient * lse).mean()

    check(loss, None)


def test_nothing_valid():
    """1 / n_valid stays with the row weights, so that nothing is 0 * inf: loss NaN, gradients exactly 0."""
    h, w, t = inputs()
    t[:] = -100
    (loss, grads), _ = check(mean, None, leaves=(h, w, t))
    assert loss[0].isnan()
    assert all((g == 0).all() for g in grads)


def test_no_rows():
    h, w, t = inputs(n=0)
    (_, grads), _ = check(lambda rows, h, w, t: rows(h, w, t)[0].sum(), None, leaves=(h, w, t), how=TRACING)
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("frozen", ["h", "w"])
def test_frozen(frozen):
    h, w, t = inputs()
    (h if frozen == "h" else w).requires_grad_(False)
    check(mean, None, leaves=(h, w, t))


def test_bias():
    h, w, t = inputs()
    bias = torch.randn(V, requires_grad=True)

    def loss(rows, h, w, t, bias):
        return rows(h, w, t, bias)[0].mean()

    check(loss, None, leaves=(h, w, t, bias))


def test_one_row_returned_is_one_number():
    check(lambda rows, h, w, t: rows(h, w, t)[0], None, leaves=inputs(n=1, ignored=2**40), how=TRACING)


# ---- losses that are not


def test_per_token_loss_returned():
    _, ran = check(lambda rows, h, w, t: rows(h, w, t)[0], Reason.VECTOR_TANGENT)
    assert ran == ["stats", "backward"]


def test_two_losses_returned():
    def loss(rows, h, w, t):
        nll, _ = rows(h, w, t)
        return nll.sum(), (nll * 0.5).mean()

    _, ran = check(loss, Reason.TANGENTS)
    assert ran == ["stats", "backward"]


def test_square():
    _, ran = check(squared, Reason.OWN_OUTPUT)
    assert ran == ["stats", "backward"]


def test_weights_from_the_own_loss():
    def loss(rows, h, w, t):
        nll, _ = rows(h, w, t)
        return (torch.exp(-nll).detach() * nll).mean()

    check(loss, Reason.OWN_OUTPUT)


def with_gradient(gradient, forward=torch.clone):
    """A function whose gradient is something else than its derivative."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, g):
            return gradient(g)

    return Function.apply


def test_gradient_that_is_not_linear():
    clipped = with_gradient(lambda g: g.clamp(-1e-3, 1e-3))
    check(lambda rows, h, w, t: clipped(rows(h, w, t)[0]).sum(), Reason.NOT_LINEAR, how=TRACING)
    product = with_gradient(lambda g: g * g)
    check(lambda rows, h, w, t: product(rows(h, w, t)[0]).sum(), Reason.NOT_LINEAR, how=TRACING)


ONES, MASK = torch.ones(N), torch.arange(N) % 3 == 0


@pytest.mark.parametrize(
    "gradient",
    [
        lambda g: g + 0.125,
        lambda g: ONES - g,
        lambda g: torch.add(ONES, g, alpha=2),
        lambda g: torch.where(MASK, g, 0.125),
        lambda g: torch.where(MASK, ONES, g),
        lambda g: F.pad(g[2:-1], (2, 1), value=1.0),
        lambda g: torch.cat([g[:-1], ONES[:1]]),
        lambda g: torch.slice_scatter(ONES, g[2:9], 0, 2, 9),
        lambda g: torch.select_scatter(ONES, g[0], 0, 2),
        lambda g: torch.scatter_add(ONES.to(g.dtype), 0, MASK.long(), g),
        lambda g: torch.index_put(ONES.to(g.dtype), (MASK.long(),), g, accumulate=True),
        lambda g: 2 / (g + 3),
        lambda g: g.round(),
        lambda g: g * g.sign(),
        lambda g: (g * 1000).int().float(),
        lambda g: torch.where(g < 0, g, 0.0),
    ],
)
def test_gradient_that_is_not_homogeneous(gradient):
    function = with_gradient(gradient)
    check(lambda rows, h, w, t: function(rows(h, w, t)[0]).mean(), Reason.NOT_LINEAR, how=TRACING)


def constant(g):
    return torch.full_like(g, 0.125)


def test_gradient_that_is_constant():
    """No tangent at all: known in the forward, whatever the incoming gradient."""
    function = with_gradient(constant)
    check(lambda rows, h, w, t: function(rows(h, w, t)[0]).sum(), None, how=TRACING)


def test_constant_beside_a_linear_cotangent():
    function = with_gradient(constant)

    def loss(rows, h, w, t):
        nll, lse = rows(h, w, t)
        return nll.sum() + function(lse).sum()

    check(loss, Reason.NOT_LINEAR, how=TRACING)


def test_inference():
    h, w, t = inputs()
    with fresh(), decisions() as log, executions() as ran, torch.no_grad():
        torch.compile(lambda h, w, t: mean(fused, h, w, t), **TRACING)(h, w, t)
    assert log == [Reason.NO_BACKWARD]
    assert ran == ["stats"]


# ---- several sites


def two_heads(rows, h, w, t):
    """Multi-token prediction: two hidden states, one head."""
    first, _ = rows(h[:30], w, t[:30])
    second, _ = rows(h[9:].tanh(), w, t[9:])
    return first.mean() + 0.3 * second.sum() / (t[9:] != -100).sum()


def test_sites_with_one_weight_and_tangent_are_merged():
    _, ran = check(two_heads, None, None)
    assert ran == ["with_grads"]


def test_merged_sites_with_bias_and_tied_embedding():
    h, w, t = inputs()
    bias = torch.randn(V, requires_grad=True)

    def loss(rows, h, w, t, bias):
        nll, lse = rows(h + w[t.clamp(min=0)], w, t, bias)
        return (
            nll.mean()
            + rows(h[:10], w, t[:10], bias)[0].sum()
            + (rows(h[5:], w, t[5:], bias)[1] * 0.1).sum()
            + 0 * lse[0]
        )

    _, ran = check(loss, None, None, None, leaves=(h, w, t, bias))
    assert ran == ["with_grads"]


def test_merged_sites_with_a_weight_cast_for_each():
    h, w, t = inputs()

    def loss(rows, h, w, t):
        return rows(h.double(), w.double(), t)[0].mean() + rows(2 * h.double(), w.double(), t)[0].mean()

    _, ran = check(loss, None, None, leaves=(h, w, t), how=TRACING)
    assert ran == ["with_grads"]


def test_user_chunked_loop():
    def loss(rows, h, w, t):
        total = 0.0
        for hc, tc in zip(h.split(13), t.split(13), strict=True):
            total = total + rows(hc, w, tc)[0].sum()
        return total / (t != -100).sum()

    _, ran = check(loss, None, None, None, None)
    assert ran == ["with_grads"]


def test_sites_with_one_weight_and_different_tangents():
    """Only the larger one holds a weight gradient from the forward to the backward."""

    def loss(rows, h, w, t):
        return rows(h[:10], w, t[:10])[0].sum(), rows(h, w, t)[0].sum()

    _, ran = check(loss, Reason.SHARED_WEIGHT, None)
    assert ran == ["stats", "with_grads", "backward"] or ran == ["with_grads", "stats", "backward"]


def test_sites_with_one_frozen_weight_hold_nothing():
    h, w, t = inputs()
    w.requires_grad_(False)

    def loss(rows, h, w, t):
        return rows(h[:10], w, t[:10])[0].sum(), rows(h, w, t)[0].sum()

    check(loss, None, None, leaves=(h, w, t), how=TRACING)


def test_sites_where_one_needs_the_others_loss():
    def loss(rows, h, w, t):
        first, _ = rows(h, w, t)
        second, _ = rows(h * 0.5, w, t)
        return (first.detach() * second).mean() + first.mean()

    check(loss, None, Reason.SHARED_WEIGHT, how=TRACING)


def test_sites_where_each_needs_the_others_loss():
    """Hoisting one is possible, both would be a cycle."""
    h, w, t = inputs()
    w2 = torch.randn(V, H, requires_grad=True)

    def loss(rows, h, w, t, w2):
        first, _ = rows(h, w, t)
        second, _ = rows(h * 0.5, w2, t)
        return (first.detach() * second).mean() + (second.detach() * first).mean()

    check(loss, None, Reason.OWN_OUTPUT, leaves=(h, w, t, w2), how=TRACING)


def same(x):
    return x.view_as(x)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda w: w, with_gradient(lambda g: g * 0.1, same)),
        (with_gradient(lambda g: g * 0.1, same), with_gradient(lambda g: g * 0.5, same)),
        (with_gradient(lambda g: g, same), with_gradient(lambda g: g.t(), same)),
        (lambda w: w, with_gradient(lambda g: g, lambda w: w.bfloat16().to(w.dtype))),
        (lambda w: w, torch.t),
    ],
    ids=["scaled", "both scaled", "transposed", "quantised", "transpose"],
)
def test_sites_whose_weight_gradients_must_not_be_added_up(first, second):
    """One storage but not one weight: the values differ, or the gradients are changed before they meet."""
    h, _, t = inputs()
    w = torch.randn(H, H, requires_grad=True)
    t = t.clamp(max=H - 1)

    rtol = 1e-2  # Inductor may leave out a cast to bfloat16 and back

    def loss(rows, h, w, t):
        return rows(h, first(w), t)[0].mean() + rows(h * 0.5, second(w), t)[0].mean()

    check(loss, None, Reason.SHARED_WEIGHT, leaves=(h, w, t), how=TRACING, rtol=rtol)


class TwoCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx, a, b):
        return 0.1 * a + b


def test_sites_whose_weight_gradients_end_in_two_sums():
    def loss(rows, h, w, t):
        a, b = TwoCopies.apply(w)
        return sum(rows(h * c, x, t)[0].mean() for c, x in ((1, a), (2, a), (3, b), (4, b)))

    check(loss, None, None, Reason.SHARED_WEIGHT, Reason.SHARED_WEIGHT, how=TRACING)


@pytest.mark.parametrize(
    "backward",
    [
        lambda a, b: a + b + b.square(),
        lambda a, b: a + (b + b),
        lambda a, b: (a + torch.ones((), dtype=a.dtype)) + (b + torch.ones((), dtype=b.dtype)),
    ],
    ids=["seen", "twice", "with something smaller"],
)
def test_sites_whose_weight_gradients_are_not_only_added_up(backward):
    class Copies(TwoCopies):
        @staticmethod
        def backward(ctx, a, b):
            return backward(a, b)

    def loss(rows, h, w, t):
        a, b = Copies.apply(w)
        return rows(h, a, t)[0].mean() + rows(h * 2, b, t)[0].mean()

    check(loss, None, Reason.SHARED_WEIGHT, how=TRACING)


def test_sites_with_different_biases():
    h, w, t = inputs()

    def loss(rows, h, w, t, bias):
        return rows(h, w, t, bias)[0].mean() + rows(h * 2, w, t, bias * 2)[0].mean() + rows(h * 3, w, t)[0].mean()

    leaves = (h, w, t, torch.randn(V, requires_grad=True))
    check(loss, None, Reason.SHARED_WEIGHT, Reason.SHARED_WEIGHT, leaves=leaves, how=TRACING)
    leaves = (h, w, t, torch.randn(V))
    check(loss, None, Reason.SHARED_WEIGHT, Reason.SHARED_WEIGHT, leaves=leaves, how=TRACING)


def test_sites_that_need_different_gradients():
    h, w, t = inputs()

    def loss(rows, h, w, t):
        return rows(h.detach(), w, t)[0].mean() + rows(h * 2, w, t)[0].mean()

    check(loss, None, Reason.SHARED_WEIGHT, leaves=(h, w, t), how=TRACING)


def test_sites_with_different_settings():
    h, w, t = inputs()

    def loss(rows, h, w, t):
        if rows is fused:
            nll, _, _ = torch.ops.flce_inductor.row_stats(h * 2, w, t, None, 3, 16, "auto")
        else:
            nll = F.cross_entropy(F.linear(h * 2, w), t.where(t >= 0, 3), ignore_index=3, reduction="none")
        return rows(h, w, t)[0].mean() + nll.mean()

    t = t.where(t >= 0, 3)
    check(loss, None, Reason.SHARED_WEIGHT, leaves=(h, w, t), how=TRACING)


def test_sites_with_different_dtypes():
    """A 16-bit and a float32 head over one float32 weight."""
    h, w, t = inputs()

    def loss(rows, h, w, t):
        low = h * 2 if rows is reference else (h * 2).bfloat16()
        return rows(low, w, t)[0].mean() + rows(h, w, t)[0].mean()

    check(loss, None, Reason.SHARED_WEIGHT, leaves=(h, w, t), how=TRACING, rtol=5e-2)


def test_two_backwards():
    """Differentiating twice inside one graph."""
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch does not trace torch.autograd.grad")

    def loss(rows, h, w, t):
        nll, _ = rows(h, w, t)
        (dh,) = torch.autograd.grad(nll.sum(), h, retain_graph=True)
        (dw,) = torch.autograd.grad((2 * nll).sum(), w)
        return dh, dw

    h, w, t = inputs()
    with fresh(), decisions() as log, torch._dynamo.config.patch(trace_autograd_ops=True):
        dh, dw = torch.compile(lambda *xs: loss(fused, *xs), fullgraph=True, **TRACING)(h, w, t)
    if not log:
        pytest.skip("this torch does not trace torch.autograd.grad")
    expected = loss(reference, double(h), double(w), t)
    close(dh, expected[0], 1e-5)
    close(dw, expected[1], 1e-5)
    assert log == [Reason.TWO_BACKWARDS]


# ---- the surroundings of a training step


def test_autograd_grad_inside_the_graph():
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch does not trace torch.autograd.grad")

    def step(rows, h, w, t):
        loss = mean(rows, h, w, t)
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    h, w, t = inputs()
    with fresh(), decisions() as log, executions() as ran, torch._dynamo.config.patch(trace_autograd_ops=True):
        actual = torch.compile(lambda *xs: step(fused, *xs), fullgraph=True, **INDUCTOR)(h, w, t)
    for a, e in zip(actual, step(reference, double(h), double(w), t), strict=True):
        close(a, e, 1e-5)
    assert log == [None]
    assert ran == ["with_grads"]


def test_checkpointed_head():
    """In a checkpointed region row_stats is tagged for recomputation; what replaces it must not be."""

    def loss(rows, h, w, t):
        return checkpoint(lambda h, w, t: mean(rows, h.sin(), w, t), h, w, t, use_reentrant=False)

    _, ran = check(loss, None)
    assert ran == ["with_grads"]


def test_checkpointed_head_that_recomputes():
    def loss(rows, h, w, t):
        return checkpoint(lambda h, w, t: squared(rows, h.sin(), w, t), h, w, t, use_reentrant=False)

    check(loss, Reason.OWN_OUTPUT)


@pytest.mark.parametrize("loss", [mean, two_heads])
def test_dynamic_rows(loss):
    """One compilation serves every N."""
    with fresh(), decisions() as log, executions() as ran:
        compiled = torch.compile(lambda *xs: loss(fused, *xs), **INDUCTOR)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for n in (48, 37, 111):
                h, _, t = leaves = inputs(n=n)
                torch._dynamo.mark_dynamic(h, 0)
                torch._dynamo.mark_dynamic(t, 0)
                actual = gradients(compiled(*leaves), leaves, 0.7)
                exact = [double(x) for x in leaves]
                expected = gradients(loss(reference, *exact), exact, 0.7)
                for a, e in zip([*actual[0], *actual[1]], [*expected[0], *expected[1]], strict=True):
                    close(a, e, 1e-5)
    assert set(log) == {None}
    assert ran == ["with_grads"] * 3


def test_retain_graph():
    h, w, t = inputs()
    with fresh():
        loss = torch.compile(lambda *xs: mean(fused, *xs), **INDUCTOR)(h, w, t)
        loss.backward(retain_graph=True)
        once = h.grad.clone(), w.grad.clone()
        loss.backward()
    for grad, first in zip((h.grad, w.grad), once, strict=True):
        torch.testing.assert_close(grad, 2 * first)


def test_input_that_is_changed_after_the_loss():
    h, w, t = inputs()

    def loss(rows, h, w, t, mask):
        out = (rows(h, w, t)[0] * mask.clone()).sum()
        mask.zero_()
        return out

    for how in (TRACING, INDUCTOR):
        check(loss, None, leaves=(h, w, t, torch.rand(N)), how=how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    check(mean, None, leaves=inputs(dtype), rtol={torch.float64: 1e-12}.get(dtype, 2e-2))


def test_float16_with_a_loss_scale():
    """Gradients of 2**-26 underflow in float16; the op keeps them scaled, and the scale is undone with the tangent."""
    h, w, t = inputs(torch.float16)

    def loss(rows, h, w, t):
        return rows(h, w, t)[0].sum() * 2.0**-22

    check(loss, None, leaves=(h, w, t), rtol=2e-2, tangent=2.0**20)
    check(loss, None, leaves=(h, w, t), rtol=2e-2, tangent=2.0**24)


def test_loss_in_16_bit():
    check(lambda rows, h, w, t: rows(h, w, t)[0].mean().bfloat16(), None, rtol=1e-2, how=TRACING)
    check(lambda rows, h, w, t: rows(h, w, t)[0].half().mean(), None, rtol=1e-2, how=TRACING)


def test_float32_weight_under_bfloat16_hidden_states():
    """Autocast's case: the weight's gradient is float32 and not rounded on its way."""
    h, _, t = inputs(torch.bfloat16)
    w = inputs()[1]

    def loss(rows, h, w, t):
        if rows is reference:
            w = w + (w.bfloat16().double() - w).detach()
        return rows(h, w, t)[0].mean()

    (_, (_, dw)), _ = check(loss, None, leaves=(h, w, t), rtol=2e-2, how=TRACING)
    assert dw.dtype == torch.float32


# ---- the cost


class Products(TorchDispatchMode):
    """Adds up 2 M N K over the matrix products."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("mm", "addmm"):
            a, b = args[-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("loss", "nvh"),
    [(mean, 6), (squared, 8), (lambda *a: mean(*a) + 0.5 * mean(*a), 12)],
    ids=["mean", "nll**2", "merged"],
)
def test_cost(loss, nvh):
    """6 NVH when hoisted, forward and backward together, 8 when not; merged sites do their own rows only."""
    h, w, t = inputs()
    products = Products()
    run = runtime.run

    def counted(*args, **kwargs):
        with products:
            return run(*args, **kwargs)

    with fresh(), mock.patch.object(runtime, "run", counted):
        torch.compile(lambda *xs: loss(fused, *xs), **INDUCTOR)(h, w, t).backward()
    assert products.flops == nvh * N * V * H


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_scales_in_place(dtype):
    """The forward computes the gradients; the backward multiplies them in the buffers that hold them."""
    h, w, t = inputs(dtype)
    with fresh():
        compiled = torch.compile(lambda *xs: mean(fused, *xs), **INDUCTOR)
        _, (forward, backward) = run_and_get_code(lambda: compiled(h, w, t).backward())
    assert "row_stats_with_grads" in forward
    assert "flce_inductor" not in backward
    for shape in ((V, H), (N, H)):
        assert f"empty_strided_cpu({shape}" not in backward
    assert "in_out_ptr" in backward
    if dtype == torch.bfloat16:  # saved for the backward in its own dtype: a float32 copy is nowhere
        assert f"empty_strided_cpu({(V, H)}, {(H, 1)}, torch.float32)" not in forward


# ---- what is written down


def readable(graph):
    """The graph with values numbered in their order, one line each."""
    names, lines = {}, []
    for node in graph.nodes:
        names[node] = node.name if node.op == "placeholder" else f"%{len(lines)}"
        if node.op == "placeholder":
            continue
        args = ", ".join(
            [str(torch.fx.node.map_arg(a, lambda n: _Name(names[n]))) for a in node.args]
            + [f"{k}={v}" for k, v in node.kwargs.items() if k in ("dtype", "alpha")]
        )
        target = str(node.target) if isinstance(node.target, (str, torch._ops.OpOverload)) else node.target.__name__
        lines.append(f"{names[node]} = {re.sub(r'flce_inductor.|.default$', '', target)}({args})")
    return "\n".join(lines)


class _Name(str):
    __repr__ = str.__str__


def test_graph():
    h, w, t = inputs(torch.bfloat16)
    graphs = []
    run = hoist.hoist

    def spy(graph):
        run(graph)
        graphs.append(readable(graph))

    with fresh(), mock.patch.object(hoist, "hoist", spy):
        torch.compile(lambda *xs: mean(fused, *xs), **TRACING)(h, w, t)
    (graph,) = graphs
    assert_expected_inline(
        graph,
        """\
%0 = aten.full([], 1, dtype=torch.float32)
%1 = aten.ne.Scalar(primals_3, -100)
%2 = aten.sum(%1)
%3 = aten.div.Tensor(%0, %2)
%4 = aten.expand(%3, [48])
%5 = row_stats_with_grads(primals_1, primals_2, primals_3, None, %4, None, -100, 16, auto, [True, True, False])
%6 = getitem(%5, 0)
%7 = aten.sum(%6)
%8 = getitem(%5, 3)
%9 = getitem(%5, 4)
%10 = getitem(%5, 6)
%11 = aten.div.Tensor(%7, %2)
%12 = aten.mul.Tensor(%10, tangents_1)
%13 = prims.convert_element_type(%8, torch.float32)
%14 = aten.mul.Tensor(%13, %12)
%15 = prims.convert_element_type(%14, torch.bfloat16)
%16 = prims.convert_element_type(%9, torch.float32)
%17 = aten.mul.Tensor(%16, %12)
%18 = prims.convert_element_type(%17, torch.bfloat16)
%19 = output([%11, %15, %18, None])""",
    )


def test_counters_and_report(caplog):
    h, w, t = inputs()
    with fresh():
        with caplog.at_level(logging.INFO, logger="flce_inductor"):
            torch.compile(lambda *xs: mean(fused, *xs), **TRACING)(h, w, t)
            torch.compile(lambda *xs: squared(fused, *xs), **TRACING)(h, w, t)
        assert counters["inductor"]["flce_hoisted"] == 1
        assert counters["inductor"]["flce_recomputed"] == 1
    assert any(f"{__file__}" in m and "in the forward" in m for m in caplog.messages)
    assert any(f"{__file__}" in m and Reason.OWN_OUTPUT.text in m for m in caplog.messages)


def test_nothing_happens_while_disabled():
    h, w, t = inputs()
    with fresh(), decisions() as log:
        torch.compile(lambda *xs: mean(fused, *xs), backend="inductor")(h, w, t).backward()
    assert log == []


# ---- random losses


def linear_maps(shape, choose, g):
    """Linear maps of a tensor of this shape, with their constants."""
    n, k = shape[0], next(k for k in (4, 3, 2, 1) if shape[0] % k == 0)
    c, v, u = choose.uniform(-2, 2), torch.rand(shape, generator=g) + 0.5, torch.rand(shape, generator=g)
    m, zero = u < 0.7, choose.choice([0.0, torch.zeros(())])
    left, right, batch = torch.rand(3, n, generator=g), torch.rand(shape[-1], 3), torch.rand(2, 3, n, generator=g)
    i, j = torch.randint(0, n, (choose.randint(1, n + 3),), generator=g), torch.randint(0, n, shape, generator=g)
    lo, stride = choose.randint(0, max(0, n - 2)), choose.randint(1, 2)
    return {
        "scalar": lambda x: x * c,
        "tensor": lambda x: torch.tensor(1.7) * x,
        "divide": lambda x: x / 3,
        "divide by vector": lambda x: x / v,
        "negate": lambda x: -x,
        "vector": lambda x: v * x,
        "mask": lambda x: x * m,
        "where": lambda x: torch.where(m, x, zero),
        "where both": lambda x: torch.where(m, 2 * x, x.flip(0)),
        "fill": lambda x: x.masked_fill(m, 0.0),
        "branches": lambda x: torch.add(x * u, x.flip(0), alpha=c),
        "difference": lambda x: x - u * x.roll(1, 0),
        "slice": lambda x: x[lo::stride],
        "reshape": lambda x: x.reshape(k, n // k, *shape[1:]),
        "transpose": lambda x: x.transpose(0, -1).contiguous(),
        "expand": lambda x: x.unsqueeze(0).expand(2, *shape),
        "sum rows": lambda x: x.sum(-1, keepdim=x.dim() == 1),
        "mean rows": lambda x: x.mean(-1, keepdim=x.dim() == 1),
        "index": lambda x: x[i],
        "index_select": lambda x: x.index_select(0, i),
        "gather": lambda x: x.gather(0, j),
        "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, j, x),
        "index_add": lambda x: torch.zeros_like(x).index_add(0, j.flatten()[:n], x),
        "pick": lambda x: x[lo] if x.dim() > 1 else x[lo : lo + 1],
        "pad": lambda x: F.pad(x, (1, 2)),
        "cat": lambda x: torch.cat([x, c * x[:1]]),
        "stack": lambda x: torch.stack([x, 3 * x]).sum(0),
        "cumsum": lambda x: x.cumsum(0),
        "split": lambda x: sum(part.sum() * (i + 1) for i, part in enumerate(x.split(5))).expand(3),
        "unbind": lambda x: sum(part * (i + 1) for i, part in enumerate(x[:4].unbind(0))).reshape(-1),
        "repeat": lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
        "matmul": lambda x: x @ right.to(x.dtype),
        "batched": lambda x: batch.to(x.dtype) @ x.reshape(n, -1),
        "from the left": lambda x: left.to(x.dtype) @ x.reshape(n, -1),
        "cast": lambda x: x.double(),
    }


CURVES = [
    torch.square,
    torch.tanh,
    torch.sigmoid,
    lambda x: x * x.detach(),
    lambda x: x.clamp(max=x.detach().mean()),
    lambda x: x * x.flatten()[0].detach(),
    lambda x: x / (1 + x.detach().norm()),
    lambda x: torch.sqrt(x * x + 1),
]


def program(seed, curved):
    """A random chain of linear maps from nll (and lse) to one number; curved: with one that isn't linear among them."""
    choose, g = random.Random(seed), torch.Generator().manual_seed(seed)
    steps, x = [], torch.ones(N)
    for _ in range(choose.randint(1, 7)):
        maps = linear_maps(tuple(x.shape), choose, g)
        steps.append(maps[choose.choice(list(maps))])
        x = steps[-1](x)
    v, m, items = torch.rand(x.numel(), generator=g), torch.rand(x.shape, generator=g) < 0.7, choose.randint(1, 99)
    m.view(-1)[0] = True
    ends = [
        torch.sum,
        torch.mean,
        lambda x: (x * m).sum() / m.sum(),
        lambda x: x.flatten() @ v.to(x.dtype),
        lambda x: x.sum() / torch.tensor(items),
    ]
    steps.append(choose.choice(ends))
    z = choose.choice([None, None, torch.rand(N, generator=g)])
    if curved:
        steps.insert(choose.randint(0, len(steps)), choose.choice(CURVES))

    def loss(rows, h, w, t):
        nll, lse = rows(h, w, t)
        x = nll if z is None else nll - z * lse
        for step in steps:
            x = step(x)
        return x

    return loss


@pytest.mark.parametrize("seed", range(72))
def test_random_linear(seed):
    check(program(seed, curved=False), None, how=TRACING, rtol=2e-5)


@pytest.mark.parametrize("seed", range(24))
def test_random_nonlinear(seed):
    _, ran = check(program(seed, curved=True), Reason.OWN_OUTPUT, how=TRACING, rtol=2e-4)
    assert ran == ["stats", "backward"]
