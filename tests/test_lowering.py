"""What the ops become in Inductor's code: buffers, one call of the loop, gradients scaled in place; and the tuner."""

import itertools
import json
import os
import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache, run_and_get_code
from util import CompileCounterWithBackend, counters, fresh

import flce_inductor
from flce_inductor import chunking, config, kernels, lowering, runtime
from flce_inductor.lowering import Candidate
from flce_inductor.runtime import Plan

OPS = torch.ops.flce_inductor
N, H, V = 50, 12, 203
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


def mean(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t)


def none(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t, reduction="none")


def family(h, w, b, t):
    z = 3 * torch.tanh(F.linear(h, w, b) / 3)
    return F.cross_entropy(z, t, label_smoothing=0.1) + 1e-2 * z.logsumexp(-1).square().mean()


def problem(dtype=torch.float32, n=N, device="cpu", sizes=(H, V), bias=True, seed=0):
    torch.manual_seed(seed)
    hidden, classes = sizes
    h, w, b = torch.randn(n, hidden), torch.randn(classes, hidden) / 3, torch.randn(classes)
    leaves = [x.to(device, dtype).requires_grad_() for x in (h, w, b)]
    t = torch.randint(classes, (n,), device=device)
    t[::7] = -100
    return [*leaves[:2], leaves[2] if bias else None, t]


def step(fn, args):
    """The loss and the gradients, by an incoming gradient that is not 1."""
    leaves = [x for x in args[:3] if x is not None]
    loss = fn(*args)
    up = torch.linspace(0.5, 1.5, loss.numel(), device=loss.device, dtype=torch.float64).reshape(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, up.to(loss.dtype))]


def reference(fn, args):
    wide = [x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x for x in args]
    return step(fn, wide)


def assert_right(got, want, tolerance):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        error = float((a.double() - b).norm() / b.norm())
        assert error < tolerance, (i, error)


TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


ALL_VALUES = [pytest.param(fn, d, "cuda", marks=CUDA) for fn in (mean, none, family) for d in TOLERANCE]
SOME_VALUES = [(mean, torch.bfloat16), (none, torch.float16), (family, torch.float64), (family, torch.float32)]


@pytest.mark.parametrize(("fn", "dtype", "device"), [(*some, "cpu") for some in SOME_VALUES] + ALL_VALUES)
def test_values(fn, dtype, device):
    """A lowering that mutates can be silently dropped: what counts are the values."""
    args = problem(dtype, device=device)
    with fresh(chunk_size=16), fresh_cache():
        assert_right(step(torch.compile(fn, backend="flce_inductor"), args), reference(fn, args), TOLERANCE[dtype])
    assert counters["inductor"]["flce_rewritten"] >= 1


@pytest.mark.parametrize(
    ("weight_dtype", "accum_dtype"),
    [(torch.bfloat16, "param"), (torch.bfloat16, "float32"), (torch.bfloat16, "auto"), (torch.float32, "auto")],
)
def test_values_of_wider_accumulators(weight_dtype, accum_dtype):
    """A dweight that is accumulated in more digits than it has is no buffer of Inductor's until it is finished."""
    args = problem(torch.bfloat16, bias=False)
    args[1] = args[1].detach().to(weight_dtype).requires_grad_()

    def fn(h, w, b, t):
        with torch.autocast("cpu", torch.bfloat16):
            return mean(h, w, b, t)

    with fresh(chunk_size=2, accum_dtype=accum_dtype), fresh_cache():  # 25 chunks
        got = step(torch.compile(fn, backend="flce_inductor"), args)
    assert got[2].dtype == weight_dtype
    assert_right(got, reference(mean, args), 3e-2)


@pytest.mark.parametrize("fn", [mean, none])
def test_dynamic_rows(fn):
    """One compilation for every N, static slab or not."""
    counter = CompileCounterWithBackend("flce_inductor")
    with fresh(chunk_size=16), fresh_cache():
        compiled = torch.compile(fn, backend=counter, dynamic=True)
        for n in (50, 64, 17, 3):
            args = problem(n=n)
            assert_right(step(compiled, args), reference(fn, args), 2e-6)
    assert counter.frame_count == 1


def forward_and_backward(fn, args, **keys):
    with fresh(**keys), fresh_cache():
        compiled = torch.compile(fn, backend="flce_inductor")
        _, code = run_and_get_code(lambda: compiled(*args).sum().backward())
    return [re.sub(r"#.*", "", part) for part in code]


def calls(code: str) -> list[str]:
    return re.findall(r"^ +(?:buf\d+ = )?torch\.ops\.flce_inductor\.(\w+)\.default\(", code, re.MULTILINE)


def test_generated_code():
    """One slab, one dweight, one call with the chosen chunk and no GEMM beside it, for any number of chunks."""
    codes = {}
    for chunk_size in (2, 16, N):
        forward, backward = codes[chunk_size] = forward_and_backward(mean, problem(), chunk_size=chunk_size)
        assert calls(forward) == ["count_rows", "run_"] and calls(backward) == ["scale_"] * 2
        assert f"-100, {chunk_size}, 'auto'" in forward
        assert not re.search(r"addmm|extern_kernels\.|mm\(", forward + backward)
        assert forward.count(f"empty_strided_cpu(({V}, {H}), ({H}, 1), torch.float32)") == 1  # dweight
        assert forward.count(f"empty_strided_cpu(({chunk_size * 256}, ), (1, ), torch.float32)") == 1  # V padded to 256
        assert f"({N}, {V})" not in forward + backward
        assert f"empty_strided_cpu(({V}, {H})" not in backward  # scaled where it is
    assert len({len(forward.splitlines()) for forward, _ in codes.values()}) == 1


def test_generated_code_of_the_recompute_path():
    """row_stats in the forward; the backward writes dh and dweight through one slab, vocabulary-major."""
    forward, backward = forward_and_backward(none, problem(), chunk_size=16)
    assert calls(forward) == ["run_"] and calls(backward) == ["run_"]
    assert f"empty_strided_cpu(({V}, {H})" not in forward
    assert backward.count(f"empty_strided_cpu(({V}, {H}), ({H}, 1), torch.float32)") == 1
    slab = runtime.slab_size(N, V, 16, True)
    assert backward.count(f"empty_strided_cpu(({slab}, ), (1, ), torch.float32)") == 1


def test_gradients_that_others_may_need_are_not_scaled_in_place():
    """Without donated buffers a second backward finds what the forward saved as it was."""
    args = problem()
    want = reference(mean, args)
    with fresh(chunk_size=16), fresh_cache(), torch._functorch.config.patch(donated_buffer=False):
        loss = torch.compile(mean, backend="flce_inductor")(*args)
        for factor in (3.0, 0.5):
            up = torch.tensor(factor)
            got = torch.autograd.grad(loss, args[:3], up, retain_graph=True)
            assert_right(got, [x * factor * 2 for x in want[1:]], 2e-6)  # reference's incoming gradient is 0.5


def test_cpp_wrapper():
    """Strings, lists and missing tensors through Inductor's C++ wrapper; a row program among them."""
    args = problem()
    with fresh(chunk_size=16), fresh_cache(), torch._inductor.config.patch(cpp_wrapper=True):
        assert_right(step(torch.compile(family, backend="flce_inductor"), args), reference(family, args), 2e-6)
    assert counters["inductor"]["flce_hoisted"] == 1


def test_a_cached_backward_that_overwrites_is_not_one_for_retain_graph():
    """The compiled code of a backward that may scale in place is in the cache when one is asked for that may not."""
    args = problem()
    want = reference(mean, args)
    with fresh_cache():
        with fresh(chunk_size=16):
            assert_right(step(torch.compile(mean, backend="flce_inductor"), args), want, 2e-6)
        with fresh(chunk_size=16), torch._functorch.config.patch(donated_buffer=False):
            loss = torch.compile(mean, backend="flce_inductor")(*args)
            for factor in (3.0, 0.5):
                got = torch.autograd.grad(loss, args[:3], torch.tensor(factor), retain_graph=True)
                assert_right(got, [x * factor * 2 for x in want[1:]], 2e-6)  # reference's incoming gradient is 0.5


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_scale(device, dtype, factor, layout):
    x = torch.randn(30, 70, device=device).to(dtype)
    x = x.t() if layout == "transposed" else x
    factor = torch.tensor(factor, dtype=runtime.stat_dtype(dtype), device=device)
    want = (x.to(factor.dtype) * factor).to(dtype)
    torch.library.opcheck(OPS.scale, (x, factor))
    assert torch.equal(OPS.scale(x, factor), want)
    y = x.clone()
    torch.library.opcheck(OPS.scale_, (y.clone(), factor))
    OPS.scale_(y, factor)
    assert torch.equal(y, want)


def test_opcheck_of_the_loop():
    h, w, b, t = (x.detach() for x in problem())
    g = torch.rand(N)
    how = (-100, 16, "auto", "", 1.0, 0.0, 1.0)
    for vocabulary_major in (False, True):
        stats = [torch.empty(N) for _ in range(4)]
        into = (stats, torch.empty_like(h), torch.empty_like(w), torch.empty(runtime.slab_size(N, V, N, False)))
        args = (h, w, t, b, None, None, None, None, g, None, None, None, [], "", *how, [True, False, False], [True] * 3)
        torch.library.opcheck(OPS.run_, (*args, vocabulary_major, "library", None, *into))
        OPS.run_(*args, vocabulary_major, "library", None, *into)
        plain = OPS.row_stats_with_grads(
            h, w, t, b, None, g, None, None, None, [], "", *how, [True, False, False], [True] * 3
        )
        terms = F.linear(h, w, b).abs().sum(1)  # of zsum, which their signs nearly cancel
        got, want = ((*nll_to_logsum, zsum / terms) for *nll_to_logsum, zsum in (stats, plain[:4]))
        for x, y in zip((*got, *into[1:3]), (*want, *plain[6:8]), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- tuning


@pytest.fixture
def small_candidates(monkeypatch):
    monkeypatch.setattr(chunking, "candidates", lambda *args, **kwargs: [8, 16, 32])


def test_tuned_choice_is_used_kept_and_told(small_candidates, monkeypatch, caplog):
    args = problem()
    with fresh_cache(), caplog.at_level("INFO", "flce_inductor"):
        with fresh(autotune=True, skip_ignored=False):
            _, code = run_and_get_code(lambda: torch.compile(mean, backend="flce_inductor")(*args).backward())
        (file,) = os.listdir(os.path.join(lowering.cache_dir(), "flce_inductor"))
        with open(os.path.join(lowering.cache_dir(), "flce_inductor", file)) as kept:
            times = json.load(kept)
        orders = ("rows-major", "vocabulary-major")
        assert set(times) == {f"{c} rows {order} library" for c in (8, 16, 32) for order in orders}
        assert all(seconds > 0 for seconds in times.values())
        chunk_size, order = re.search(r"tuned: (\d+) rows ([\w-]+) library, of ", caplog.text).groups()
        assert all(name in caplog.text for name in times)
        how = f"-100, {chunk_size}, 'auto', '', 1.0, 0.0, 1.0, [False, False, False], [True, True, True]"
        assert f"{how}, {order == 'vocabulary-major'}, 'library'" in code[0]
        # a second compilation, or process, measures nothing
        monkeypatch.setattr(lowering, "_Benchmark", None)
        with fresh(autotune=True, skip_ignored=False):
            (site,) = flce_inductor.explain(mean, *args)
        assert site.tuned.startswith(f"{chunk_size} rows {order} library, of ")
        assert f"tuned: {chunk_size} rows" in str(site)


@pytest.mark.parametrize(("keys", "tunes"), [({}, False), ({"autotune": True}, True), ({"autotune": False}, False)])
@pytest.mark.parametrize("max_autotune", [False, True])
def test_when_it_tunes(keys, tunes, max_autotune, small_candidates, monkeypatch):
    seen = []
    monkeypatch.setattr(lowering, "_times", lambda problem, settings: seen.append(problem) or {CANDIDATES[0]: 1.0})
    with fresh(**keys), torch._inductor.config.patch(max_autotune=max_autotune):
        flce_inductor.explain(mean, *problem())
    assert len(seen) == (tunes or (max_autotune and not keys))


CANDIDATES = [Candidate(c, Plan(order)) for c in (512, 1024, 2048) for order in (False, True)]


@pytest.mark.parametrize(
    ("seconds", "tolerance", "chosen"),
    [
        ([1.2, 9, 1.01, 9, 1.0, 9], 0.02, (1024, False)),  # the smallest slab within 2 %
        ([1.2, 9, 1.01, 9, 1.0, 9], 0.0, (2048, False)),
        ([1.2, 9, 1.01, 9, 1.0, 9], 0.25, (512, False)),
        ([1.01, 1.0, 1.2, 9, 1.0, 9], 0.02, (512, True)),  # of the same slab, the faster
    ],
)
def test_choice(seconds, tolerance, chosen):
    site = lowering._Problem(8192, 8, 9, None, None, None, False, False, (), (), (), ())
    best = lowering.choose(dict(zip(CANDIDATES, seconds, strict=True)), site, tolerance)
    assert (best.chunk_size, best.plan.vocabulary_major) == chosen


def test_candidates_that_do_not_fit_are_not_tried(small_candidates, monkeypatch):
    ran = []

    class Benchmark:
        def __init__(self, problem):
            pass

        def __call__(self, candidates):
            ran.extend(candidates)
            return dict.fromkeys(candidates, 1.0)

    monkeypatch.setattr(lowering, "_Benchmark", Benchmark)
    monkeypatch.setattr(lowering._Problem, "timed_rows", lambda self: 16)
    site = None
    original = lowering._Problem.of

    def spy(node):
        nonlocal site
        site = original(node)
        return site

    monkeypatch.setattr(lowering._Problem, "of", staticmethod(spy))
    with fresh(autotune=True, skip_ignored=False), fresh_cache():
        flce_inductor.explain(mean, *problem())
        assert len(ran) == 6
    needed = site.bytes(Candidate(8, Plan(False)))
    assert needed < site.bytes(Candidate(16, Plan(False))) and needed < site.bytes(Candidate(8, Plan(True)))
    ran.clear()
    monkeypatch.setattr(lowering, "_available", lambda device: needed / 0.9 + 1)
    with fresh(autotune=True, skip_ignored=False), fresh_cache():
        flce_inductor.explain(mean, *problem())
    assert ran == [Candidate(8, Plan(False))]


def test_times_that_were_taken_while_memory_was_short_are_not_all(small_candidates, monkeypatch):
    args, ran, benchmark = problem(), [], lowering._Benchmark.__call__
    monkeypatch.setattr(lowering._Benchmark, "__call__", lambda self, c: ran.append(len(c)) or benchmark(self, c))
    with fresh(autotune=True, skip_ignored=False), fresh_cache():
        for memory, tried in ((0, [1]), (0, []), (1 << 40, [6]), (1 << 40, []), (0, [])):
            monkeypatch.setattr(lowering, "_available", lambda device, memory=memory: memory)
            ran.clear()
            flce_inductor.explain(mean, *args)
            assert ran == tried


def test_memory_of_a_benchmark_includes_all_of_h():
    tall = SITE._replace(N=400_000, H=512, V=200)
    assert tall.bytes(Candidate(64, Plan(False))) > 400_000 * 512 * 2


SITE = lowering._Problem(
    200, 8, 50, torch.bfloat16, torch.bfloat16, torch.device("cpu"), False, False, (True, False, False, False),
    (-100, "auto", "", 1.0, 0.0, 1.0), (False,) * 3, (True, True, False),
)  # fmt: skip


def test_candidates_take_turns_and_accumulate_as_in_all_chunks(small_candidates, monkeypatch):
    runs, run = [], runtime.run

    def spy(h, *args, **kwargs):
        how, plan = args[4], kwargs["plan"]
        if not plan.vocabulary_major:
            runs.append((how.chunk_size, h.shape[0], how.accum_dtype))
        return run(h, *args, **kwargs)

    monkeypatch.setattr(runtime, "run", spy)
    monkeypatch.setattr(lowering._Problem, "timed_rows", lambda self: 100)
    candidates = SITE.candidates(config.current())
    times = lowering._Benchmark(SITE)(candidates)
    assert set(times) == set(candidates) and all(t > 0 for t in times.values())
    # a chunk and about 100 rows of each, round after round; 200 rows are 25 chunks of 8, which "auto" accumulates in
    # float32
    turn = [(8, 8, "float32"), (8, 96, "float32"), (16, 16, "param"), (16, 96, "param")]
    turn += [(32, 32, "param"), (32, 96, "param")]
    assert runs == turn * 4


@pytest.mark.parametrize("some", [100, 1000])
def test_times_are_those_of_all_rows(some, small_candidates, monkeypatch):
    """What a loop costs before its first chunk, and the clock's noise, aren't multiplied by the number of chunks."""
    noise, took = itertools.cycle([4.0, -4.0, 2.0, -2.0, 1.0]), 0.0

    def run(h, weight, target, bias, class_weight, how, *, saved=None, needs=None, **_):
        nonlocal took
        steps = len(weight) * 200 / how.chunk_size / 50 if saved else len(h) / how.chunk_size
        took = 40.0 + 10.0 * steps + next(noise)

    monkeypatch.setattr(runtime, "run", run)
    monkeypatch.setattr(lowering, "_seconds", lambda work, device: (work(), took)[1])
    monkeypatch.setattr(lowering._Problem, "timed_rows", lambda self: some)
    times = lowering._Benchmark(SITE)(SITE.candidates(config.current()))
    for candidate, seconds in times.items():
        chunks = 200 / candidate.chunk_size
        want = 2 * (40 + 10 * chunks) if candidate.plan.vocabulary_major else 40 + 10 * chunks
        assert seconds == pytest.approx(want, rel=0.15), candidate


def test_tuned_on_the_size_of_now_and_right_for_others(small_candidates):
    counter = CompileCounterWithBackend("flce_inductor")
    with fresh(autotune=True), fresh_cache():
        compiled = torch.compile(mean, backend=counter, dynamic=True)
        for n in (50, 64, 17):
            args = problem(n=n)
            assert_right(step(compiled, args), reference(mean, args), 2e-6)
    assert counter.frame_count == 1


def test_tuning_leaves_the_random_state_alone(small_candidates):
    args = problem()
    with fresh(autotune=True), fresh_cache():
        before = torch.get_rng_state()
        flce_inductor.explain(mean, *args)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("plan", [Plan(False, "library"), Plan(True, "library"), Plan(False, "triton")])
@pytest.mark.parametrize("fn", [mean, family])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        *(pytest.param("cuda", d, marks=CUDA) for d in (torch.float32, torch.bfloat16, torch.float16)),
    ],
)
def test_forced_plan(fn, device, dtype, plan, monkeypatch):
    """Whatever the tuner chooses is right; where the Triton kernel can't be had the library does it."""
    used = []
    original = kernels.triton_gemm_
    monkeypatch.setattr(kernels, "triton_gemm_", lambda *args, **more: used.append(1) or original(*args, **more))
    args = problem(dtype, n=300, device=device, sizes=(64, 1003))
    monkeypatch.setattr(lowering, "_times", lambda *_: {Candidate(128, plan): 1.0})
    with fresh(autotune=True), fresh_cache():
        got = step(torch.compile(fn, backend="flce_inductor"), args)
    assert_right(got, reference(fn, args), TOLERANCE[dtype] * 2)
    hoisted = not (fn is family and dtype == torch.float16)  # which takes no row program
    assert counters["inductor"]["flce_hoisted"] == hoisted
    can = device == "cuda" and dtype.itemsize == 2
    assert len(used) == (3 if hoisted and plan.accumulate == "triton" and can else 0)


# ---------------------------------------------------------------- Triton's products


@pytest.mark.parametrize(
    ("into", "operand"), [(a, b) for a in TOLERANCE for b in TOLERANCE if a.itemsize < 8 > b.itemsize]
)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("M", "P", "K"), [(1003, 70, 50), (256, 128, 64), (130, 33, 7), (2049, 264, 513)])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gemm(M, P, K, first, into, operand):
    """into (+)= a @ b, one rounding; a's transpose as wide as a padded slab is."""
    torch.manual_seed(0)
    a = torch.randn(K, -(-M // 64) * 64, device="cuda").to(operand)[:, :M].t()
    b, destination = torch.randn(K, P, device="cuda").to(operand), torch.randn(M, P, device="cuda").to(into)
    want = a.double() @ b.double() + (0 if first else destination.double())
    kernels.triton_gemm_(destination, a, b, first)
    error = (destination.double() - want).abs().max() / want.abs().max()
    assert error < max(torch.finfo(into).eps, 1e-5 if operand == torch.float32 else 1e-6 * K**0.5)


@pytest.mark.parametrize("count", [0, 7, 700, 1100, 2000])
@pytest.mark.parametrize("over", ["rows", "depth"])
@pytest.mark.parametrize("layout", ["mk kp", "mk pk", "km kp", "km pk"])
@pytest.mark.parametrize("padding", [0, 3])  # with 3 there are no descriptors
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gemm_up_to_a_count(count, over, layout, padding):
    """What lies behind the count in K takes no part, NaN as it may be; rows behind it stay as they are."""
    torch.manual_seed(0)
    sizes, start = {"m": 1003, "p": 264, "k": 1000}, 100
    a, b = (
        torch.randn(sizes[i], -(-sizes[j] // 64) * 64 + padding, device="cuda").bfloat16()[:, : sizes[j]]
        for i, j in layout.split()
    )
    a, b = (x if at in ("mk", "kp") else x.t() for x, at in zip((a, b), layout.split(), strict=True))
    into, left = torch.randn(1003, 264, device="cuda").bfloat16(), max(0, count - start)
    depth, rows = (left, 1003) if over == "depth" else (1000, left)
    a[:, depth:], b[depth:] = float("nan"), float("nan")
    want, before = a[:, :depth].double() @ b[:depth].double() + into.double(), into.clone()
    kernels.triton_gemm_(into, a, b, False, count=torch.tensor(count, device="cuda"), start=start, over=over)
    torch.testing.assert_close(into[:rows].double(), want[:rows], rtol=1e-2, atol=0.3)
    untouched = -(-rows // 128) * 128
    assert torch.equal(into[untouched:], before[untouched:])
