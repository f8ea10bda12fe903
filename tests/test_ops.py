"""The three ops: schemas and fakes (opcheck), gradients against float64, and the memory that the loop may take."""

import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flce_inductor import kernels, runtime
from flce_inductor.kernels import IDENTITY, Cotangents, Epilogue, Statistics
from flce_inductor.runtime import How, Needs, RowProgram, Want

OPS = torch.ops.flce_inductor
TANH = Epilogue("tanh", 1 / 3, 0.0, 3.0)
SIGMOID = Epilogue("sigmoid", 1 / 1.5, 0.7, 4.0)
SCALED = Epilogue("", -0.6, 0.3, 1.7)
EPILOGUES = [IDENTITY, TANH, SIGMOID, SCALED]
WANT_ALL, WANT_NONE = Want(True, True, True), Want()
ALL = Needs(True, True, True)


class Head(NamedTuple):
    h: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None


class Grads(NamedTuple):
    dh: Tensor
    dweight: Tensor
    dbias: Tensor


def how(chunk=16, accum_dtype="auto", epilogue=IDENTITY, ignore_index=-100) -> How:
    return How(ignore_index, chunk, accum_dtype, epilogue)


HOW = how()


def flat(h: How) -> tuple:
    return (*h[:3], *h.epilogue)


def row_stats(head, how=HOW, want=WANT_NONE) -> Statistics:
    return Statistics(*OPS.row_stats(*head, *flat(how), list(want)))


def backward(head, stats, g, how=HOW, needs=ALL) -> Grads:
    pz = None if g.pz is None else stats.pz
    return Grads(*OPS.row_stats_backward(*head, stats.max, stats.logsum, pz, *g, *flat(how), list(needs)))


def with_grads(head, g, how=HOW, want=WANT_NONE, needs=ALL, program="", row_inputs=()):
    """Statistics, gradients and unscale."""
    out = OPS.row_stats_with_grads(*head, *g, list(row_inputs), program, *flat(how), list(want), list(needs))
    return Statistics(*out[:6]), Grads(*out[6:9]), out[9]


def problem(N=50, H=12, V=203, dtype=torch.float64, bias=True, class_weight=False, requires_grad=False) -> Head:
    """V is more than 64, the least block of columns, and no multiple of it."""
    torch.manual_seed(0)
    h = torch.randn(N, H).to(dtype).requires_grad_(requires_grad)
    weight = (torch.randn(V, H) / 3).to(dtype).requires_grad_(requires_grad)
    b = torch.randn(V).to(dtype).requires_grad_(requires_grad) if bias else None
    target = torch.randint(V, (N,))
    target[::7] = -100
    u = torch.rand(V, dtype=runtime.stat_dtype(dtype)) if class_weight else None
    return Head(h, weight, target, b, u)


def random_cotangents(N, names=Cotangents._fields, dtype=torch.float64) -> Cotangents:
    torch.manual_seed(1)
    drawn = {name: torch.randn(N, dtype=dtype) for name in Cotangents._fields}
    return Cotangents(**{name: drawn[name] for name in names})


def apply(epilogue, x):
    y = epilogue.scale * (x + epilogue.shift)
    return epilogue.cap * {"": lambda y: y, "tanh": torch.tanh, "sigmoid": torch.sigmoid}[epilogue.function](y)


def reference_statistics(z, target, u) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """nll, lse, zsum, pz, argmax of logits z [N, V], differentiable."""
    nll, lse = F.cross_entropy(z, target, reduction="none"), z.logsumexp(1)
    zsum = (z if u is None else z * u.double()).sum(1)
    pz = (z.softmax(1) * (z - z.detach().amax(1, keepdim=True))).sum(1)
    return nll, lse, zsum, pz, z.argmax(1)


def reference(head, g=None, epilogue=IDENTITY):
    """The statistics, and the gradients of sum(<cotangent, statistic>), in float64 eager."""
    xs = [None if x is None else x.detach().double().requires_grad_() for x in (head.h, head.weight, head.bias)]
    stats = reference_statistics(apply(epilogue, F.linear(*xs)), head.target, head.class_weight)
    if g is None:
        return stats, None
    loss = sum((s * c.double()).sum() for s, c in zip(stats, g, strict=False) if c is not None)
    grads = iter(torch.autograd.grad(loss, [x for x in xs if x is not None]))
    return stats, Grads(*(None if x is None else next(grads) for x in xs))


def error(got, want):
    return float(((got.double() - want).norm() / want.norm()).detach())


def check_statistics(got: Statistics, want, wanted=WANT_ALL, tolerance=1e-14):
    nll, lse, zsum, pz, argmax = want
    assert error(got.nll, nll) < tolerance
    assert error(got.max + got.logsum, lse) < tolerance
    for name, expected in (("zsum", zsum), ("pz", pz)):
        if getattr(wanted, name):
            assert error(getattr(got, name), expected) < tolerance * 10, name
        else:
            assert getattr(got, name).numel() == 0, name
    assert torch.equal(got.argmax, argmax) if wanted.argmax else got.argmax.numel() == 0


def check_gradients(got: Grads, want: Grads, tolerance=1e-13):
    for name, grad, expected in zip(Grads._fields, got, want, strict=True):
        if expected is None:
            assert grad.numel() == 0, name
        else:
            assert error(grad, expected) < tolerance, name


COTANGENTS = [("nll",), ("lse",), ("zsum",), ("pz",), ("nll", "zsum"), ("nll", "lse", "zsum", "pz")]
FEATURES = [
    dict(epilogue=IDENTITY, bias=False, class_weight=False),
    dict(epilogue=TANH, bias=True, class_weight=True),
    dict(epilogue=SIGMOID, bias=True, class_weight=True),
]


def feature_id(x):
    return x["epilogue"].function or "plain" if isinstance(x, dict) else None


class TestOpcheck:
    """Schema, fake and real outputs agree, autograd registration, and AOTAutograd with dynamic shapes."""

    @pytest.mark.parametrize("feature", FEATURES, ids=feature_id)
    @pytest.mark.parametrize("want", [WANT_NONE, WANT_ALL], ids=["none", "all"])
    def test_row_stats(self, feature, want):
        epilogue, *_ = feature.values()
        head = problem(bias=feature["bias"], class_weight=feature["class_weight"], requires_grad=True)
        torch.library.opcheck(OPS.row_stats.default, (*head, *flat(how(epilogue=epilogue)), list(want)))

    @pytest.mark.parametrize("needs", [ALL, Needs(True, False, False), Needs(False, True, False)])
    @pytest.mark.parametrize("names", [("nll",), Cotangents._fields], ids="-".join)
    def test_row_stats_backward(self, needs, names):
        head, way = problem(class_weight=True), how(epilogue=TANH)
        stats, g = row_stats(head, way, WANT_ALL), random_cotangents(50, names)
        pz = stats.pz if g.pz is not None else None
        args = (*head, stats.max, stats.logsum, pz, *g, *flat(way), list(needs))
        torch.library.opcheck(OPS.row_stats_backward.default, args)

    @pytest.mark.parametrize("needs", [ALL, Needs(True, False, False), Needs(False, True, False)])
    @pytest.mark.parametrize("feature", FEATURES[:2], ids=feature_id)
    def test_row_stats_with_grads(self, needs, feature):
        epilogue, *_ = feature.values()
        head = problem(bias=feature["bias"], class_weight=feature["class_weight"])
        needs = needs if feature["bias"] else needs._replace(dbias=False)
        g = random_cotangents(50)
        args = (*head, *g, [], "", *flat(how(epilogue=epilogue)), list(WANT_ALL), list(needs))
        torch.library.opcheck(OPS.row_stats_with_grads.default, args)

    def test_row_program(self):
        head, row_input = problem(), torch.rand(50, dtype=torch.float64)
        program = RowProgram([["mul", ["r", 0], ["r", 5]]], [6, None, None, None]).text()
        args = (*head, *Cotangents(), [row_input], program, *flat(HOW), list(WANT_NONE), list(ALL))
        torch.library.opcheck(OPS.row_stats_with_grads.default, args)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_dtypes_of_the_outputs(self, dtype):
        """The fake's dtypes are the real ones, for parameters of the same dtype and for float32 ones (autocast)."""
        checks = ("test_schema", "test_faketensor")
        for wide in (False, True):
            head = problem(dtype=dtype, class_weight=True)
            if wide:
                head = head._replace(weight=head.weight.float(), bias=head.bias.float())
            g = random_cotangents(50, dtype=torch.float32)
            args = (*head, *g, [], "", *flat(HOW), list(WANT_ALL), list(ALL))
            torch.library.opcheck(OPS.row_stats_with_grads.default, args, test_utils=checks)
            stats = row_stats(head, want=WANT_ALL)
            args = (*head, stats.max, stats.logsum, stats.pz, *g, *flat(HOW), list(ALL))
            torch.library.opcheck(OPS.row_stats_backward.default, args, test_utils=checks)

    def test_fake_strides_follow_a_transposed_weight(self):
        head = problem()
        head = head._replace(weight=head.weight.t().contiguous().t())
        g = random_cotangents(50, ("nll",))
        args = (*head, *g, [], "", *flat(HOW), list(WANT_NONE), list(ALL))
        torch.library.opcheck(OPS.row_stats_with_grads.default, args)
        stats = row_stats(head)
        args = (*head, stats.max, stats.logsum, None, *g, *flat(HOW), list(ALL))
        torch.library.opcheck(OPS.row_stats_backward.default, args)
        for grads in (with_grads(head, g)[1], backward(head, stats, g)):
            assert grads.dweight.stride() == head.weight.stride()


class TestNumbers:
    """Each feature against float64 autograd, in both orders of the loop."""

    @pytest.mark.parametrize("names", COTANGENTS, ids="-".join)
    @pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: f"{e.function}{e.scale:.2g}")
    @pytest.mark.parametrize("chunk", [1, 7, 40, 1000])
    @pytest.mark.parametrize("class_weight", [False, True])
    def test_statistics_and_gradients(self, names, epilogue, chunk, class_weight):
        head, way = problem(class_weight=class_weight), how(chunk, epilogue=epilogue)
        g = random_cotangents(50, names)
        stats, grads = reference(head, g, epilogue)
        rows_major = with_grads(head, g, way, WANT_ALL)
        saved = row_stats(head, way, WANT_ALL)
        for got in (rows_major[0], saved):
            check_statistics(got, stats)
        assert rows_major[2] == 1  # unscale
        check_gradients(rows_major[1], grads)
        check_gradients(backward(head, saved, g, way), grads)

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("want", list(itertools.product([False, True], repeat=3)))
    def test_statistics_as_wanted(self, bias, want):
        head, want = problem(bias=bias, class_weight=True), Want(*want)
        stats, _ = reference(head)
        check_statistics(row_stats(head, want=want), stats, want)
        got, grads, _ = with_grads(head, random_cotangents(50, ("nll",)), want=want, needs=Needs(True, True, bias))
        check_statistics(got, stats, want)
        check_gradients(grads, reference(head, random_cotangents(50, ("nll",)))[1])

    @pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: f"{e.function}{e.scale:.2g}")
    @pytest.mark.parametrize("V", [130, 256, 257])
    def test_statistics_of_blocks_of_columns(self, epilogue, V, monkeypatch):
        """Small chunks: the statistics come from blocks of columns that all rows share, in the memory of a chunk."""
        monkeypatch.setattr(runtime, "_MOST_BLOCKS", 2)  # are put together at a time
        head, want = problem(V=V, class_weight=True), Want(zsum=True)
        head.target[1:9] = torch.tensor([0, 63, 64, 127, 128, V - 1, -100, 129])
        stats, _ = reference(head, epilogue=epilogue)
        monkeypatch.setattr(runtime._Head, "rows_major", None)
        with Allocations(head) as seen:
            check_statistics(row_stats(head, how(8, epilogue=epilogue), want), stats, want)
        assert max(seen.sizes) <= 50 * 64

    @pytest.mark.parametrize("ignore_index", [-(2**63), -(2**63) + 100, 2**63 - 1, 130])
    def test_any_ignore_index_in_blocks_of_columns(self, ignore_index):
        head, way = problem(V=256), how(8, ignore_index=ignore_index)
        head.target[head.target == -100] = ignore_index
        g = random_cotangents(50, ("nll", "lse"))
        z = F.linear(head.h, head.weight, head.bias).requires_grad_()
        nll = F.cross_entropy(z, head.target, reduction="none", ignore_index=ignore_index)
        stats = row_stats(head, way)
        torch.testing.assert_close(stats.nll, nll)
        (dz,) = torch.autograd.grad((nll * g.nll + z.logsumexp(1) * g.lse).sum(), z)
        torch.testing.assert_close(backward(head, stats, g, way).dweight, dz.t() @ head.h)

    def test_statistics_of_blocks_of_columns_that_hold_infinities(self, monkeypatch):
        """Excluded classes, a whole block of them and the label's too; a row of nothing else; NaN and inf; logits so
        large that their sum with a logarithm has no digits left."""
        head = problem(V=256, dtype=torch.float32, bias=False)
        head.target[:9] = torch.tensor([70, 200, 3, 3, 130, 250, 70, -100, -100])
        h, weight, bias = torch.zeros_like(head.h), torch.zeros_like(head.weight), torch.zeros(256)
        weight[:, 0], bias[64:128] = torch.arange(256) / 64, -torch.inf
        h[:, 0] = 1
        h[[1, 2, 4, 5, 7], 0] = torch.tensor([1e7, 0, torch.nan, torch.inf, torch.nan])
        head = head._replace(h=h, bias=bias)
        monkeypatch.setattr(runtime._Head, "rows_major", None)
        monkeypatch.setattr(runtime, "_MOST_BLOCKS", 3)
        for masked in (bias, torch.full_like(bias, -torch.inf)):
            head = head._replace(bias=masked)
            got = row_stats(head, how(8))
            z = F.linear(head.h, head.weight, masked)
            nll = F.cross_entropy(z.double(), head.target, reduction="none").float()
            torch.testing.assert_close(got.nll, nll, equal_nan=True)
            torch.testing.assert_close(got.max + got.logsum, z.double().logsumexp(1).float(), equal_nan=True)

    @pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
    @pytest.mark.parametrize("order", ["rows-major", "vocabulary-major"])
    def test_only_what_is_needed(self, needs, order):
        head, needs, g = problem(class_weight=True), Needs(*needs), random_cotangents(50)
        _, want = reference(head, g)
        if order == "rows-major":
            got = with_grads(head, g, want=WANT_ALL, needs=needs)[1]
        else:
            got = backward(head, row_stats(head, want=WANT_ALL), g, needs=needs)
        check_gradients(got, Grads(*(x if need else None for x, need in zip(want, needs, strict=True))))

    @pytest.mark.parametrize("layout", ["transposed", "strided weight", "strided hidden", "expanded hidden"])
    def test_layouts(self, layout):
        head = problem()
        h, weight = head.h, head.weight
        head = {
            "transposed": lambda: head._replace(weight=weight.t().contiguous().t()),
            "strided weight": lambda: head._replace(
                weight=weight.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
            ),
            "strided hidden": lambda: head._replace(h=h.t().contiguous().t()),
            "expanded hidden": lambda: head._replace(h=h[:1].expand(50, 12)),
        }[layout]()
        g = random_cotangents(50)
        stats, grads = reference(head, g)
        got = with_grads(head, g, want=WANT_ALL)
        check_statistics(got[0], stats)
        check_gradients(got[1], grads)
        check_gradients(backward(head, row_stats(head, want=WANT_ALL), g), grads)

    @pytest.mark.parametrize("ignore_index", [-100, -1, 0, 5, 202])
    def test_ignore_index(self, ignore_index):
        """Also one that is a class, in any block of columns."""
        head = problem(class_weight=True)
        target = head.target.clamp(min=0)
        target[::3] = ignore_index
        head, way = head._replace(target=target), how(ignore_index=ignore_index)
        g = random_cotangents(50)
        xs = [x.detach().requires_grad_() for x in (head.h, head.weight, head.bias)]
        z = F.linear(*xs)
        nll = F.cross_entropy(z, target, reduction="none", ignore_index=ignore_index)
        rest = reference_statistics(z, target.clamp(min=0), head.class_weight)[1:]
        loss = sum((s * c).sum() for s, c in zip((nll, *rest), g, strict=False))
        want = Grads(*torch.autograd.grad(loss, xs))
        got = with_grads(head, g, way, WANT_ALL)
        check_statistics(got[0], (nll, *rest))
        assert not got[0].nll[target == ignore_index].any()
        check_gradients(got[1], want)
        check_gradients(backward(head, row_stats(head, way, WANT_ALL), g, way), want)

    @pytest.mark.parametrize("frozen", [None, 0, 1, 2])
    @pytest.mark.parametrize("names", [("nll",), ("nll", "lse"), Cotangents._fields], ids="-".join)
    def test_autograd(self, frozen, names):
        head, way = problem(class_weight=True, requires_grad=True), how(epilogue=TANH)
        g = random_cotangents(50, names)
        _, want = reference(head, g, TANH)
        xs = [head.h, head.weight, head.bias]
        if frozen is not None:
            xs[frozen].requires_grad_(False)
        stats = row_stats(head, way, WANT_ALL)
        assert not stats.max.requires_grad and not stats.argmax.requires_grad
        by_name = stats._asdict() | {"lse": stats.max + stats.logsum}
        sum((by_name[name] * getattr(g, name)).sum() for name in names).backward()
        for i, x in enumerate(xs):
            assert x.grad is None if i == frozen else error(x.grad, want[i]) < 1e-13

    def test_class_weight_has_no_gradient(self):
        head = problem(class_weight=True, requires_grad=True)
        u = head.class_weight.requires_grad_()
        row_stats(head, want=WANT_ALL).zsum.sum().backward()
        assert u.grad is None and head.weight.grad is not None

    @pytest.mark.parametrize("op", ["row_stats", "row_stats_backward", "row_stats_with_grads"])
    def test_no_second_derivative(self, op):
        head = problem(requires_grad=True)
        g = random_cotangents(50, ("nll",))
        if op == "row_stats":
            (dh,) = torch.autograd.grad(row_stats(head).nll.sum(), head.h, create_graph=True)
        elif op == "row_stats_backward":
            dh = backward(head, row_stats(head), g).dh
        else:
            dh = with_grads(head, g)[1].dh
        with pytest.raises(RuntimeError, match="no second derivative"):
            dh.sum().backward()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("order", ["rows-major", "vocabulary-major"])
    def test_no_worse_than_eager(self, dtype, order):
        head, way = problem(N=400, H=32, V=301, dtype=dtype), how(64)
        g = Cotangents(torch.rand(400, generator=torch.Generator().manual_seed(0)))
        _, want = reference(head, g)
        xs = [x.detach().requires_grad_() for x in (head.h, head.weight, head.bias)]
        loss = (F.cross_entropy(F.linear(*xs), head.target, reduction="none").float() * g.nll).sum()
        eager = torch.autograd.grad(loss, xs)
        if order == "rows-major":
            _, grads, unscale = with_grads(head, g, way)
        else:
            grads, unscale = backward(head, row_stats(head, way), g, way), 1
        for got, theirs, expected in zip(grads, eager, want, strict=True):
            assert error(got.double() * unscale, expected) <= 2 * error(theirs, expected) + 1e-7

    @pytest.mark.parametrize("saved", [False, True])
    def test_what_memory_held_before_has_no_part_in_it(self, saved):
        head, way = problem(N=400, H=32, V=301, dtype=torch.bfloat16), how(64)
        stats = row_stats(head, way)
        slab = torch.full([400 * 320], float("nan"), dtype=torch.bfloat16)
        _, grads = runtime.run(
            *head,
            runtime.How(way[0], way[1]),
            saved=kernels.Statistics(None, stats.max, stats.logsum) if saved else None,
            cotangents=Cotangents(torch.ones(400)),
            needs=runtime.Needs(True, True, True),
            into=runtime.Buffers(slab=slab),
        )
        assert not any(x.isnan().any() for x in grads)

    @pytest.mark.parametrize("factor", [1e-7, 1.0, 1e4])
    @pytest.mark.parametrize("names", COTANGENTS, ids="-".join)
    @pytest.mark.parametrize("wide", [False, True])
    def test_float16_keeps_small_and_large_gradients(self, factor, names, wide):
        """Cotangents whose gradients under- or overflow float16 keep their relative precision through unscale."""
        head = problem(N=400, H=32, V=301, dtype=torch.float16, class_weight=True)
        if wide:
            head = head._replace(weight=head.weight.float(), bias=head.bias.float())
        way = how(64, epilogue=TANH)
        g = Cotangents(*(None if x is None else x * factor for x in random_cotangents(400, names, torch.float32)))
        # the reference's logits are rounded where eager rounds them
        x = F.linear(head.h, head.weight.half(), head.bias.half()).double().requires_grad_()
        stats = reference_statistics(apply(TANH, x), head.target, head.class_weight)
        loss = sum((s * c.double()).sum() for s, c in zip(stats, g, strict=False) if c is not None)
        (dx,) = torch.autograd.grad(loss, x)
        want = Grads(dx @ head.weight.double(), dx.t() @ head.h.double(), dx.sum(0))
        _, grads, unscale = with_grads(head, g, way, WANT_ALL)
        for got, expected in zip(grads, want, strict=True):
            assert error(got.double() * unscale.double(), expected) < 2e-3

    def test_float16_gradients_of_the_backward_are_final(self):
        """row_stats_backward knows its cotangents: a GradScaler's factor is in them, nothing is deferred."""
        head = problem(N=400, H=32, V=301, dtype=torch.float16)
        g = Cotangents(torch.rand(400) * 2.0**10 / 400)
        _, want = reference(head, g)
        for grad, expected in zip(backward(head, row_stats(head), g), want, strict=True):
            assert grad.dtype == torch.float16 and error(grad, expected) < 4e-3

    def test_common_offset(self):
        """p comes from max and logsum apart: an offset of 1e4 in all logits costs nothing in float32."""
        head = problem(N=64, H=8, V=50, dtype=torch.float32, class_weight=True)
        head = head._replace(bias=torch.full((50,), 1e4), target=head.target.clamp(min=0))
        exact = F.linear(*head[:2], head.bias).double().requires_grad_()  # eager's own rounding of the logits
        for names in (("nll",), ("lse",)):
            g = Cotangents(**{name: torch.ones(64) for name in names})
            stats = reference_statistics(exact, head.target, head.class_weight)
            (want,) = torch.autograd.grad(stats[0 if names == ("nll",) else 1].sum(), exact)
            _, grads, _ = with_grads(head, g, needs=Needs(False, False, True))
            assert error(grads.dbias, want.sum(0)) < 2e-6
            grads = backward(head, row_stats(head), g, needs=Needs(False, False, True))
            assert error(grads.dbias, want.sum(0)) < 2e-6

    def test_common_offset_of_the_loss(self):
        head = problem(N=64, H=8, V=50, dtype=torch.float32)
        head = head._replace(bias=torch.full((50,), 1e4), target=head.target.clamp(min=0))
        exact = F.linear(*head[:2], head.bias).double()
        nll = F.cross_entropy(exact, head.target, reduction="none")
        assert error(row_stats(head).nll, nll) < 1e-6

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_rows_do_not_mix(self, bad):
        head = problem(class_weight=True)
        head = head._replace(target=head.target.clamp(min=0))
        clean, g = row_stats(head, want=WANT_ALL), random_cotangents(50)
        h = head.h.clone()
        h[20, 3] = bad
        head = head._replace(h=h)
        others = torch.arange(50) != 20
        stats, grads, _ = with_grads(head, g, want=WANT_ALL)
        again = backward(head, row_stats(head, want=WANT_ALL), g)
        assert not stats.nll[20].isfinite()
        for got, expected in zip(stats, clean, strict=True):
            assert torch.equal(got[others], expected[others])
        for dh in (grads.dh, again.dh):
            assert dh[20].isnan().all() and dh[others].isfinite().all()
        assert not grads.dweight.isfinite().all() and not again.dweight.isfinite().all()  # as in eager


class TestPrecision:
    """dweight where it is accumulated over 64 chunks, against float64 with the logits that eager has."""

    N, H, V = 1024, 32, 64

    def setup_method(self):
        self.chunks = {64: 16, 17: 61, 16: 64, 2: 512, 1: 1024}  # number of chunks: rows in each

    def head(self, dtype, wide):
        head = problem(self.N, self.H, self.V, dtype, bias=False)
        return head._replace(weight=head.weight.float()) if wide else head

    def exact(self, head):
        z = F.linear(head.h, head.weight.to(head.h.dtype)).double().requires_grad_()
        F.cross_entropy(z, head.target, reduction="sum").backward()
        return z.grad.t() @ head.h.double()

    def eager(self, head):
        weight = head.weight.detach().requires_grad_()
        z = F.linear(head.h, weight.to(head.h.dtype))
        F.cross_entropy(z.float() if head.h.dtype.itemsize == 2 else z, head.target, reduction="sum").backward()
        return error(weight.grad, self.exact(head))

    def ours(self, head, accum_dtype, chunks):
        g, needs = Cotangents(torch.ones(self.N, dtype=runtime.stat_dtype(head.h.dtype))), Needs(False, True, False)
        _, grads, unscale = with_grads(head, g, how(self.chunks[chunks], accum_dtype), needs=needs)
        assert grads.dweight.dtype == head.weight.dtype
        return error(grads.dweight.double() * unscale.double(), self.exact(head))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_16_bit_parameter(self, dtype):
        """ "param" rounds once per chunk and its error grows; "float32" and the many chunks of "auto" don't."""
        head = self.head(dtype, wide=False)
        once = self.ours(head, "param", 1)  # one chunk: one rounding
        assert self.ours(head, "param", 64) > 3 * once
        assert self.ours(head, "param", 16) > 1.4 * once
        for chunks in self.chunks:
            assert self.ours(head, "float32", chunks) < 1.2 * once
        assert self.ours(head, "auto", 64) < 1.2 * once and self.ours(head, "auto", 17) < 1.2 * once
        assert self.ours(head, "auto", 16) == self.ours(head, "param", 16)

    @pytest.mark.parametrize(
        ("dtype", "wide"),
        [
            (torch.bfloat16, False),
            (torch.bfloat16, True),
            (torch.float16, False),
            (torch.float16, True),
            (torch.float32, False),
        ],
    )
    def test_auto_stays_below_three_times_eager(self, dtype, wide):
        head = self.head(dtype, wide)
        eager = self.eager(head)
        for chunks in self.chunks:
            assert self.ours(head, "auto", chunks) <= 3 * eager

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_float32_parameter(self, dtype):
        """It is the destination of 16-bit products itself: no rounding between chunks under any setting."""
        head = self.head(dtype, wide=True)
        once = self.ours(head, "param", 1)
        for accum_dtype in ("param", "float32", "auto"):
            assert self.ours(head, accum_dtype, 64) < 1.2 * once

    @pytest.mark.parametrize("accum_dtype", ["param", "float32", "auto"])
    def test_float32_throughout(self, accum_dtype):
        head = self.head(torch.float32, wide=False)
        for chunks in self.chunks:
            assert self.ours(head, accum_dtype, chunks) < 2e-6

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_vocabulary_major_rounds_once(self, dtype):
        """Whatever accum_dtype says."""
        head, needs = problem(self.N, self.H, 640, dtype, bias=False), Needs(True, True, False)
        g = Cotangents(torch.rand(self.N))
        z = F.linear(head.h, head.weight).double().requires_grad_()
        (F.cross_entropy(z, head.target, reduction="none") * g.nll).sum().backward()
        want = z.grad.t() @ head.h.double()
        errors = [
            error(backward(head, row_stats(head), g, how(rows, "param"), needs).dweight, want) for rows in (1024, 16)
        ]
        assert errors[1] < 1.05 * errors[0]


class TestRowProgram:
    def test_text_round_trip(self):
        steps = [["mul", ["r", 0], 2.5], ["to", ["r", 6], "int64"], ["where", ["r", 7], ["r", 8], float("-inf")]]
        program = RowProgram(steps, [6, None, 8, None])
        assert RowProgram.parse(program.text()) == program
        assert RowProgram.parse(program.text()).text() == program.text()

    @pytest.mark.parametrize("op", ["index_put_", "__class__", "sum", "rand_like"])
    def test_unknown_operation(self, op):
        head = problem()
        program = RowProgram([[op, ["r", 0]]], [5, None, None, None]).text()
        with pytest.raises(ValueError, match=rf"row program.*{op}"):
            with_grads(head, Cotangents(), program=program)

    def test_every_operation(self):
        """Each against numpy, on rows of both signs."""
        x = np.array([-2.5, -1.0, -0.3, 0.0, 0.4, 1.0, 2.5])
        y = np.array([1.0, -1.0, 2.0, 0.5, 0.4, -3.0, 2.5])
        positive, a, b = np.abs(x) + 0.1, x > 0, y > 0
        erf = np.vectorize(math.erf)
        table = [
            ((x,), {
                "abs": np.abs, "atan": np.arctan, "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh, "erf": erf,
                "erfc": lambda x: 1 - erf(x), "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "floor": np.floor,
                "isinf": np.isinf, "isnan": np.isnan, "neg": np.negative, "relu": lambda x: np.where(x > 0, x, 0.0),
                "round": np.round, "sgn": np.sign, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "sign": np.sign,
                "signbit": np.signbit, "sin": np.sin, "sinh": np.sinh, "square": np.square, "tan": np.tan,
                "tanh": np.tanh, "trunc": np.trunc,
            }),
            ((positive,), {
                "log": np.log, "log10": np.log10, "log1p": np.log1p, "log2": np.log2, "reciprocal": np.reciprocal,
                "rsqrt": lambda x: x**-0.5, "sqrt": np.sqrt,
            }),
            ((x, y), {
                "add": np.add, "atan2": np.arctan2, "div": np.divide, "eq": np.equal, "fmod": np.fmod,
                "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less, "maximum": np.maximum,
                "minimum": np.minimum, "mul": np.multiply, "ne": np.not_equal, "remainder": np.remainder,
                "sub": np.subtract,
            }),
            ((positive, y), {"pow": np.power}),
            ((y, positive), {"xlogy": lambda y, x: y * np.log(x)}),
            ((x, -0.5), {"clamp_min": np.maximum, "clamp_max": np.minimum}),
            ((x, -0.5, 0.5), {"clamp": np.clip}),
            ((x, None, 0.5), {"clamp": lambda x, least, most: np.minimum(x, most)}),
            ((a, b), {
                "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor,
                "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
            }),
            ((a,), {"bitwise_not": np.bitwise_not, "logical_not": np.logical_not}),
            ((a, x, y), {"where": np.where}),
            ((1.5, x), {"sub": np.subtract, "add": np.add, "mul": np.multiply}),
        ]  # fmt: skip
        table = [(op, f, operands) for operands, fs in table for op, f in fs.items()]
        assert {op for op, _, _ in table} == set(runtime.ROW_OPS)
        statistics = [torch.from_numpy(x)] + [None] * 4
        for op, f, operands in table:
            inputs = [v for v in operands if isinstance(v, np.ndarray)]
            registers = iter(range(5, 5 + len(inputs)))
            step = [op, *(["r", next(registers)] if isinstance(v, np.ndarray) else v for v in operands)]
            program = RowProgram([step], [5 + len(inputs), None, None, None])
            got = RowProgram.parse(program.text())(statistics, [torch.from_numpy(v) for v in inputs])
            want = np.asarray(f(*operands)).astype(float)
            np.testing.assert_allclose(got.nll.numpy(), want, rtol=1e-13, atol=1e-15, err_msg=op)
            assert got[1:] == (None, None, None)

    def test_casts_and_numbers(self):
        """ "to" rounds, numbers stand for operands, and cotangents come in the statistics' dtype."""
        statistics = [torch.tensor([0.3, 1.7])] + [None] * 4
        program = RowProgram(
            [["to", ["r", 0], "int64"], ["add", ["r", 5], 2], ["mul", ["r", 6], 3]], [None, 7, 0, None]
        )
        got = RowProgram.parse(program.text())(statistics, [])
        assert got.lse.tolist() == [6.0, 9.0] and got.lse.dtype == torch.float32
        assert torch.equal(got.zsum, statistics[0]) and got.nll is None and got.pz is None

    @pytest.mark.parametrize("chunk", [1, 16, 1000])
    def test_z_loss(self, chunk):
        """g_lse = 2 c lse, beside a cotangent of the nll, equals the differentiated formula."""
        head, c = problem(), 0.01
        g_nll = torch.rand(50, dtype=torch.float64)
        steps = [["add", ["r", 1], ["r", 2]], ["mul", ["r", 6], 2 * c]]
        program = RowProgram(steps, [5, 7, None, None]).text()
        xs = [x.detach().requires_grad_() for x in (head.h, head.weight, head.bias)]
        nll, lse, *_ = reference_statistics(F.linear(*xs), head.target, None)
        want = Grads(*torch.autograd.grad((g_nll * nll).sum() + c * lse.square().sum(), xs))
        stats, grads, unscale = with_grads(head, Cotangents(), how(chunk), program=program, row_inputs=[g_nll])
        check_statistics(stats, reference(head)[0], WANT_NONE)
        check_gradients(grads, want)
        assert unscale == 1

    def test_every_statistic_and_cotangent(self):
        """A loss of nll, lse, zsum and pz in which each cotangent depends on other statistics of the row."""
        head, way = problem(class_weight=True), how(epilogue=TANH)
        x = [t.detach().requires_grad_() for t in (head.h, head.weight, head.bias)]
        nll, lse, zsum, pz, _ = reference_statistics(apply(TANH, F.linear(*x)), head.target, head.class_weight)
        weights = torch.rand(50, dtype=torch.float64)
        loss = (weights * torch.exp(-nll) + torch.tanh(lse) * pz + 0.01 * zsum * pz).sum()
        want = Grads(*torch.autograd.grad(loss, x))
        r = lambda i: ["r", i]  # noqa: E731
        steps = [
            ["neg", r(0)], ["exp", r(6)], ["mul", r(7), r(5)], ["neg", r(8)],  # 9: -w exp(-nll)
            ["add", r(1), r(2)], ["tanh", r(10)], ["mul", r(11), r(11)], ["sub", 1.0, r(12)],
            ["mul", r(13), r(4)],  # 14
            ["mul", r(4), 0.01],  # 15
            ["mul", r(3), 0.01], ["add", r(16), r(11)],  # 17: 0.01 zsum + tanh(lse)
        ]  # fmt: skip
        program = RowProgram(steps, [9, 14, 15, 17]).text()
        _, grads, _ = with_grads(
            head, Cotangents(), way, Want(True, True, False), program=program, row_inputs=[weights]
        )
        check_gradients(grads, want)


class TestBadInput:
    @pytest.mark.parametrize("label", [203, -1, -101, 10**9])
    def test_label_out_of_range(self, label):
        head, g = problem(), random_cotangents(50, ("nll",))
        stats = row_stats(head)
        head.target[33] = label
        for call in (lambda: row_stats(head), lambda: with_grads(head, g), lambda: backward(head, stats, g)):
            with pytest.raises(IndexError, match=rf"{label} .*203"):
                call()

    def test_no_rows(self):
        head, g = problem(N=0, class_weight=True), random_cotangents(0)
        stats, grads, _ = with_grads(head, g, want=WANT_ALL)
        assert all(s.shape == (0,) for s in stats)
        for got in (grads, backward(head, row_stats(head, want=WANT_ALL), g)):
            assert got.dh.shape == (0, 12) and got.dweight.shape == (203, 12) and got.dbias.shape == (203,)
            assert not got.dweight.any() and not got.dbias.any()

    def test_no_rows_of_float16(self):
        head, g = problem(N=0, dtype=torch.float16), random_cotangents(0, ("nll",), torch.float32)
        for got in (with_grads(head, g)[1], backward(head, row_stats(head), g)):
            assert got.dweight.shape == (203, 12) and not got.dweight.any() and not got.dbias.any()

    @pytest.mark.parametrize("infinite", [float("inf"), float("nan")])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
    def test_cotangents_of_ignored_rows_do_not_count(self, infinite, dtype):
        head = problem(dtype=dtype)
        head.target[:] = -100
        g = Cotangents(torch.full((50,), infinite, dtype=runtime.stat_dtype(dtype)))
        stats, grads, unscale = with_grads(head, g)
        assert not stats.nll.any() and unscale.isfinite()
        for three in (grads, backward(head, stats, g)):
            assert not three.dh.any() and not three.dweight.any() and not three.dbias.any()

    def test_cotangents_of_ignored_rows_do_not_choose_the_scale(self):
        """A large finite one would leave no digits to the rows that count."""
        head = problem(N=400, H=32, V=301, dtype=torch.float16)
        g = torch.rand(400)
        _, want = reference(head, Cotangents(g))
        _, grads, unscale = with_grads(head, Cotangents(torch.where(head.target == -100, 1e8, g)))
        for grad, expected in zip(grads, want, strict=True):
            assert error(grad.double() * unscale.double(), expected) < 4e-3

    @pytest.mark.parametrize("wrong", ["hidden", "rows", "bias", "class weight", "dtype"])
    def test_shapes_that_do_not_fit(self, wrong):
        head = problem(class_weight=True)
        head = {
            "hidden": head._replace(h=head.h[:, :5]),
            "rows": head._replace(target=head.target[:-1]),
            "bias": head._replace(bias=head.bias[:-1]),
            "class weight": head._replace(class_weight=head.class_weight[:-1]),
            "dtype": head._replace(target=head.target.int()),
        }[wrong]
        match = {
            "hidden": "shapes cannot be multiplied",
            "rows": "batch_size",
            "bias": "a bias",
            "class weight": "a class weight",
            "dtype": "int64",
        }[wrong]
        with pytest.raises(RuntimeError, match=match):
            row_stats(head)
        with pytest.raises(RuntimeError, match=match):
            with_grads(head, Cotangents())

    def test_gradient_of_pz_needs_it(self):
        head, g = problem(), random_cotangents(50, ("pz",))
        with pytest.raises(ValueError, match="pz is missing"):
            with_grads(head, g)
        with pytest.raises(ValueError, match="pz is missing"):
            stats = row_stats(head, want=WANT_ALL)
            OPS.row_stats_backward(*head, stats.max, stats.logsum, None, *g, *flat(HOW), list(ALL))


class Allocations(TorchDispatchMode):
    """Element counts and dtypes of all storages that appear while the mode is on."""

    def __init__(self, known):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known if x is not None}
        self.keep, self.seen, self.calls = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if not isinstance(x, torch.Tensor) or x.device.type == "meta":  # meta tensors take no memory
                continue
            if x.untyped_storage()._cdata not in self.known:
                self.known.add(x.untyped_storage()._cdata)
                self.keep.append(x)
                self.seen.append((x.untyped_storage().nbytes() // x.dtype.itemsize, x.dtype))
        return out

    @property
    def sizes(self):
        return [size for size, _ in self.seen]


class TestMemory:
    """Counted in elements, at sizes where slab, dweight and logits can't be mistaken for each other."""

    N, H, V, C = 512, 8, 8192, 32
    SLAB, PARAMETER = C * V, V * H

    def head(self, dtype, weight_dtype):
        head = problem(self.N, self.H, self.V, dtype, bias=False)
        return head if weight_dtype == "same" else head._replace(weight=head.weight.to(weight_dtype))

    def count(self, head, g, **kwargs):
        with Allocations([*head, g.nll]) as seen:
            runtime.run(*head, cotangents=g, needs=Needs(True, True, False), **kwargs)
        return seen

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("weight_dtype", ["same", torch.float32])
    def test_one_slab_one_dweight(self, dtype, weight_dtype, monkeypatch):
        monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1 << 14)
        head, g = self.head(dtype, weight_dtype), Cotangents(torch.ones(self.N))
        seen = self.count(head, g, how=how(self.C, "param"))
        assert seen.seen.count((self.SLAB, dtype)) == 1
        assert max(seen.sizes) == self.SLAB < self.N * self.V / 4
        # the destination, and under autocast the cast of the parameter; whatever the number of chunks
        wanted = 1 if head.weight.dtype == dtype else 2
        assert sum(size == self.PARAMETER for size in seen.sizes) == wanted
        if head.weight.dtype == dtype:  # in place: beta=0 first, then beta=1, into the one destination
            into = [(a[0], k.get("beta", 1)) for f, a, k in seen.calls if f is torch.ops.aten.addmm_.default]
            into = [(x, beta) for x, beta in into if x.shape == head.weight.shape]
            assert len({x.data_ptr() for x, _ in into}) == 1
            assert [beta for _, beta in into] == [0] + [1] * (self.N // self.C - 1)

    @pytest.mark.parametrize("accum_dtype", ["float32", "auto"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_float32_accumulation_of_a_16_bit_parameter(self, dtype, accum_dtype, monkeypatch):
        """Two float32 halves, the first of which becomes the result: never a whole [V, H] in float32."""
        monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1 << 16)
        head, g = self.head(dtype, "same"), Cotangents(torch.ones(self.N))
        rows = self.C // 2  # 32 chunks
        seen = self.count(head, g, how=how(rows, accum_dtype))
        assert [d for size, d in seen.seen if size == self.PARAMETER] == []
        assert seen.seen.count((self.PARAMETER // 2, torch.float32)) == 2
        # the rows kernel's float32 copy of a slab that fits into a cache is the only large one
        wide = [size for size, d in seen.seen if d == torch.float32 and size != rows * self.V]
        assert max(wide) <= self.PARAMETER / 2

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("weight_dtype", ["same", torch.float32])
    @pytest.mark.parametrize("accum_dtype", ["param", "float32"])
    def test_vocabulary_major(self, dtype, weight_dtype, accum_dtype, monkeypatch):
        """One dweight, rounded once, needs no accumulator; the slab is as large as rows-major's."""
        monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1 << 14)
        head, g = self.head(dtype, weight_dtype), Cotangents(torch.ones(self.N))
        stats = row_stats(head, how(self.C))
        with Allocations([*head, g.nll, *stats]) as seen:
            runtime.run(*head, how(self.C, accum_dtype), saved=stats, cotangents=g, needs=Needs(True, True, False))
        wanted = 1 if head.weight.dtype == dtype else 2
        assert sum(size == self.PARAMETER for size in seen.sizes) == wanted
        assert seen.seen.count((self.SLAB, dtype)) == 1
        assert max(seen.sizes) == self.SLAB < self.N * self.V / 4

    def test_vocabulary_major_in_one_block(self):
        """Where all rows are one chunk the block is the vocabulary, and dweight still the only [V, H]."""
        head, g = self.head(torch.float32, "same"), Cotangents(torch.ones(self.N))
        stats = row_stats(head, how(self.N))
        with Allocations([*head, g.nll, *stats]) as seen:
            runtime.run(*head, how(self.N), saved=stats, cotangents=g, needs=Needs(True, True, False))
        assert seen.sizes.count(self.PARAMETER) == 1

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_no_logits_in_forward_and_backward(self, reduction, monkeypatch):
        """Nor inside the ops, where a dispatch mode sees nothing unless it is entered there."""
        import flce_inductor

        head = problem(self.N, self.H, self.V, torch.float32, bias=False, requires_grad=True)
        seen, original = Allocations(head), runtime.run

        def run(*args, **kwargs):
            with seen:
                return original(*args, **kwargs)

        monkeypatch.setattr(runtime, "run", run)
        with seen:
            loss = flce_inductor.linear_cross_entropy(*head[:3], reduction=reduction, chunk_size=self.C)
            loss.sum().backward()
        assert self.SLAB in seen.sizes  # the mode saw the inside
        assert max(seen.sizes) < self.N * self.V / 4


@pytest.mark.parametrize(
    ("device", "capability", "operand", "destination", "path"),
    [
        ("cuda", (9, 0), torch.bfloat16, torch.bfloat16, "direct"),
        ("cuda", (8, 0), torch.float16, torch.float16, "direct"),
        ("cuda", (7, 5), torch.float16, torch.float16, "fallback"),
        ("cuda", (7, 0), torch.bfloat16, torch.bfloat16, "fallback"),
        ("cuda", (7, 5), torch.float32, torch.float32, "direct"),
        ("cuda", (9, 0), torch.float32, torch.float32, "direct"),
        ("cuda", (9, 0), torch.float64, torch.float64, "direct"),
        ("cuda", (9, 0), torch.bfloat16, torch.float32, "out_dtype"),
        ("cuda", (8, 6), torch.float16, torch.float32, "out_dtype"),
        ("cuda", (7, 5), torch.float16, torch.float32, "fallback"),
        ("cuda", (9, 0), torch.float32, torch.bfloat16, "fallback"),
        ("cuda", (9, 0), torch.bfloat16, torch.float16, "fallback"),
        ("cuda", (9, 0), torch.float32, torch.float64, "fallback"),
        ("cpu", None, torch.float32, torch.float32, "direct"),
        ("cpu", None, torch.bfloat16, torch.bfloat16, "direct"),
        ("cpu", None, torch.float64, torch.float64, "direct"),
        ("cpu", None, torch.bfloat16, torch.float32, "fallback"),
        ("xpu", None, torch.bfloat16, torch.bfloat16, "fallback"),
        ("mps", None, torch.float32, torch.float32, "fallback"),
    ],
)
def test_accumulate_path(device, capability, operand, destination, path):
    assert runtime.accumulate_path(device, capability, operand, destination) == path


@pytest.mark.parametrize("path", ["direct", "fallback"])
def test_every_path_accumulates(path, monkeypatch):
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1000)  # several blocks
    slab, h = torch.randn(3, 20, 50), torch.randn(3, 20, 7)
    dweight = torch.full((50, 7), float("nan"))
    for i in range(3):
        runtime.accumulate_(dweight, slab[i].t(), h[i], i == 0, path)
    torch.testing.assert_close(dweight, torch.einsum("icv,ich->vh", slab, h))


@pytest.mark.parametrize("aligned", [False, True])  # whether V's rest after its last multiple of 8 is its own block
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("R", [1, 63, 64, 65, 200, 257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dweight_in_two_float32_halves_is_rounded_once(dtype, R, transposed, aligned, monkeypatch):
    """And in place: what is returned has the layout of the weight, in a storage of its size but for the padding."""
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1000)  # several blocks
    S, gen = 23, torch.Generator().manual_seed(R)
    stored = torch.empty(R, S, dtype=dtype)
    weight = stored.t() if transposed else stored
    V, H = weight.shape
    cut = V // 8 * 8
    blocks = [slice(0, cut), slice(cut, V)] if aligned and V > 8 else [slice(0, V)]
    gradient = runtime._WeightGradient(weight, torch.float32, "fallback")
    for held in gradient.held:
        held.fill_(float("nan"))
    want = torch.zeros(V, H, dtype=torch.float64)
    for i, rows in enumerate((20, 20, 5)):
        # numbers whose sums float32 holds exactly, and the 16-bit dtypes don't
        slab, h = (torch.randint(-127, 128, (rows, n), generator=gen).to(dtype) for n in (V, H))
        h /= 64
        gradient.add(slab, h, blocks, first=i == 0)
        want += slab.double().t() @ h.double()
    got = gradient.result()
    assert got.dtype == dtype and torch.equal(got, want.to(dtype))
    assert not torch.equal(got.double(), want)
    assert got.stride() == torch.empty_like(weight).stride()
    assert got.untyped_storage().nbytes() <= R * S * 2 + 2 * 64 * S * 2


@pytest.mark.parametrize("V", [16, 23, 8, 7, 64, 203, 128257])
@pytest.mark.parametrize("columns", [64, 4096, 10**9])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_blocks_are_a_partition_of_the_vocabulary(V, columns, device):
    """On CUDA in 16 bits whatever is behind the last multiple of 8 is a block of its own."""
    columns = min(columns, V)
    head = SimpleNamespace(V=V, device=torch.device(device), dtype=torch.bfloat16)
    parts = runtime._Head.blocks(head, columns)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(V))
    assert all(0 < part.stop - part.start <= columns for part in parts)
    if device == "cuda" and V > 8:
        assert all(part.start % 8 == 0 for part in parts)
        assert V % 8 == 0 or parts[-1].stop - parts[-1].start == V % 8


@pytest.mark.parametrize("chunk", [1, 16, 1000])
@pytest.mark.parametrize("order", ["rows-major", "vocabulary-major"])
def test_unaligned_split(chunk, order, monkeypatch):
    """The split that only CUDA takes, with the CPU's products."""
    head, g = problem(class_weight=True), random_cotangents(50)
    original = runtime._Head.blocks

    def blocks(self, columns):
        return original(SimpleNamespace(V=self.V, device=torch.device("cuda"), dtype=torch.bfloat16), columns)

    monkeypatch.setattr(runtime._Head, "blocks", blocks)
    stats, want = reference(head, g)
    if order == "rows-major":
        got, grads, _ = with_grads(head, g, how(chunk), WANT_ALL)
        check_statistics(got, stats)
    else:
        grads = backward(head, row_stats(head, want=WANT_ALL), g, how(chunk))
    check_gradients(grads, want)


@pytest.mark.parametrize(
    ("dtype", "factor"), list(itertools.product([torch.bfloat16, torch.float16], [1e-3, 1.0, 3.7e4]))
)
def test_scaled_rounds_once(dtype, factor, monkeypatch):
    """x * factor with a float32 factor that the dtype of x doesn't hold, in blocks."""
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 100)
    x, factor = (torch.randn(30, 7) / max(factor, 1)).to(dtype), torch.tensor(factor * math.pi / 3)
    want = (x.float() * factor).to(dtype)
    assert torch.equal(runtime.scaled(x, factor), want)
    y = x.clone()
    kernels.scale_(y, factor)
    assert torch.equal(y, want)
