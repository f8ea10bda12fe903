"""Rows whose label is ignored are left out of the loop, and nothing of the result tells."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache, run_and_get_code
from util import CompileCounterWithBackend, fresh

import flce_inductor
from flce_inductor import chunking, hoist, runtime
from flce_inductor.explain import Reason
from flce_inductor.runtime import How, Needs

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
IGNORE = -100


def problem(N=300, H=32, V=501, dtype=torch.float32, device="cpu", ignored=0.6, block=False, seed=0):
    """h, weight and labels of which a share is ignored: here and there, or a block in front as of a prompt."""
    gen = torch.Generator().manual_seed(seed)
    h = torch.randn(N, H, generator=gen).to(device, dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=gen) / 3).to(device, dtype).requires_grad_()
    target = torch.randint(V, (N,), generator=gen)
    target[torch.arange(N) < ignored * N if block else torch.rand(N, generator=gen) < ignored] = IGNORE
    return h, weight, target.to(device)


def mean(h, weight, target):
    return F.cross_entropy(F.linear(h, weight), target)


def shifted(h, weight, target):
    return F.cross_entropy(F.linear(h, weight).float(), F.pad(target, (0, 1), value=IGNORE)[1:])


def focal(h, weight, target):
    nll = F.cross_entropy(F.linear(h, weight), target, reduction="none")
    return ((1 - torch.exp(-nll)) ** 2 * nll).sum() / (target != IGNORE).sum()


def weighted(h, weight, target):
    nll = F.cross_entropy(F.linear(h, weight), target, reduction="none")
    return (nll * torch.linspace(0, 1, len(nll), device=nll.device, dtype=nll.dtype)).sum()


def smooth(h, weight, target):
    return F.cross_entropy(F.linear(h, weight), target, label_smoothing=0.1)


def z_loss(h, weight, target):
    logits = F.linear(h, weight)
    return F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


def accuracy(h, weight, target):
    logits = F.linear(h, weight)
    return F.cross_entropy(logits, target), (logits.argmax(-1) == target).sum()


@pytest.fixture
def products(monkeypatch):
    """Rows of each product that makes logits."""
    seen, original = [], runtime._Head.logits_

    def spy(self, slab, rows, columns):
        if columns.start == 0:
            seen.append(rows.stop - rows.start)
        return original(self, slab, rows, columns)

    monkeypatch.setattr(runtime._Head, "logits_", spy)
    return seen


def skipping(device):
    """The key's value that leaves ignored rows out of problems as small as these: see test_delay."""
    return True if device == "cuda" else "auto"


def gradients(fn, args, compiled=True, **keys):
    h, weight, target = args
    if compiled:
        with fresh(**{"skip_ignored": skipping(h.device.type), **keys}):
            loss = torch.compile(fn, backend="flce_inductor")(h, weight, target)
            loss = loss[0] if isinstance(loss, tuple) else loss
            return loss.detach(), *torch.autograd.grad(loss, (h, weight))
    h, weight = (x.detach().double().requires_grad_() for x in (h, weight))
    loss = fn(h, weight, target)
    loss = loss[0] if isinstance(loss, tuple) else loss
    return loss.detach(), *torch.autograd.grad(loss, (h, weight))


def assert_close(got, want, dtype):
    limit = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-13}[dtype]
    for a, b in zip(got, want, strict=True):
        if torch.isnan(b).any():
            assert torch.isnan(a).any()
        else:
            assert (a.double() - b).norm() <= limit * b.norm() + 1e-12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fn", [mean, shifted, focal, weighted])
def test_gradients_and_work(fn, dtype, device, products):
    if (fn, dtype) in ((focal, torch.float16), (shifted, torch.float64)):
        pytest.skip("float16 takes no row programs, and float64 logits are not cast down")
    for ignored, block in ((0.6, False), (0.6, True), (0.97, False)):
        args = problem(dtype=dtype, device=device, ignored=ignored, block=block)
        products.clear()
        got = gradients(fn, args, chunk_size=64)
        target = F.pad(args[2], (0, 1), value=IGNORE)[1:] if fn is shifted else args[2]
        count = int((target != IGNORE).sum())
        assert products == [64] * (count // 64) + [count % 64] * (count % 64 > 0)
        assert_close(got, gradients(fn, args, compiled=False), dtype)
        assert not got[1][target == IGNORE].any()


@pytest.mark.parametrize("device", DEVICES)
def test_none_all_and_nearly_none_ignored(device, products):
    for ignored, rows in ((0.0, [64] * 4 + [44]), (1.0, [0]), (0.01, [64] * 4 + [44])):
        args = problem(device=device, ignored=ignored)
        products.clear()
        got = gradients(mean, args, chunk_size=64)
        assert products == rows  # for a handful of rows gathering doesn't pay
        assert_close(got, gradients(mean, args, compiled=False), torch.float32)


@pytest.mark.parametrize("fn", [smooth, z_loss, accuracy])
def test_statistics_of_all_rows(fn, products):
    args = problem()
    got = gradients(fn, args, chunk_size=64)
    assert sum(products) == 300
    assert_close(got, gradients(fn, args, compiled=False), torch.float32)
    with fresh():
        (site, *_) = flce_inductor.explain(torch.compile(fn, backend="flce_inductor"), *args)
    assert site.skips is False and site.skip_reason is Reason.ALL_ROWS
    assert "ignored are computed, too, because a statistic" in str(site)


def test_key_and_report(products):
    args = problem()
    gradients(mean, args, skip_ignored=False)
    assert sum(products) == 300
    for value in ("auto", True):
        with fresh(skip_ignored=value):
            (site,) = flce_inductor.explain(torch.compile(mean, backend="flce_inductor"), *args)
        assert site.skips and "rows whose label is ignored cost nothing" in str(site)
    with fresh(skip_ignored=False):
        (site,) = flce_inductor.explain(torch.compile(mean, backend="flce_inductor"), *args)
    assert site.skips is None and "label is ignored" not in str(site)
    for wrong in ("always", 1, None, 0):
        message = r"flce_inductor\.skip_ignored=.*allowed are 'auto', True, False"
        with pytest.raises(ValueError, match=message):  # alone: torch's patch of several would leave the others set
            torch._inductor.config.flce_inductor.skip_ignored = wrong


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_parts_bias_and_scratch_smaller_than_what_moves(device):
    h, weight, target = problem(N=200, H=40, V=90, device=device)
    bias = torch.randn(90, device=device)
    counted = runtime.count_rows(target, IGNORE)
    want = gradients(
        lambda h, w, t: F.cross_entropy(F.linear(h, w, bias.to(h.dtype)), t, reduction="sum"),
        (h, weight, target),
        False,
    )
    for needs in (Needs(True, True, True), Needs(True, False, False), Needs(False, True, False)):
        for slab in (None, torch.empty(7 * 128, device=device)):
            into = runtime.Buffers(slab=slab)
            how = How(IGNORE, 7)
            g = runtime.Cotangents(torch.ones(200, device=device))
            stats, grads = runtime.run(
                h.detach(),
                weight.detach(),
                target,
                bias,
                None,
                how,
                cotangents=g,
                needs=needs,
                into=into,
                counted=counted,
            )
            assert float(stats.nll.sum() - want[0]) < 1e-3 and not stats.nll[target == IGNORE].any()
            for got, expected, needed in zip(grads, want[1:], needs[:2], strict=False):
                assert not needed or (got.double() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_any_length_and_count_is_one_compilation(device):
    counter = CompileCounterWithBackend("flce_inductor")
    with fresh(chunk_size=32, skip_ignored=skipping(device)):
        compiled = torch.compile(mean, backend=counter, dynamic=True)
        for N, ignored in ((300, 0.5), (64, 0.9), (133, 0.0), (31, 0.5), (500, 0.2)):
            args = problem(N=N, ignored=ignored, device=device, seed=N)
            loss = compiled(*args)
            got = loss.detach(), *torch.autograd.grad(loss, args[:2])
            assert_close(got, gradients(mean, args, compiled=False), torch.float32)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_counted_before_the_model_runs(device):
    h, weight, target = problem(device=device)
    layer = torch.randn(32, 32, device=device)
    with fresh(skip_ignored=skipping(device)):
        fn = torch.compile(lambda h, w, t: shifted(torch.tanh(h @ layer), w, t), backend="flce_inductor")
        _, code = run_and_get_code(lambda: fn(h, weight, target).backward())
    calls = re.findall(
        r"count_rows|flce_inductor\.run_|extern_kernels\.mm|mkl\w*|tanh", code[0][code[0].index("def call") :]
    )
    assert calls.index("count_rows") == 0 and "flce_inductor.run_" in calls[1:]


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_delay(layers, monkeypatch):
    """A GPU's host waits for the count only if what the graph computes before the head keeps the device busy."""
    facts = chunking.Card(1e12, 1e9, 1e12, 1 << 30)
    N, H, V, seen = 300, 32, 501, []

    def counted(new, loop, target, how, *_, **__):
        seen.append(hoist._delay(loop, target.meta["val"].shape[0], how[1]))
        return None, None

    monkeypatch.setattr(hoist, "_counted", counted)
    monkeypatch.setattr(chunking, "card", lambda device: facts)
    h, weight, target = problem(N, H, V)
    layer = torch.randn(H, H)

    def model(h, weight, target):
        for _ in range(layers):
            h = torch.tanh(h @ layer)
        return mean(h, weight, target)

    with fresh(chunk_size=100):
        torch.compile(model, backend="flce_inductor")(h, weight, target).backward()
    head, before = 6 * N * H * V, 2 * N * H * H * layers
    assert seen == [chunking.delay(head, before, 100, N, torch.float32, facts)]
    assert (seen[0] == 0) == (layers > 0)


@pytest.mark.parametrize("_", [pytest.param(0, marks=gpu)])
def test_auto_waits_where_it_costs_nothing(_, products):
    """8 layers of 0.7 ms each keep an H200 busy while the host catches up; without them its launches come too late."""
    h, weight, target = problem(N=16384, H=4096, V=50257, dtype=torch.bfloat16, device="cuda")
    layer = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64

    def model(h, weight, target):
        for _ in range(8):
            h = torch.tanh(h @ layer)
        return mean(h, weight, target)

    for fn, skips in ((model, True), (mean, False)):
        with fresh(min_logits_bytes=0):
            compiled = torch.compile(fn, backend="flce_inductor")
            (site,) = flce_inductor.explain(compiled, h, weight, target)
            assert site.skips is skips and (skips or site.skip_reason is Reason.LATE_LAUNCHES)
            products.clear()
            compiled(h, weight, target).backward()
            assert sum(products) == (int((target != IGNORE).sum()) if skips else len(target))


def test_what_an_ignored_row_holds_is_nobodys(products):
    """Eager multiplies its NaN by 0; here the row isn't read."""
    h, weight, target = problem()
    with torch.no_grad():
        h[target == IGNORE] = float("nan")
    got = gradients(mean, (h, weight, target))
    assert all(x.isfinite().all() for x in got)


def cuda_args():
    return problem(N=512, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("_", [pytest.param(0, marks=gpu)])
def test_labels_that_the_model_makes_are_known_too_late(_, products):
    h, weight, target = cuda_args()

    def late(h, weight, target):
        return mean(h, weight, torch.where(h.float().sum(-1) > 0, target, IGNORE))

    for setting, skips in (("auto", False), (True, True)):
        with fresh(skip_ignored=setting):
            (site,) = flce_inductor.explain(torch.compile(late, backend="flce_inductor"), h, weight, target)
        assert site.skips is skips and (skips or site.skip_reason is Reason.LATE_COUNT)
        assert_close(
            gradients(late, (h, weight, target), skip_ignored=setting),
            gradients(late, (h, weight, target), compiled=False),
            torch.bfloat16,
        )


@pytest.mark.parametrize(
    ("setting", "dtype", "bias", "skips"),
    [
        pytest.param(*case, marks=gpu)
        for case in (
            (True, torch.bfloat16, False, True),
            (True, torch.float16, False, True),
            ("auto", torch.bfloat16, False, False),
            (True, torch.float32, False, False),
            (True, torch.bfloat16, True, False),
        )
    ],
)
def test_cuda_graphs(setting, dtype, bias, skips):
    """One capture serves any number of ignored rows; all rows are computed where no kernel of ours can be."""
    h, weight, target = problem(N=512, V=1003, H=64, dtype=dtype, device="cuda")
    b = torch.randn(1003, device="cuda").to(dtype).requires_grad_(bias)

    def fn(h, weight, b, target):
        return F.cross_entropy(F.linear(h, weight, b), target)

    with fresh(skip_ignored=setting, chunk_size=200), torch._inductor.config.patch({"triton.cudagraphs": True}):
        compiled = torch.compile(fn, backend="flce_inductor")
        (site,) = flce_inductor.explain(compiled, h, weight, b, target)
        assert site.skips is skips and (skips or site.skip_reason is Reason.CUDA_GRAPHS)
        for ignored in (0.6, 0.6, 0.6, 0.0, 1.0, 0.99):
            target.copy_(problem(N=512, V=1003, ignored=ignored, seed=int(ignored * 100))[2])
            torch.compiler.cudagraph_mark_step_begin()
            loss = compiled(h, weight, b, target)
            got = [x.clone() for x in (loss.detach(), *torch.autograd.grad(loss, (h, weight)))]
            leaves = [x.detach().double().requires_grad_() for x in (h, weight)]
            want = fn(*leaves, b.detach().double(), target)
            assert_close(got, (want.detach(), *torch.autograd.grad(want, leaves)), dtype)


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_count_that_stays_on_the_device(ignored, dtype):
    """Without kernels that know the count all rows are computed, but what an ignored row holds is nobody's."""
    h, weight, target = problem(dtype=dtype, ignored=ignored)
    want = gradients(lambda *args: mean(*args) * (target != IGNORE).sum(), (h, weight, target), False)
    h, weight = h.detach().clone(), weight.detach()
    h[target == IGNORE] = float("nan")
    g, slab = runtime.Cotangents(torch.ones(300)), torch.full((64 * 512,), float("nan"), dtype=dtype)
    stats, grads = runtime.run(
        h,
        weight,
        target,
        None,
        None,
        How(IGNORE, 64),
        cotangents=g,
        needs=Needs(True, True, False),
        into=runtime.Buffers(slab=slab),
        counted=(target != IGNORE).sum(),
    )
    unscaled = [x.double() * grads.unscale for x in grads[:2]]
    assert_close([stats.nll.sum(), *unscaled], [want[0].nan_to_num(), *(x.nan_to_num() for x in want[1:])], dtype)
    assert not stats.nll[target == IGNORE].any() and not grads.dh[target == IGNORE].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", ["auto", True, False])
def test_explicit_function(setting, device, products):
    """In eager code a GPU's host would have to wait for the count: it does so when it is told to."""
    h, weight, target = problem(device=device)
    count = int((target != IGNORE).sum())
    skips = setting is True or (setting == "auto" and device == "cpu")
    for more, counted in (({}, skips), ({"z_loss": 1e-3}, False), ({"label_smoothing": 0.1}, False)):
        products.clear()
        with fresh(skip_ignored=setting):
            loss = flce_inductor.linear_cross_entropy(h, weight, target, chunk_size=64, **more)
            got = loss.detach(), *torch.autograd.grad(loss, (h, weight))
        assert sum(products) == (count if counted else 300)
        if not more:
            assert_close(got, gradients(mean, (h, weight, target), False), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", ["auto", True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_explicit_function_in_compiled_code(reduction, setting, device, products):
    """As of the losses that are found: this package's passes do it, stock Inductor's graph computes all rows."""
    h, weight, target = problem(device=device)
    count = int((target != IGNORE).sum())
    skips = setting is True or (setting == "auto" and device == "cpu")
    want = gradients(
        lambda h, w, t: F.cross_entropy(F.linear(h, w), t, reduction=reduction), (h, weight, target), False
    )
    for more, backend, counted in (
        ({}, "flce_inductor", skips),
        ({}, "inductor", False),
        ({"z_loss": 1e-3}, "flce_inductor", False),
        ({"label_smoothing": 0.1}, "flce_inductor", False),
    ):

        def fn(h, weight, target, more=more):
            return flce_inductor.linear_cross_entropy(
                h * 1.0, weight, target.flip(0).flip(0), reduction=reduction, **more
            )

        products.clear()
        with fresh(chunk_size=64, skip_ignored=setting):
            loss = torch.compile(fn, backend=backend)(h, weight, target)
            got = loss.detach(), *torch.autograd.grad(loss, (h, weight))
        assert sum(products) == (count if counted else 300)
        if not more:
            assert_close(got, want, torch.float32)


@pytest.mark.parametrize("autotune", [False, True])
def test_explicit_function_after_stock_inductor(autotune, monkeypatch):
    """Stock Inductor keeps a layout constraint for the op, which knows how many arguments it was traced with."""
    monkeypatch.setattr(chunking, "candidates", lambda *args: [16, 32])
    h, weight, target = problem(N=40, V=160)

    def fn(h, weight, target):
        return flce_inductor.linear_cross_entropy(h, weight, target)

    with fresh_cache():
        torch.compile(fn, backend="inductor")(h, weight, target)
        got = gradients(fn, (h, weight, target), autotune=autotune)
    assert_close(got, gradients(mean, (h, weight, target), False), torch.float32)


def test_labels_of_chance_are_drawn_in_their_turn():
    """Were they drawn when the graph starts, dropout would see other numbers."""

    def step(h, weight, target):
        h = F.dropout(h, 0.5)
        return mean(h, weight, torch.randint(len(weight), target.shape))

    args, losses = problem(), []
    for setting in ("auto", True, False):
        with fresh(skip_ignored=setting), torch._inductor.config.patch(fallback_random=True):
            torch.manual_seed(3)
            losses.append(float(torch.compile(step, backend="flce_inductor")(*args)))
    torch.manual_seed(3)
    assert losses == pytest.approx([float(step(*args))] * 3, rel=1e-5)


def test_tuner_leaves_ignored_rows_out(monkeypatch, products):
    """The vocabulary-major order computes all rows, so it isn't tried."""
    monkeypatch.setattr(chunking, "candidates", lambda *args: [16, 32])
    h, weight, target = problem()
    with torch.no_grad():
        h[target == IGNORE] = float("nan")
    for setting, tried in ((True, False), (False, True)):
        with fresh(skip_ignored=setting, autotune=True), fresh_cache():
            (site,) = flce_inductor.explain(torch.compile(mean, backend="flce_inductor"), h, weight, target)
        assert bool(site.skips) is setting and ("vocabulary-major" in site.tuned) is tried
    with fresh_cache():
        assert all(x.isfinite().all() for x in gradients(mean, (h, weight, target), autotune=True))


def test_report_of_two_losses_on_one_line():
    def loss(h, weight, target, smoothing):
        return F.cross_entropy(F.linear(h, weight), target, label_smoothing=smoothing)

    def step(h, weight, other, target):
        return loss(h, weight, target, 0.0) + loss(h, other, target, 0.1)

    h, weight, target = problem()
    with fresh():
        compiled = torch.compile(step, backend="flce_inductor")
        sites = flce_inductor.explain(compiled, h, weight, weight.detach().clone().requires_grad_(), target)
    assert sites[0].where == sites[1].where
    assert [(site.skips, site.skip_reason) for site in sites] == [(True, None), (False, Reason.ALL_ROWS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_frozen_hidden_states_are_gathered_chunk_by_chunk(dtype, monkeypatch):
    seen, gather = [], torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *args, **more: seen.append(len(args[2])) or gather(*args, **more))
    h, weight, target = problem(dtype=dtype)
    h = h.detach()
    with fresh(chunk_size=64):
        loss = flce_inductor.linear_cross_entropy(h, weight, target)
    (dweight,) = torch.autograd.grad(loss, weight)
    count = int((target != IGNORE).sum())
    chunks = [64] * (count // 64) + [count % 64]
    assert seen == (chunks if dtype == torch.float32 else [count])  # float16's scale depends on all that count
    want = gradients(mean, (h.requires_grad_(), weight, target), False)
    assert_close((loss.detach(), dweight), (want[0], want[2]), dtype)


@pytest.mark.parametrize("_", [pytest.param(0, marks=gpu)])
def test_no_more_memory_than_with_all_rows(_):
    args = problem(N=4096, H=512, V=32000, dtype=torch.bfloat16, device="cuda")
    peaks = []
    for setting in (False, True):
        with fresh(skip_ignored=setting):
            compiled = torch.compile(mean, backend="flce_inductor")
            for _ in range(2):
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                grads = torch.autograd.grad(compiled(*args), args[:2])
                peak = torch.cuda.max_memory_allocated() - before
                del grads
            peaks.append(peak)
    assert peaks[1] <= peaks[0] + (1 << 20)
