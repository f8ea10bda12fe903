"""linear_cross_entropy and cross_entropy for explicit use, against float64 eager."""

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flce_inductor import cross_entropy, kernels, linear_cross_entropy, runtime

REDUCTIONS = ["mean", "sum", "none"]
CHUNK = 16


def problem(dtype=torch.float64, shape=(3, 20), H=12, V=37):
    torch.manual_seed(0)
    h = torch.randn(*shape, H).to(dtype).requires_grad_()
    weight = (torch.randn(V, H) / 3).to(dtype).requires_grad_()
    bias = torch.randn(V).to(dtype).requires_grad_()
    target = torch.randint(V, shape)
    target.view(-1)[::7] = -100
    return h, weight, bias, target


def class_weights(V=37, dtype=torch.float64):
    torch.manual_seed(1)
    u = torch.rand(V, dtype=dtype)
    u[3] = 0
    return u


def loss_of(z, target, *, z_loss=0.0, softcap=None, logit_scale=1.0, reduction="mean", ignore_index=-100, **kwargs):
    """The reference: F.cross_entropy of the logits, and the z-loss by its formula."""
    z = z.flatten(0, -2) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    labels = target.flatten()
    loss = F.cross_entropy(z, labels, reduction=reduction, ignore_index=ignore_index, **kwargs)
    if z_loss:
        valid = labels != ignore_index
        squares = z_loss * z.logsumexp(1) ** 2 * valid
        loss = loss + (squares if reduction == "none" else squares.sum() / (valid.sum() if reduction == "mean" else 1))
    return loss if loss.dim() == 0 else loss.reshape(target.shape)


def reference(h, linear_weight, bias, target, **kwargs):
    return loss_of(F.linear(h, linear_weight, bias), target, **kwargs)


def grads(fn, inputs, upstream=3.0):
    xs = [x.detach().requires_grad_() for x in inputs]
    loss = fn(*xs)
    (loss * upstream).sum().backward()
    return [loss.detach(), *(x.grad for x in xs)]


def upstream_of(reduction, target):
    torch.manual_seed(2)
    return torch.randn(target.shape, dtype=torch.float64) if reduction == "none" else 3.0


def same(got, want, **tolerance):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def error(got, want):
    return float(((got.double() - want.double()).norm() / want.double().norm()).detach())


class Allocations(TorchDispatchMode):
    """Element counts of all storages that appear while the mode is on (inside the ops it sees nothing)."""

    def __init__(self, *known):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known if x is not None}
        self.keep, self.sizes = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.known:
                self.known.add(x.untyped_storage()._cdata)
                self.keep.append(x)
                self.sizes.append(x.untyped_storage().nbytes() // x.dtype.itemsize)
        return out


FEATURES = {
    "class weight": dict(weight=class_weights()),
    "smoothing": dict(label_smoothing=0.1),
    "smoothing, class weight": dict(label_smoothing=0.1, weight=class_weights()),
    "smoothing, class weight, ignored class": dict(label_smoothing=0.2, weight=class_weights(), ignore_index=5),
    "ignored class": dict(ignore_index=0),
    "z-loss": dict(z_loss=1e-2),
    "z-loss, smoothing, class weight": dict(z_loss=1e-2, label_smoothing=0.1, weight=class_weights()),
    "softcap": dict(softcap=2.0),
    "scale": dict(logit_scale=0.7),
    "scale 0": dict(logit_scale=0.0),
    "scale, softcap": dict(logit_scale=-1.5, softcap=3.0),
    "everything": dict(
        weight=class_weights(), ignore_index=5, label_smoothing=0.1, z_loss=1e-2, softcap=2.0, logit_scale=1.3
    ),
}
features = pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES.keys())


def labels_for(feature, target):
    """Labels that are classes, but for those ignored."""
    return torch.where(target == -100, feature.get("ignore_index", -100), target)


def calls_of_run(monkeypatch):
    calls = []
    original = runtime.run
    monkeypatch.setattr(runtime, "run", lambda *a, **k: calls.append(k) or original(*a, **k))
    return calls


class TestLinear:
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("chunk_size", [None, 1, CHUNK, 10**6])
    def test_equals_eager(self, reduction, chunk_size):
        *inputs, target = problem()
        upstream = upstream_of(reduction, target)

        def ours(h, w, b):
            return linear_cross_entropy(h, w, target, linear_bias=b, reduction=reduction, chunk_size=chunk_size)

        got = grads(ours, inputs, upstream)
        same(got, grads(lambda h, w, b: reference(h, w, b, target, reduction=reduction), inputs, upstream))

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @features
    def test_features(self, feature, reduction):
        *inputs, target = problem()
        target, kwargs = labels_for(feature, target), feature | dict(reduction=reduction)
        upstream = upstream_of(reduction, target)
        want = grads(lambda h, w, b: reference(h, w, b, target, **kwargs), inputs, upstream)
        got = grads(
            lambda h, w, b: linear_cross_entropy(h, w, target, linear_bias=b, chunk_size=CHUNK, **kwargs),
            inputs,
            upstream,
        )
        same(got, want)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @features
    def test_features_in_other_dtypes(self, feature, reduction, dtype):
        """Gradients no further from float64 than twice eager's own error, and the per-row statistics exact."""
        *inputs, target = problem(dtype)
        target, kwargs = labels_for(feature, target), feature | dict(reduction=reduction)
        in_dtype = kwargs | ({"weight": kwargs["weight"].to(dtype)} if "weight" in kwargs else {})
        exact = kwargs | ({"weight": in_dtype["weight"].double()} if "weight" in kwargs else {})
        want = grads(lambda h, w, b: reference(h, w, b, target, **exact), [x.double() for x in inputs])
        eager = grads(lambda h, w, b: reference(h, w, b, target, **in_dtype), inputs)
        got = grads(
            lambda h, w, b: linear_cross_entropy(h, w, target, linear_bias=b, chunk_size=CHUNK, **in_dtype), inputs
        )
        for ours, theirs, expected in zip(got, eager, want, strict=True):
            assert ours.dtype == dtype
            if expected.any():
                assert error(ours, expected) <= 2 * error(theirs, expected) + torch.finfo(dtype).eps / 2
            else:
                assert not ours.any()

    @pytest.mark.parametrize("softcap", [None, 2.0])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("scale", [1.3, -0.4, 0.0])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_learned_scale(self, scale, bias, softcap, reduction):
        h, weight, b, target = problem()
        inputs = [h, weight, torch.tensor(scale, dtype=torch.float64)] + ([b] if bias else [])
        upstream = upstream_of(reduction, target)

        def ours(h, w, s, b=None):
            args = dict(logit_scale=s, softcap=softcap, reduction=reduction, chunk_size=CHUNK)
            return linear_cross_entropy(h, w, target, linear_bias=b, **args)

        def theirs(h, w, s, b=None):
            return reference(h, w, b, target, logit_scale=s, softcap=softcap, reduction=reduction)

        got, want = grads(ours, inputs, upstream), grads(theirs, inputs, upstream)
        assert want[3].shape == () and want[3] != 0
        same(got, want)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_learned_scale_keeps_dtypes(self, dtype):
        h, weight, bias, target = problem(dtype)
        scale = torch.tensor([1.3]).requires_grad_()  # a parameter of shape [1], in float32
        linear_cross_entropy(h, weight, target, linear_bias=bias, logit_scale=scale).backward()
        want = grads(
            lambda h, w, b, s: reference(h, w, b, target, logit_scale=s),
            [x.double() for x in (h, weight, bias, scale)],
            1.0,
        )[1:]
        for x, expected in zip((h, weight, bias, scale), want, strict=True):
            assert x.grad.dtype == x.dtype and x.grad.shape == x.shape
            assert error(x.grad, expected) < {2: 2e-2, 4: 1e-5}[dtype.itemsize]

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_class_weight_has_no_gradient(self, reduction):
        h, weight, _, target = problem()
        u = class_weights().requires_grad_()
        for smoothing in (0.0, 0.1):
            args = dict(weight=u, reduction=reduction, label_smoothing=smoothing)
            linear_cross_entropy(h, weight, target, **args).sum().backward()
            cross_entropy(F.linear(h, weight), target, **args).sum().backward()
        assert u.grad is None

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_labels_of_weight_zero(self, smoothing):
        """0 / 0, as torch: NaN with its gradient."""
        *inputs, target = problem()
        args = dict(weight=torch.zeros(37, dtype=torch.float64), label_smoothing=smoothing)
        got = grads(lambda h, w, b: linear_cross_entropy(h, w, target, linear_bias=b, **args), inputs)
        want = grads(lambda h, w, b: reference(h, w, b, target, **args), inputs)
        assert all(x.isnan().all() for x in want[:1] + want[2:])
        same([got[0], *got[2:]], [want[0], *want[2:]], equal_nan=True)
        valid = target != -100
        assert got[1][valid].isnan().all() and want[1][valid].isnan().all()
        assert linear_cross_entropy(*inputs[:2], target, reduction="sum", **args) == 0

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_loss_dtype(self, dtype):
        h, weight, bias, target = problem(dtype)
        args = dict(linear_bias=bias, reduction="none")
        assert linear_cross_entropy(h, weight, target, **args).dtype == dtype
        loss = linear_cross_entropy(h, weight, target, loss_dtype=torch.float32, **args)
        want = loss_of(F.linear(h, weight, bias).double(), target, reduction="none")
        torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_loss_at_a_large_vocabulary(self, dtype, reduction):
        """All the precision of float32 at V = 151936: summing is not done in 16 bits, nor naively."""
        h, weight, bias, _ = problem(dtype, shape=(4,), H=8, V=151936)
        target = torch.tensor([0, 151935, 77, -100])
        args = dict(reduction=reduction, label_smoothing=0.1, z_loss=1e-3)
        with torch.no_grad():
            z = F.linear(h, weight, bias).double()  # rounded where eager rounds
            got = linear_cross_entropy(h, weight, target, linear_bias=bias, loss_dtype=torch.float32, **args)
            over = cross_entropy(F.linear(h, weight, bias), target, loss_dtype=torch.float32, **args)
        want = loss_of(z, target, **args)
        for loss in (got, over):
            assert loss.dtype == torch.float32
            torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_autocast(self, dtype, reduction):
        *inputs, target = problem(torch.float32)
        results = []
        for fn in (reference, lambda h, w, b, t, **k: linear_cross_entropy(h, w, t, linear_bias=b, **k)):
            with torch.autocast("cpu", dtype=dtype):
                results.append(grads(lambda h, w, b, fn=fn: fn(h, w, b, target, reduction=reduction), inputs))
        for want, got in zip(*results, strict=True):
            assert got.dtype == want.dtype == torch.float32
            assert error(got, want) < (2e-2 if dtype == torch.bfloat16 else 3e-3)

    def test_autocast_leaves_float64_alone(self):
        *inputs, target = problem()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = grads(lambda h, w, b: linear_cross_entropy(h, w, target, linear_bias=b), inputs)
            over = cross_entropy(F.linear(*inputs), target)
            want = grads(lambda h, w, b: reference(h, w, b, target), inputs)
        same([*got, over.detach()], [*want, want[0]])

    @pytest.mark.parametrize("accum_dtype", ["param", "float32", "auto", None])
    def test_accum_dtype(self, accum_dtype, monkeypatch):
        """It reaches the loop; None is the key's value."""
        from torch._inductor import config

        seen, original = [], runtime.accumulator_dtype
        monkeypatch.setattr(runtime, "accumulator_dtype", lambda *a: seen.append(a[1]) or original(*a))
        h, weight, _, target = problem(torch.bfloat16)
        with config.patch({"flce_inductor.accum_dtype": "param"}):
            linear_cross_entropy(h, weight, target, accum_dtype=accum_dtype)
        assert seen == [accum_dtype or "param"]

    @pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_frozen(self, frozen, reduction):
        *inputs, target = problem()
        want = grads(lambda h, w, b: reference(h, w, b, target, reduction=reduction), inputs)[1:]
        for i in frozen:
            inputs[i].requires_grad_(False)
        h, weight, bias = inputs
        (linear_cross_entropy(h, weight, target, linear_bias=bias, reduction=reduction) * 3).sum().backward()
        for i, (x, grad) in enumerate(zip(inputs, want, strict=True)):
            assert x.grad is None if i in frozen else torch.allclose(x.grad, grad)

    @pytest.mark.parametrize("kwargs", [{}, {"z_loss": 1e-2}, {"label_smoothing": 0.1}])
    def test_no_grad_computes_statistics_only(self, kwargs, monkeypatch):
        calls = calls_of_run(monkeypatch)
        h, weight, _, target = problem()
        with torch.no_grad():
            assert not linear_cross_entropy(h, weight, target, **kwargs).requires_grad
        assert not linear_cross_entropy(h.detach(), weight.detach(), target, **kwargs).requires_grad
        assert len(calls) == 2 and not any(any(call.get("needs", ())) for call in calls)

    @pytest.mark.parametrize("kwargs", [{}, {"z_loss": 1e-2}, {"label_smoothing": 0.1, "weight": class_weights()}])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_one_pass(self, kwargs, reduction, monkeypatch):
        """A scalar loss computes its gradients in the forward: one run of the loop in all."""
        calls = calls_of_run(monkeypatch)
        h, weight, _, target = problem()
        linear_cross_entropy(h, weight, target, reduction=reduction, **kwargs).backward()
        assert len(calls) == 1

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("z_loss", [0.0, 1e-2])
    def test_backward_twice(self, reduction, z_loss):
        h, weight, bias, target = problem()
        args = dict(linear_bias=bias, reduction=reduction, z_loss=z_loss)
        loss = linear_cross_entropy(h, weight, target, **args).sum()
        loss.backward(retain_graph=True)
        once = [x.grad.clone() for x in (h, weight, bias)]
        (loss * 2).backward()
        same([x.grad for x in (h, weight, bias)], [3 * x for x in once])

    def test_slices_of_the_loss_per_token(self):
        h, weight, _, target = problem()
        loss = linear_cross_entropy(h, weight, target, reduction="none")
        loss[0].sum().backward(retain_graph=True)
        (2 * loss[1:, ::2]).sum().backward()
        h2, w2 = h.detach().requires_grad_(), weight.detach().requires_grad_()
        want = reference(h2, w2, None, target, reduction="none")
        (want[0].sum() + 2 * want[1:, ::2].sum()).backward()
        same([h.grad, weight.grad], [h2.grad, w2.grad])

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @features
    def test_all_ignored(self, feature, reduction):
        h, weight, bias, target = problem()
        target[:] = feature.get("ignore_index", -100)
        loss = linear_cross_entropy(h, weight, target, linear_bias=bias, reduction=reduction, **feature)
        assert loss.isnan().all() if reduction == "mean" else not loss.any()
        loss.sum().backward()
        assert not h.grad.any() and not weight.grad.any() and not bias.grad.any()

    @pytest.mark.parametrize("kwargs", [{}, {"z_loss": 1e-2, "label_smoothing": 0.1}])
    def test_no_rows(self, kwargs):
        h, weight, _, target = problem(shape=(0, 5))
        assert linear_cross_entropy(h, weight, target, **kwargs).isnan()
        assert linear_cross_entropy(h, weight, target, reduction="sum", **kwargs) == 0
        assert linear_cross_entropy(h, weight, target, reduction="none", **kwargs).shape == (0, 5)
        linear_cross_entropy(h, weight, target, reduction="sum", **kwargs).backward()
        assert not weight.grad.any()

    def test_one_row_without_a_batch(self):
        h, weight, bias, _ = problem(shape=())
        target = torch.tensor(4)
        got = linear_cross_entropy(h, weight, target, linear_bias=bias, reduction="none")
        assert got.shape == ()
        same(
            [got, cross_entropy(F.linear(h, weight, bias), target)],
            2 * [F.cross_entropy(F.linear(h, weight, bias), target)],
        )

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("in_place", [False, True])
    def test_second_derivative_is_refused(self, reduction, in_place):
        h, weight, _, target = problem()
        loss = linear_cross_entropy(h, weight, target, reduction=reduction, in_place_backward=in_place).sum()
        (dh,) = torch.autograd.grad(loss, h, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            dh.sum().backward()

    def test_strided_inputs(self):
        h, weight, bias, target = problem(shape=(20, 6))
        views = (h.transpose(0, 1), weight.t().contiguous().t(), bias, target.t())
        got = linear_cross_entropy(*views[:2], views[3], linear_bias=bias)
        want = reference(views[0].contiguous(), weight, bias, target.t().contiguous())
        torch.testing.assert_close(got, want)
        got.backward()
        first = h.grad.clone()
        h.grad = None
        want.backward()
        torch.testing.assert_close(first, h.grad)


class TestInPlaceBackward:
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_equals_the_default(self, reduction, dtype):
        *inputs, target = problem(dtype)

        def of(in_place):
            return grads(
                lambda h, w, b: linear_cross_entropy(
                    h, w, target, linear_bias=b, reduction=reduction, in_place_backward=in_place
                ),
                inputs,
            )

        for got, want in zip(of(True), of(False), strict=True):
            assert torch.equal(got, want)

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("retain_graph", [False, True])
    def test_runs_once(self, reduction, retain_graph):
        h, weight, _, target = problem()
        loss = linear_cross_entropy(h, weight, target, reduction=reduction, in_place_backward=True).sum()
        loss.backward(retain_graph=retain_graph)
        before = weight.grad.clone()
        with pytest.raises(RuntimeError, match="in_place_backward=True.*in_place_backward=False"):
            loss.backward()
        assert torch.equal(weight.grad, before)

    def test_slices_are_a_second_backward(self):
        h, weight, _, target = problem()
        loss = linear_cross_entropy(h, weight, target, reduction="none", in_place_backward=True)
        loss[0].sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="in_place_backward"):
            loss[1].sum().backward()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("weight_dtype", ["same", torch.float32])
    @pytest.mark.parametrize("in_place", [False, True])
    def test_gradients_are_what_the_forward_made(self, dtype, weight_dtype, in_place, monkeypatch):
        """In place, .grad is the tensor that the loop wrote, not a copy, because nothing else holds it."""
        made, original = [], runtime.run

        def run(*args, **kwargs):
            out = original(*args, **kwargs)
            made.extend(x.data_ptr() for x in out[1][:3])
            return out

        monkeypatch.setattr(runtime, "run", run)
        h, weight, bias, target = problem(dtype)
        weight = weight if weight_dtype == "same" else weight.detach().to(weight_dtype).requires_grad_()
        loss = linear_cross_entropy(h, weight, target, linear_bias=bias, in_place_backward=in_place)
        loss.backward()
        assert [x.grad.data_ptr() == p for x, p in zip((h, weight, bias), made, strict=True)] == [in_place] * 3

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("in_place", [False, True])
    def test_allocations_of_the_backward(self, dtype, in_place, monkeypatch):
        """The default's backward allocates one [V, H]; in place none."""
        monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1 << 10)
        V, H = 512, 24
        h, weight, _, target = problem(dtype, H=H, V=V)
        with Allocations(h, weight, target) as forward:
            loss = linear_cross_entropy(h, weight, target, in_place_backward=in_place)
        assert forward.sizes.count(V * H) == 1
        with Allocations(h, weight, target, *forward.keep) as backward:
            torch.autograd.grad(loss, (h, weight))
        assert backward.sizes.count(V * H) == (0 if in_place else 1)


class TestCompiled:
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("feature", ["class weight", "z-loss", "everything", "ignored class"])
    def test_features(self, feature, reduction):
        """Dynamo and AOTAutograd take it whole; aot_eager runs the ops as they are."""
        feature = FEATURES[feature]
        *inputs, target = problem()
        target, kwargs = labels_for(feature, target), feature | dict(reduction=reduction)
        upstream = upstream_of(reduction, target)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def ours(h, w, b):
            return linear_cross_entropy(h, w, target, linear_bias=b, chunk_size=CHUNK, **kwargs)

        got = grads(ours, inputs, upstream)
        same(got, grads(lambda h, w, b: reference(h, w, b, target, **kwargs), inputs, upstream))

    def test_learned_scale(self):
        h, weight, bias, target = problem()
        inputs = [h, weight, bias, torch.tensor(1.3, dtype=torch.float64)]

        @torch.compile(fullgraph=True, backend="aot_eager")
        def ours(h, w, b, s):
            return linear_cross_entropy(h, w, target, linear_bias=b, logit_scale=s, softcap=2.0)

        want = grads(lambda h, w, b, s: reference(h, w, b, target, logit_scale=s, softcap=2.0), inputs)
        same(grads(ours, inputs), want)

    def test_autocast(self):
        *inputs, target = problem(torch.float32)

        def ours(h, w, b):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return linear_cross_entropy(h, w, target, linear_bias=b)

        same(grads(torch.compile(ours, fullgraph=True, backend="aot_eager"), inputs), grads(ours, inputs))

    @pytest.mark.parametrize("backend", ["inductor", "flce_inductor"])
    def test_takes_one_pass(self, backend, monkeypatch):
        calls = calls_of_run(monkeypatch)
        *inputs, target = problem(torch.float32)
        args = dict(label_smoothing=0.1, z_loss=1e-2)
        fn = torch.compile(
            lambda h, w, b: linear_cross_entropy(h, w, target, linear_bias=b, **args), fullgraph=True, backend=backend
        )
        got = grads(fn, inputs)
        assert len(calls) == 1 and all(calls[0]["needs"])
        want = grads(lambda h, w, b: reference(h, w, b, target, **args), [x.double() for x in inputs])
        same(got, [x.float() for x in want], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("backend", ["inductor", "flce_inductor"])
    def test_loss_per_token(self, backend):
        *inputs, target = problem(torch.float32)
        kwargs = dict(reduction="none", weight=class_weights(dtype=torch.float32), softcap=2.0)
        fn = torch.compile(
            lambda h, w, b: linear_cross_entropy(h, w, target, linear_bias=b, **kwargs), fullgraph=True, backend=backend
        )
        exact = kwargs | {"weight": kwargs["weight"].double()}
        want = grads(lambda h, w, b: reference(h, w, b, target, **exact), [x.double() for x in inputs])
        same(grads(fn, inputs), [x.float() for x in want], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_in_place_backward(self, reduction):
        """A second backward is right: nothing could raise, so nothing is overwritten."""
        h, weight, _, target = problem()

        @torch.compile(fullgraph=True, backend="inductor")
        def ours(h, w):
            return linear_cross_entropy(h, w, target, reduction=reduction, in_place_backward=True)

        want = grads(lambda h, w: reference(h, w, None, target, reduction=reduction), [h, weight])[1:]
        # by default a compiled backward frees what it may overwrite
        with torch._functorch.config.patch(donated_buffer=False):
            loss = 3 * ours(h, weight).sum()
            same(torch.autograd.grad(loss, (h, weight), retain_graph=True), want)
            same(torch.autograd.grad(loss, (h, weight)), want)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_cross_entropy(self, reduction):
        """Over logits: its kernel runs between two graphs."""
        *inputs, target = problem()
        kwargs = dict(reduction=reduction, softcap=2.0, label_smoothing=0.1, z_loss=1e-2)
        upstream = upstream_of(reduction, target)
        fn = torch.compile(lambda h, w, b: cross_entropy(F.linear(h, w, b), target, **kwargs) * 2, backend="aot_eager")
        want = grads(lambda h, w, b: reference(h, w, b, target, **kwargs) * 2, inputs, upstream)
        same(grads(fn, inputs, upstream), want)


WRONG_ARGUMENTS = [
    ({"reduction": "max"}, ValueError, "reduction.*mean, sum, none"),
    ({"reduction": None}, ValueError, "reduction.*mean, sum, none"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be between 0.0 and 1.0.*1.5"),
    ({"label_smoothing": -0.1}, ValueError, "label_smoothing must be between"),
    ({"label_smoothing": float("nan")}, ValueError, "label_smoothing must be between"),
    ({"softcap": 0.0}, ValueError, "softcap=0.0.*above 0"),
    ({"softcap": -3.0}, ValueError, "softcap=-3.0"),
    ({"weight": torch.ones(36, dtype=torch.float64)}, RuntimeError, "class weight.*36"),
]
WRONG_ARGUMENTS_LINEAR = [
    ({"chunk_size": 0}, ValueError, "chunk_size=0"),
    ({"chunk_size": True}, ValueError, "chunk_size=True"),
    ({"chunk_size": 1.0}, ValueError, "chunk_size=1.0"),
    ({"accum_dtype": "bf16"}, ValueError, "accum_dtype='bf16'.*'param'"),
    ({"accum_dtype": torch.float32}, ValueError, "accum_dtype=torch.float32.*'param'"),
    ({"logit_scale": torch.ones(8)}, ValueError, r"logit_scale is one number, not a tensor \[8\]"),
]


class TestBadInput:
    @pytest.mark.parametrize(("kwargs", "error", "match"), WRONG_ARGUMENTS + WRONG_ARGUMENTS_LINEAR)
    def test_wrong_arguments(self, kwargs, error, match):
        h, weight, _, target = problem()
        with pytest.raises(error, match=match):
            linear_cross_entropy(h, weight, target, **kwargs)

    @pytest.mark.parametrize(("kwargs", "error", "match"), WRONG_ARGUMENTS)
    def test_wrong_arguments_over_logits(self, kwargs, error, match):
        h, weight, _, target = problem()
        with pytest.raises(error, match=match):
            cross_entropy(F.linear(h, weight), target, **kwargs)

    def test_wrong_tensors(self):
        h, weight, bias, target = problem()
        with pytest.raises(IndexError, match="Target 37 is out of bounds"):
            linear_cross_entropy(h, weight, torch.full_like(target, 37))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            linear_cross_entropy(h[..., :5], weight, target)
        with pytest.raises(RuntimeError, match=r"target of shape \(3, 20\), got \(2, 20\)"):
            linear_cross_entropy(h, weight, target[:2])
        with pytest.raises(RuntimeError, match=r"target of shape \(3, 20\), got \(20, 3\)"):
            linear_cross_entropy(h, weight, target.t())  # as many labels, of other rows
        with pytest.raises(RuntimeError, match="dtype"):
            linear_cross_entropy(h, weight.float(), target)
        with pytest.raises(RuntimeError, match="int64"):
            linear_cross_entropy(h, weight, target.int())
        with pytest.raises(RuntimeError, match="bias"):
            linear_cross_entropy(h, weight, target, linear_bias=bias[:5])

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("label", [37, -1, 10**9])
    @pytest.mark.parametrize("kwargs", [{}, {"weight": class_weights(), "label_smoothing": 0.1, "z_loss": 0.1}])
    def test_label_out_of_range(self, reduction, label, kwargs):
        h, weight, _, target = problem()
        target[2, 3] = label
        for call in (
            lambda: linear_cross_entropy(h, weight, target, reduction=reduction, **kwargs),
            lambda: cross_entropy(F.linear(h, weight), target, reduction=reduction, **kwargs),
        ):
            with pytest.raises(IndexError, match=str(label)):
                call()

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("leaf", [0, 1, 2])
    def test_derivatives_by_torch_func(self, reduction, leaf):
        *xs, target = problem()

        def loss(x):
            h, weight, bias = [x if i == leaf else y for i, y in enumerate(xs)]
            return linear_cross_entropy(h, weight, target, linear_bias=bias, reduction=reduction).sum()

        for transformed in (torch.func.grad(loss), lambda x: torch.func.jvp(loss, (x,), (x,))):
            with pytest.raises(RuntimeError, match="torch.func.*loss.backward"):
                transformed(xs[leaf].detach())
        with pytest.raises(RuntimeError, match="torch.func.*loss.backward"):
            torch.func.grad(lambda z: cross_entropy(z, target, reduction=reduction).sum())(F.linear(*xs).detach())

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_vmap(self, reduction):
        h, weight, _, target = (x.detach() for x in problem())
        got = torch.vmap(lambda h, t: linear_cross_entropy(h, weight, t, reduction=reduction))(h, target)
        want = [F.cross_entropy(F.linear(x, weight), t, reduction=reduction) for x, t in zip(h, target, strict=True)]
        torch.testing.assert_close(got, torch.stack(want))

    def test_wrong_tensors_over_logits(self):
        h, weight, _, target = problem()
        logits = F.linear(h, weight)
        with pytest.raises(RuntimeError, match=r"target of shape \(3, 20\), got \(2, 20\)"):
            cross_entropy(logits, target[:2])
        with pytest.raises(RuntimeError, match=r"target of shape \(3, 20\), got \(20, 3\)"):
            cross_entropy(logits, target.t())
        with pytest.raises(RuntimeError, match="int64"):
            cross_entropy(logits, target.int())
        with pytest.raises(RuntimeError, match="floating"):
            cross_entropy(logits.long(), target)
        with pytest.raises(TypeError, match="logit_scale"):
            cross_entropy(logits, target, logit_scale=torch.tensor(2.0))


def over_logits(shape=(60,), V=37, dtype=torch.float64, requires_grad=True):
    torch.manual_seed(0)
    logits = (3 * torch.randn(*shape, V)).to(dtype).requires_grad_(requires_grad)
    target = torch.randint(V, shape)
    target.view(-1)[::7] = -100
    return logits, target


class TestOverLogits:
    @pytest.mark.parametrize("shape", [(60,), (3, 20)], ids=["2-D", "3-D"])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("feature", [{}, *FEATURES.values()], ids=["plain", *FEATURES.keys()])
    def test_features(self, feature, reduction, shape):
        logits, target = over_logits(shape)
        target, kwargs = labels_for(feature, target), feature | dict(reduction=reduction)
        upstream = upstream_of(reduction, target)
        got = grads(lambda z: cross_entropy(z, target, **kwargs), [logits], upstream)
        same(got, grads(lambda z: loss_of(z, target, **kwargs), [logits], upstream))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("feature", [{}, FEATURES["everything"]], ids=["plain", "everything"])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_other_dtypes(self, dtype, feature, reduction):
        """The loss to the last digit of its dtype, and each element of the gradient rounded once."""
        logits, target = over_logits(dtype=dtype)
        target = labels_for(feature, target)
        kwargs = feature | dict(reduction=reduction, loss_dtype=torch.float32)
        (got, dz), (want, exact) = (
            grads(lambda z: cross_entropy(z, target, **kwargs), [logits]),
            grads(lambda z: loss_of(z, target, **feature, reduction=reduction), [logits.double()]),
        )
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        assert dz.dtype == dtype
        # atol: cancellation at the label in float32, and float16's least number
        torch.testing.assert_close(dz.double(), exact, rtol=torch.finfo(dtype).eps * 0.6 + 1e-5, atol=5e-7)
        loss = cross_entropy(logits, target, **feature, reduction=reduction)
        assert loss.dtype == dtype and torch.equal(loss, got.to(dtype))

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_backward_twice(self, reduction):
        logits, target = over_logits()
        loss = cross_entropy(logits, target, reduction=reduction, label_smoothing=0.1).sum()
        before = logits.detach().clone()
        loss.backward(retain_graph=True)
        once = logits.grad.clone()
        (loss * 2).backward()
        torch.testing.assert_close(logits.grad, 3 * once)
        assert torch.equal(logits, before)
        same([once], grads(lambda z: loss_of(z, target, reduction=reduction, label_smoothing=0.1), [logits], 1.0)[1:])

    def test_slices_of_the_loss_per_token(self):
        logits, target = over_logits((3, 20))
        loss = cross_entropy(logits, target, reduction="none")
        for i in range(3):
            (loss[i, i::3] * (i + 1)).sum().backward(retain_graph=i < 2)
        z = logits.detach().requires_grad_()
        want = loss_of(z, target, reduction="none")
        sum((want[i, i::3] * (i + 1)).sum() for i in range(3)).backward()
        torch.testing.assert_close(logits.grad, z.grad)

    @pytest.mark.parametrize("layout", ["strided", "expanded", "transposed", "negative sum"])
    def test_layouts_of_the_upstream_gradient(self, layout):
        logits, target = over_logits((4, 15))
        upstream = {
            "strided": torch.randn(4, 30, dtype=torch.float64)[:, ::2],
            "expanded": torch.randn(4, 1, dtype=torch.float64).expand(4, 15),
            "transposed": torch.randn(15, 4, dtype=torch.float64).t(),
            "negative sum": torch.tensor(-2.0, dtype=torch.float64).expand(4, 15),
        }[layout]
        args = dict(reduction="none", label_smoothing=0.1, z_loss=0.1)
        got = torch.autograd.grad(cross_entropy(logits, target, **args), logits, upstream)
        want = torch.autograd.grad(loss_of(logits, target, **args), logits, upstream)
        same(got, want)

    @pytest.mark.parametrize(
        "layout", ["class dimension moved", "sliced classes", "sliced rows", "expanded rows", "batch transposed"]
    )
    def test_layouts_of_the_logits(self, layout):
        base, target = over_logits((4, 15))

        def view(z):
            return {
                "class dimension moved": lambda: z.transpose(1, 2).contiguous().transpose(1, 2),
                "sliced classes": lambda: z[..., :31],
                "sliced rows": lambda: z[:, ::2],
                "expanded rows": lambda: z[:, :1].expand(4, 15, 37),
                "batch transposed": lambda: z.transpose(0, 1),
            }[layout]()

        target = {"sliced rows": target[:, ::2], "batch transposed": target.t()}.get(layout, target).clamp(max=30)
        assert layout == "expanded rows" or not view(base).is_contiguous()
        got = grads(lambda z: cross_entropy(view(z), target), [base])
        same(got, grads(lambda z: loss_of(view(z), target), [base]))

    def test_logits_that_others_read(self):
        """The default neither changes them nor hands out a gradient that shares memory with them."""
        logits, target = over_logits()
        hidden = logits * 1.0
        loss = cross_entropy(hidden, target) + hidden.square().mean()
        loss.backward()
        want = grads(lambda z: loss_of(z, target) + z.square().mean(), [logits], 1.0)
        same([loss.detach(), logits.grad], want)

    @pytest.mark.parametrize("changed", ["logits", "class weight", "target"])
    def test_what_is_saved_must_not_change(self, changed):
        logits, target = over_logits()
        z, u = logits * 1.0, class_weights()
        loss = cross_entropy(z, target, weight=u, label_smoothing=0.1)
        with torch.no_grad():
            {"logits": z, "class weight": u, "target": target}[changed].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @features
    def test_all_ignored(self, feature, reduction):
        logits, target = over_logits()
        target[:] = feature.get("ignore_index", -100)
        loss = cross_entropy(logits, target, reduction=reduction, **feature)
        assert loss.isnan().all() if reduction == "mean" else not loss.any()
        loss.sum().backward()
        # torch's own gradient of a mean over nothing with label smoothing is NaN; the linear form's is 0
        assert not logits.grad.any()

    def test_no_rows(self):
        logits, target = over_logits((0, 5))
        assert cross_entropy(logits, target).isnan()
        assert cross_entropy(logits, target, reduction="none").shape == (0, 5)
        cross_entropy(logits, target, reduction="sum").backward()
        assert logits.grad.shape == (0, 5, 37)

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_second_derivative_is_refused(self, reduction):
        logits, target = over_logits()
        (dz,) = torch.autograd.grad(cross_entropy(logits, target, reduction=reduction).sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            dz.sum().backward()

    def test_in_place_backward_needs_triton(self):
        logits, target = over_logits()
        with pytest.raises(ValueError, match="in_place_backward=True needs a device with Triton.*cpu"):
            cross_entropy(logits, target, in_place_backward=True)

    def test_no_grad(self):
        logits, target = over_logits()
        with torch.no_grad():
            loss = cross_entropy(logits, target, z_loss=0.1)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, loss_of(logits, target, z_loss=0.1).detach())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_one_allocation_of_the_logits_size(self, dtype):
        """None in the forward, the gradient in the backward; the rest are blocks that fit into a cache."""
        N, V = 1024, 8192
        logits, target = over_logits((N,), V, dtype)
        with Allocations(logits, target) as forward:
            loss = cross_entropy(logits, target, label_smoothing=0.1)
        assert max(forward.sizes) <= N * V / 4
        with Allocations(logits, target, *forward.keep) as backward:
            (grad,) = torch.autograd.grad(loss, logits)
        assert backward.sizes.count(N * V) == 1 and grad.shape == (N, V)
        assert max(size for size in backward.sizes if size != N * V) <= N * V / 4


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestOverLogitsInPlace:
    """On a card by the Triton kernel; on the CPU, let in for once, by the torch one, which shows the bookkeeping."""

    N, V = 256, 4000

    @pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)], autouse=True)
    def device(self, request, monkeypatch):
        self.device = request.param
        if self.device == "cpu":

            def rows_(slab, *args, **kwargs):
                with torch.autograd._unsafe_preserve_version_counter(slab):  # a Triton kernel doesn't count versions
                    kernels.torch_rows_(slab, *args, **kwargs)

            monkeypatch.setattr(kernels, "rows_", rows_)
            monkeypatch.setattr(kernels, "TRITON_DEVICES", ("cpu",))

    def problem(self, dtype=torch.bfloat16):
        logits, target = over_logits((self.N,), self.V, dtype)
        return logits.detach().to(self.device).requires_grad_(), target.to(self.device)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("kwargs", [{}, dict(label_smoothing=0.1, z_loss=1e-3, softcap=20.0)])
    def test_equals_the_default(self, dtype, reduction, kwargs):
        logits, target = self.problem(dtype)
        found = []
        for in_place in (False, True):
            z = logits.detach().clone().requires_grad_()
            loss = cross_entropy(z * 1, target, reduction=reduction, in_place_backward=in_place, **kwargs)
            loss.sum().backward()
            found.append((loss.detach(), z.grad))
        for default, in_place in zip(*found, strict=True):
            assert torch.equal(default, in_place)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_no_allocation_in_the_backward(self, dtype):
        logits, target = self.problem(dtype)
        with Allocations(logits, target) as forward:
            loss = cross_entropy(logits, target, in_place_backward=True)
        with Allocations(logits, target, *forward.keep) as backward:
            (grad,) = torch.autograd.grad(loss, logits)
        assert grad.data_ptr() == logits.data_ptr()
        # the torch kernel converts 16 bits block by block, here in one block
        if not (self.device == "cpu" and dtype.itemsize == 2):
            assert max(backward.sizes) <= self.N * self.V / 4

    def test_peak_memory_of_the_backward(self):
        if self.device == "cpu":
            pytest.skip("the CPU has no allocator that counts")
        logits, target = self.problem()
        size = logits.numel() * logits.element_size()
        gc.collect()  # what other tests left must not be freed in between
        peaks = []
        for in_place in (False, True):
            for _ in range(2):  # the first builds the kernels
                z = logits.detach().clone().requires_grad_()
                loss = cross_entropy(z, target, in_place_backward=in_place)
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                torch.autograd.grad(loss, z)
                peak = torch.cuda.max_memory_allocated() - before
                del loss, z
            peaks.append(peak)
        assert peaks[1] < 0.25 * size and peaks[0] >= 0.95 * size

    @pytest.mark.parametrize("retain_graph", [False, True])
    def test_runs_once(self, retain_graph):
        logits, target = self.problem()
        loss = cross_entropy(logits * 1, target, in_place_backward=True)
        loss.backward(retain_graph=retain_graph)
        with pytest.raises(RuntimeError, match="in_place_backward" if retain_graph else "second time"):
            loss.backward()

    def test_other_readers_notice(self):
        """A backward that needs the logits after they were overwritten raises."""
        logits, target = self.problem(torch.float32)
        z = logits * 1
        square, loss = z.square().sum(), cross_entropy(z, target, in_place_backward=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()

    def test_expanded_logits(self):
        """Rows that share memory are not overwritten by one another."""
        logits, target = self.problem(torch.float32)
        found = []
        for in_place in (False, True):
            z = logits[:1].detach().requires_grad_()
            expanded = (z * 1).expand(self.N, self.V)
            cross_entropy(expanded, target, in_place_backward=in_place).backward()
            found.append(z.grad)
        assert torch.equal(*found)

    def test_second_derivative_is_refused(self):
        logits, target = self.problem(torch.float32)
        loss = cross_entropy(logits * 1, target, in_place_backward=True)
        (dz,) = torch.autograd.grad(loss, logits, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            dz.sum().backward()


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize(("in_place", "reduction"), list(itertools.product([False, True], REDUCTIONS)))
def test_float16_under_a_grad_scaler(in_place, reduction, z_loss):
    """Gradients too small for float16 until the scaler's factor arrives with the backward."""
    h, weight, bias, target = problem(torch.float16, shape=(256,), V=301)
    factor = 2.0**12
    want = grads(
        lambda h, w, b: reference(h, w, b, target, z_loss=z_loss) / 2**10,
        [x.double() for x in (h, weight, bias)],
        factor,
    )[1:]
    count = (target != -100).sum()
    args = dict(linear_bias=bias, reduction=reduction, z_loss=z_loss, in_place_backward=in_place)
    loss = linear_cross_entropy(h, weight, target, loss_dtype=torch.float32, **args)
    loss = loss if reduction == "mean" else loss.sum() / count
    (loss / 2**10 * factor).backward()
    for x, expected in zip((h, weight, bias), want, strict=True):
        assert error(x.grad, expected) < 4e-3


@pytest.mark.parametrize("z_loss", [0.0, 1e-7])
def test_float16_keeps_small_class_weights(z_loss):
    """Cotangents below float16's range in the forward, which a GradScaler lifts in the backward."""
    *inputs, target = problem(torch.float16)
    args = dict(weight=torch.full((37,), 1e-6), reduction="sum", z_loss=z_loss)
    exact = args | {"weight": args["weight"].double()}
    want = grads(lambda h, w, b: reference(h, w, b, target, **exact), [x.double() for x in inputs], 2.0**16)
    args |= dict(loss_dtype=torch.float32, chunk_size=CHUNK)
    got = grads(lambda h, w, b: linear_cross_entropy(h, w, target, linear_bias=b, **args), inputs, 2.0**16)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 4e-3
