"""The three ops: schemas and fakes (opcheck), gradients against float64, and the memory that the loop may take."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flce_inductor import runtime

OPS = torch.ops.flce_inductor
HOW = (-100, 16, "auto")  # ignore_index, chunk_size, accum_dtype


def problem(N=50, H=12, V=37, dtype=torch.float64, bias=True, requires_grad=False):
    torch.manual_seed(0)
    h = torch.randn(N, H).to(dtype).requires_grad_(requires_grad)
    weight = (torch.randn(V, H) / 3).to(dtype).requires_grad_(requires_grad)
    b = torch.randn(V).to(dtype).requires_grad_(requires_grad) if bias else None
    target = torch.randint(V, (N,))
    target[::7] = -100
    return h, weight, target, b


def reference(h, weight, target, bias, g_nll, g_lse):
    """nll, lse and the gradients of <g_nll, nll> + <g_lse, lse> in float64 eager."""
    xs = [None if x is None else x.detach().double().requires_grad_() for x in (h, weight, bias)]
    z = F.linear(*xs)
    nll, lse = F.cross_entropy(z, target, reduction="none"), z.logsumexp(1)
    loss = (nll * g_nll).sum() + (lse * g_lse).sum()
    return [nll, lse], list(torch.autograd.grad(loss, [x for x in xs if x is not None]))


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


class TestOpcheck:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_row_stats(self, bias, dtype):
        h, weight, target, b = problem(bias=bias, dtype=dtype, requires_grad=True)
        torch.library.opcheck(OPS.row_stats.default, (h, weight, target, b, *HOW))

    @pytest.mark.parametrize("needs", [[True, True, True], [True, False, False], [False, True, False]])
    def test_row_stats_backward(self, needs):
        h, weight, target, b = problem()
        _, top, logsum = OPS.row_stats(h, weight, target, b, *HOW)
        for g_nll, g_lse in ((torch.randn_like(top), None), (None, torch.randn_like(top))):
            args = (h, weight, target, b, top, logsum, g_nll, g_lse, *HOW, needs)
            torch.library.opcheck(OPS.row_stats_backward.default, args)

    @pytest.mark.parametrize("needs", [[True, True, True], [True, False, False], [False, True, False]])
    def test_row_stats_with_grads(self, needs):
        h, weight, target, b = problem()
        g = torch.randn(h.shape[0], dtype=h.dtype)
        torch.library.opcheck(OPS.row_stats_with_grads.default, (h, weight, target, b, g, None, *HOW, needs))

    def test_fake_strides_follow_a_transposed_weight(self):
        h, weight, target, b = problem()
        transposed = weight.t().contiguous().t()
        g = torch.randn(h.shape[0], dtype=h.dtype)
        args = (h, transposed, target, b, g, None, *HOW, [True, True, True])
        torch.library.opcheck(OPS.row_stats_with_grads.default, args)
        assert OPS.row_stats_with_grads(*args)[4].stride() == transposed.stride()


class TestNumbers:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("chunk", [1, 16, 17, 1000])
    def test_statistics_and_gradients(self, bias, chunk):
        h, weight, target, b = problem(bias=bias)
        g_nll, g_lse = torch.randn(2, h.shape[0], dtype=h.dtype)
        (nll, lse), grads = reference(h, weight, target, b, g_nll, g_lse)
        how = (-100, chunk, "auto")
        got = OPS.row_stats_with_grads(h, weight, target, b, g_nll, g_lse, *how, [True, True, bias])
        saved = OPS.row_stats(h, weight, target, b, *how)
        again = OPS.row_stats_backward(h, weight, target, b, *saved[1:], g_nll, g_lse, *how, [True, True, bias])
        for stats in (got, saved):
            assert error(stats[0], nll) < 1e-14
            assert error(stats[1] + stats[2], lse) < 1e-14
        for three in (got[3:6], again):
            for grad, want in zip(three, grads, strict=False):
                assert error(grad, want) < 1e-14

    @pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
    def test_only_what_is_needed(self, needs):
        h, weight, target, b = problem()
        g = torch.randn(h.shape[0], dtype=h.dtype)
        _, want = reference(h, weight, target, b, g, torch.zeros_like(g))
        got = OPS.row_stats_with_grads(h, weight, target, b, g, None, *HOW, list(needs))[3:6]
        for need, grad, expected in zip(needs, got, want, strict=True):
            assert error(grad, expected) < 1e-14 if need else grad.numel() == 0

    @pytest.mark.parametrize("frozen", [None, 0, 1, 2])
    def test_autograd(self, frozen):
        h, weight, target, b = problem(requires_grad=True)
        g_nll, g_lse = torch.randn(2, h.shape[0], dtype=h.dtype)
        _, want = reference(h, weight, target, b, g_nll, g_lse)
        xs = [h, weight, b]
        if frozen is not None:
            xs[frozen].requires_grad_(False)
        nll, top, logsum = OPS.row_stats(h, weight, target, b, *HOW)
        assert not top.requires_grad
        ((nll * g_nll).sum() + ((top + logsum) * g_lse).sum()).backward()
        for i, x in enumerate(xs):
            assert x.grad is None if i == frozen else error(x.grad, want[i]) < 1e-14

    def test_no_second_derivative(self):
        h, weight, target, b = problem(requires_grad=True)
        nll = OPS.row_stats(h, weight, target, b, *HOW)[0].sum()
        (dh,) = torch.autograd.grad(nll, h, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            dh.sum().backward()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_no_worse_than_eager(self, dtype):
        h, weight, target, b = problem(N=400, H=32, V=301, dtype=dtype)
        g = torch.rand(400)
        _, want = reference(h, weight, target, b, g.double(), torch.zeros(400).double())
        xs = [x.detach().requires_grad_() for x in (h, weight, b)]
        loss = (F.cross_entropy(F.linear(*xs), target, reduction="none").float() * g).sum()
        eager = torch.autograd.grad(loss, xs)
        *_, dh, dweight, dbias, unscale = OPS.row_stats_with_grads(
            h, weight, target, b, g, None, -100, 64, "auto", [True] * 3
        )
        for got, theirs, expected in zip((dh, dweight, dbias), eager, want, strict=True):
            assert error(got.double() * unscale, expected) <= 2 * error(theirs, expected) + 1e-7

    @pytest.mark.parametrize("factor", [1e-7, 1.0, 1e4])
    def test_float16_keeps_small_and_large_gradients(self, factor):
        """Cotangents whose gradients under- or overflow float16 keep their relative precision through unscale."""
        h, weight, target, b = problem(N=400, H=32, V=301, dtype=torch.float16)
        g = torch.rand(400) * factor
        _, want = reference(h, weight, target, b, g.double(), torch.zeros(400).double())
        *_, dh, dweight, dbias, unscale = OPS.row_stats_with_grads(
            h, weight, target, b, g, None, -100, 64, "auto", [True] * 3
        )
        for got, expected in zip((dh, dweight, dbias), want, strict=True):
            assert error(got.double() * unscale.double(), expected) < 2e-3

    @pytest.mark.parametrize("accum_dtype", ["param", "float32", "auto"])
    def test_accum_dtype(self, accum_dtype):
        """At 64 chunks "param" shows one rounding per chunk; "float32", and "auto" above 16 chunks, don't."""
        h, weight, target, _ = problem(N=1024, H=32, V=64, dtype=torch.bfloat16, bias=False)
        g = torch.ones(1024)
        _, (_, want) = reference(h, weight, target, None, g.double(), torch.zeros(1024).double())
        dweight = OPS.row_stats_with_grads(
            h, weight, target, None, g, None, -100, 16, accum_dtype, [False, True, False]
        )[4]
        assert dweight.dtype == torch.bfloat16
        if accum_dtype == "param":
            assert error(dweight, want) > 4e-3
        else:
            assert error(dweight, want) < 3e-3

    def test_common_offset(self):
        """p comes from max and logsum apart: an offset of 1e4 in all logits costs nothing in float32."""
        h, weight, target, _ = problem(N=64, H=8, V=50, dtype=torch.float32)
        bias = torch.full((50,), 1e4)
        exact = F.linear(h, weight, bias).double().requires_grad_()  # eager's own rounding of the logits
        F.cross_entropy(exact, target, reduction="sum").backward()
        grads = OPS.row_stats_with_grads(
            h, weight, target, bias, torch.ones(64), None, -100, 16, "auto", [False, False, True]
        )
        assert error(grads[5], exact.grad.sum(0)) < 2e-6

    def test_rows_do_not_mix(self):
        h, weight, target, b = problem()
        target = target.clamp(min=0)
        clean = OPS.row_stats(h, weight, target, b, *HOW)[0]
        g = torch.ones(50, dtype=h.dtype)
        h[20] = float("nan")
        nll, *_, dh, _, _, _ = OPS.row_stats_with_grads(h, weight, target, b, g, None, *HOW, [True, True, True])
        others = torch.arange(50) != 20
        assert nll[20].isnan() and dh[20].isnan().all()
        assert torch.equal(nll[others], clean[others]) and dh[others].isfinite().all()


class TestBadInput:
    @pytest.mark.parametrize("label", [37, -1, -101, 10**9])
    def test_label_out_of_range(self, label):
        h, weight, target, b = problem()
        target[33] = label
        with pytest.raises(IndexError, match=rf"{label} .*37"):
            OPS.row_stats(h, weight, target, b, *HOW)

    def test_no_rows(self):
        h, weight, target, b = problem(N=0)
        *stats, dh, dweight, dbias, _ = OPS.row_stats_with_grads(
            h, weight, target, b, torch.ones(0, dtype=h.dtype), None, *HOW, [True] * 3
        )
        assert all(s.shape == (0,) for s in stats) and dh.shape == (0, 12)
        assert dweight.shape == (37, 12) and not dweight.any() and not dbias.any()

    @pytest.mark.parametrize("infinite", [float("inf"), float("nan")])
    def test_cotangents_of_ignored_rows_do_not_count(self, infinite):
        h, weight, target, b = problem()
        target[:] = -100
        g = torch.full((50,), infinite, dtype=h.dtype)
        nll, *_, dh, dweight, dbias, _ = OPS.row_stats_with_grads(
            h, weight, target, b, g, None, *HOW, [True, True, True]
        )
        assert not nll.any() and not dh.any() and not dweight.any() and not dbias.any()

    @pytest.mark.parametrize("wrong", ["hidden", "rows", "bias", "dtype"])
    def test_shapes_that_do_not_fit(self, wrong):
        h, weight, target, b = problem()
        given = {
            "hidden": (h[:, :5], weight, target, b),
            "rows": (h, weight, target[:-1], b),
            "bias": (h, weight, target, b[:-1]),
            "dtype": (h, weight, target.int(), b),
        }[wrong]
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied|batch_size|bias|int64"):
            OPS.row_stats(*given, *HOW)


class Allocations(TorchDispatchMode):
    """Numbers of elements of all storages that appear while the mode is on."""

    def __init__(self, known):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.keep, self.sizes, self.calls = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.known:
                self.known.add(x.untyped_storage()._cdata)
                self.keep.append(x)
                self.sizes.append(x.untyped_storage().nbytes() // x.dtype.itemsize)
        return out


class TestMemory:
    N, H, V, C = 2048, 8, 32768, 128

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("weight_dtype", ["same", torch.float32])
    def test_one_slab_one_dweight(self, dtype, weight_dtype, monkeypatch):
        monkeypatch.setattr(runtime, "_SCRATCH_BYTES", 1 << 16)
        h, weight, target, _ = problem(self.N, self.H, self.V, dtype, bias=False)
        weight = weight if weight_dtype == "same" else weight.to(weight_dtype)
        g = torch.ones(self.N)
        needs = runtime.Needs(True, True, False)
        with Allocations([h, weight, target, g]) as seen:
            runtime.run(
                h, weight, target, None, ignore_index=-100, chunk_size=self.C, accum_dtype="param", g_nll=g, needs=needs
            )
        slab, parameter = self.C * self.V, self.V * self.H
        assert seen.sizes.count(slab) == 1
        assert max(seen.sizes) == slab < self.N * self.V / 4
        # the destination, and under autocast the cast of the parameter; whatever the number of chunks
        wanted = 1 if weight.dtype == dtype else 2
        assert sum(size == parameter for size in seen.sizes) == wanted
        if weight.dtype == dtype:  # in place: beta=0 first, then beta=1, into the one destination
            into = [(a[0], k.get("beta", 1)) for f, a, k in seen.calls if f is torch.ops.aten.addmm_.default]
            into = [(x, beta) for x, beta in into if x.shape == weight.shape]
            assert len({x.data_ptr() for x, _ in into}) == 1
            assert [beta for _, beta in into] == [0] + [1] * (self.N // self.C - 1)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_no_logits_in_forward_and_backward(self, reduction):
        import flce_inductor

        h, weight, target, _ = problem(self.N, self.H, self.V, torch.float32, bias=False, requires_grad=True)
        with Allocations([h, weight, target]) as seen:
            loss = flce_inductor.linear_cross_entropy(h, weight, target, reduction=reduction, chunk_size=self.C)
            loss.sum().backward()
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
    monkeypatch.setattr(runtime, "_SCRATCH_BYTES", 1000)  # several blocks
    slab, h = torch.randn(3, 20, 50), torch.randn(3, 20, 7)
    dweight = torch.full((50, 7), float("nan"))
    for i in range(3):
        runtime.accumulate_(dweight, slab[i], h[i], i == 0, path)
    torch.testing.assert_close(dweight, torch.einsum("icv,ich->vh", slab, h))


@pytest.mark.parametrize("V", [16, 23, 8, 7])
def test_vocabulary_split_is_a_partition(V):
    parts = runtime._vocabulary_parts(V, torch.bfloat16, torch.device("cuda"))
    assert [i for part in parts for i in range(V)[part]] == list(range(V))
    assert len(parts) == 1 or parts[0].stop % 8 == 0
