"""The rows kernel: nll and lse of each row, dlogits in place, on every implementation.

`TestRows` runs over the torch implementation on the CPU and the Triton kernel on a GPU; a process of its own runs it
over the Triton kernel under the interpreter, because TRITON_INTERPRET has to be set before triton is imported.
"""

import importlib.metadata
import itertools
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flce_inductor import kernels
from flce_inductor.kernels import RowsKey, rows_, source_hash_files, torch_rows_, triton_rows_

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IGNORE = -100
MODES = {"stats": (True, False), "stats_and_grad": (True, True), "grad_from_saved": (False, True)}
gpu_only = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Impl(NamedTuple):
    """An implementation of rows_ with the device and slab dtype to try it on."""

    rows_: object
    device: str
    dtype: torch.dtype

    @property
    def stat_dtype(self):
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def _impls():
    if INTERPRETED:  # not bfloat16: the interpreter gets it wrong (facts)
        return [
            pytest.param(Impl(triton_rows_, "cpu", d), id=f"interpreter-{d}") for d in (torch.float32, torch.float64)
        ]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    on_cpu = [pytest.param(Impl(torch_rows_, "cpu", d), id=f"torch-{d}") for d in dtypes]
    on_gpu = [pytest.param(Impl(triton_rows_, "cuda", d), id=f"triton-{d}", marks=gpu_only) for d in dtypes]
    on_gpu.append(pytest.param(Impl(torch_rows_, "cuda", torch.bfloat16), id="torch-on-cuda", marks=gpu_only))
    return on_cpu + on_gpu


@pytest.fixture(params=_impls())
def impl(request):
    return request.param


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


@pytest.fixture(autouse=True)
def few_rows_per_block(monkeypatch):
    """So that small slabs take the torch implementation through several blocks, the last one ragged."""
    monkeypatch.setattr(kernels, "_rows_per_block", lambda slab, dtype: 3)


class Result(NamedTuple):
    nll: torch.Tensor
    lse: torch.Tensor
    dlogits: torch.Tensor
    max: torch.Tensor
    logsum: torch.Tensor


def reference(z, target, g_nll=None, g_lse=None, scale=None, ignore_index=IGNORE) -> Result:
    """In float64 on the CPU by torch's own loss and autograd. z [C, V]; g_nll, g_lse [C] or None; scale [] or None."""
    z = z.detach().cpu().double()
    target = target.cpu()
    top = z.amax(1)
    # Softmax does not see a shift, and float64 too would lose digits to a large common offset.
    shift = top.where(top.isfinite(), 0)
    z = (z - shift[:, None]).requires_grad_()
    nll = F.cross_entropy(z, target, reduction="none", ignore_index=ignore_index)
    lse = torch.logsumexp(z, 1)
    factor = 1.0 if scale is None else scale.cpu().double()
    cotangents = [torch.zeros(len(z)).double() if g is None else g.cpu().double() * factor for g in (g_nll, g_lse)]
    (dlogits,) = torch.autograd.grad([nll, lse], z, cotangents)
    return Result(nll.detach(), lse.detach() + shift, dlogits, top, lse.detach() - (top - shift))


def run(impl, slab, target, g_nll=None, g_lse=None, scale=None, ignore_index=IGNORE, *, mode, saved=None) -> Result:
    """Calls the implementation on `slab` itself. Statistics are outputs, or inputs taken from `saved`."""
    stats, grad = mode
    C = len(slab)
    poison = 12345.0  # whatever is not written stands out
    nll, top, logsum = (torch.full([C], poison, dtype=impl.stat_dtype, device=impl.device) for _ in range(3))
    if not stats:
        nll = None
        top.copy_(saved.max)
        logsum.copy_(saved.logsum)
    before = [t.clone() for t in (top, logsum)]
    slab_before = slab.clone()
    given = [None if g is None else g.to(impl.device, impl.stat_dtype) for g in (g_nll, g_lse, scale)]
    impl.rows_(slab, target.to(impl.device), nll, top, logsum, *given, ignore_index, stats=stats, grad=grad)
    if not grad:
        assert_same(slab, slab_before)
    if not stats:
        assert_same(top, before[0])
        assert_same(logsum, before[1])
    return Result(nll, top + logsum, slab, top, logsum)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_right(impl, actual: Result, expected: Result, mode, size=1.0):
    """`size`: the largest cotangent. dlogits may differ by their one rounding and what stat dtype arithmetic costs."""
    stats, grad = mode
    eps = torch.finfo(impl.stat_dtype).eps
    if stats:
        magnitude = expected.max.abs().nan_to_num(0, 0, 0).max().item() if len(expected.max) else 0
        close = dict(rtol=8 * eps, atol=4 * eps * (1 + magnitude), equal_nan=True)
        torch.testing.assert_close(actual.lse.cpu().double(), expected.lse, **close)
        # nll is a difference: a common offset of the logits costs it nothing.
        torch.testing.assert_close(actual.nll.cpu().double(), expected.nll, rtol=8 * eps, atol=16 * eps, equal_nan=True)
    if grad:
        rounding = 0 if impl.dtype == impl.stat_dtype else torch.finfo(impl.dtype).eps / 2
        tiny = 2.0**-25 if impl.dtype == torch.float16 else 0  # half of float16's smallest subnormal
        torch.testing.assert_close(
            actual.dlogits.cpu().double(),
            expected.dlogits,
            rtol=rounding * 1.01,
            atol=size * 16 * eps + tiny,
            equal_nan=True,
        )


def problem(impl, C=7, V=50, spread=3.0, seed=0):
    """(slab [C, V], target [C] with the first label, the last one and two ignored rows, g_nll [C], g_lse [C])."""
    gen = torch.Generator().manual_seed(seed)
    slab = (torch.randn(C, V, generator=gen) * spread).to(impl.dtype).to(impl.device)
    target = torch.randint(V, (C,), generator=gen)
    target[0], target[1] = 0, V - 1
    target[2] = target[C - 1] = IGNORE
    return slab, target, torch.randn(C, generator=gen), torch.randn(C, generator=gen)


class TestRows:
    # 16 and 8192 are the kernel's smallest and largest BLOCK (4096 in float64): below, at and above, with a rest.
    @pytest.mark.parametrize("V", [1, 2, 16, 17, 1000, 8192, 20003])
    def test_nll_lse_and_dlogits_are_those_of_autograd(self, impl, mode, V):
        slab, target, g_nll, _ = problem(impl, V=V)
        expected = reference(slab, target, g_nll)
        actual = run(impl, slab, target, g_nll, mode=mode, saved=expected)
        assert_right(impl, actual, expected, mode, size=3)
        assert expected.dlogits.abs().max() > 0.1 or V == 1

    @pytest.mark.parametrize("has_g_nll, has_g_lse, has_scale", list(itertools.product([False, True], repeat=3)))
    def test_cotangents_and_scale_may_each_be_missing(self, impl, mode, has_g_nll, has_g_lse, has_scale):
        slab, target, g_nll, g_lse = problem(impl)
        given = (
            g_nll if has_g_nll else None,
            g_lse if has_g_lse else None,
            torch.tensor(0.37) if has_scale else None,
        )
        expected = reference(slab, target, *given)
        actual = run(impl, slab, target, *given, mode=mode, saved=expected)
        assert_right(impl, actual, expected, mode, size=5)

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_cotangent_of_an_ignored_row_is_not_looked_at(self, impl, mode, bad):
        slab, target, g_nll, g_lse = problem(impl)
        ignored = target == IGNORE
        g_nll[ignored] = bad
        expected = reference(slab, target, g_nll, g_lse)
        assert expected.dlogits.isfinite().all()
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected)
        assert_right(impl, actual, expected, mode, size=5)

    def test_ignored_rows_become_exactly_zero(self, impl):
        slab, target, g_nll, _ = problem(impl)
        actual = run(impl, slab, target, g_nll, mode=MODES["stats_and_grad"])
        ignored = (target == IGNORE).to(impl.device)
        assert (actual.nll[ignored] == 0).all() and (actual.dlogits[ignored] == 0).all()
        assert (actual.nll[~ignored] > 0).all() and (actual.dlogits[~ignored] != 0).any(1).all()

    def test_ignore_index_may_be_a_class(self, impl, mode):
        slab, target, g_nll, g_lse = problem(impl)
        target = target.clamp(min=0)
        expected = reference(slab, target, g_nll, g_lse, ignore_index=0)
        actual = run(impl, slab, target, g_nll, g_lse, ignore_index=0, mode=mode, saved=expected)
        assert_right(impl, actual, expected, mode, size=5)

    def test_a_common_offset_of_ten_thousand_costs_no_precision(self, impl, mode):
        slab, target, g_nll, g_lse = problem(impl, V=1000)
        slab += 1e4
        expected = reference(slab, target, g_nll, g_lse)
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected)
        assert_right(impl, actual, expected, mode, size=5)  # 2e-6 of the cotangent in float32; from lse alone: 5e-4

    def test_logits_of_minus_infinity_have_no_probability(self, impl, mode):
        slab, target, g_nll, g_lse = problem(impl, V=9000)
        slab[:, :8500] = -math.inf  # more than the kernel's first block
        slab[3, 8600] = -math.inf
        target[target != IGNORE] = 8999
        target[5] = 17  # a label of probability 0: nll = inf
        expected = reference(slab, target, g_nll, g_lse)
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected)
        assert_right(impl, actual, expected, mode, size=5)
        if mode[0]:
            assert actual.nll[5] == math.inf
        if mode[1]:
            assert (actual.dlogits[:5, :8500] == 0).all()

    def test_extreme_finite_logits(self, impl, mode):
        slab, target, g_nll, g_lse = problem(impl, V=50)
        finfo = torch.finfo(impl.dtype)
        slab[0] = finfo.min  # a uniform row at the lower end
        slab[1] = finfo.max
        slab[3, 10] = finfo.min
        expected = reference(slab, target, g_nll, g_lse)
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected)
        # max + logsum absorbs the logsum in these rows, so its absolute error says nothing.
        if mode[0]:
            torch.testing.assert_close(actual.logsum.cpu().double(), expected.logsum, rtol=1e-6, atol=1e-6)
            assert (actual.nll[:2].cpu() - math.log(50)).abs().max() < 1e-5
        if mode[1]:
            wanted = (g_nll + g_lse)[:2, None].double() / 50 - g_nll[:2, None].double() * F.one_hot(target[:2], 50)
            torch.testing.assert_close(actual.dlogits[:2].cpu().double(), wanted, rtol=finfo.eps, atol=1e-5)

    @pytest.mark.parametrize("V, bad_column", [(50, 0), (9001, 8999)])
    def test_a_bad_row_becomes_nan_and_touches_no_other(self, impl, mode, V, bad_column):
        clean, target, g_nll, g_lse = problem(impl, V=V)
        slab = clean.clone()
        slab[1, bad_column] = math.nan
        slab[2, bad_column] = math.nan  # ignored: nll is 0
        slab[3, bad_column] = math.inf
        slab[4, 0] = slab[4, bad_column] = math.inf
        slab[5] = -math.inf
        expected = reference(slab, target, g_nll, g_lse)
        assert expected.nll[[1, 3, 4, 5]].isnan().all() and expected.nll[2] == 0  # eager agrees
        assert expected.dlogits[1:6].isnan().all()
        good = [0, 6]
        stats = run(impl, slab.clone(), target, mode=MODES["stats"])  # what the forward of these saved
        expected_good = run(impl, clean, target, g_nll, g_lse, mode=mode, saved=stats)
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=stats)
        if mode[0]:
            assert actual.nll[[1, 3, 4, 5]].isnan().all() and actual.nll[2] == 0
            assert_same(actual.nll[good], expected_good.nll[good])
            assert_same(actual.lse[good], expected_good.lse[good])
            assert actual.lse[5] == -math.inf  # as torch.logsumexp
        if mode[1]:
            assert actual.dlogits[1:6].isnan().all()
            assert_same(actual.dlogits[good], expected_good.dlogits[good])
            assert actual.dlogits[good].isfinite().all()

    @pytest.mark.parametrize("V, padded", [(50, 64), (50, 51), (9001, 9024), (1, 8)])
    def test_a_slab_with_padded_rows_keeps_its_padding(self, impl, mode, V, padded):
        _, target, g_nll, g_lse = problem(impl, V=V)
        whole, *_ = problem(impl, V=padded)
        whole[:, V:] = math.nan
        slab = whole[:, :V]
        expected = reference(slab, target, g_nll, g_lse)
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected)
        assert_right(impl, actual, expected, mode, size=5)
        assert whole[:, V:].isnan().all()

    @pytest.mark.parametrize("label", [-1, 50, -(10**12), 2**62])
    def test_an_outside_label_accesses_nothing_and_has_no_plausible_loss(self, impl, mode, label):
        whole, _, g_nll, g_lse = problem(impl, C=9, V=64)
        slab = whole[1:8, :50]
        whole_before = whole.clone()
        g_nll, g_lse = g_nll[1:8], g_lse[1:8]
        expected = reference(slab, torch.zeros(7, dtype=torch.int64), None, g_nll.double() + g_lse)
        target = torch.full([7], label)
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected)
        if mode[0]:
            assert actual.nll.isnan().all()
        assert_right(impl, actual, expected, (False, mode[1]), size=5)
        whole[1:8, :50] = whole_before[1:8, :50]
        assert_same(whole, whole_before)

    def test_a_vocabulary_block_gets_its_columns_of_the_whole_gradient(self, impl):
        slab, target, g_nll, g_lse = problem(impl, C=9, V=500)
        target[3:6] = torch.tensor([100, 199, 200])
        expected = reference(slab, target, g_nll, g_lse)
        for lo, hi in ((0, 200), (200, 400), (400, 500)):
            actual = run(
                impl,
                slab[:, lo:hi],
                target - lo,  # 100 - 200 is -100: not ignored, as ignore_index is shifted too
                g_nll,
                g_lse,
                ignore_index=IGNORE - lo,
                mode=MODES["grad_from_saved"],
                saved=expected,
            )
            assert_right(impl, actual, expected._replace(dlogits=expected.dlogits[:, lo:hi]), (False, True), size=5)

    def test_vectors_that_are_read_may_have_any_stride(self, impl, mode):
        slab, target, _, g_lse = problem(impl)
        g_nll = torch.tensor(0.7, device=impl.device, dtype=impl.stat_dtype).expand(len(slab))  # as from a mean
        g_lse = torch.stack([g_lse, g_lse + 1], 1).to(impl.device, impl.stat_dtype)[:, 0]
        target = torch.stack([target, target + 1], 1).to(impl.device)[:, 0]
        expected = reference(slab, target, g_nll, g_lse)
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected)
        assert_right(impl, actual, expected, mode, size=5)

    def test_no_rows(self, impl, mode):
        slab, target, g_nll, g_lse = problem(impl)
        nothing = [t[:0] for t in (slab, target, g_nll, g_lse)]
        actual = run(impl, *nothing, mode=mode, saved=reference(*nothing))
        assert actual.dlogits.shape == (0, 50)


# ---------------------------------------------------------------- the torch implementation


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest storage that an operation returned, other than the given ones."""

    def __init__(self, *known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.known:
                self.nbytes = max(self.nbytes, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_temporaries_are_a_few_rows(dtype, mode):
    impl = Impl(torch_rows_, "cpu", dtype)
    slab, target, g_nll, _ = problem(impl, C=60, V=1000)
    stats = run(impl, slab.clone(), target, mode=MODES["stats"])
    stats_and_grad = (stats.nll, stats.max, stats.logsum, g_nll, None, None, IGNORE)
    with Largest(slab) as largest:
        torch_rows_(slab, target, *stats_and_grad, stats=mode[0], grad=mode[1])
    assert largest.nbytes <= 3 * 1000 * 4  # few_rows_per_block


def test_rows_per_block_is_bounded_and_never_zero(monkeypatch):
    monkeypatch.undo()
    slab = torch.empty(1, 50000)
    assert 1 < kernels._rows_per_block(slab, torch.float32) * 50000 * 4 <= kernels._BLOCK_BYTES["cpu"]
    assert kernels._rows_per_block(torch.empty(1, 10**7, device="meta"), torch.float64) == 1


# ---------------------------------------------------------------- the Triton kernel without a GPU


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


needs_triton = pytest.mark.skipif(_version("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.skipif(
    (_version("triton") or "").startswith("3.6.0")
    and tuple(int(n) for n in (_version("numpy") or "0.0").split(".")[:2]) >= (2, 4),
    reason="the interpreter of triton 3.6.0 does not work with numpy 2.4 and later",
)
def test_the_triton_kernel_under_the_interpreter():
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::TestRows"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed and int(passed[1]) > 100, child.stdout
    assert "skipped" not in child.stdout, child.stdout


def all_keys(float64=False):
    """Every kernel that rows_ can ask for."""
    keys = [RowsKey(True, False, False, False, False, float64)]
    for stats, g_nll, g_lse, scale in itertools.product([False, True], repeat=4):
        if g_nll or g_lse or not scale:
            keys.append(RowsKey(stats, True, g_nll, g_lse, scale, float64))
    return keys


FULL = RowsKey(stats=True, grad=True, g_nll=True, g_lse=True, scale=True, float64=False)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves nothing to compile")
@pytest.mark.parametrize(
    "capability, slab_type, keys",
    [
        *(pytest.param(90, t, all_keys(), id=f"sm_90-{t}-all") for t in ("fp32", "fp16", "bf16")),
        *(
            pytest.param(cc, t, [FULL], id=f"sm_{cc}-{t}")
            for cc, t in itertools.product((80, 100), ("fp32", "fp16", "bf16"))
        ),
        pytest.param(90, "fp64", [FULL._replace(float64=True)], id="sm_90-fp64"),
    ],
)
def test_the_triton_kernel_compiles(capability, slab_type, keys, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for key in keys:
        block, num_warps = kernels._config(128256, key.float64)
        types = {"slab": f"*{slab_type}", "target": "*i64"}
        stat = "*fp64" if key.float64 else "*fp32"
        signature = {f"{name}_ptr": types.get(name, stat) for name in kernels.pointer_args(key)}
        aligned = {(i,): [["tt.divisibility", 16]] for i in (0, len(signature))}  # slab_ptr and row_stride
        signature |= dict.fromkeys(("row_stride", "V", "ignore_index"), "i32") | {"BLOCK": "constexpr"}
        source = ASTSource(kernels.load_kernel(key), signature, {"BLOCK": block}, aligned)
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps, "enable_fp_fusion": True},
        )
        assert len(compiled.asm["cubin"]) > 0
        ptx = compiled.asm["ptx"]
        assert f".target sm_{capability}" in ptx
        assert "ld.global.v" in ptx and ("st.global.v" in ptx) == key.grad  # V in no power of two, and still vectors
        assert ".local" not in ptx  # no spilled arrays


def test_kernels_hold_exactly_the_features_in_use():
    sources = {key: kernels.render(key) for key in (*all_keys(), *all_keys(float64=True))}
    assert len(set(sources.values())) == len(sources) == 30
    for key, source in sources.items():
        for name, used in (("nll_ptr", key.stats), ("tl.log", key.stats), ("g_nll_ptr", key.g_nll)):
            assert (name in source.replace("g_nll_ptr", "" if name == "nll_ptr" else "g_nll_ptr")) == used, (key, name)
        for name, used in (("g_lse_ptr", key.g_lse), ("scale_ptr", key.scale), ("float64", key.float64)):
            assert (name in source) == used, (key, name)
        assert ("tl.store(row_ptr" in source) == key.grad
        assert ("float32" in source) != key.float64


@pytest.mark.parametrize("V, block, warps", [(1, 16, 1), (300, 512, 2), (8192, 8192, 32), (128256, 8192, 32)])
def test_configuration_follows_the_vocabulary(V, block, warps):
    assert kernels._config(V, False) == (block, warps)
    assert kernels._config(V, True)[0] == min(block, 4096)


# ---------------------------------------------------------------- rows_: which implementation, and the fallback


def call_rows(C=4, V=8):
    """rows_ on a small CPU problem, checked against the reference."""
    impl = Impl(rows_, "cpu", torch.float32)
    slab, target, g_nll, g_lse = problem(impl, C=C, V=V)
    expected = reference(slab, target, g_nll, g_lse)
    actual = run(impl, slab, target, g_nll, g_lse, mode=MODES["stats_and_grad"])
    assert_right(impl, actual, expected, MODES["stats_and_grad"], size=5)


@pytest.fixture
def broken_triton(monkeypatch):
    """Makes rows_ believe that Triton serves the CPU. Set `.error` to what a launch raises; `.launches` counts them."""

    class Broken:
        error = None
        launches = 0

        def __call__(self, *args, **kwargs):
            self.launches += 1
            raise self.error

    broken = Broken()
    monkeypatch.setattr(kernels, "_TRITON_DEVICES", ("cpu",))
    monkeypatch.setattr(kernels, "_unbuildable", set())
    monkeypatch.setattr(kernels, "triton_rows_", broken)
    return broken


def _build_errors():
    yield RuntimeError("PassManager::run failed")
    yield RuntimeError("Triton Error [CUDA]: device kernel image is invalid")
    yield RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
    yield FileNotFoundError(2, "No such file or directory", "ptxas")
    yield subprocess.CalledProcessError(1, "gcc")
    yield ModuleNotFoundError("No module named 'triton'")
    if _version("triton"):
        from triton.runtime.errors import OutOfResources, PTXASError

        yield OutOfResources(300000, 232448, "shared memory")
        yield PTXASError("ptxas fatal")


@pytest.mark.parametrize("error", list(_build_errors()), ids=lambda e: type(e).__name__)
def test_a_kernel_that_cannot_be_built_is_replaced_once_with_a_warning(broken_triton, error):
    broken_triton.error = error
    with pytest.warns(RuntimeWarning) as caught:
        call_rows()
    (message,) = [str(w.message) for w in caught]
    for part in ("could not be built for cpu", type(error).__name__, str(error), "slower", "C compiler is on PATH"):
        assert part in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_rows()
        call_rows(C=5, V=9)  # same kernel
    assert broken_triton.launches == 1

    slab = torch.zeros(3, 5, dtype=torch.float64)  # another kernel: tried, and warned about
    nll, top, logsum = torch.empty(3, 3, dtype=torch.float64)
    target = torch.tensor([0, 4, IGNORE])
    with pytest.warns(RuntimeWarning, match="could not be built"):
        rows_(slab, target, nll, top, logsum, None, None, None, IGNORE, stats=True, grad=False)
    torch.testing.assert_close(nll, torch.tensor([math.log(5), math.log(5), 0]).double())
    assert broken_triton.launches == 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        TypeError("got an unexpected keyword"),
        ValueError("rows_: slab must be"),
    ],
    ids=str,
)
def test_other_errors_are_not_hidden(broken_triton, error):
    broken_triton.error = error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(type(error), match=re.escape(str(error))):
                call_rows()
    assert broken_triton.launches == 2


def test_rows_takes_triton_where_it_serves_the_device_and_torch_elsewhere(monkeypatch):
    taken = []
    monkeypatch.setattr(kernels, "triton_rows_", lambda *a, **k: taken.append("triton"))
    monkeypatch.setattr(kernels, "torch_rows_", lambda *a, **k: taken.append("torch"))
    args = (torch.zeros(1, 2), *[None] * 7, IGNORE)
    rows_(*args, stats=True, grad=False)
    monkeypatch.setattr(kernels, "_TRITON_DEVICES", ("cpu",))
    rows_(*args, stats=True, grad=False)
    assert taken == ["torch", "triton"]
    monkeypatch.undo()
    assert kernels._TRITON_DEVICES == ("cuda", "xpu")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slab": torch.zeros(3, 5, 1)}, "slab must be"),
        ({"slab": torch.zeros(3, 5, dtype=torch.int64)}, "slab must be"),
        ({"slab": torch.zeros(5, 3).T}, "unit stride"),
        ({"target": torch.zeros(3, dtype=torch.int32)}, "target must be"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, "target must be"),
        ({"nll": None}, "nll is missing"),
        ({"nll": torch.zeros(6)[::2]}, "nll is written and must be contiguous"),
        ({"max": torch.zeros(3, dtype=torch.float64)}, "max must be"),
        ({"logsum": torch.zeros(2)}, "logsum must be"),
        ({"g_nll": torch.zeros(3, dtype=torch.bfloat16)}, "g_nll must be"),
        ({"g_lse": torch.zeros(())}, "g_lse must be"),
        ({"scale": torch.zeros(1)}, "scale must be"),
        ({"scale": torch.zeros((), device="meta")}, "scale must be"),
    ],
)
@pytest.mark.parametrize("implementation", [torch_rows_, triton_rows_])
def test_wrong_tensors_are_refused(implementation, change, message):
    args = {
        "slab": torch.zeros(3, 5),
        "target": torch.zeros(3, dtype=torch.int64),
        "nll": torch.zeros(3),
        "max": torch.zeros(3),
        "logsum": torch.zeros(3),
        "g_nll": torch.zeros(3),
        "g_lse": None,
        "scale": None,
        "ignore_index": IGNORE,
    }
    with pytest.raises(ValueError, match=f"rows_: .*{message}|{message}"):
        implementation(**(args | change), stats=True, grad=True)


def test_source_hash_files_are_this_package_s_kernels_and_templates():
    files = source_hash_files()
    assert all(Path(f).is_absolute() and Path(f).is_file() for f in files)
    assert [Path(f).name for f in files[:1]] == ["kernels.py"]
    assert "rows.py.jinja" in {Path(f).name for f in files[1:]}
    assert all(f.endswith(".jinja") for f in files[1:]) and len(set(files)) == len(files)


# ---------------------------------------------------------------- the Triton kernel on a GPU


def gpu(test):
    for mark in gpu_only:
        test = mark(test)
    return test


def on_gpu(C, V, dtype=torch.bfloat16, seed=0):
    """Arguments of rows_ up to ignore_index for a random slab made on the device."""
    gen = torch.Generator("cuda").manual_seed(seed)
    slab = torch.empty(C, V, dtype=dtype, device="cuda").normal_(generator=gen)
    target = torch.randint(V, (C,), device="cuda", generator=gen)
    nll, top, logsum = torch.full((3, C), math.nan, device="cuda")
    return slab, target, nll, top, logsum, torch.ones(C, device="cuda"), None, None, IGNORE


@gpu
def test_rows_runs_the_triton_kernel_on_the_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "torch_rows_", None)
    slab, *rest = on_gpu(64, 32000)
    expected = reference(slab, rest[0], rest[4])
    rows_(slab, *rest, stats=True, grad=True)
    impl = Impl(rows_, "cuda", torch.bfloat16)
    actual = Result(rest[1], rest[2] + rest[3], slab, rest[2], rest[3])
    assert_right(impl, actual, expected, (True, True))


@gpu
def test_more_than_2_31_elements():
    C, V = 16800, 128256
    if torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("needs 6 GB of free GPU memory")
    assert C * V > 2**31
    slab, target, nll, top, logsum, *rest = on_gpu(C, V)
    picked = [0, 1, C // 2, C - 2, C - 1]
    expected = reference(slab[picked], target[picked], torch.ones(len(picked)))
    triton_rows_(slab, target, nll, top, logsum, *rest, stats=True, grad=True)
    actual = Result(nll[picked], (top + logsum)[picked], slab[picked], None, None)
    assert_right(Impl(triton_rows_, "cuda", torch.bfloat16), actual, expected, (True, True))
    assert nll.isfinite().all()


@gpu
@pytest.mark.parametrize("implementation", [triton_rows_, torch_rows_])
def test_no_host_synchronisation_and_no_large_temporary(implementation):
    args = on_gpu(2048, 32000)
    implementation(*args, stats=True, grad=True)  # compile outside
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        implementation(*args, stats=True, grad=True)
        implementation(*args, stats=False, grad=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 4 << 20  # the slab has 125 MiB


@gpu
def test_another_number_of_rows_compiles_nothing():
    import triton

    compiled = []
    previous = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda **kwargs: compiled.append(kwargs) and None
    try:
        # Vectors of any alignment, and the numbers that Triton specialises an integer argument on.
        for C, lo, ignore_index in ((1, 0, 1), (16, 1, 16), (37, 2, -100), (1000, 4, 5)):
            slab, *vectors, _ = on_gpu(C + lo, 4999)
            part = [None if v is None else v[lo:] for v in vectors]
            triton_rows_(slab[:C], *part, ignore_index, stats=True, grad=True)
    finally:
        triton.knobs.runtime.jit_cache_hook = previous
    assert len(compiled) <= 1


@gpu
def test_the_gradient_pass_runs_in_a_cuda_graph():
    args = on_gpu(32, 5000)
    logits = args[0].clone()
    triton_rows_(*args, stats=True, grad=True)
    expected = args[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_rows_(*args, stats=True, grad=True)
    args[0].copy_(logits)
    graph.replay()
    assert_same(args[0], expected)
