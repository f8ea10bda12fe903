"""What only a card can show: peak memory, no host synchronisation, 16-bit numerics of the whole loop."""

import pytest
import torch
import torch.nn.functional as F

import flce_inductor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIB = 2**20
SMALL = {"flce_inductor.min_logits_bytes": 0, "flce_inductor.min_vocab_size": 0}


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


@pytest.mark.parametrize(
    ("dtype", "accum_dtype"),
    [
        (torch.bfloat16, "param"),
        (torch.float16, "param"),
        (torch.float32, "param"),
        (torch.bfloat16, "float32"),
        (torch.float16, "float32"),
    ],
)
def test_peak_is_gradients_plus_slab(dtype, accum_dtype):
    """With float32 accumulation of a 16-bit dweight, 2 V H bytes more."""
    N, H, V, C = 8192, 4096, 128256, 1024
    h, weight, target = head(N, H, V, dtype)
    options = {"flce_inductor.chunk_size": C, "flce_inductor.accum_dtype": accum_dtype}
    compiled = torch.compile(loss_fn, backend="flce_inductor", options=options)

    def step():
        h.grad = weight.grad = None
        compiled(h, weight, target).backward()
        h.grad = weight.grad = None

    peak = peak_of_step(step)
    gradients, slab = (N * H + V * H) * dtype.itemsize, C * V * dtype.itemsize
    more = 2 * V * H if accum_dtype == "float32" else 0
    assert peak <= gradients + 1.1 * slab + more, f"{peak / MIB:.0f} MiB"
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
        (loss * up.to(torch.promote_types(loss.dtype, torch.float32))).sum().backward()
        return [loss.detach().double()] + [x.grad.double() for x in xs if x is not None]

    def eager(h, w, b):
        return F.cross_entropy(F.linear(h, w, b), target, reduction=reduction)

    def ours(h, w, b):
        return flce_inductor.linear_cross_entropy(h, w, target, linear_bias=b, reduction=reduction, chunk_size=128)

    compiled = torch.compile(eager, backend="flce_inductor", options=SMALL)
    reference = run(eager, *(None if x is None else x.double() for x in (h, weight, b)))
    theirs = run(eager, h, weight, b)
    for fn in (ours, compiled) if V == 5003 else (ours,):  # compiling takes seconds
        for got, eager_got, want in zip(run(fn, h, weight, b), theirs, reference, strict=True):
            error, allowed = ((x - want).norm() / want.norm() for x in (got, eager_got))
            slack = 1e-14 if dtype == torch.float64 else torch.finfo(dtype).eps
            assert error <= 3 * allowed + slack, (float(error), float(allowed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gradient_goes_to_the_float32_parameter(dtype):
    h, weight, target = head(512, 256, 5000, torch.float32)

    def fn(h, weight):
        with torch.autocast("cuda", dtype=dtype):
            return F.cross_entropy(F.linear(h, weight), target)

    compiled = torch.compile(fn, backend="flce_inductor", options=SMALL)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_two_runs_are_bitwise_equal(dtype):
    h, weight, target = head(1000, 256, 5003, dtype)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for reduction in ("mean", "none", "mean", "none"):
            h.grad = weight.grad = None
            loss = flce_inductor.linear_cross_entropy(h, weight, target, reduction=reduction, chunk_size=128)
            loss.sum().backward()
            runs.append((loss.detach(), h.grad, weight.grad))
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in ((runs[0], runs[2]), (runs[1], runs[3])):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_captured_by_a_cuda_graph():
    """mode="reduce-overhead" captures the step, and its replays are right for new data."""
    from torch._dynamo.utils import counters

    h, weight, target = head(512, 256, 5000, torch.bfloat16)
    options = {**SMALL, "triton.cudagraphs": True}
    skipped = counters["inductor"]["cudagraph_skips"]
    compiled = torch.compile(loss_fn, backend="flce_inductor", options=options)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn_like(h).requires_grad_()
        weight.grad = None
        loss = compiled(x, weight, target)
        loss.backward()
        w = weight.detach().float().requires_grad_()
        want = loss_fn(x.detach().float(), w, target)
        want.backward()
        assert abs(float(loss) - float(want)) < 5e-2  # the loss is bfloat16
        assert (weight.grad.float() - w.grad).norm() / w.grad.norm() < 1e-2
    assert counters["inductor"]["cudagraph_skips"] == skipped


@pytest.mark.parametrize("extra", [{"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"softcap": 20.0}, {"weight": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_family(extra, dtype):
    h, weight, target = head(700, 128, 5003, dtype)
    target[::5] = -100
    extra = {k: torch.rand(5003, device="cuda") if k == "weight" else v for k, v in extra.items()}
    loss = flce_inductor.linear_cross_entropy(h, weight, target, chunk_size=128, loss_dtype=torch.float32, **extra)
    loss.backward()
    x, w = h.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    z = F.linear(x, w)
    z = 20 * torch.tanh(z / 20) if "softcap" in extra else z
    kwargs = {k: v.double() if k == "weight" else v for k, v in extra.items() if k in ("label_smoothing", "weight")}
    want = F.cross_entropy(z, target, **kwargs)
    if "z_loss" in extra:
        want = want + 1e-3 * z.logsumexp(1)[target != -100].square().mean()
    want.backward()
    assert abs(loss.double() - want) / want < 1e-3
    for got, expected in ((h.grad, x.grad), (weight.grad, w.grad)):
        assert (got.double() - expected).norm() / expected.norm() < (5e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize(
    ("weight_dtype", "accum_dtype", "limit"),
    [
        (torch.float32, "auto", 1.1),  # autocast, as GradScaler asks for it
        (torch.float16, "float32", 1.1),
        (torch.float16, "auto", 2.2),  # eight chunks in the parameter's dtype
    ],
)
def test_float16_under_grad_scaler(weight_dtype, accum_dtype, limit):
    """As good as eager's float16 at a loss scale of 2^16, N = 16384: nothing under- or overflows."""
    h, weight, target = head(16384, 256, 8000, torch.float16)
    weight = weight.detach().to(weight_dtype).requires_grad_()
    x, w = h.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss_fn(x, w, target).backward()
    errors = []
    options = {**SMALL, "flce_inductor.chunk_size": 2048, "flce_inductor.accum_dtype": accum_dtype}

    def upcast(h, weight, target):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = F.linear(h, weight)
        return F.cross_entropy(logits.float(), target)

    for fn in (upcast, torch.compile(upcast, backend="flce_inductor", options=options)):
        h.grad = weight.grad = None
        (fn(h, weight, target) * 2.0**16).backward()
        got = (h.grad.double() / 2**16, weight.grad.double() / 2**16)
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(got, (x.grad, w.grad), strict=True)])
    (dh, dweight), (our_dh, our_dweight) = errors
    assert our_dh <= 1.1 * dh
    assert our_dweight <= limit * dweight


def test_float16_trains():
    """Autocast with a GradScaler: the loss follows float32's as closely as eager's float16 does."""

    def curve(dtype, backend):
        torch.manual_seed(0)
        V, H = 2000, 64
        body = torch.nn.Sequential(torch.nn.Embedding(V, H), torch.nn.Linear(H, H), torch.nn.GELU()).cuda()
        weight = torch.nn.Parameter(torch.randn(V, H, device="cuda") * H**-0.5)
        optimizer = torch.optim.SGD([*body.parameters(), weight], lr=2.0)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is not None)

        def step(ids, target):
            with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
                return F.cross_entropy(F.linear(body(ids), weight), target)

        if backend is not None:
            options = {**SMALL, "flce_inductor.chunk_size": 128}
            step = torch.compile(step, backend=backend, options=options)
        losses = []
        for _ in range(60):
            ids = torch.randint(V, (512,), device="cuda")
            optimizer.zero_grad()
            loss = step(ids, (ids * 7 + 3) % V)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
        return torch.tensor(losses)

    exact, theirs, ours = curve(None, None), curve(torch.float16, None), curve(torch.float16, "flce_inductor")
    assert exact[-1] < exact[0] - 1
    assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + 1e-3


@pytest.mark.parametrize("max_slab_bytes", [32 << 20, 64 << 20])
def test_tight_slab_takes_the_vocabulary_major_order(max_slab_bytes):
    """With few rows a chunk the logits are computed twice: less memory, and a weight gradient that is rounded once."""
    from torch._dynamo.utils import counters

    h, weight, target = head(8192, 1024, 128256, torch.bfloat16)
    options = {"flce_inductor.max_slab_bytes": max_slab_bytes}
    compiled = torch.compile(loss_fn, backend="flce_inductor", options=options)
    before = counters["inductor"]["flce_recomputed"]

    def step():
        h.grad = weight.grad = None
        compiled(h, weight, target).backward()
        h.grad = weight.grad = None

    peak = peak_of_step(step)
    assert counters["inductor"]["flce_recomputed"] == before + 1
    gradients = (h.numel() + weight.numel()) * 2
    wide_dh = h.numel() * 4
    assert peak <= gradients + wide_dh + 1.1 * max_slab_bytes + 4 * MIB, f"{peak / MIB:.0f} MiB"
