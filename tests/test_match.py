"""Which spellings of head and loss are rewritten, that loss and gradients are right, and which graphs are left alone.

The reference is always the same function in float64 eager mode (util.check). Programs take hidden states h [B, T, H],
a weight w [V, H], a bias b [V] and labels t [B, T], unless they say else.
"""

import collections
import inspect
import logging
import random
from unittest import mock

import flce_inductor
import pytest
import torch
import torch.nn.functional as F
import util
from expecttest import assert_expected_inline
from flce_inductor import match, runtime
from flce_inductor.explain import Reason
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from util import INDUCTOR, TRACING, assert_same, check, compiled, eager, fresh

B, T, H, V = 2, 4, 5, 11
CE, linear = F.cross_entropy, F.linear


def data(dtype=torch.float32, batch=B, time=T, grad=True, seed=0):
    """h, w, b, t with a quarter of the labels ignored."""
    g = torch.Generator().manual_seed(seed)
    h, w, b = (torch.randn(*shape, generator=g).to(dtype) for shape in ((batch, time, H), (V, H), (V,)))
    t = torch.randint(0, V, (batch, time), generator=g)
    t[:, ::4] = -100
    return (*(x.requires_grad_(grad) for x in (h, w, b)), t)


def flat(z):
    return z.view(-1, V)


def by_name(*functions):
    """Parametrise over functions, each named for what it spells."""
    return pytest.mark.parametrize("fn", [pytest.param(f, id=f.__name__) for f in functions])


def programs(text):
    """Functions (h, w, b, t) from lines of expressions; a line `a; b; c` has statements before its result."""
    made = []
    for line in filter(None, map(str.strip, text.splitlines())):
        *before, result = [part.strip() for part in line.split(";")]
        body = "\n    ".join([*before, f"return {result}"])
        scope = dict(globals())
        exec(compile(f"def fn(h, w, b, t):\n    {body}\n", "<program>", "exec"), scope)
        scope["fn"].losses = line.count("CE(") + line.count("CrossEntropyLoss(")
        made.append(pytest.param(scope["fn"], id=line))
    return made


# ---------------------------------------------------------------- the loss's arguments

ARGUMENTS = programs("""
    CE(flat(linear(h, w)), t.view(-1))
    CE(input=flat(linear(h, w)), target=t.view(-1))
    CE(target=t.view(-1), input=flat(linear(h, w)))
    CE(flat(linear(h, w)), target=t.view(-1), reduction="sum")
    CE(flat(linear(h, w)), t.view(-1), None, None, -100, None, "mean", 0.0)
    CE(flat(linear(h, w)), t.view(-1), None, None, -100, None, "sum", 0.0)
    CE(flat(linear(h, w)), t.view(-1), None, reduction="none")
    CE(flat(linear(h, w)), t.view(-1), weight=None, size_average=None, reduce=None, label_smoothing=0.0)
    CE(flat(linear(h, w)), t.view(-1).clamp(min=-1), ignore_index=-1)
    CE(flat(linear(h, w)), t.view(-1).clamp(min=0), ignore_index=3)
    CE(flat(linear(h, w)), t.view(-1).clamp(min=0), ignore_index=0, reduction="none")
    CE(flat(linear(h, w)), t.view(-1).clamp(min=0))
    CE(flat(linear(h, w)), t.view(-1).clamp(min=0), ignore_index=V + 5, reduction="sum")
    CE(flat(linear(h, w)), t.view(-1).masked_fill(t.view(-1) < 0, 500), ignore_index=500)
    nn.CrossEntropyLoss()(flat(linear(h, w)), t.view(-1))
    nn.CrossEntropyLoss(ignore_index=-1, reduction="none")(flat(linear(h, w)), t.view(-1).clamp(min=-1))
    CE(flat(linear(h, w)), t.view(-1), reduction="none").view(B, T).sum(1) / 3
    CE(flat(linear(h, w)), t.view(-1), reduction="sum") / (t != -100).sum()
    l = CE(flat(linear(h, w)), t.view(-1), reduction="none"); l *= 2; l[0] = 3; l
    l = CE(flat(linear(h, w)), t.view(-1)); l += h.sum(); l
    CE(flat(linear(h, w)), torch.full_like(t, -100).view(-1))
    CE(flat(linear(h, w)), torch.full_like(t, -100).view(-1), reduction="sum")
    CE(flat(linear(h[:0], w)), t[:0].view(-1))
    CE(flat(linear(h[:0], w)), t[:0].view(-1), reduction="sum") + w.sum()
    CE(flat(linear(h[:0], w)), t[:0].view(-1), reduction="none")
""")


@pytest.mark.parametrize("fn", ARGUMENTS)
def test_arguments(fn):
    check(fn, *data(), reasons=[None] * fn.losses)


def test_all_ignored_gives_nan_and_zero_gradients():
    h, w, b, _ = data()
    t = torch.full((B, T), -100)
    got = check(lambda h, w, b, t: CE(flat(linear(h, w, b)), t.view(-1)), h, w, b, t)
    assert got.outputs[0].isnan()
    assert all((g == 0).all() for g in got.grads)


class Model(nn.Module):
    def __init__(self, bias=False, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, H)
        self.body = nn.Linear(H, H)
        self.head = nn.Linear(H, V, bias=bias)
        self.criterion = nn.CrossEntropyLoss()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, t):
        logits = self.head(self.body(self.embed(ids)).tanh())
        return self.criterion(logits.view(-1, V), t.view(-1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", ["", "head", "body", "embed"])
def test_modules(bias, tied, frozen):
    model = Model(bias, tied)
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or not name.startswith(frozen))
    t = data()[-1]
    got = check(lambda model, ids, t: model(ids, t), model, t.clamp(min=0), t)
    assert all(g is not None for g in got.grads)


@pytest.mark.parametrize("trained", ["h", "w", "b"])
def test_only_the_gradients_that_are_needed(trained):
    args = data(grad=False)
    dict(zip("hwb", args, strict=False))[trained].requires_grad_()
    with mock.patch.object(runtime, "run", wraps=runtime.run) as run:
        check(lambda h, w, b, t: CE(flat(linear(h, w, b)), t.view(-1)), *args)
    wanted = [tuple(call.kwargs["needs"]) for call in run.call_args_list if "needs" in call.kwargs]
    assert wanted == [tuple(name == trained for name in "hwb")]


# ---------------------------------------------------------------- heads

HEADS = programs("""
    CE(flat(linear(h, w, b)), t.view(-1))
    CE(flat(linear(h, weight=w)), t.view(-1))
    CE(flat(linear(input=h, weight=w, bias=b)), t.view(-1))
    CE(flat(linear(h, w, bias=None)), t.view(-1))
    CE(flat(h @ w.t()), t.view(-1))
    CE(flat(h @ w.T), t.view(-1))
    CE(flat(h @ w.mT), t.view(-1))
    CE(flat(torch.matmul(h, w.transpose(0, 1))), t.view(-1))
    CE(flat(torch.matmul(h, torch.transpose(w, 1, 0))), t.view(-1))
    CE(flat(torch.matmul(input=h, other=torch.t(w))), t.view(-1))
    CE(flat(h.matmul(w.transpose(-1, -2))), t.view(-1))
    CE(flat(h.matmul(w.permute(1, 0))), t.view(-1))
    CE(flat(h.matmul(w.permute(0, 1).t())), t.view(-1))
    CE(flat(h.matmul(w.swapaxes(0, 1))), t.view(-1))
    CE(flat(h.matmul(w.transpose(0, 0).t())), t.view(-1))
    CE(flat(h.matmul(w.t().t().t())), t.view(-1))
    CE(flat(h.matmul(w.transpose(dim0=0, dim1=1))), t.view(-1))
    CE(torch.mm(h.view(-1, H), w.t()), t.view(-1))
    CE(h.view(-1, H).mm(w.T), t.view(-1))
    CE(flat(linear(h, w.t().contiguous().t())), t.view(-1))
    CE(flat(h @ w.t().contiguous()), t.view(-1))
    CE(flat(linear(h.view(1, B, T, H), w)), t.view(-1))
    CE(flat(linear(h.transpose(0, 1), w).transpose(0, 1).contiguous()), t.view(-1))
    CE(flat(linear(h[:, :1].expand(B, T, H), w)), t.view(-1))
    CE(linear(h[:, ::2].transpose(0, 1).reshape(-1, H), w), t[:, ::2].t().reshape(-1))
    CE(linear(h.view(-1, H).t().contiguous().t(), w), t.view(-1))
    CE(linear(h.view(-1, H), torch.cat([w, w])[:V]), t.view(-1))
    CE(linear(h[:, 0], w[:3], b[:3]), t[:, 1] % 3)
    CE(linear(h[:, 0], w[:1], b[:1]), t[:, 0] * 0)
    CE(linear(h.view(-1, H), w[:H]), t.view(-1).clamp(max=H - 1))
    CE(h.view(-1, H) @ w[:H], t.view(-1).clamp(max=H - 1))
    CE(h.view(-1, H) @ w[:H].T, t.view(-1).clamp(max=H - 1))
    CE(linear(h[0], h[0]), t[0] % T)
    CE(linear(h[:, 0] * 1, w * 2), t[:, 1]) + CE(linear(h[:, 1], w[:4]), t[:, 1] % 4)
""")


@pytest.mark.parametrize("fn", HEADS)
def test_heads(fn):
    check(fn, *data(), reasons=[None] * fn.losses)


# ---------------------------------------------------------------- links between head and loss

LINKS = programs("""
    CE(linear(h, w).view(-1, V), t.view(-1))
    CE(linear(h, w).view((B * T, -1)), t.view(-1))
    CE(linear(h, w).reshape(B * T, V), t.view(-1))
    CE(torch.reshape(linear(h, w), (-1, V)), t.view(-1))
    CE(linear(h, w).flatten(0, 1), t.flatten())
    CE(linear(h, w).flatten(end_dim=-2), t.flatten())
    CE(torch.flatten(linear(h, w), 0, 1), t.flatten())
    CE(linear(h, w).view(B, 2, 2, V).flatten(0, 2), t.flatten())
    CE(linear(h, w).view(T, B, V).view(-1, V), t.view(-1))
    CE(linear(h, w).float().view(-1, V).contiguous(), t.view(-1))
    CE(linear(h, w).to(torch.float32).to(dtype=torch.float32).type(torch.float32).view(-1, V), t.view(-1))
    CE(linear(h, w).type_as(h).to(h).view(-1, V), t.view(-1))
    CE(linear(h, w)[..., :-1, :].contiguous().view(-1, V), t[..., 1:].contiguous().view(-1))
    CE(linear(h, w)[:, 1:].reshape(-1, V), t[:, :-1].reshape(-1))
    CE(linear(h, w)[:, :-1, :].reshape(-1, V), t[:, 1:].reshape(-1))
    CE(linear(h, w)[:, 1::2].reshape(-1, V), t[:, 1::2].reshape(-1))
    CE(linear(h, w)[0], t[0])
    CE(linear(h, w)[:, -1], t[:, -1])
    CE(linear(h, w)[:, -1, :], t[:, -1])
    CE(linear(h, w)[:, -1:].squeeze(1), t[:, -1])
    CE(linear(h, w)[None, 0, ..., :].squeeze(0), t[0])
    CE(linear(h, w)[..., None, :, :].reshape(-1, V), t.reshape(-1))
    CE(linear(h, w)[1, ...], t[1])
    CE(linear(h, w).view(-1, V), F.pad(t, (0, 1), value=-100)[..., 1:].contiguous().view(-1))
    CE(linear(h, w).transpose(0, 1).reshape(-1, V), t.t().reshape(-1))
    CE(linear(h, w).transpose(0, 1).contiguous().view(-1, V), t.t().contiguous().view(-1))
    CE(linear(h, w).permute(1, 0, 2).reshape(-1, V), t.t().reshape(-1))
    CE(linear(h, w).permute((1, 0, -1)).reshape(-1, V), t.t().reshape(-1))
    CE(linear(h, w).swapaxes(-2, -3).reshape(-1, V), t.t().reshape(-1))
    CE(linear(h, w).unsqueeze(0).squeeze(0).view(-1, V), t.view(-1))
    CE(linear(h, w).unsqueeze(-2).squeeze(2).view(-1, V), t.view(-1))
    CE(torch.unsqueeze(linear(h, w), dim=1).reshape(-1, V), t.view(-1))
    CE(linear(h, w).narrow(1, 1, 2).reshape(-1, V), t[:, 1:3].reshape(-1))
    CE(linear(h, w).narrow(dim=1, start=1, length=2).reshape(-1, V), t[:, 1:3].reshape(-1))
    CE(linear(h, w).select(1, 2), t[:, 2])
    CE(torch.select(linear(h, w), 0, -1), t[-1])
    z = linear(h, w); CE(z.view(z.size(0) * z.size(1), z.size(-1)), t.view(-1))
    z = linear(h, w); CE(z.view(-1, z.shape[2]), t.view(-1)) * z.numel() / len(z)
    CE(linear(h[:1, :1], w).flatten(0, 2).unsqueeze(0), t[0, 1:2])
""")


@pytest.mark.parametrize("fn", LINKS)
def test_links(fn):
    check(fn, *data(), reasons=None)


# ---------------------------------------------------------------- dtypes

UPCASTS = programs("""
    CE(flat(linear(h, w, b)), t.view(-1))
    CE(flat(linear(h, w, b).float()), t.view(-1))
    CE(flat(linear(h, w, b)).to(torch.float32), t.view(-1), reduction="sum")
    CE(flat(linear(h, w, b)), t.view(-1), reduction="none")
""")


def assert_as_good_as_eager(fn, args, actual, dtype):
    """The error against float64 is at most twice that of eager mode in the dtype, plus one rounding."""
    expected, plain = eager(fn, *args), eager(fn, *args, dtype=None)
    eps = torch.finfo(dtype).eps
    runs = ([*run.outputs, *run.grads] for run in (actual, expected, plain))
    for a, e, p in zip(*runs, strict=True):
        if p is None:
            assert a is None
            continue
        assert a.dtype == p.dtype
        allowed = 2 * (p.double() - e).abs().max() + 2 * eps * e.abs().max()
        assert (a.double() - e).abs().max() <= allowed


@pytest.mark.parametrize("fn", UPCASTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(fn, dtype):
    args = data(dtype)
    with fresh():
        actual = compiled(fn, *args)
    casts = {"float", "float32"} & {*fn.__code__.co_names}
    assert actual.reasons == [Reason.LINK if dtype == torch.float64 and casts else None]
    assert_as_good_as_eager(fn, args, actual, torch.float32 if casts else dtype)


def autocast(dtype, enabled=True):
    return torch.autocast("cpu", dtype, enabled)


def autocast_loss_inside(h, w, b, t):
    with autocast(torch.bfloat16):
        return CE(flat(linear(h, w, b)), t.view(-1))


def autocast_loss_outside(h, w, b, t):
    with autocast(torch.bfloat16):
        z = linear(h, w, b)
    return CE(flat(z), t.view(-1))


def autocast_upcast(h, w, b, t):
    with autocast(torch.bfloat16):
        z = linear(h, w, b).float()
    return CE(flat(z), t.view(-1), reduction="sum")


def autocast_fp16_matmul(h, w, b, t):
    with autocast(torch.float16):
        return CE(flat(h.tanh() @ w.t()), t.view(-1))


def cast_by_hand(h, w, b, t):
    z = linear(h.bfloat16(), w.bfloat16(), b.to(torch.bfloat16))
    return CE(flat(z).float(), t.view(-1))


def transposed_cast_by_hand(h, w, b, t):
    return CE(flat(h.half() @ w.t().half()).float(), t.view(-1))


def autocast_switched_off(h, w, b, t):
    with autocast(torch.bfloat16):
        x = linear(h, w[:H])
        with autocast(torch.bfloat16, False):
            z = linear(x.to(w.dtype), w, b)
        return CE(flat(z), t.view(-1))


@by_name(
    autocast_loss_inside,
    autocast_loss_outside,
    autocast_upcast,
    autocast_fp16_matmul,
    cast_by_hand,
    transposed_cast_by_hand,
    autocast_switched_off,
)
def test_autocast_inside(fn):
    args = data()
    with fresh():
        actual = compiled(fn, *args)
    assert actual.reasons == [None]
    assert {g.dtype for g in actual.grads if g is not None} == {torch.float32}
    assert_as_good_as_eager(fn, args, actual, torch.float16 if "half" in fn.__code__.co_names else torch.bfloat16)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_outside(reduction):
    def fn(h, w, b, t):
        return CE(flat(linear(h, w, b)), t.view(-1), reduction=reduction)

    args = data()
    with fresh(), autocast(torch.bfloat16):
        actual = compiled(fn, *args)
        assert actual.reasons == [None]
        assert {g.dtype for g in actual.grads} == {torch.float32}
        assert_as_good_as_eager(fn, args, actual, torch.bfloat16)


# ---------------------------------------------------------------- dynamic shapes

DYNAMIC = programs("""
    CE(linear(h, w).view(-1, V), t.view(-1))
    z = linear(h, w); CE(z.view(-1, z.size(-1)), t.view(-1), reduction="sum") / t.numel()
    z = linear(h, w, b); CE(z.view(z.size(0) * z.size(1), z.size(2)), t.view(-1)) / z.size(1)
    z = h @ w.t(); m, n, v = z.shape; CE(z.reshape(m * n, v), t.view(-1)) * z.numel()
    z = linear(h, w); CE(z[:, :-1].contiguous().view(-1, z.shape[-1]), t[:, 1:].reshape(-1))
    z = linear(h, w)[..., :-1, :].contiguous(); CE(z.view(-1, z.size(-1)), t[..., 1:].contiguous().view(-1))
    z = linear(h[:, 1:], w); CE(z.reshape(z.size(0) * z.size(1), -1), t[:, 1:].reshape(-1), reduction="none")
    z = linear(h, w).transpose(0, 1); CE(z.reshape(z.size(0) * z.size(1), V), t.t().reshape(-1))
    CE(linear(h, w)[:, -1], t[:, -1])
    CE(linear(h, w).narrow(1, 0, h.size(1) - 1).flatten(0, 1), t[:, :-1].flatten())
    CE(linear(h, w).flatten(0, 1)[h.size(0) :], t.flatten()[h.size(0) :])
""")


@pytest.mark.parametrize("marked", ["batch", "time", "automatic"])
@pytest.mark.parametrize("fn", DYNAMIC)
def test_dynamic_shapes(fn, marked):
    counter = util.CompileCounterWithBackend(TRACING)
    sizes = {"batch": [(2, 4), (3, 4), (5, 4)], "time": [(2, 4), (2, 7), (2, 3)]}.get(marked, [(2, 4), (3, 5), (5, 7)])
    with fresh():
        step = torch.compile(fn, backend=counter, fullgraph=True)
        for batch, time in sizes:
            h, w, b, t = data(batch=batch, time=time)
            w, b = nn.Parameter(w.detach()), nn.Parameter(b.detach())
            if marked != "automatic":
                for x in (h, t):
                    torch._dynamo.mark_dynamic(x, 0 if marked == "batch" else 1)
            with util.collect() as sites:
                actual = util.outcome_of(step, (h, w, b, t))
            assert {site.reason for site in sites} <= {None}
            assert_same(actual, eager(fn, h, w, b, t))
        assert counter.frame_count == (2 if marked == "automatic" else 1)


def test_rows_that_only_the_data_decides():
    def fn(h, w, b, t):
        valid = t != -100
        z = linear(h[valid], w)
        return CE(z.view(z.size(0), -1), t[valid])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = check(fn, *data())
    assert got.sites[0].logits_bytes is None


def test_dynamic_vocabulary_is_left_alone():
    def fn(h, w, b, t):
        return CE(linear(h, w).flatten(0, 1), t.view(-1))

    check(fn, *data(), reasons=Reason.UNKNOWN_SHAPE, dynamic=True)


# ---------------------------------------------------------------- modes


def fused_calls(run):
    """For each call of the chunk loop whether it computed gradients."""
    return [any(call.kwargs.get("needs", (False,))) for call in run.call_args_list]


def head_and_loss(h, w, b, t):
    return CE(linear(h, w, b), t)


def head_and_loss_inside(mode):
    def fn(h, w, b, t):
        with mode():
            return CE(linear(h, w, b), t)

    return fn


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inside", [True, False])
def test_without_gradients_only_statistics_are_computed(mode, inside):
    # rows are flat outside of the function: stock compile fails for views in inference_mode
    h, w, b, t = data()
    args = (h.detach().view(-1, H).requires_grad_(), w, b, t.view(-1))
    with mock.patch.object(runtime, "run", wraps=runtime.run) as run:
        if inside:
            check(head_and_loss_inside(mode), *args)
        else:
            with mode():
                check(head_and_loss, *args)
    assert fused_calls(run) == [False]


def loss_without_gradients(h, w, b, t):
    z = linear(h, w)
    with torch.no_grad():
        return CE(flat(z), t.view(-1)) + 1


def gradients_switched_on_inside(h, w, b, t):
    with torch.no_grad(), torch.enable_grad():
        return CE(flat(linear(h, w)), t.view(-1))


@by_name(loss_without_gradients, gradients_switched_on_inside)
def test_modes_that_are_rewritten(fn):
    check(fn, *data())


def head_without_gradients(h, w, b, t):
    with torch.no_grad():
        z = linear(h, w)
    return CE(flat(z), t.view(-1)) * h.sum()


def head_in_inference_mode(h, w, b, t):
    with torch.inference_mode():
        z = linear(h, w)
    return CE(z.flatten(0, 1), t.view(-1)) * h.sum()


def only_the_loss_with_gradients(h, w, b, t):
    with torch.no_grad():
        z = linear(h, w)
        with torch.enable_grad():
            return CE(flat(z), t.view(-1))


def decorated_head(h, w, b, t):
    return CE(flat(torch.no_grad()(lambda: linear(h, w))()), t.view(-1)) * w.sum()


@by_name(head_without_gradients, head_in_inference_mode, only_the_loss_with_gradients, decorated_head)
@pytest.mark.parametrize("outside", [torch.enable_grad, torch.no_grad])
def test_head_without_gradients_is_left_alone(fn, outside):
    with outside():
        check(fn, *data(), reasons=Reason.NO_GRAD_HEAD)


# ---------------------------------------------------------------- refusals

OUTSIDE = []
Output = collections.namedtuple("Output", "loss logits")


class Tripled(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * 3


READERS = programs("""
    z = flat(linear(h, w)); CE(z, t.view(-1)) + z.topk(2)[0].sum()
    z = flat(linear(h, w)); CE(z, t.view(-1)), z.softmax(-1).max(-1)[0]
    z = flat(linear(h, w)); CE(z, t.view(-1)), z.detach().sort(-1)[0][:, 0]
    z = linear(h, w); CE(flat(z), t.view(-1)) + 1e-4 * (z[0] ** 2).mean()
    z = linear(h, w); y = flat(z); CE(y, t.view(-1)) + z.sin().sum()
    z = linear(h, w); y = z.float(); CE(flat(y), t.view(-1)) + y.sum()
    z = flat(linear(h, w)); CE(z, t.view(-1)) * z.detach().std()
    z = flat(linear(h, w)); torch.autograd.grad(CE(z, t.view(-1)), z)[0]
    z = flat(linear(h, w)); y = torch.zeros_like(z).scatter_(1, t.view(-1, 1).clamp(min=0), 1); CE(z, t.view(-1)) + y.sum()
""")

RETURNED = programs("""
    z = linear(h, w); z, CE(flat(z), t.view(-1))
    z = flat(linear(h, w)); {"loss": CE(z, t.view(-1)), "logits": z}
    z = linear(h, w); y = z.float(); Output(CE(flat(y), t.view(-1)), y)
    z = flat(linear(h, w)); OUTSIDE.append(z); CE(z, t.view(-1))
""")

LINKED = programs("""
    CE(flat(linear(h, w)).detach(), t.view(-1)) + h.sum()
    CE(F.dropout(flat(linear(h, w)), 0.0), t.view(-1))
    CE(flat(linear(h, w).sin()), t.view(-1))
    CE(flat(linear(h, w)).flip(0), t.view(-1))
    CE(flat(linear(h, w)).roll(1, 0), t.view(-1))
    CE(flat(linear(h, w)).roll(1, 1), t.view(-1))
    CE(linear(h, w).view(-1, V).t().reshape(-1, V), t.view(-1))
    CE(linear(h, w).reshape(V, -1).t(), t.view(-1))
    CE(linear(h, torch.cat([w, w])[: 2 * V]).view(-1, V), torch.cat([t, t]).view(-1))
    CE(linear(h, torch.cat([w, w])).view(B, T, 2, V).select(2, 1).reshape(-1, V), t.view(-1))
    CE(linear(h, torch.cat([w, w]))[..., ::2].reshape(-1, V), t.view(-1))
    CE(linear(h, torch.cat([w, w])).unflatten(-1, (2, V)).flatten(0, 2), torch.stack([t, t], -1).flatten())
    CE(linear(h, torch.cat([w, w])).chunk(2, -1)[1].reshape(-1, V), t.view(-1))
    CE(linear(h, w).chunk(2)[0].view(-1, V), t[:1].view(-1))
    CE(linear(h, w)[[0, 1]].view(-1, V), t.view(-1))
    CE(linear(h, w).expand(3, B, T, V).reshape(-1, V), t.expand(3, B, T).reshape(-1))
    CE(linear(h, w).cumsum(1).view(-1, V), t.view(-1))
    CE(flat(linear(h, w)).clamp(-1, 1), t.view(-1))
    CE(Tripled.apply(flat(linear(h, w))), t.view(-1))
    CE(flat(linear(h, w) + linear(h, w)), t.view(-1))
    CE(flat(linear(h, w)).view(torch.int32).view(torch.float32), t.view(-1)) + h.sum()
    CE(torch.matmul(h, torch.stack([w.t()] * B)).view(-1, V), t.view(-1))
    CE(linear(h[0, 0], w).unsqueeze(0), t[0, :1])
    CE(flat(linear(h, w, b[:1])), t.view(-1))
    CE(flat(linear(h, w, b[3])), t.view(-1))
    z = flat(linear(h, w)); z += 1; CE(z, t.view(-1))
    z = flat(linear(h, w)); z.clamp_(-1, 1); CE(z, t.view(-1))
    CE(linear(h[0], h[0]).t(), t[0] % T)
    CE(linear(h[0], h[0]).transpose(0, 1), t[0] % T)
    CE((w @ h.view(-1, H).t()).t(), t.view(-1))
    CE(torch.stack([linear(h[0], h[0])] * T).transpose(0, 2).reshape(-1, T), t.new_zeros(T * T))
    CE(checkpoint(lambda h: flat(linear(h, w)), h, use_reentrant=False), t.view(-1))
""")

def soft_targets(h, w, b, t):
    return CE(flat(linear(h, w)), F.one_hot(t.view(-1).clamp(min=0), V).to(h.dtype))


def class_first(h, w, b, t):
    return CE(linear(h, w).transpose(1, 2), t)


def unbatched(h, w, b, t):
    return CE(linear(h[0, 1], w), t[0, 1])


def size_average(h, w, b, t):
    return CE(flat(linear(h, w)), t.view(-1), None, False)


def reduce(h, w, b, t):
    return nn.CrossEntropyLoss(reduce=False)(flat(linear(h, w)), t.view(-1))


def logits_given(h, w, b, t):
    return CE(h.view(-1, H), t.view(-1) % H) + h.sum()


@pytest.mark.parametrize("fn", READERS)
def test_logits_with_another_reader_are_left_alone(fn):
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        check(fn, *data(), reasons=Reason.READER)


def test_two_losses_over_the_same_logits_are_left_alone():
    def fn(h, w, b, t):
        z = flat(linear(h, w))
        return CE(z, t.view(-1)), CE(z, t.view(-1), reduction="sum")

    check(fn, *data(), reasons=[Reason.READER] * 2)


@pytest.mark.parametrize("fn", RETURNED)
def test_returned_logits_are_left_alone(fn):
    check(fn, *data(), reasons=Reason.RETURNED)
    OUTSIDE.clear()


@pytest.mark.parametrize("fn", LINKED)
def test_unknown_links_are_left_alone(fn):
    check(fn, *data(), reasons=Reason.LINK)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (soft_targets, Reason.CLASS_PROBABILITIES),
        (class_first, Reason.LOGITS_SHAPE),
        (unbatched, Reason.LOGITS_SHAPE),
        (size_average, Reason.LEGACY_REDUCTION),
        (reduce, Reason.LEGACY_REDUCTION),
        (logits_given, Reason.NO_HEAD),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_other_refusals(fn, reason):
    check(fn, *data(), reasons=reason)


# supported one day: change the reason to None here
LATER = [
    (programs("CE(flat(linear(h, w)), t.view(-1), weight=torch.arange(V, dtype=h.dtype))"), Reason.CLASS_WEIGHT),
    (programs("CE(flat(linear(h, w)), t.view(-1), torch.arange(V, dtype=h.dtype))"), Reason.CLASS_WEIGHT),
    (programs("CE(flat(linear(h, w)), t.view(-1), label_smoothing=0.1)"), Reason.LABEL_SMOOTHING),
    (programs("nn.CrossEntropyLoss(label_smoothing=0.1)(flat(linear(h, w)), t.view(-1))"), Reason.LABEL_SMOOTHING),
    (programs("CE(flat(linear(h, w)) + b, t.view(-1))"), Reason.LINK),
    (programs("CE(flat(linear(h, w)) * 2, t.view(-1))"), Reason.LINK),
    (programs("CE(flat(linear(h, w) / 3).tanh() * 3, t.view(-1))"), Reason.LINK),
    (programs("CE(linear(h, torch.cat([w, w]))[..., :V].reshape(-1, V), t.view(-1))"), Reason.LINK),
    (programs("CE(flat(linear(h, w)).log_softmax(-1), t.view(-1))"), Reason.LINK),
    (programs("CE(torch.einsum('bth,vh->btv', h, w).view(-1, V), t.view(-1))"), Reason.LINK),
    (programs("CE(torch.addmm(b, h.view(-1, H), w.t()), t.view(-1))"), Reason.LINK),
    (programs("z = linear(h, w); CE(flat(z), t.view(-1)) + z.argmax(-1).sum()"), Reason.READER),
    (programs("z = linear(h, w); CE(flat(z), t.view(-1)) + 0.1 * z.logsumexp(-1).mean()"), Reason.READER),
]


@pytest.mark.parametrize(("fn", "reason"), [pytest.param(p.values[0], r, id=p.id) for [p], r in LATER])
def test_not_supported_yet(fn, reason):
    check(fn, *data(), reasons=reason)


def test_too_small():
    def fn(h, w, b, t):
        return CE(flat(linear(h, w)), t.view(-1))

    check(fn, *data(), reasons=Reason.TOO_SMALL, keys={"min_logits_bytes": B * T * V * 4 + 1})
    check(fn, *data(), keys={"min_logits_bytes": B * T * V * 4})
    check(fn, *data(), reasons=Reason.TOO_SMALL, keys={"min_logits_bytes": 64 << 20})


def test_int32_labels():
    def fn(h, w, b, t):
        return CE(flat(linear(h, w)), t.view(-1))

    h, w, b, t = data()
    expected = eager(fn, h, w, b, t)
    with fresh():
        actual = compiled(fn, h, w, b, t.int())  # eager mode refuses int32, stock compile takes it
    assert actual.reasons == [Reason.TARGET_DTYPE]
    assert_same(actual, expected)


def test_dtypes_that_the_ops_do_not_take():
    def fn(h, w, b, t):
        return CE(flat(linear(h, w.bfloat16(), b)), t.view(-1))

    h, w, b, t = data()
    with fresh(), autocast(torch.float16):
        actual = compiled(fn, h, w, b, t)
        assert actual.reasons == [Reason.DTYPE]
        assert_as_good_as_eager(fn, (h, w, b, t), actual, torch.bfloat16)


def test_graph_break_between_head_and_loss():
    def fn(h, w, b, t):
        z = flat(linear(h, w))
        torch._dynamo.graph_break()
        return CE(z, t.view(-1))

    check(fn, *data(), reasons=Reason.NO_HEAD, fullgraph=False)


class Renamed(torch.Tensor):
    """A subclass that Dynamo looks through: torch functions mean what they mean for plain tensors."""


class Scaled(torch.Tensor):
    """A subclass for which linear is another function."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 2 if function is torch._C._nn.linear else result


def test_torch_function_subclasses():
    def renamed(h, w, b, t):
        return CE(linear(h.as_subclass(Renamed), w).flatten(0, 1), t.view(-1)).as_subclass(torch.Tensor)

    def scaled(h, w, b, t):
        return CE(linear(h.as_subclass(Scaled), w).flatten(0, 1), t.view(-1)).as_subclass(torch.Tensor)

    check(renamed, *data())
    check(scaled, *data(), reasons=Reason.LINK)


@pytest.mark.parametrize("position", ["h", "w", "b", "t"])
def test_wrapper_subclasses_are_left_alone(position):
    def fn(h, w, b, t):
        return CE(linear(h, w, b).flatten(0, 1), t.view(-1)).sum()

    args = list(data(grad=False))
    i = "hwbt".index(position)
    expected = eager(fn, *args, dtype=None).outputs[0]
    args[i] = TwoTensor(args[i], args[i].clone())
    with fresh(), util.collect() as sites:
        actual = torch.compile(fn, backend=TRACING, fullgraph=True)(*args)
    assert [site.reason for site in sites] == [Reason.SUBCLASS]
    torch.testing.assert_close(actual.a, expected)
    torch.testing.assert_close(actual.b, expected)


# ---------------------------------------------------------------- transforms of torch.func, autograd.Function, hooks

TRANSFORMED = programs("""
    torch.func.grad(lambda h: CE(linear(h, w).flatten(0, 1), t.view(-1)))(h)
    torch.func.grad_and_value(lambda w: CE(linear(h, w).flatten(0, 1), t.view(-1)))(w)
    torch.func.vjp(lambda h: CE(linear(h, w).flatten(0, 1), t.view(-1)), h)[0]
    torch.func.jvp(lambda h: CE(linear(h, w).flatten(0, 1), t.view(-1)), (h,), (torch.ones_like(h),))
    torch.func.jacrev(lambda h: CE(linear(h, w).flatten(0, 1), t.view(-1), reduction="none"))(h)
    torch.vmap(lambda h, t: CE(linear(h, w), t))(h, t)
    torch.vmap(lambda w: CE(linear(h, w).flatten(0, 1), t.view(-1)))(torch.stack([w, w * 2]))
    torch.vmap(lambda t: CE(linear(h, w)[0], t))(t)
    dual_tangent(h, w, t)
""")


def dual_tangent(h, w, t):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(h, torch.ones_like(h))
        loss = CE(linear(dual, w).flatten(0, 1), t.view(-1))
        return torch.autograd.forward_ad.unpack_dual(loss).tangent.detach() + w.sum()


@pytest.mark.parametrize("fn", TRANSFORMED)
def test_transforms_are_left_alone(fn):
    fn.__globals__.setdefault("dual_tangent", dual_tangent)
    check(fn, *data(), reasons=Reason.SUBCLASS)


def beside_vmap(h, w, b, t):
    return torch.vmap(lambda x: x.sum() * CE(flat(linear(h, w)), t.view(-1)))(b)


def behind_function(h, w, b, t):
    return CE(flat(linear(Tripled.apply(h), w)), t.view(-1))


def hidden_with_hook(h, w, b, t):
    x = h * 1
    x.register_hook(lambda g: g * 2)
    return CE(flat(linear(x, w)), t.view(-1))


def loss_with_hook(h, w, b, t):
    loss = CE(flat(linear(h, w)), t.view(-1))
    loss.register_hook(lambda g: g * 2)
    return loss * 3


def checkpointed(h, w, b, t):
    return checkpoint(lambda h: CE(flat(linear(h.tanh(), w)), t.view(-1)), h, use_reentrant=False)


def in_a_branch(h, w, b, t):
    def branch(h, w):
        return CE(flat(linear(h, w)), t.view(-1))

    return torch.cond(h.sum() > 0, branch, lambda h, w: h.mean() + w.mean(), (h, w))


@torch.compiler.nested_compile_region
def region(h, w, t):
    return CE(flat(linear(h, w)), t.view(-1))


def in_a_region(h, w, b, t):
    return region(h, w, t) + 2 * region(h * 2, w, t)


def hidden_that_becomes_a_leaf(h, w, b, t):
    x = h.detach().requires_grad_()
    return torch.autograd.grad(CE(flat(linear(x, w)), t.view(-1)), x)[0]


def deterministic(h, w, b, t):
    torch.use_deterministic_algorithms(True)
    loss = CE(flat(linear(h, w)), t.view(-1))
    torch.use_deterministic_algorithms(False)
    return loss


def labels_changed_before(h, w, b, t):
    y = t.clone()
    y[:, 1] = -100
    return CE(flat(linear(h, w)), y.view(-1))


def labels_changed_between(h, w, b, t):
    y = t.clone()
    z = linear(h, w)
    y[:, 1] = -100
    return CE(flat(z), y.view(-1))


def labels_changed_after(h, w, b, t):
    y = t.clone()
    with torch.no_grad():
        loss = CE(flat(linear(h, w)), y.view(-1))
        y[:, 1] = -100
    return loss, y


def heads_over_views_of_one_weight(h, w, b, t):
    return CE(flat(linear(h, w)), t.view(-1)) + CE(linear(h, w[1:]).view(-1, V - 1), t.view(-1) % (V - 1))


def weight_from_activations(h, w, b, t):
    return CE(linear(h[0], h[1]), t[0] % T)


@by_name(
    beside_vmap,
    behind_function,
    hidden_with_hook,
    loss_with_hook,
    checkpointed,
    in_a_branch,
    hidden_that_becomes_a_leaf,
    deterministic,
    labels_changed_before,
    labels_changed_between,
    labels_changed_after,
    weight_from_activations,
    in_a_region,
)
def test_surroundings_that_do_not_matter(fn):
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        check(fn, *data())


def test_heads_over_views_of_one_weight():
    check(heads_over_views_of_one_weight, *data(), reasons=[None, None])


@torch._dynamo.allow_in_graph
def view(z, *shape):
    return torch.Tensor.view(z, *shape) * 2


@torch._dynamo.allow_in_graph
def contiguous(z):
    return z.flip(1)


view.__module__ = contiguous.__module__ = "torch"


def test_functions_named_like_torch_functions_are_not_links():
    check(lambda h, w, b, t: CE(view(linear(h, w), -1, V), t.view(-1)), *data(), reasons=Reason.LINK)
    check(lambda h, w, b, t: CE(flat(contiguous(linear(h, w))), t.view(-1)), *data(), reasons=Reason.LINK)


def logits_with_hook(h, w, b, t):
    z = flat(linear(h, w))
    z.register_hook(lambda g: g * 2)
    return CE(z, t.view(-1))


def test_logits_with_a_hook_are_left_alone():
    check(logits_with_hook, *data(), reasons=Reason.LINK)
