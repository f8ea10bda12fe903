"""The rows kernel: statistics of each row and dlogits, on every implementation.

`TestRows` runs over the torch implementation on the CPU and the Triton kernel on a GPU; a process of its own runs it
over the Triton kernel under the interpreter, because TRITON_INTERPRET has to be set before triton is imported.

A kernel takes a second to compile, so the GPU runs each test in bfloat16 and only some in the other dtypes.
"""

import functools
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
from flce_inductor.kernels import (
    IDENTITY,
    Cotangents,
    Epilogue,
    RowsKey,
    Statistics,
    rows_,
    select,
    torch_rows_,
    triton_rows_,
)

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


def _impls(gpu_dtypes=(torch.bfloat16,)):
    if INTERPRETED:  # not bfloat16: the interpreter gets it wrong (facts)
        return [
            pytest.param(Impl(triton_rows_, "cpu", d), id=f"interpreter-{d}") for d in (torch.float32, torch.float64)
        ]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    on_cpu = [pytest.param(Impl(torch_rows_, "cpu", d), id=f"torch-{d}") for d in dtypes]
    return on_cpu + [pytest.param(Impl(triton_rows_, "cuda", d), id=f"triton-{d}", marks=gpu_only) for d in gpu_dtypes]


def _every_impl():
    impls = _impls(gpu_dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64))
    if not INTERPRETED:
        impls.append(pytest.param(Impl(torch_rows_, "cuda", torch.bfloat16), id="torch-on-cuda", marks=gpu_only))
    return impls


def pytest_generate_tests(metafunc):
    """The arguments `impl`, `mode` and `every_impl`, which is `impl` and the dtypes that it leaves out on a GPU.

    What the statistics alone compile to is part of what statistics and gradient do: `test_every_dtype` is enough of it
    on a GPU.
    """
    names = set(metafunc.fixturenames)
    if {"impl", "mode"} <= names:
        both = [
            pytest.param(*impl.values, mode, id=f"{impl.id}-{name}", marks=impl.marks)
            for impl in _impls()
            for name, mode in MODES.items()
            if impl.values[0].device == "cpu" or mode[1]
        ]
        metafunc.parametrize("impl, mode", both)
    elif "impl" in names:
        metafunc.parametrize("impl", _impls())
    elif "mode" in names:
        metafunc.parametrize("mode", MODES.values(), ids=MODES)
    if "every_impl" in names:
        metafunc.parametrize("every_impl", _every_impl())


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
    zsum: torch.Tensor | None = None
    pz: torch.Tensor | None = None
    argmax: torch.Tensor | None = None


def apply(epilogue, x):
    function = {"": lambda y: y, "tanh": torch.tanh, "sigmoid": torch.sigmoid}[epilogue.function]
    return epilogue.cap * function(epilogue.scale * (x + epilogue.shift))


def reference(
    x,
    target,
    g_nll=None,
    g_lse=None,
    scale=None,
    ignore_index=IGNORE,
    *,
    g_zsum=None,
    g_pz=None,
    class_weight=None,
    epilogue=IDENTITY,
) -> Result:
    """In float64 on the CPU by torch's own loss and autograd. x [C, V]; cotangents [C] or None; scale [] or None."""
    x = x.detach().cpu().double().requires_grad_()
    target = target.cpu()
    z = apply(epilogue, x)
    top = z.detach().amax(1)
    # Softmax does not see a shift, and float64 too would lose digits to a large common offset.
    shift = top.where(top.isfinite(), 0)
    shifted = z - shift[:, None]
    nll = F.cross_entropy(shifted, target, reduction="none", ignore_index=ignore_index)
    lse = torch.logsumexp(shifted, 1)
    zsum = (z if class_weight is None else z * class_weight.cpu().double()).sum(1)
    mean = (shifted.softmax(1) * shifted.where(shifted != -math.inf, 0)).sum(1)  # pz
    factor = 1.0 if scale is None else scale.cpu().double()
    # zsum and pz only if they have a cotangent: in eager too a statistic that nothing uses makes no NaN
    pairs = [(nll, g_nll), (lse, g_lse)] + [(y, g) for y, g in ((zsum, g_zsum), (mean, g_pz)) if g is not None]
    cotangents = [torch.zeros(len(z)).double() if g is None else g.cpu().double() * factor for _, g in pairs]
    (dlogits,) = torch.autograd.grad([y for y, _ in pairs], x, cotangents)
    statistics = nll, lse + shift, dlogits, top, lse - (top - shift), zsum, mean, z.argmax(1)
    return Result(*(t.detach() for t in statistics))


def run(
    impl,
    slab,
    target,
    g_nll=None,
    g_lse=None,
    scale=None,
    ignore_index=IGNORE,
    *,
    mode,
    saved=None,
    wants=(),
    g_zsum=None,
    g_pz=None,
    class_weight=None,
    epilogue=IDENTITY,
    out=None,
) -> Result:
    """Calls the implementation on `slab` itself. Statistics are outputs, or inputs taken from `saved`.

    wants: those of "zsum", "pz" and "argmax" to ask for besides nll, max and logsum.
    """
    stats, grad = mode
    C = len(slab)
    poison = 12345  # whatever is not written stands out

    def vector(name):
        return torch.full([C], poison, dtype=torch.int64 if name == "argmax" else impl.stat_dtype, device=impl.device)

    def given(tensor):
        return None if tensor is None else tensor.to(impl.device, impl.stat_dtype)

    if stats:
        statistics = Statistics(**{name: vector(name) for name in ("nll", "max", "logsum", *wants)})
    else:
        statistics = Statistics(
            None, given(saved.max), given(saved.logsum), pz=None if g_pz is None else given(saved.pz)
        )
    before = [None if t is None else t.clone() for t in statistics]
    slab_before = slab.clone()
    impl.rows_(
        slab,
        target.to(impl.device),
        statistics,
        Cotangents(given(g_nll), given(g_lse), given(g_zsum), given(g_pz)),
        ignore_index,
        stats=stats,
        grad=grad,
        scale=given(scale),
        class_weight=given(class_weight),
        epilogue=epilogue,
        out=out,
    )
    if not grad or out is not None:
        assert_same(slab, slab_before)
    if not stats:
        for old, new in zip(before, statistics, strict=True):
            assert old is None or assert_same(old, new) is None
    nll, top, logsum, *others = statistics
    return Result(nll, top + logsum, slab if out is None else out, top, logsum, *others)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_right(impl, actual: Result, expected: Result, mode, size=1.0, z_error=0.0):
    """`size`: the largest cotangent. dlogits may differ by their one rounding and what stat dtype arithmetic costs.

    z_error: of the epilogue's z, in units of the stat dtype's epsilon."""
    stats, grad = mode
    eps = torch.finfo(impl.stat_dtype).eps

    def assert_close(name, atol, rtol=8 * eps):
        value = getattr(actual, name).cpu().double()
        torch.testing.assert_close(value, getattr(expected, name), rtol=rtol, atol=atol, equal_nan=True)

    if stats:
        magnitude = expected.max.abs().nan_to_num(0, 0, 0).max().item() if len(expected.max) else 0
        assert_close("lse", 4 * eps * (1 + magnitude + z_error))
        # nll is a difference: a common offset of the logits costs it nothing.
        assert_close("nll", eps * (16 + 4 * z_error))
        if actual.pz is not None:
            assert_close("pz", eps * (32 + 8 * z_error))  # the same for any common offset
        if actual.zsum is not None:
            root = actual.dlogits.shape[1] ** 0.5
            assert_close("zsum", eps * (8 + root) * (1 + magnitude + z_error * root))
        if actual.argmax is not None:
            assert_same(actual.argmax.cpu(), expected.argmax)
    if grad:
        rounding = 0 if impl.dtype == impl.stat_dtype else torch.finfo(impl.dtype).eps / 2
        tiny = 2.0**-25 if impl.dtype == torch.float16 else 0  # half of float16's smallest subnormal
        assert_close("dlogits", size * eps * (16 + z_error) + tiny, rtol=rounding * 1.01)


def problem(impl, C=7, V=50, spread=3.0, seed=0):
    """(slab [C, V], target [C] with the first label, the last one and two ignored rows, g_nll [C], g_lse [C])."""
    gen = torch.Generator().manual_seed(seed)
    slab = (torch.randn(C, V, generator=gen) * spread).to(impl.dtype).to(impl.device)
    target = torch.randint(V, (C,), generator=gen)
    target[0], target[1] = 0, V - 1
    target[2] = target[C - 1] = IGNORE
    return slab, target, torch.randn(C, generator=gen), torch.randn(C, generator=gen)


EPILOGUES = {
    "tanh": Epilogue("tanh", 1 / 7.5, 0.5, 9.0),
    "sigmoid": Epilogue("sigmoid", 1 / 7.5, 5.0, 23.0),
    "affine": Epilogue("", -0.7, 0.3, 2.0),
}
Z_ERROR = 70  # of these, by their size
EVERYTHING = ("zsum", "class_weight", "pz", "argmax", "scale", "out")
COMBINATIONS = [
    *(("zsum",), ("zsum", "class_weight"), ("pz",), ("argmax",), ("out",), ("tanh",), ("sigmoid",), ("affine",)),
    *((*EVERYTHING, function) for function in EPILOGUES),
]


def options(features, slab, seed=1):
    """Keyword arguments for `run`: each feature with what it takes."""
    C, V = slab.shape
    gen = torch.Generator().manual_seed(seed)
    g_zsum, g_pz, u = torch.randn(C, generator=gen), torch.randn(C, generator=gen), torch.rand(V, generator=gen)
    u[torch.rand(V, generator=gen) < 0.2] = 0
    given = {"wants": tuple(name for name in ("zsum", "pz", "argmax") if name in features)}
    if "zsum" in features:
        given["g_zsum"] = g_zsum
    if "pz" in features:
        given["g_pz"] = g_pz
    if "class_weight" in features:
        given["class_weight"] = u
    if "scale" in features:
        given["scale"] = torch.tensor(0.37)
    if "out" in features:
        given["out"] = torch.full_like(slab, math.nan)
    for name in EPILOGUES.keys() & set(features):
        given["epilogue"] = EPILOGUES[name]
    return given


def for_reference(given):
    return {name: value for name, value in given.items() if name not in ("wants", "out")}


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

    @pytest.mark.parametrize("V, width", [(50, 64), (9001, 9024), (1, 16), (32, 32)])
    @pytest.mark.parametrize("features", [(), ("zsum", "class_weight", "pz", "argmax", "tanh")])
    def test_a_padding_that_may_be_overwritten_has_no_part_in_anything(self, impl, mode, features, V, width):
        if impl.rows_ is not triton_rows_:
            pytest.skip("only the Triton kernel makes use of it")
        whole, *_ = problem(impl, V=width)
        _, target, g_nll, g_lse = problem(impl, V=V)
        whole[:, V:] = math.nan
        slab = whole[:, :V]
        given = options(features, slab)
        expected = reference(slab, target, g_nll, g_lse, **for_reference(given))
        lent = impl._replace(rows_=functools.partial(triton_rows_, padded=True))
        actual = run(lent, slab, target, g_nll, g_lse, mode=mode, saved=expected, **given)
        assert_right(impl, actual, expected, mode, size=10, z_error=Z_ERROR)

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

    @pytest.mark.parametrize("features", [(), ("zsum", "class_weight", "pz", "tanh")], ids="-".join)
    def test_a_vocabulary_block_gets_its_columns_of_the_whole_gradient(self, impl, features):
        slab, target, g_nll, g_lse = problem(impl, C=9, V=500)
        target[3:6] = torch.tensor([100, 199, 200])
        given = options(features, slab)
        expected = reference(slab, target, g_nll, g_lse, **for_reference(given))
        for lo, hi in ((0, 200), (200, 400), (400, 500)):
            if "class_weight" in features:
                given["class_weight"] = options(features, slab)["class_weight"][lo:hi]
            actual = run(
                impl,
                slab[:, lo:hi],
                target - lo,  # 100 - 200 is -100: not ignored, as ignore_index is shifted too
                g_nll,
                g_lse,
                ignore_index=IGNORE - lo,
                mode=MODES["grad_from_saved"],
                saved=expected,
                **given,
            )
            part = expected._replace(dlogits=expected.dlogits[:, lo:hi])
            assert_right(impl, actual, part, (False, True), size=10, z_error=Z_ERROR if features else 0)

    def test_vectors_that_are_read_may_have_any_stride(self, impl, mode):
        slab, target, _, g_lse = problem(impl)

        def strided(vector):
            return torch.stack([vector, vector + 1], 1).to(impl.device, impl.stat_dtype)[:, 0]

        g_nll = torch.tensor(0.7, device=impl.device, dtype=impl.stat_dtype).expand(len(slab))  # as from a mean
        given = options(("zsum", "class_weight", "pz"), slab)
        vectors = {name: strided(given[name]) for name in ("g_zsum", "g_pz", "class_weight")}
        target = torch.stack([target, target + 1], 1).to(impl.device)[:, 0]
        expected = reference(slab, target, g_nll, g_lse, **vectors)
        actual = run(impl, slab, target, g_nll, strided(g_lse), mode=mode, saved=expected, **(given | vectors))
        assert_right(impl, actual, expected, mode, size=10)

    @pytest.mark.parametrize("features", [(), (*EVERYTHING, "tanh")], ids="-".join)
    def test_no_rows(self, impl, mode, features):
        slab, target, g_nll, g_lse = (t[:0] for t in problem(impl))
        given = options(features, slab)
        expected = reference(slab, target, g_nll, g_lse, **for_reference(given))
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected, **given)
        assert actual.dlogits.shape == (0, 50)

    # 9001: full blocks and a rest, whatever the block
    @pytest.mark.parametrize("features", COMBINATIONS, ids="-".join)
    def test_each_feature_alone_and_all_together(self, impl, mode, features):
        self.check_features(impl, mode, features, V=9001)

    @pytest.mark.parametrize("features", [(), COMBINATIONS[-2]], ids="-".join)
    def test_every_dtype(self, every_impl, features):
        for mode in MODES.values():
            self.check_features(every_impl, mode, features, V=5000)

    @pytest.mark.parametrize("V", [1, 17, 8192])
    def test_all_features_at_any_vocabulary(self, impl, mode, V):
        self.check_features(impl, mode, COMBINATIONS[-1], V)  # the negative scale makes padding inf unless masked

    def check_features(self, impl, mode, features, V):
        slab, target, g_nll, g_lse = problem(impl, V=V)
        given = options(features, slab)
        expected = reference(slab, target, g_nll, g_lse, **for_reference(given))
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected, **given)
        assert_right(impl, actual, expected, mode, size=10, z_error=Z_ERROR if "epilogue" in given else 0)

    @pytest.mark.parametrize("features", [c for c in COMBINATIONS if c != ("argmax",)], ids="-".join)
    def test_features_change_the_gradient_that_they_should(self, features):
        """Of the reference: a feature that it ignores would be ignored by the comparison too."""
        slab, target, g_nll, g_lse = problem(Impl(None, "cpu", torch.float64))
        with_feature = reference(slab, target, g_nll, g_lse, **for_reference(options(features, slab)))
        plain = reference(slab, target, g_nll, g_lse)
        assert ((with_feature.dlogits - plain.dlogits).abs().max() > 0.1) == (features != ("out",))

    @pytest.mark.parametrize("given", [("zsum",), ("pz",), ("zsum", "pz", "scale")], ids="-".join)
    def test_cotangents_of_zsum_and_pz_stand_alone(self, impl, given):
        slab, target, *_ = problem(impl)
        given = options(given, slab)
        expected = reference(slab, target, **for_reference(given))
        actual = run(impl, slab, target, mode=MODES["stats_and_grad"], **given)
        assert_right(impl, actual, expected, MODES["stats_and_grad"], size=5)

    def test_an_excluded_logit_in_zsum_is_what_the_sum_gives(self, impl, mode):
        slab, target, g_nll, g_lse = problem(impl, V=9001)
        given = options(("zsum", "class_weight"), slab)
        given["class_weight"][:20] = 0.5
        given["class_weight"][11] = 0
        slab[3, 10] = -math.inf
        slab[4, 11] = -math.inf
        expected = reference(slab, target, g_nll, g_lse, **for_reference(given))
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected, **given)
        assert_right(impl, actual, expected, mode, size=5)
        if mode[0]:
            assert actual.zsum[3] == -math.inf and actual.zsum[4].isnan()  # 0 * -inf
            assert actual.zsum.isfinite().sum() == 5
        if mode[1]:
            assert actual.dlogits.isfinite().all()

    def test_excluded_logits_add_nothing_to_pz_and_get_no_gradient_of_it(self, impl, mode):
        slab, target, *_ = problem(impl, V=9000)
        slab[:, :8500] = -math.inf  # more than the kernel's first block
        slab[3, 8501:] = -math.inf  # one logit left: pz is it less max
        given = options(("pz",), slab)
        expected = reference(slab, target, **for_reference(given))
        actual = run(impl, slab, target, mode=mode, saved=expected, **given)
        assert_right(impl, actual, expected, mode, size=5)
        if mode[0]:
            assert actual.pz[3] == 0
        if mode[1]:
            assert (actual.dlogits[:, :8500] == 0).all() and actual.dlogits.isfinite().all()

    def test_a_common_offset_costs_pz_nothing(self, impl):
        slab, target, *_ = problem(impl, V=1000)
        slab += 1e4
        given = options(("pz",), slab)
        expected = reference(slab, target, **for_reference(given))
        actual = run(impl, slab, target, mode=MODES["stats_and_grad"], **given)
        assert_right(impl, actual, expected, MODES["stats_and_grad"], size=5)

    def test_the_extremes_of_pz(self, impl):
        slab, target, *_ = problem(impl)
        finfo = torch.finfo(impl.dtype)
        slab[0] = finfo.min  # a uniform row at the lower end
        slab[1, 1:] = finfo.min
        slab[1, 0] = finfo.max  # further apart than the largest number
        actual = run(impl, slab, target, mode=MODES["stats_and_grad"], **options(("pz",), slab.clone()))
        assert_same(actual.pz[:2].cpu().double(), torch.zeros(2, dtype=torch.float64))
        assert actual.dlogits.isfinite().all() and (actual.dlogits[1, 1:] == 0).all()

    def test_argmax_is_the_first_of_the_largest_or_of_the_nans(self, impl):
        slab, target, *_ = problem(impl, V=9001)
        lowest = torch.finfo(impl.dtype).min
        slab[0, [5, 700, 8600]] = 100
        slab[1, [20, 8700]], slab[1, 3] = math.nan, math.inf
        slab[2] = -math.inf
        slab[3] = -math.inf
        slab[3, [30, 31, 8999]] = lowest
        slab[4, [8999, 17]] = math.inf
        slab[5, 8999] = math.nan
        slab[6, 9000] = 100
        actual = run(impl, slab, target, mode=MODES["stats"], wants=("argmax",))
        assert actual.argmax.tolist() == [5, 20, 0, 30, 17, 8999, 9000] == slab.argmax(1).tolist()

    @pytest.mark.parametrize("function", ["tanh", "sigmoid"])
    def test_a_saturated_logit_gets_exactly_no_gradient(self, impl, mode, function):
        slab, target, g_nll, g_lse = problem(impl)
        target[3] = 17
        slab[:, 17], slab[:, 18], slab[:, 19], slab[:, 20] = math.inf, -math.inf, 1e4, -1e4
        given = options(("zsum", "pz", function), slab)
        expected = reference(slab, target, g_nll, g_lse, **for_reference(given))
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected, **given)
        assert_right(impl, actual, expected, mode, size=10, z_error=Z_ERROR)
        if mode[0]:
            assert (actual.max == given["epilogue"].cap).all() and actual.nll.isfinite().all()
        if mode[1]:
            assert (actual.dlogits[:, 17:21] == 0).all() and (actual.dlogits[:, :17] != 0).any(1).all()

    def test_the_softcap_of_small_logits_is_as_exact_as_they_are(self, impl):
        slab, target, *_ = problem(impl, spread=1e-3)
        epilogue = Epilogue("tanh", 1 / 50, 0, 50)
        expected = reference(slab, target, epilogue=epilogue)
        actual = run(impl, slab, target, mode=MODES["stats"], epilogue=epilogue)
        # float32 has a branch for them; float64 has digits to spare
        allowed = 2e-7 * expected.max if impl.stat_dtype == torch.float32 else torch.tensor(1e-13)
        assert ((actual.max.cpu() - expected.max).abs() <= allowed).all()

    def test_a_bad_row_touches_no_other_with_all_features(self, impl, mode):
        clean, target, g_nll, g_lse = problem(impl, V=9001)
        slab = clean.clone()
        slab[1, 8999] = slab[2, 0] = slab[5] = math.nan
        given = options((*EVERYTHING, "tanh"), slab)
        saved = run(impl, slab.clone(), target, mode=MODES["stats"], **given)
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=saved, **given)
        actual = actual._replace(dlogits=actual.dlogits.clone())  # out is used again
        expected = run(impl, clean, target, g_nll, g_lse, mode=mode, saved=saved, **given)
        good, bad = [0, 3, 4, 6], [1, 2, 5]
        for name, value in actual._asdict().items():
            if value is not None and (name != "dlogits" or mode[1]):
                assert_same(value[good], getattr(expected, name)[good])
        if mode[0]:
            assert actual.nll[[1, 5]].isnan().all() and actual.pz[bad].isnan().all() and actual.zsum[bad].isnan().all()
            assert actual.argmax[bad].tolist() == [8999, 0, 0]
        if mode[1]:
            assert actual.dlogits[bad].isnan().all() and actual.dlogits[good].isfinite().all()

    @pytest.mark.parametrize("V, padded", [(50, 64), (9001, 9024)])
    def test_out_may_have_padded_rows_of_its_own(self, impl, mode, V, padded):
        slab, target, g_nll, g_lse = problem(impl, V=V)
        whole = torch.full([len(slab), padded], 7.0, dtype=impl.dtype, device=impl.device)
        expected = reference(slab, target, g_nll, g_lse)
        actual = run(impl, slab, target, g_nll, g_lse, mode=mode, saved=expected, out=whole[:, :V])
        assert_right(impl, actual, expected, mode, size=5)
        assert (whole[:, V:] == 7).all()
        assert mode[1] or (whole == 7).all()

    def test_label_smoothing_with_class_weights_is_linear_in_the_statistics(self, impl):
        """(1 - eps) * w[t] * nll + eps / V * sum_v w[v] * (lse - z[v]), whose last sum is W * lse - zsum."""
        slab, target, *_ = problem(impl, V=1000)
        smoothing, V = 0.1, 1000
        weight = options(("class_weight",), slab)["class_weight"]
        weight[target[3]] = 0
        valid = target != IGNORE
        x = slab.detach().cpu().double().requires_grad_()
        loss = F.cross_entropy(x, target, weight.double(), label_smoothing=smoothing, reduction="none")
        g = torch.randn(len(x), generator=torch.Generator().manual_seed(5)).double()
        (dlogits,) = torch.autograd.grad(loss, x, g)

        w, share = (1 - smoothing) * weight.double()[target.where(valid, 0)], smoothing / V * valid.double()
        cotangents = {"g_nll": g * w, "g_lse": g * share * weight.double().sum(), "g_zsum": -g * share}
        actual = run(
            impl, slab, target, mode=MODES["stats_and_grad"], wants=("zsum",), class_weight=weight, **cotangents
        )
        nll, lse, zsum = (t.cpu().double() for t in (actual.nll, actual.lse, actual.zsum))
        torch.testing.assert_close(w * nll + share * (weight.double().sum() * lse - zsum), loss, rtol=1e-5, atol=1e-6)
        assert_right(impl, actual, reference(slab, target)._replace(dlogits=dlogits), (False, True), size=3)


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
    saved = run(impl, slab.clone(), target, mode=MODES["stats"])
    statistics = Statistics(saved.nll, saved.max, saved.logsum)
    with Largest(slab) as largest:
        torch_rows_(slab, target, statistics, Cotangents(g_nll), IGNORE, stats=mode[0], grad=mode[1])
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
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + [f"{__file__}::{name}" for name in (TestRows.__name__, TestScaleAndProducts.__name__)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed and int(passed[1]) > 100, child.stdout
    assert "skipped" not in child.stdout, child.stdout


LAYOUTS = list(itertools.product(("mk", "km"), ("kp", "pk")))


def laid_out(layout, M, P, K):
    """a [M, K] and b [K, P], random, in that order in memory and with a padding."""
    sizes = {"m": M, "p": P, "k": K}
    for at, shape in zip(layout, ("mk", "kp"), strict=True):
        x = torch.randn(sizes[at[0]], sizes[at[1]] + 5)[:, : sizes[at[1]]]
        yield x if at == shape else x.t()


class TestScaleAndProducts:
    """The kernels without a CPU twin of their own, under the interpreter; on a card by test_lowering.py."""

    pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")

    @pytest.mark.parametrize("size", [1, 4096, 5000])
    @pytest.mark.parametrize("factor", [1.0, -0.37])
    def test_scale(self, size, factor, monkeypatch):
        monkeypatch.setattr(kernels, "_SCALE_PROGRAMS", 1)  # each program takes several blocks
        x = torch.randn(size + 7)
        want, factor = x.clone(), torch.tensor(factor)
        want[:size] *= factor
        kernels.triton_scale_(x[:size], factor)
        assert torch.equal(x, want)

    @pytest.mark.parametrize(("M", "P", "K"), [(203, 70, 50), (64, 64, 32), (130, 33, 7), (100, 10, 65)])
    @pytest.mark.parametrize("first", [True, False])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_gemm(self, M, P, K, first, layout):
        torch.manual_seed(0)
        (a, b), bias, into = laid_out(layout, M, P, K), torch.randn(P), torch.randn(M + 1, P + 3)
        want = into.double()
        want[:M, :P] = a.double() @ b.double() + bias.double() + (0 if first else want[:M, :P])
        kernels.triton_gemm_(into[:M, :P], a, b, first, bias=bias)
        torch.testing.assert_close(into.double(), want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("count", [0, 7, 64, 70, 130])
    @pytest.mark.parametrize("over", ["rows", "depth"])
    @pytest.mark.parametrize("first", [True, False])
    def test_gemm_up_to_a_count(self, count, over, first):
        """Tiles of rows that aren't needed stay as they are; what lies behind in K takes no part, NaN as it may be."""
        a, b = laid_out(("km", "kp"), 130, 70, 65)
        into, start = torch.randn(130, 70), 3
        count, left = torch.tensor(count), max(0, count - start)
        if over == "depth":
            a[:, left:], b[left:] = float("nan"), float("nan")
        depth = left if over == "depth" else 65
        want, before = a[:, :depth].double() @ b[:depth].double() + (0 if first else into.double()), into.clone()
        kernels.triton_gemm_(into, a, b, first, count=count, start=start, over=over)
        rows = left if over == "rows" else 130
        torch.testing.assert_close(into[:rows].double(), want[:rows], rtol=1e-5, atol=1e-5)
        untouched = -(-left // 64) * 64 if over == "rows" else 130
        assert torch.equal(into[untouched:], before[untouched:])

    @pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
    @pytest.mark.parametrize("bias", [False, True])
    def test_a_count_that_the_host_never_sees(self, ignored, bias, monkeypatch):
        """The loop of runtime.py over all rows, its kernels over those that count; ignored rows hold NaN."""
        from flce_inductor import runtime

        monkeypatch.setattr(kernels, "TRITON_DEVICES", ("cpu",))
        N, H, V = 203, 40, 90
        torch.manual_seed(0)
        h, w, b = (x.half() for x in (torch.randn(N, H), torch.randn(V, H) / 3, torch.randn(V)))
        target = torch.randint(V, (N,)).masked_fill_(torch.rand(N) < ignored, -100)
        b = b if bias else None
        x, y = (t.double().requires_grad_() for t in (h, w))
        z = torch.nn.functional.linear(x, y, b if b is None else b.double())
        want = torch.nn.functional.cross_entropy(z, target, reduction="none")
        want.sum().backward()
        h[target == -100] = float("nan")
        needs = runtime.Needs(True, True, False)
        g, how = Cotangents(torch.ones(N)), runtime.How(-100, 64)
        count = (target != -100).sum()
        stats, grads = runtime.run(h, w, target, b, None, how, cotangents=g, needs=needs, counted=count)
        for got, expected in ((stats.nll, want), (grads.dh, x.grad), (grads.dweight, y.grad)):
            unscaled = got.double() * (1 if got is stats.nll else grads.unscale)
            assert (unscaled - expected).norm() <= 1e-3 * expected.norm()


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves nothing to compile")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("into", ["bf16", "fp32"])
def test_scale_and_gemm_compile(capability, into, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target, fusion = GPUTarget("cuda", capability, 32), {"enable_fp_fusion": True}
    scale = {"x_ptr": f"*{into}", "factor_ptr": "*fp32", "size": "i64", "BLOCK": "constexpr"}
    source = ASTSource(kernels._load_scale(), scale, {"BLOCK": 4096})
    ptx = triton.compile(source, target=target, options={"num_warps": 8, **fusion}).asm["ptx"]
    assert f".target sm_{capability}" in ptx

    blocks = kernels._gemm_config(torch.bfloat16)
    sizes = dict(zip("mpk", blocks, strict=False))
    constants = {f"BLOCK_{d.upper()}": size for d, size in sizes.items()} | {"FIRST": False, "GROUP": 8}
    # dweight, dweight up to a count, and the logits and dh of as many rows
    variants = [(("km", "kp"), False, ""), (("km", "kp"), False, "depth"), (("mk", "pk"), True, "rows")]
    variants.append((("mk", "kp"), False, "rows"))
    for (layout, bias, over), descriptors in itertools.product(variants, (False, True)):
        if descriptors and capability < 90:
            continue
        kernel = kernels.load_gemm(descriptors, False, layout, bias, over)
        places = {"into": (into, "mp"), "a": ("bf16", layout[0]), "b": ("bf16", layout[1])}
        kinds = {"bias": "bf16", "count": "i64"}
        signature = {}
        for parameter in kernel.params:
            name = parameter.name.partition("_")[0]
            dtype, at = places.get(name, (kinds.get(name), ""))
            if parameter.name.endswith("_ptr"):
                signature[parameter.name] = f"*{dtype}"
            elif parameter.name.endswith("_desc"):
                signature[parameter.name] = f"tensordesc<{dtype}[{sizes[at[0]]},{sizes[at[1]]}]>"
            else:
                signature[parameter.name] = "constexpr" if parameter.name in constants else "i32"
        divisible = {(i,): [["tt.divisibility", 16]] for i in range(6)} if not descriptors else {}
        source = ASTSource(kernel, signature, constants, divisible)
        options = {"num_warps": blocks[3], "num_stages": blocks[4], **fusion}
        ptx = triton.compile(source, target=target, options=options).asm["ptx"]
        assert f".target sm_{capability}" in ptx
        assert ("cp.async.bulk.tensor" in ptx) == descriptors
        assert capability != 90 or "wgmma" in ptx


def all_keys(float64=False):
    """Every kernel that rows_ can ask for without the features below."""
    keys = [RowsKey(stats=True, grad=False, float64=float64)]
    for stats, g_nll, g_lse, scale in itertools.product([False, True], repeat=4):
        if g_nll or g_lse or not scale:
            keys.append(RowsKey(stats=stats, grad=True, g_nll=g_nll, g_lse=g_lse, scale=scale, float64=float64))
    return keys


FULL = RowsKey(stats=True, grad=True, g_nll=True, g_lse=True, scale=True)
RICH = FULL._replace(
    g_zsum=True, g_pz=True, zsum=True, pz=True, argmax=True, class_weight=True, out=True, function="tanh"
)
FEATURES = [
    FULL._replace(zsum=True, g_zsum=True),
    FULL._replace(zsum=True, g_zsum=True, class_weight=True, function="tanh"),
    FULL._replace(pz=True, g_pz=True),
    FULL._replace(pz=True, zsum=True, g_pz=True, g_zsum=True, class_weight=True, function="tanh"),
    FULL._replace(argmax=True, function="affine"),
    FULL._replace(out=True, function="sigmoid"),
    FULL._replace(padded=True),
    FULL._replace(padded=True, counted=True),
    RICH._replace(padded=True, out=False),
    RICH,
    RICH._replace(stats=False, zsum=False, argmax=False),
    RICH._replace(grad=False, g_nll=False, g_lse=False, g_zsum=False, g_pz=False, scale=False, out=False),
]


def cross_compile(key, capability, signature, itemsize, aligned):
    """The compiled kernel for `key` and a slab of that itemsize; signature and aligned by parameter name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernels.load_kernel(key)
    names = [parameter.name for parameter in kernel.params]
    for parameter in kernel.params:  # a float argument is passed as float32 unless annotated
        assert not parameter.name.startswith("z_") or parameter.annotation_type == signature[parameter.name]
    block, num_warps = kernels._config(128256, key, itemsize)
    constants = {"BLOCK": block, "GROUP": 16 // itemsize}
    signature = {name: "constexpr" if name in constants else signature[name] for name in names}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in names}
    return triton.compile(
        ASTSource(kernel, signature, constants, divisible),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": True},
    )


def spilled_bytes(cubin, tmp_path):
    """Stack of each thread, which is where ptxas puts what it has no registers for; 0 without NVIDIA's tool."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not cuobjdump.is_file():
        return 0
    (tmp_path / "kernel.cubin").write_bytes(cubin)
    usage = subprocess.run(
        [cuobjdump, "--dump-resource-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    )
    return int(re.search(r"STACK:(\d+)", usage.stdout)[1])


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves nothing to compile")
@pytest.mark.parametrize(
    "capability, slab_type, keys",
    [
        pytest.param(90, "bf16", [*all_keys(), *FEATURES], id="sm_90-bf16-all"),
        *(pytest.param(90, t, [*all_keys()[:2], FULL, *FEATURES[-3:]], id=f"sm_90-{t}") for t in ("fp32", "fp16")),
        *(
            pytest.param(cc, t, [FULL, RICH], id=f"sm_{cc}-{t}")
            for cc, t in itertools.product((80, 100), ("fp32", "fp16", "bf16"))
        ),
        pytest.param(90, "fp64", [FULL._replace(float64=True), RICH._replace(float64=True)], id="sm_90-fp64"),
    ],
)
def test_the_triton_kernel_compiles(capability, slab_type, keys, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for key in keys:
        stat = "fp64" if key.float64 else "fp32"
        itemsize = int(slab_type[-2:]) // 8
        types = {"slab": f"*{slab_type}", "out": f"*{slab_type}"} | dict.fromkeys(("target", "argmax", "count"), "*i64")
        signature = {f"{name}_ptr": types.get(name, f"*{stat}") for name in kernels.pointer_args(key)}
        signature |= dict.fromkeys(("row_stride", "out_row_stride", "V", "ignore_index", "start"), "i32")
        signature |= dict.fromkeys(("z_scale", "z_shift", "z_cap"), stat)
        aligned = ("slab_ptr", "out_ptr", "class_weight_ptr", "row_stride", "out_row_stride")
        compiled = cross_compile(key, capability, signature, itemsize, aligned)
        ptx = compiled.asm["ptx"]
        assert f".target sm_{capability}" in ptx
        scalar = re.findall(r"ld\.global\.b16|st\.global\.b16", ptx)
        assert len(scalar) <= 2 or not key.padded, "the label's column alone"
        assert "ld.global.v" in ptx and ("st.global.v" in ptx) == key.grad  # V in no power of two, and still vectors
        assert ".local" not in ptx and spilled_bytes(compiled.asm["cubin"], tmp_path) == 0


def test_kernels_hold_exactly_the_features_in_use():
    plain = [*all_keys(), *all_keys(float64=True)]
    sources = {key: kernels.render(key) for key in (*plain, *FEATURES)}
    assert len(set(sources.values())) == len(sources) == 30 + len(FEATURES)
    for key, source in sources.items():
        names = re.findall(r"^    (\w+)_ptr,", source, re.MULTILINE)
        assert names == kernels.pointer_args(key)
        words = set(re.findall(r"\w+", source))
        for word, used in {
            "nll_ptr": key.stats,
            "log": key.stats,
            "m": key.stats,
            "uz": key.zsum,
            "q": key.stats and key.pz,
            "row_mean": key.pz,
            "best": key.argmax,
            "g_nll_ptr": key.g_nll,
            "g_lse_ptr": key.g_lse,
            "gz": key.g_zsum,
            "gp": key.g_pz,
            "scale_ptr": key.scale,
            "u": key.class_weight,
            "out_row_stride": key.out,
            "epilogue": bool(key.function),
            "slope": bool(key.function),
            "z_shift": bool(key.function),
            "float64": key.float64,
            "float32": not key.float64,
        }.items():
            assert (word in words) == used, (key, word)
        assert ("tl.store(row_ptr" in source) == (key.grad and not key.out)


@pytest.mark.parametrize(
    "V, block, warps",
    [(1, 16, 1), (300, 512, 2), (2048, 2048, 8), (8192, 8192, 32), (50257, 8192, 32), (128256, 16384, 32)],
)
def test_configuration_follows_the_vocabulary_and_the_registers(V, block, warps):
    assert kernels._config(V, FULL, 2) == (block, warps)
    assert kernels._config(V, FULL, 4)[0] == min(block, 4096 if V == 50257 else 8192)
    assert kernels._config(V, FULL, 8)[0] == min(block, 4096)
    assert kernels._config(V, FULL._replace(pz=True, function="tanh"), 2) == (block, warps)
    assert kernels._config(V, RICH, 2)[0] == min(block, 4096 if V == 50257 else 8192)
    assert kernels._config(V, RICH, 8)[0] == min(block, 2048)
    assert [kernels._config(128256, RICH, itemsize)[1] for itemsize in (2, 4)] == [16, 32]


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
    monkeypatch.setattr(kernels, "TRITON_DEVICES", ("cpu",))
    monkeypatch.setattr(kernels, "_unbuildable", set())
    monkeypatch.setattr(kernels, "_launch_rows", broken)
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
    for part in (
        "`rows` could not be built for cpu",
        type(error).__name__,
        str(error),
        "slower",
        "C compiler is on PATH",
    ):
        assert part in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_rows()
        call_rows(C=5, V=9)  # same kernel
    assert broken_triton.launches == 1

    slab = torch.zeros(3, 5, dtype=torch.float64)  # another kernel: tried, and warned about
    statistics = Statistics(*torch.empty(3, 3, dtype=torch.float64))
    target = torch.tensor([0, 4, IGNORE])
    with pytest.warns(RuntimeWarning, match="`rows` could not be built"):
        rows_(slab, target, statistics, None, IGNORE, stats=True, grad=False)
    torch.testing.assert_close(statistics.nll, torch.tensor([math.log(5), math.log(5), 0]).double())
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
    for name in ("_launch_rows", "torch_rows_"):
        monkeypatch.setattr(kernels, name, lambda *args, name=name, **options: taken.append(name))
    statistics = Statistics(None, None, None)
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(kernels, "TRITON_DEVICES", devices)
        rows_(torch.zeros(1, 2), None, statistics, None, IGNORE, stats=True, grad=False)
    assert taken == ["torch_rows_", "_launch_rows"]
    monkeypatch.undo()
    assert kernels.TRITON_DEVICES == ("cuda", "xpu")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slab": torch.zeros(3, 5, 1)}, "slab must be"),
        ({"slab": torch.zeros(3, 5, dtype=torch.int64)}, "slab must be"),
        ({"slab": torch.zeros(5, 3).T}, "slab must have unit stride"),
        ({"target": torch.zeros(3, dtype=torch.int32)}, "target must be"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, "target must be"),
        ({"nll": None}, "nll is missing"),
        ({"nll": torch.zeros(6)[::2]}, "nll is written and must be contiguous"),
        ({"max": torch.zeros(3, dtype=torch.float64)}, "max must be"),
        ({"logsum": torch.zeros(2)}, "logsum must be"),
        ({"zsum": torch.zeros(6)[::2]}, "zsum is written and must be contiguous"),
        ({"pz": torch.zeros(3, 1)}, "pz must be"),
        ({"argmax": torch.zeros(3)}, "argmax must be"),
        ({"g_nll": torch.zeros(3, dtype=torch.bfloat16)}, "g_nll must be"),
        ({"g_lse": torch.zeros(())}, "g_lse must be"),
        ({"g_zsum": torch.zeros(5)}, "g_zsum must be"),
        ({"g_pz": torch.zeros(3, dtype=torch.int64), "pz": torch.zeros(3)}, "g_pz must be"),
        ({"g_pz": torch.zeros(3)}, "pz is missing"),
        ({"scale": torch.zeros(1)}, "scale must be"),
        ({"scale": torch.zeros((), device="meta")}, "scale must be"),
        ({"class_weight": torch.zeros(3)}, "class_weight must be"),
        ({"out": torch.zeros(3, 5, dtype=torch.float16)}, "out must be"),
        ({"out": torch.zeros(5, 3).T}, "out must have unit stride"),
        ({"epilogue": Epilogue("relu")}, "epilogue.function must be one of .*'relu'"),
    ],
)
@pytest.mark.parametrize("implementation", [torch_rows_, triton_rows_])
def test_wrong_arguments_are_refused(implementation, change, message):
    given = {"slab": torch.zeros(3, 5), "target": torch.zeros(3, dtype=torch.int64), "g_nll": torch.zeros(3)}
    given |= dict.fromkeys(("nll", "max", "logsum"), torch.zeros(3))
    given |= change
    statistics = Statistics(**{name: given.pop(name, None) for name in Statistics._fields})
    cotangents = Cotangents(**{name: given.pop(f"g_{name}", None) for name in Cotangents._fields})
    slab, target = given.pop("slab"), given.pop("target")
    with pytest.raises(ValueError, match=f"rows_: {message}"):
        implementation(slab, target, statistics, cotangents, IGNORE, stats=True, grad=True, **given)


def test_select_takes_rows_of_each_vector():
    x = torch.arange(4)
    assert [v if v is None else v.tolist() for v in select(Cotangents(x, pz=x + 1), slice(2))] == [
        [0, 1],
        None,
        None,
        [1, 2],
    ]
    part = select(Statistics(None, x, x + 1), slice(1, 3))
    assert isinstance(part, Statistics) and part.nll is None and part.argmax is None
    assert part.max.tolist() == [1, 2] and part.logsum.tolist() == [2, 3]
    part.max.zero_()
    assert x.tolist() == [0, 0, 0, 3]  # views


# ---------------------------------------------------------------- the Triton kernel on a GPU


def gpu(test):
    for mark in gpu_only:
        test = mark(test)
    return test


def on_gpu(C, V, dtype=torch.bfloat16, seed=0, features=()):
    """(positional arguments of rows_, options) for a random slab made on the device."""
    gen = torch.Generator("cuda").manual_seed(seed)
    slab = torch.empty(C, V, dtype=dtype, device="cuda").normal_(generator=gen)
    target = torch.randint(V, (C,), device="cuda", generator=gen)
    vectors = iter(torch.full((9, C), math.nan, device="cuda"))
    extra = {name: next(vectors) for name in ("zsum", "pz") if name in features}
    if "argmax" in features:
        extra["argmax"] = torch.zeros(C, dtype=torch.int64, device="cuda")
    statistics = Statistics(next(vectors), next(vectors), next(vectors), **extra)
    one = torch.ones(C, device="cuda")
    cotangents = Cotangents(one, None, *(one if name in features else None for name in ("zsum", "pz")))
    options = {"class_weight": torch.ones(V, device="cuda")} if "class_weight" in features else {}
    options["epilogue"] = next((EPILOGUES[name] for name in features if name in EPILOGUES), IDENTITY)
    return (slab, target, statistics, cotangents, IGNORE), options


@gpu
def test_rows_runs_the_triton_kernel_on_the_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "torch_rows_", None)
    args, _ = on_gpu(64, 32000)
    slab, target, (nll, top, logsum, *_), cotangents, _ = args
    expected = reference(slab, target, cotangents.nll)
    rows_(*args, stats=True, grad=True)
    actual = Result(nll, top + logsum, slab, top, logsum)
    assert_right(Impl(rows_, "cuda", torch.bfloat16), actual, expected, (True, True))


@gpu
def test_more_than_2_31_elements():
    C, V = 16800, 128256
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    assert C * V > 2**31
    args, options = on_gpu(C, V, features=("argmax",))
    slab, target, (nll, top, logsum, *_, argmax), *_ = args
    picked = [0, 1, C // 2, C - 2, C - 1]
    expected = reference(slab[picked], target[picked], torch.ones(len(picked)))
    out = torch.empty_like(slab)
    triton_rows_(*args, stats=True, grad=True, out=out, **options)
    actual = Result(nll[picked], (top + logsum)[picked], out[picked], top, logsum, argmax=argmax[picked])
    assert_right(Impl(triton_rows_, "cuda", torch.bfloat16), actual, expected, (True, True))
    assert nll.isfinite().all()
    del out
    triton_rows_(*args, stats=False, grad=True)
    assert_right(
        Impl(triton_rows_, "cuda", torch.bfloat16), actual._replace(dlogits=slab[picked]), expected, (False, True)
    )


@gpu
@pytest.mark.parametrize("implementation", [triton_rows_, torch_rows_])
def test_no_host_synchronisation_and_no_large_temporary(implementation):
    args, options = on_gpu(2048, 32000, features=("zsum", "class_weight", "pz", "argmax", "tanh"))

    def both():
        implementation(*args, stats=True, grad=True, **options)
        implementation(*args, stats=False, grad=True, **options)

    both()  # compile outside
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 4 << 20  # the slab has 125 MiB


@gpu
def test_another_number_of_rows_or_epilogue_compiles_nothing():
    import triton

    compiled = []
    previous = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda **kwargs: compiled.append(kwargs) and None
    try:
        # Vectors of any alignment, and the numbers that Triton specialises an integer argument on.
        for features, cap in (((), None), (("zsum", "pz", "argmax", "tanh"), 16)):
            for C, lo, ignore_index in ((1, 0, 1), (16, 1, 16), (37, 2, -100), (1000, 4, 5)):
                (slab, target, *groups, _), options = on_gpu(C + lo, 4999, features=features)
                rows = slice(lo, None)
                if cap:
                    options["epilogue"] = Epilogue("tanh", C, lo, cap)
                groups = [select(group, rows) for group in groups]
                triton_rows_(slab[:C], target[rows], *groups, ignore_index, stats=True, grad=True, **options)
            assert len(compiled) <= 1
            compiled.clear()
    finally:
        triton.knobs.runtime.jit_cache_hook = previous


@gpu
def test_the_gradient_pass_runs_in_a_cuda_graph():
    args, options = on_gpu(32, 5000, features=("zsum", "tanh"))
    slab = args[0]
    logits = slab.clone()
    triton_rows_(*args, stats=True, grad=True, **options)
    expected = slab.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_rows_(*args, stats=True, grad=True, **options)
    slab.copy_(logits)
    graph.replay()
    assert_same(slab, expected)
