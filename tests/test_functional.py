"""linear_cross_entropy for explicit use, against float64 eager."""

import pytest
import torch
import torch.nn.functional as F

from flce_inductor import linear_cross_entropy


def problem(dtype=torch.float64, shape=(3, 20), H=12, V=37):
    torch.manual_seed(0)
    h = torch.randn(*shape, H).to(dtype).requires_grad_()
    weight = (torch.randn(V, H) / 3).to(dtype).requires_grad_()
    bias = torch.randn(V).to(dtype).requires_grad_()
    target = torch.randint(V, shape)
    target.view(-1)[::7] = -100
    return h, weight, bias, target


def reference(h, weight, bias, target, **kwargs):
    z = F.linear(h, weight, bias)
    loss = F.cross_entropy(z.flatten(0, -2), target.flatten(), **kwargs)
    return loss if loss.dim() == 0 else loss.reshape(target.shape)


def grads(fn, inputs, upstream=3.0):
    xs = [x.detach().requires_grad_() for x in inputs]
    loss = fn(*xs)
    (loss * upstream).sum().backward()
    return [loss.detach(), *(x.grad for x in xs)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_size", [None, 1, 16, 10**6])
@pytest.mark.parametrize("compiled", [False, True])
def test_equals_eager(reduction, chunk_size, compiled):
    *inputs, target = problem()
    upstream = torch.randn(target.shape, dtype=torch.float64) if reduction == "none" else 3.0

    def ours(h, w, b):
        return linear_cross_entropy(h, w, target, linear_bias=b, reduction=reduction, chunk_size=chunk_size)

    fn = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    got = grads(fn, inputs, upstream)
    want = grads(lambda h, w, b: reference(h, w, b, target, reduction=reduction), inputs, upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["inductor", "flce_inductor"])
def test_compiled_takes_one_pass(backend, monkeypatch):
    from flce_inductor import runtime

    calls = []
    original = runtime.run
    monkeypatch.setattr(runtime, "run", lambda *a, **k: calls.append(k) or original(*a, **k))
    h, weight, bias, target = problem(torch.float32)
    fn = torch.compile(
        lambda h, w, b: linear_cross_entropy(h, w, target, linear_bias=b), fullgraph=True, backend=backend
    )
    fn(h, weight, bias).backward()
    assert len(calls) == 1 and all(calls[0]["needs"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_dtype(dtype):
    h, weight, bias, target = problem(dtype)
    args = dict(linear_bias=bias, reduction="none")
    assert linear_cross_entropy(h, weight, target, **args).dtype == dtype
    loss = linear_cross_entropy(h, weight, target, loss_dtype=torch.float32, **args)
    z = F.linear(h, weight, bias).double()
    want = F.cross_entropy(z.flatten(0, -2), target.flatten(), reduction="none").reshape(target.shape)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    *inputs, target = problem(torch.float32)
    results = []
    for fn in (reference, lambda h, w, b, t: linear_cross_entropy(h, w, t, linear_bias=b)):
        with torch.autocast("cpu", dtype=dtype):
            results.append(grads(lambda h, w, b, fn=fn: fn(h, w, b, target), inputs))
    for want, got in zip(*results, strict=True):
        assert got.dtype == want.dtype == torch.float32
        assert (got - want).norm() / want.norm() < (2e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen(frozen, reduction):
    *inputs, target = problem()
    want = grads(lambda h, w, b: reference(h, w, b, target, reduction=reduction), inputs)[1:]
    inputs[frozen].requires_grad_(False)
    h, weight, bias = inputs
    (linear_cross_entropy(h, weight, target, linear_bias=bias, reduction=reduction) * 3).sum().backward()
    for i, (x, grad) in enumerate(zip(inputs, want, strict=True)):
        assert x.grad is None if i == frozen else torch.allclose(x.grad, grad)


def test_no_grad_computes_statistics_only(monkeypatch):
    from flce_inductor import runtime

    calls = []
    original = runtime.run
    monkeypatch.setattr(runtime, "run", lambda *a, **k: calls.append(k) or original(*a, **k))
    h, weight, _, target = problem()
    with torch.no_grad():
        linear_cross_entropy(h, weight, target)
    assert len(calls) == 1 and not any(calls[0].get("needs", ()))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_backward_twice(reduction):
    h, weight, _, target = problem()
    loss = linear_cross_entropy(h, weight, target, reduction=reduction).sum()
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    (loss * 2).backward()
    torch.testing.assert_close(weight.grad, 3 * once)


def test_slices_of_the_loss_per_token():
    h, weight, _, target = problem()
    loss = linear_cross_entropy(h, weight, target, reduction="none")
    loss[0].sum().backward(retain_graph=True)
    (2 * loss[1:, ::2]).sum().backward()
    h2, w2 = h.detach().requires_grad_(), weight.detach().requires_grad_()
    want = reference(h2, w2, None, target, reduction="none")
    (want[0].sum() + 2 * want[1:, ::2].sum()).backward()
    torch.testing.assert_close(h.grad, h2.grad)
    torch.testing.assert_close(weight.grad, w2.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored(reduction):
    h, weight, _, target = problem()
    target[:] = -100
    loss = linear_cross_entropy(h, weight, target, reduction=reduction)
    assert loss.isnan().all() if reduction == "mean" else not loss.any()
    loss.sum().backward()
    assert not h.grad.any() and not weight.grad.any()


def test_no_rows():
    h, weight, _, target = problem(shape=(0, 5))
    assert linear_cross_entropy(h, weight, target).isnan()
    assert linear_cross_entropy(h, weight, target, reduction="sum") == 0
    assert linear_cross_entropy(h, weight, target, reduction="none").shape == (0, 5)
    linear_cross_entropy(h, weight, target, reduction="sum").backward()
    assert not weight.grad.any()


def test_second_derivative_is_refused():
    h, weight, _, target = problem()
    (dh,) = torch.autograd.grad(linear_cross_entropy(h, weight, target), h, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dh.sum().backward()


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"reduction": "max"}, ValueError, "reduction.*mean, sum, none"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0"),
        ({"chunk_size": True}, ValueError, "chunk_size=True"),
        ({"accum_dtype": "bf16"}, ValueError, "accum_dtype='bf16'.*'param'"),
    ],
)
def test_wrong_arguments(kwargs, error, match):
    h, weight, _, target = problem()
    with pytest.raises(error, match=match):
        linear_cross_entropy(h, weight, target, **kwargs)


def test_wrong_tensors():
    h, weight, bias, target = problem()
    with pytest.raises(IndexError, match="Target 37 is out of bounds"):
        linear_cross_entropy(h, weight, torch.full_like(target, 37))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear_cross_entropy(h[..., :5], weight, target)
    with pytest.raises(RuntimeError, match="batch_size"):
        linear_cross_entropy(h, weight, target[:2])
    with pytest.raises(RuntimeError, match="dtype"):
        linear_cross_entropy(h, weight.float(), target)
    with pytest.raises(RuntimeError, match="int64"):
        linear_cross_entropy(h, weight, target.int())
    with pytest.raises(RuntimeError, match="bias"):
        linear_cross_entropy(h, weight, target, linear_bias=bias[:5])


def test_strided_inputs():
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
