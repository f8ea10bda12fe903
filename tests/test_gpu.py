"""What only a card can show: peak memory, no host synchronisation, 16-bit numerics of the whole loop."""

import pytest
import torch
import torch.nn.functional as F

import flce_inductor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIB = 2**20


def loss_fn(h, weight, target):
    return F.cross_entropy(F.linear(h, weight), target)


def head(N, H, V, dtype):
    torch.manual_seed(0)
    h = torch.randn(N, H, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(V, H, device="cuda") * H**-0.5).to(dtype).requires_grad_()
    return h, weight, torch.randint(V, (N,), device="cuda")


def peak_of_step(step) -> int:
    """Bytes above what was allocated before, in the steady state."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_peak_is_gradients_plus_slab(dtype):
    N, H, V, C = 8192, 4096, 128256, 1024
    h, weight, target = head(N, H, V, dtype)
    compiled = torch.compile(loss_fn, backend="flce_inductor", options={"flce_inductor.chunk_size": C})

    def step():
        h.grad = weight.grad = None
        compiled(h, weight, target).backward()
        h.grad = weight.grad = None

    peak = peak_of_step(step)
    gradients, slab = (N * H + V * H) * dtype.itemsize, C * V * dtype.itemsize
    assert peak <= gradients + 1.1 * slab, f"{peak / MIB:.0f} MiB"
    assert peak >= gradients + slab, "the measurement saw less than what must exist"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_host_synchronisation(reduction):
    h, weight, target = head(512, 256, 5003, torch.bfloat16)
    target[::3] = -100
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = flce_inductor.linear_cross_entropy(h, weight, target, reduction=reduction, chunk_size=128)
        loss.backward(torch.ones_like(loss))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("V", [5000, 5003, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_worse_than_eager(V, bias, dtype, reduction):
    """Errors against float64, beside those of eager in the same dtype."""
    N, H = 700, 128
    h, weight, target = head(N, H, V, dtype)
    b = torch.randn(V, device="cuda").to(dtype).requires_grad_() if bias else None
    target[::5] = -100
    up = torch.randn(N, device="cuda") if reduction == "none" else torch.tensor(3.0, device="cuda")

    def run(fn, *inputs):
        xs = [None if x is None else x.detach().requires_grad_() for x in inputs]
        loss = fn(*xs)
        (loss.float() * up).sum().backward()
        return [loss.detach().double()] + [x.grad.double() for x in xs if x is not None]

    def eager(h, w, b):
        return F.cross_entropy(F.linear(h, w, b), target, reduction=reduction)

    def ours(h, w, b):
        return flce_inductor.linear_cross_entropy(h, w, target, linear_bias=b, reduction=reduction, chunk_size=128)

    compiled = torch.compile(eager, backend="flce_inductor", options={"flce_inductor.min_logits_bytes": 0})
    reference = run(eager, *(None if x is None else x.double() for x in (h, weight, b)))
    theirs = run(eager, h, weight, b)
    for fn in (ours, compiled):
        for got, eager_got, want in zip(run(fn, h, weight, b), theirs, reference, strict=True):
            error, allowed = ((x - want).norm() / want.norm() for x in (got, eager_got))
            assert error <= 3 * allowed + torch.finfo(dtype).eps, (float(error), float(allowed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gradient_goes_to_the_float32_parameter(dtype):
    h, weight, target = head(512, 256, 5000, torch.float32)

    def fn(h, weight):
        with torch.autocast("cuda", dtype=dtype):
            return F.cross_entropy(F.linear(h, weight), target)

    compiled = torch.compile(fn, backend="flce_inductor", options={"flce_inductor.min_logits_bytes": 0})
    grads = []
    for run in (fn, compiled):
        weight.grad = h.grad = None
        run(h, weight).backward()
        assert weight.grad.dtype == torch.float32
        grads.append((h.grad, weight.grad))
    for theirs, got in zip(*grads, strict=True):
        assert (theirs - got).norm() / theirs.norm() < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_out_of_range_label_fails():
    """In a process of its own: a device assertion ends the CUDA context."""
    import subprocess
    import sys

    code = (
        "import torch, flce_inductor; h = torch.randn(8, 16, device='cuda'); w = torch.randn(100, 16, device='cuda');"
        "print(flce_inductor.linear_cross_entropy(h, w, torch.full((8,), 100, device='cuda')).item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "out of bounds" in done.stderr + done.stdout
