"""The hoist: what moves into the forward, what must not, and that gradients are right either way.

A loss is a function loss(rows, h, w, t), where rows(h, w, t) gives (nll, lse), and zsum and pz if more is asked for: by
the op in the compiled function, by F.linear and F.cross_entropy in float64 in the reference.
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
from flce_inductor.losses import Loss

N, H, V = 48, 8, 40
INDUCTOR = dict(backend="inductor", options={"flce_inductor.enable": True})
TRACING = dict(backend=tracing_backend)  # the same passes and partition, run without code generation


def row_stats(h, w, t, bias=None, ignore_index=-100, want=(False, False, False)):
    return torch.ops.flce_inductor.row_stats(
        h, w, t, bias, None, ignore_index, 16, "auto", "", 1.0, 0.0, 1.0, list(want)
    )


def fused(h, w, t, bias=None, more=False):
    nll, top, logsum, zsum, pz, _ = row_stats(h, w, t, bias, want=(more, more, False))
    return (nll, top + logsum, zsum, top + pz) if more else (nll, top + logsum)


def reference(h, w, t, bias=None, more=False):
    z = F.linear(h, w, bias)
    rows = F.cross_entropy(z, t, reduction="none"), z.logsumexp(-1)
    return (*rows, z.sum(-1), (z.softmax(-1) * z).sum(-1)) if more else rows


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
        elif kwargs.get("program"):
            log.append("program")
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
        assert {"with_grads", "program"}.issuperset(ran)
    return actual, ran


def mean(rows, h, w, t):
    return rows(h, w, t)[0].sum() / (t != -100).sum()


def squared(rows, h, w, t):
    return (rows(h, w, t)[0] ** 2).sum()


def normalised(rows, h, w, t):
    """Weights that need all rows before the first gradient."""
    nll, _ = rows(h, w, t)
    return (nll / (1 + nll.detach().max())).sum()


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


# ---- losses whose row weights are a function of the same row's statistics


ROWS, COLUMNS = 6, 8
_GENERATOR = torch.Generator().manual_seed(0)
OLD, REFERENCE = (3 + torch.rand(N, generator=_GENERATOR) for _ in range(2))
ADVANTAGES = torch.randn(ROWS, 1, generator=_GENERATOR)


def z_loss(rows, h, w, t):
    nll, lse = rows(h, w, t)
    valid = t != -100
    return nll.sum() / valid.sum() + 1e-2 * torch.where(valid, lse**2, 0.0).sum() / valid.sum()


def masked_z_loss(rows, h, w, t):
    valid = t != -100
    return 1e-2 * (rows(h, w, t)[1].square() * valid).sum() / valid.sum()


def dft(rows, h, w, t):
    nll, _ = rows(h, w, t)
    return (torch.exp(-nll).detach() * nll).sum() / (t != -100).sum()


def dft_differentiated(rows, h, w, t):
    nll, _ = rows(h, w, t)
    return (torch.exp(-nll) * nll).mean()


def focal(rows, h, w, t):
    nll, _ = rows(h, w, t)
    return ((1 - torch.exp(-nll)) ** 2.5 * nll).mean()


def ppo(rows, h, w, t):
    """Clipped ratios, an advantage for each sequence, mean over the tokens that count."""
    nll = rows(h, w, t)[0].view(ROWS, COLUMNS)
    mask = (t != -100).view(ROWS, COLUMNS)
    ratio = torch.exp(OLD.to(nll.dtype).view(ROWS, COLUMNS) - nll)
    advantages = ADVANTAGES.to(nll.dtype)
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(gain * mask).sum() / mask.sum()


def grpo(rows, h, w, t):
    """With its penalty for leaving the reference, and a mean over sequences of means over tokens."""
    nll = rows(h, w, t)[0].view(ROWS, COLUMNS)
    mask = (t != -100).view(ROWS, COLUMNS)
    ratio = torch.exp(nll.detach() - nll)
    gap = nll - REFERENCE.to(nll.dtype).view_as(nll)
    loss = 0.04 * (gap.exp() - gap - 1) - ratio * ADVANTAGES.to(nll.dtype)
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


def smoothed_z_loss(rows, h, w, t):
    if rows is reference:
        z = F.linear(h, w)
        return F.cross_entropy(z, t, label_smoothing=0.1) + 1e-2 * z.logsumexp(-1)[t != -100].square().mean()
    nll, lse, zsum, _ = rows(h, w, t, more=True)
    return Loss(label_smoothing=0.1, z_loss=1e-2)(nll, lse, zsum, t, None, V)


def squared_entropy(rows, h, w, t):
    nll, lse, _, pz = rows(h, w, t, more=True)
    return nll.mean() - 0.01 * (lse - pz).square().mean()


def spread_of_logits(rows, h, w, t):
    _, lse, zsum, pz = rows(h, w, t, more=True)
    return ((zsum / V - lse) * pz.tanh()).mean()


def shapes(rows, h, w, t):
    nll, lse = rows(h, w, t)
    x = nll.view(1, ROWS, 1, COLUMNS).permute(1, 2, 0, 3)[:, 0]
    y = x.square().expand(1, 1, -1, -1, -1).squeeze() * lse.reshape(ROWS, COLUMNS)
    return (y * ADVANTAGES.to(y.dtype) * torch.arange(COLUMNS)).reshape(-1) @ OLD.to(y.dtype)


def dtypes(rows, h, w, t):
    """Operands whose dtypes and dimensions take different parts in promotion."""
    nll, lse = rows(h, w, t)
    lse = torch.where(lse > torch.tensor(1.5, dtype=torch.float64), lse, torch.ones((), dtype=torch.float64))
    x = nll * torch.tensor(0.3, dtype=torch.float64) + torch.tensor(3) * lse.tanh() / torch.arange(1, N + 1)
    x = torch.add(t, x * lse, alpha=2) - torch.add(1, nll * lse, alpha=0.5) + nll ** MASK.long() + nll * (nll > 2)
    edge, same = torch.tensor(0.7, dtype=torch.float64), nll * 0 + 0.7  # float32's 0.7 is smaller
    x = x * (same >= edge) * (torch.where(nll > 1, same, edge) >= 0.7)
    return (x.double() * nll * OLD.double()).mean()


def constants(rows, h, w, t):
    nll, lse = rows(h, w, t)
    x = torch.full_like(nll, 0.3) * nll**2 + torch.maximum(lse, torch.tensor(1.5, dtype=lse.dtype)) * nll
    y = torch.where(nll > 2, torch.tensor(1.5), torch.tensor(-0.5)) * nll * torch.ones_like(lse).exp()
    return (x + y + 2 / (1 + nll) + (3 - lse) ** 3 + 2**nll).mean()


def rounded_constants(rows, h, w, t):
    nll, _ = rows(h, w, t)
    wide = torch.where(nll > 2, torch.full((), 0.3, dtype=torch.float64), torch.full((), 0.7, dtype=torch.float64))
    return (wide * nll * (nll.detach() * torch.full((), 0.3))).mean()


def operators(rows, h, w, t):
    nll, lse = rows(h, w, t)
    old = OLD.to(nll.dtype)
    parts = [
        f(nll + 0.1) for f in (F.softplus, F.logsigmoid, F.gelu, F.silu, F.elu, torch.log1p, torch.sqrt, torch.sin)
    ]
    parts += [F.smooth_l1_loss(nll, old, reduction="none"), F.relu(nll - 1), (nll - 3).abs(), nll.nan_to_num()]
    parts += [nll.clamp(max=torch.tensor(3.0)), torch.maximum(nll, old), nll.masked_fill(nll > 3, 0.0), F.mish(nll)]
    parts += [torch.rsqrt(nll + 1), torch.log2(lse + 9), torch.expm1(-nll), torch.atan2(nll, lse), torch.erf(nll)]
    parts += [torch.where((nll > 1) & ~(lse < 3) | (t == 4), nll, lse), F.huber_loss(nll, old, reduction="none")]
    return sum(part.mean() * (i + 1) for i, part in enumerate(parts))


PROGRAMS = [squared, z_loss, masked_z_loss, dft, dft_differentiated, focal, ppo, grpo, smoothed_z_loss, squared_entropy]
PROGRAMS += [spread_of_logits, shapes, dtypes, constants, operators]


@pytest.mark.parametrize("loss", PROGRAMS)
def test_program(loss):
    _, ran = check(loss, None, how=TRACING, rtol=2e-5)
    assert ran == ["program"]


def test_programs_compiled():
    """Several in one graph, each over its own weight."""
    h, w, t = inputs()
    losses = [z_loss, ppo, squared_entropy]
    weights = [(w * (i + 1)).detach().requires_grad_() for i in range(len(losses))]

    def loss(rows, h, t, *ws):
        return sum(f(rows, h, w, t) for f, w in zip(losses, ws, strict=True))

    _, ran = check(loss, *[None] * len(losses), leaves=(h, t, *weights))
    assert ran == ["program"] * len(losses)


@pytest.mark.parametrize("loss", [z_loss, dft, smoothed_z_loss, masked_z_loss])
def test_program_when_nothing_is_valid(loss):
    """Gradients are exactly 0 where eager's are: 1 / n_valid meets the cotangent of nll, which ignored rows don't take,
    or a selection. It does not where z-loss is masked by a product: NaN, as in eager."""
    h, w, t = inputs()
    t[:] = -100
    (values, grads), _ = check(loss, None, leaves=(h, w, t), how=TRACING)
    assert values[0].isnan()
    assert all((g.isnan() if loss is masked_z_loss else g == 0).all() for g in grads)


def test_program_with_infinite_weights():
    """At an ignored row they are selected away with nll, and make NaN with lse."""
    h, w, t = inputs()
    w.requires_grad_(False)
    infinite = torch.where(torch.arange(N) % 10 == 0, torch.inf, 1.0)
    assert (t[::10] == -100).all()
    check(lambda rows, h, w, t: (infinite * rows(h, w, t)[0] ** 2).sum(), None, leaves=(h, w, t), how=TRACING)
    check(lambda rows, h, w, t: (infinite * rows(h, w, t)[1] ** 2).sum(), None, leaves=(h, w, t), how=TRACING)


@pytest.mark.parametrize("n", [0, 1])
def test_program_of_few_rows(n):
    def loss(rows, h, w, t):
        nll, lse = rows(h, w, t)
        x = nll.view(-1, 1).square() * lse.view(-1, 1) * torch.ones(1, 1, dtype=lse.dtype)
        return (x[:, 0] / max(1, n)).sum()

    check(loss, None, leaves=inputs(n=n, ignored=2**40), how=TRACING)


def test_program_without_a_tangent():
    """The gradient computed in the graph: the incoming gradient takes no part."""
    function = with_gradient(lambda g: torch.full_like(g, 0.125))
    check(lambda rows, h, w, t: function(rows(h, w, t)[0] ** 2).sum(), None, how=TRACING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("loss", [focal, squared_entropy, rounded_constants])
def test_program_dtypes(loss, dtype):
    check(loss, None, leaves=inputs(dtype), rtol={torch.float64: 1e-12}.get(dtype, 2e-2), how=TRACING)


def test_program_in_16_bit():
    def loss(rows, h, w, t):
        nll, lse = rows(h, w, t)
        return ((nll.bfloat16() ** 2).float() * lse.half()).mean()

    check(loss, None, rtol=1e-2, how=TRACING)


def test_program_of_float16_recomputes():
    """The gradients' scale comes from the row weights, before the first chunk."""
    check(squared, Reason.OWN_OUTPUT, leaves=inputs(torch.float16), how=TRACING, rtol=2e-2)


BATCH_LEVEL = {
    "normalised": normalised,
    "softmax over rows": lambda nll, lse: nll * torch.softmax(-nll, 0).detach(),
    "differentiated": lambda nll, lse: torch.exp(-nll) / torch.exp(-nll).sum() * nll,
    "mean": lambda nll, lse: nll * nll.detach().mean(),
    "sequence": lambda nll, lse: nll.view(ROWS, COLUMNS).mean(1).exp(),
    "sorted": lambda nll, lse: nll * lse.detach().sort()[0],
    "cumsum": lambda nll, lse: nll * lse.detach().cumsum(0),
    "index": lambda nll, lse: nll * lse.detach()[torch.arange(N).roll(1)],
    "roll": lambda nll, lse: nll * lse.detach().roll(1),
    "flip": lambda nll, lse: nll * lse.flip(0),
    "slice": lambda nll, lse: nll[1:] * lse[:-1],
    "one row": lambda nll, lse: nll * lse[3].detach(),
    "transpose": lambda nll, lse: nll.view(ROWS, COLUMNS) * lse.view(COLUMNS, ROWS).t(),
    "outer": lambda nll, lse: nll.unsqueeze(0) * lse.unsqueeze(1),
    "expanded": lambda nll, lse: nll.expand(3, N) ** 2,
    "matmul": lambda nll, lse: (nll @ torch.ones(N, N, dtype=nll.dtype).triu()) * lse,
    "operator": lambda nll, lse: torch.lgamma(nll + 1),
    "rounding mode": lambda nll, lse: torch.div(nll, 0.7, rounding_mode="floor") * nll,
}


@pytest.mark.parametrize("function", BATCH_LEVEL.values(), ids=BATCH_LEVEL)
def test_function_of_more_than_the_row(function):
    def loss(rows, h, w, t):
        return function(*rows(h, w, t)).sum()

    _, ran = check(function if function is normalised else loss, Reason.OWN_OUTPUT, how=TRACING, rtol=1e-4)
    assert ran == ["stats", "backward"]


def test_gradient_that_goes_where_the_own_loss_says():
    """To the largest losses: the indices are the statistics' own."""
    check(lambda rows, h, w, t: rows(h, w, t)[0].topk(9)[0].sum(), Reason.NOT_LINEAR, how=TRACING)
    check(lambda rows, h, w, t: (rows(h, w, t)[0].sort()[0] ** 2).sum(), Reason.NOT_LINEAR, how=TRACING)


def test_function_of_argmax_recomputes():
    def loss(rows, h, w, t):
        if rows is reference:
            wrong = F.linear(h, w).argmax(-1) != t
            return (rows(h, w, t)[0] * wrong).sum()
        nll, *_, argmax = row_stats(h, w, t, want=(False, False, True))
        return (nll * (argmax != t)).sum()

    check(loss, Reason.OWN_OUTPUT, how=TRACING)


def test_program_with_dynamic_shapes():
    """One compilation serves every B and T; advantages [B, 1] are expanded to shapes that only the graph knows."""

    def loss(rows, h, w, t, advantages):
        B, T, _ = h.shape
        labels = t[:, 1:]
        nll = rows(h[:, :-1].reshape(-1, H), w, labels.reshape(-1))[0].view(B, T - 1)
        ratio = torch.exp(nll.detach() - nll)
        mask = labels != -100
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return ((nll / T) ** 2 * B - gain).mul(mask).sum() / mask.sum()

    _, w, _ = inputs()
    with fresh(), decisions() as log, executions() as ran:
        compiled = torch.compile(lambda *xs: loss(fused, *xs), **INDUCTOR)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for B, T in ((6, 8), (5, 7), (2, 19)):
                h, _, t = inputs(n=B * T)
                leaves = (h.detach().view(B, T, H).requires_grad_(), w, t.view(B, T), torch.randn(B, 1))
                for x in (leaves[0], leaves[2]):
                    torch._dynamo.mark_dynamic(x, 0)
                    torch._dynamo.mark_dynamic(x, 1)
                torch._dynamo.mark_dynamic(leaves[3], 0)
                exact = [double(x) for x in leaves]
                actual = gradients(compiled(*leaves), leaves, 0.7)
                expected = gradients(loss(reference, *exact), exact, 0.7)
                for a, e in zip([*actual[0], *actual[1]], [*expected[0], *expected[1]], strict=True):
                    close(a, e, 1e-5)
    assert set(log) == {None}
    assert ran == ["program"] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", [TRACING, INDUCTOR], ids=["tracing", "inductor"])
def test_program_on_a_card(how):
    """The Triton kernels, and a factor that is one number on the CPU."""
    factor, old = torch.tensor(0.3), OLD.cuda()

    def loss(rows, h, w, t):
        nll, lse, zsum, pz = rows(h, w, t, more=True)
        ratio = torch.exp(factor * (old.to(nll.dtype) - nll))
        return (torch.min(ratio, ratio.clamp(0.8, 1.2)) + (lse - pz) ** 2 + (zsum / V) * nll * (t != -100)).mean()

    leaves = tuple(x.detach().cuda().requires_grad_(x.requires_grad) for x in inputs())
    _, ran = check(loss, None, leaves=leaves, how=how)
    assert ran == ["program"]


def texts(loss, leaves):
    found = {}

    def spy(text, parse=runtime.RowProgram.parse):
        found[text] = None  # read when the op is traced, and again when it runs
        return parse(text)

    with fresh(), mock.patch.object(runtime.RowProgram, "parse", spy):
        torch.compile(lambda *xs: loss(fused, *xs), **TRACING)(*leaves)
    return list(found)


def test_program_text():
    (text,) = texts(z_loss, inputs())
    assert_expected_inline(
        text,
        """\
{'steps': [['add', ['r', 1], ['r', 2]], ['pow', ['r', 7], 1.0], ['mul', ['r', 8], 2.0], ['mul', ['r', 6], ['r', 9]]], \
'cotangents': [5, 10, null, null]}""",
    )


@pytest.mark.parametrize("loss", [ppo, operators])
def test_program_text_is_a_function_of_the_graph(loss):
    """The text is part of the keys of Inductor's caches. Names in the graph, which differ below, have no part in it."""
    h, w, t = inputs()

    def with_more(rows, h, w, t, x):
        return loss(rows, h.sin() * x.exp(), w, t)

    (text,) = texts(loss, (h, w, t))
    assert texts(loss, (h, w, t)) == texts(with_more, (h, w, t, torch.rand(()))) == [text]
    parsed = runtime.RowProgram.parse(text)
    assert parsed.text() == text
    assert {step[0] for step in parsed.steps} <= {*runtime.ROW_OPS, "to"}


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


def chunks(rows, h, w, t, size=13):
    return [rows(hc, w, tc) for hc, tc in zip(h.split(size), t.split(size), strict=True)]


def test_sites_with_one_program_are_merged():
    weights = torch.rand(N)

    def loss(rows, h, w, t):
        parts = zip(chunks(rows, h, w, t), weights.split(13), (0.5, 1, 2, 3), strict=True)
        return sum((c * v * nll**2 + lse**2).sum() for (nll, lse), v, c in parts) / (t != -100).sum()

    _, ran = check(loss, *[None] * 4, how=TRACING)
    assert ran == ["program"]


def test_sites_with_one_program_where_one_needs_the_others_loss():
    def loss(rows, h, w, t):
        a, _ = rows(h, w, t)
        b, _ = rows(h * 0.5, w, t)
        return (a**2 * OLD).mean() + (b**2 * a.detach()).mean()

    _, ran = check(loss, None, Reason.SHARED_WEIGHT, how=TRACING)
    assert sorted(ran) == ["backward", "program", "stats"]


def test_sites_with_different_programs_are_not_merged():
    def loss(rows, h, w, t):
        (a, _), (b, _), (c, _), (d, _) = chunks(rows, h, w, t)
        return (a**2).sum() + (b**3).sum() + c.sum() + (d.half() ** 2).sum()

    _, ran = check(loss, None, *[Reason.SHARED_WEIGHT] * 3, how=TRACING, rtol=1e-3)
    assert sorted(ran) == ["backward"] * 3 + ["program"] + ["stats"] * 3


def test_sites_where_a_program_needs_the_others_loss():
    """Known before it, as from a reference model, or computed by the same loss from what the program computes."""
    h, w, t = inputs()
    w2 = torch.randn(V, H, requires_grad=True)

    def loss(rows, h, w, t, w2):
        policy, _ = rows(h, w, t)
        other, _ = rows(h * 0.5, w2, t)
        gap = policy - other.detach()
        return (gap.exp() - gap).mean() + other.mean()

    _, ran = check(loss, None, None, leaves=(h, w, t, w2), how=TRACING)
    assert sorted(ran) == ["program", "with_grads"]

    def both(rows, h, w, t, w2):
        a, _ = rows(h, w, t)
        b, _ = rows(h * 0.5, w2, t)
        return ((a - b) ** 2).mean()

    _, ran = check(both, None, Reason.OWN_OUTPUT, leaves=(h, w, t, w2), how=TRACING)
    assert sorted(ran) == ["backward", "program", "stats"]


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
            nll = row_stats(h * 2, w, t, ignore_index=3)[0]
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
        return checkpoint(lambda h, w, t: normalised(rows, h.sin(), w, t), h, w, t, use_reentrant=False)

    check(loss, Reason.OWN_OUTPUT)


def test_checkpointed_head_with_a_program():
    def loss(rows, h, w, t):
        return checkpoint(lambda h, w, t: squared(rows, h.sin(), w, t), h, w, t, use_reentrant=False)

    _, ran = check(loss, None)
    assert ran == ["program"]


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
    [(mean, 6), (squared, 6), (normalised, 8), (lambda *a: mean(*a) + 0.5 * mean(*a), 12)],
    ids=["mean", "nll**2", "normalised", "merged"],
)
def test_cost(loss, nvh):
    """6 NVH when hoisted, forward and backward together, 8 when not; merged sites do their own rows only. Without
    skipping rows: what that saves has tests of its own."""
    h, w, t = inputs()
    products = Products()
    run = runtime.run

    def counted(*args, **kwargs):
        with products:
            return run(*args, **kwargs)

    keys = {**INDUCTOR["options"], "flce_inductor.skip_ignored": False}
    with fresh(), mock.patch.object(runtime, "run", counted):
        torch.compile(lambda *xs: loss(fused, *xs), backend="inductor", options=keys)(h, w, t).backward()
    assert products.flops == nvh * N * V * H


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_scales_in_place(dtype):
    """The forward computes the gradients; the backward multiplies them in the buffers that hold them."""
    h, w, t = inputs(dtype)
    with fresh():
        compiled = torch.compile(lambda *xs: mean(fused, *xs), **INDUCTOR)
        _, (forward, backward) = run_and_get_code(lambda: compiled(h, w, t).backward())
    assert "flce_inductor.run_" in forward and "flce_inductor.run_" not in backward
    assert "flce_inductor.scale_" in backward
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
%0 = count_rows(primals_3, -100)
%1 = aten.full([], 1, dtype=torch.float32)
%2 = aten.ne.Scalar(primals_3, -100)
%3 = aten.sum(%2)
%4 = aten.div.Tensor(%1, %3)
%5 = aten.expand(%4, [48])
%6 = row_stats_with_grads(primals_1, primals_2, primals_3, None, None, %5, None, None, None, [], , -100, 16, auto, , \
1.0, 0.0, 1.0, [False, False, False], [True, True, False], False, library, %0)
%7 = getitem(%6, 0)
%8 = aten.sum(%7)
%9 = getitem(%6, 6)
%10 = getitem(%6, 7)
%11 = getitem(%6, 9)
%12 = aten.div.Tensor(%8, %3)
%13 = aten.mul.Tensor(%11, tangents_1)
%14 = scale(%9, %13)
%15 = scale(%10, %13)
%16 = output([%12, %14, %15, None])""",
    )


def test_counters_and_report(caplog):
    h, w, t = inputs()
    with fresh():
        with caplog.at_level(logging.INFO, logger="flce_inductor"):
            torch.compile(lambda *xs: mean(fused, *xs), **TRACING)(h, w, t)
            torch.compile(lambda *xs: normalised(fused, *xs), **TRACING)(h, w, t)
        assert counters["inductor"]["flce_hoisted"] == 1
        assert counters["inductor"]["flce_recomputed"] == 1
    assert any(f"{__file__}" in m and "in the forward" in m for m in caplog.messages)
    assert any(f"{__file__}" in m and f"{Reason.OWN_OUTPUT.text} (aten.max" in m for m in caplog.messages)


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
    lambda x: x * x.detach().mean(),
    lambda x: x * (1 + x.square().sum()),
    lambda x: x * x.flatten()[0].detach(),
    lambda x: x / (1 + x.detach().norm()),
    lambda x: x * x.detach().flatten().cumsum(0).view_as(x),
]


def chain(seed, curved):
    """A random chain of linear maps from nll (and lse) to one number; curved: with one that isn't linear among them,
    nor a function of one row."""
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


@pytest.mark.parametrize("seed", range(48))
def test_random_linear(seed):
    check(chain(seed, curved=False), None, how=TRACING, rtol=2e-5)


@pytest.mark.parametrize("seed", range(24))
def test_random_nonlinear(seed):
    _, ran = check(chain(seed, curved=True), Reason.OWN_OUTPUT, how=TRACING, rtol=2e-4)
    assert ran == ["stats", "backward"]


def row_functions(choose, g):
    """Elementwise functions with bounded values and derivatives, of one or two tensors of one shape."""
    v, u, sequence = torch.rand(N, generator=g) + 0.5, torch.rand(N, generator=g), torch.rand(ROWS, 1, generator=g)
    c, m = choose.uniform(-2, 2), u < 0.7

    def over(x, constant):
        return constant.to(x.dtype).view(x.shape)

    def for_each_sequence(x):
        return (x.view(ROWS, COLUMNS) * sequence.to(x.dtype) + torch.arange(COLUMNS) / N).view(x.shape)

    one = {
        "tanh": torch.tanh,
        "sigmoid": lambda x: torch.sigmoid(x - c),
        "exp": lambda x: torch.exp(-x.abs()),
        "log": lambda x: torch.log(1.5 + x.square()),
        "log1p": lambda x: torch.log1p(x.abs()),
        "sqrt": lambda x: torch.sqrt(x * x + 1),
        "reciprocal": lambda x: 1 / (1.5 + torch.abs(x)),
        "power": lambda x: (1 + x.abs()) ** choose_power,
        "softplus": F.softplus,
        "silu": F.silu,
        "clamp": lambda x: x.clamp(-abs(c), 2.2),
        "relu": lambda x: F.relu(x - c),
        "detached": lambda x: x * torch.exp(-x.square()).detach(),
        "scale": lambda x: c * x,
        "shift": lambda x: c - x,
        "vector": lambda x: over(x, v) * x,
        "divide": lambda x: x / over(x, v),
        "mask": lambda x: x * over(m, m).view(x.shape),
        "where": lambda x: torch.where(m.view(x.shape), x, c),
        "fill": lambda x: x.masked_fill(m.view(x.shape), 0.0),
        "sequence": for_each_sequence,
        "reshape": lambda x: x.reshape(choose_shape),
        "unsqueeze": lambda x: x.unsqueeze(0).squeeze(),
        "cast": lambda x: x.double(),
    }
    two = {
        "add": lambda x, y: torch.add(x, y, alpha=c),
        "difference": lambda x, y: x - y,
        "product": lambda x, y: x * y.tanh(),
        "ratio": lambda x, y: x / (1.5 + y.abs()),
        # x and y may be equal but for rounding
        "minimum": lambda x, y: torch.minimum(x, 1.01 * y - 0.013),
        "maximum": lambda x, y: torch.maximum(x, 1.01 * y - 0.013),
        "choice": lambda x, y: torch.where(x.detach() < 1.01 * y - 0.013, x, y.square().tanh()),
        "clipped": lambda x, y: torch.minimum(x, y.detach() + 0.1),
    }
    choose_power = choose.choice([0.5, 1.5, 2, -1])
    choose_shape = choose.choice([(N,), (ROWS, COLUMNS), (1, COLUMNS, ROWS), (N, 1)])
    return one, two


def row_program(seed):
    """A random elementwise function of nll and lse, reduced to one number with weights, a mask or 1 / n_valid."""
    choose, g = random.Random(seed), torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(choose.randint(2, 7)):
        one, two = row_functions(choose, g)
        name = choose.choice([*one, *two, *two])
        steps.append((one[name], None) if name in one else (two[name], choose.randint(0, 9)))
    v, m = torch.rand(N, generator=g), torch.rand(N, generator=g) < 0.7
    end = choose.choice(
        [
            lambda x, t: x.sum() / (t != -100).sum(),
            lambda x, t: x.mean(),
            lambda x, t: (x * m).sum() / m.sum(),
            lambda x, t: x @ v.to(x.dtype),
            lambda x, t: torch.where(t != -100, x, 0.0).sum() / N,
        ]
    )

    def loss(rows, h, w, t):
        nll, lse = rows(h, w, t)
        values = [lse, nll, nll * lse / 4]  # the last makes it a program whatever follows
        for f, other in steps:
            x = values[-1]
            values.append(f(x) if other is None else f(x, values[other % len(values)].view(x.shape)))
        return end(values[-1].reshape(-1) + values[2], t)

    return loss


@pytest.mark.parametrize("block", range(8))
def test_random_programs(block):
    """Five in one graph, each over its own weight."""
    losses = [row_program(5 * block + i) for i in range(5)]
    h, w, t = inputs(seed=block)
    weights = [(w + 0.1 * i).detach().requires_grad_() for i in range(5)]

    def loss(rows, h, t, *ws):
        return sum(f(rows, h, w, t) for f, w in zip(losses, ws, strict=True))

    _, ran = check(loss, *[None] * 5, leaves=(h, t, *weights), how=TRACING, rtol=1e-4)
    assert ran == ["program"] * 5
