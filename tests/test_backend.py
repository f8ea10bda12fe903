"""The ways in: backend name, options, config keys, and the passes that the user has set."""

import importlib
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from util import fresh

import flce_inductor
from flce_inductor import _compat, backend

KEYS = inductor_config.flce_inductor
SMALL = {"flce_inductor.min_logits_bytes": 0, "flce_inductor.min_vocab_size": 0}


def loss_fn(h, weight, target):
    return F.cross_entropy(F.linear(h, weight), target)


def problem():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(30, 8))  # a parameter's shape stays static under dynamic=True
    return torch.randn(40, 8, requires_grad=True), weight, torch.randint(30, (40,))


def rewrites(**compile_args) -> int:
    """How many losses a compilation of loss_fn rewrites; checks its results against float64."""
    torch._dynamo.reset()
    h, weight, target = problem()
    before = counters["inductor"]["flce_rewritten"]
    with fresh_cache():
        loss = torch.compile(loss_fn, **compile_args)(h, weight, target)
        loss.backward()
    h64, w64 = h.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want = loss_fn(h64, w64, target)
    want.backward()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad.double(), w64.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(h.grad.double(), h64.grad, rtol=1e-4, atol=1e-6)
    return counters["inductor"]["flce_rewritten"] - before


class TestSwitches:
    def test_backend_by_name(self):
        assert rewrites(backend="flce_inductor", options=SMALL) == 1

    def test_off_by_default(self):
        assert rewrites(options=SMALL) == 0

    def test_option_of_stock_inductor(self):
        assert rewrites(options={"flce_inductor.enable": True, **SMALL}) == 1

    def test_process_wide_flag(self):
        with inductor_config.patch({"flce_inductor.enable": True, **SMALL}):
            assert rewrites() == 1

    @pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs", "reduce-overhead"])
    def test_mode(self, mode):
        with inductor_config.patch(SMALL):
            assert rewrites(backend="flce_inductor", mode=mode, fullgraph=True, dynamic=True) == 1

    def test_mode_reaches_inductor(self):
        assert backend._patches("max-autotune", None, None)["max_autotune"] is True

    def test_unknown_option(self):
        with pytest.raises(Exception, match="no_such_key"):
            rewrites(backend="flce_inductor", options={"no_such_key": 1})

    def test_no_import_needed(self, tmp_path):
        code = (
            "import torch, torch.nn.functional as F\n"
            "f = torch.compile(lambda h, w, t: F.cross_entropy(h @ w.t(), t), backend='flce_inductor',"
            " options={'flce_inductor.min_logits_bytes': 0})\n"
            "f(torch.randn(8, 4), torch.randn(128, 4), torch.randint(128, (8,)))\n"
            "assert torch._dynamo.utils.counters['inductor']['flce_rewritten'] == 1"
        )
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # a graph from a cache runs no passes
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=env)

    def test_user_chunk_size_is_exact(self):
        seen = []
        original = flce_inductor.ops.runtime.run

        def spy(*args, **kwargs):
            seen.append(args[5].chunk_size)
            return original(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flce_inductor.ops.runtime, "run", spy)
            rewrites(backend="flce_inductor", options={"flce_inductor.chunk_size": 13, **SMALL})
        assert seen == [13]


WRONG = [
    ("enable", 1),
    ("chunk_size", 0),
    ("chunk_size", -5),
    ("chunk_size", True),
    ("chunk_size", 2.0),
    ("max_slab_bytes", 0),
    ("accum_dtype", "float16"),
    ("accum_dtype", None),
    ("min_logits_bytes", -1),
    ("min_logits_bytes", None),
    ("min_vocab_size", -1),
    ("unused_logits", "zero"),
    ("unused_logits", None),
    ("unused_logits", True),
]


class TestKeys:
    @pytest.mark.parametrize(("key", "wrong"), WRONG)
    def test_wrong_values(self, key, wrong):
        """Refused where they are set, by whichever way, naming the key, the value and what is allowed."""
        before = getattr(KEYS, key)
        message = rf"flce_inductor\.{key}={wrong!r}: allowed"
        with pytest.raises(ValueError, match=message):
            setattr(KEYS, key, wrong)
        with pytest.raises(ValueError, match=message), inductor_config.patch({f"flce_inductor.{key}": wrong}):
            pass
        with pytest.raises((ValueError, RuntimeError), match=f"flce_inductor.{key}"):  # RuntimeError: a wrong type
            torch.compile(loss_fn, options={f"flce_inductor.{key}": wrong})(*problem())
        assert getattr(KEYS, key) == before

    def test_right_values_and_reset(self):
        with inductor_config.patch({"flce_inductor.chunk_size": 7, "flce_inductor.accum_dtype": "float32"}):
            assert KEYS.chunk_size == 7 and KEYS.accum_dtype == "float32"
        assert KEYS.chunk_size is None and KEYS.accum_dtype == "auto"

    def test_a_reload_keeps_them(self):
        with inductor_config.patch({"flce_inductor.chunk_size": 7}):
            importlib.reload(flce_inductor)
            assert inductor_config.flce_inductor.chunk_size == KEYS.chunk_size == 7
            with pytest.raises(ValueError, match="chunk_size"):
                KEYS.chunk_size = 0
        assert KEYS.chunk_size is None
        assert rewrites(backend="flce_inductor", options=SMALL) == 1

    def test_part_of_the_cache_key(self):
        def digest(**patches):
            with inductor_config.patch({f"flce_inductor.{k}": v for k, v in patches.items()}):
                return inductor_config.get_hash()

        keys = ({}, {"chunk_size": 5}, {"chunk_size": 6}, {"enable": True}, {"unused_logits": "nan"})
        assert len({digest(**key) for key in keys}) == 5

    def test_unknown_key(self):
        with pytest.raises(AttributeError):
            KEYS.no_such_key = 1


class Marked(CustomGraphPass):
    """A user's pass that counts its runs."""

    runs = 0

    def __call__(self, graph):
        type(self).runs += 1

    def uuid(self):
        return "marked"


class TestUserPasses:
    def test_backend_keeps_a_pass_from_options(self):
        Marked.runs = 0
        options = {"pre_grad_custom_pass": Marked(), "joint_custom_pre_pass": Marked(), **SMALL}
        assert rewrites(backend="flce_inductor", options=options) == 1
        assert Marked.runs == 2

    def test_backend_keeps_a_pass_from_the_config(self):
        Marked.runs = 0
        with inductor_config.patch({"pre_grad_custom_pass": Marked(), "joint_custom_pre_pass": Marked()}):
            assert rewrites(backend="flce_inductor", options=SMALL) == 1
        assert Marked.runs == 2

    def test_with_passes(self):
        Marked.runs = 0
        key = "pre_grad_custom_pass"
        once = flce_inductor.with_passes(key, Marked())
        twice = flce_inductor.with_passes(key, once)
        assert len(_compat.iter_passes(twice)) == 2  # ours is added once
        with inductor_config.patch({key: twice, "flce_inductor.enable": True, **SMALL}):
            assert rewrites() == 1
        assert Marked.runs == 1

    @pytest.mark.parametrize(
        ("key", "rewritten", "consequence"),
        [("pre_grad_custom_pass", 0, "nothing is rewritten"), ("joint_custom_pre_pass", 1, "second time")],
    )
    def test_displaced(self, key, rewritten, consequence):
        backend._warn_displaced.cache_clear()
        with (
            inductor_config.patch({key: Marked(), "flce_inductor.enable": True, **SMALL}),
            pytest.warns(UserWarning, match=f"{key} was set.*{consequence}.*with_passes"),
        ):
            assert rewrites() == rewritten

    def test_a_pass_without_uuid_keeps_the_chain_out_of_the_cache(self):
        chain = _compat._Chain(lambda graph: None, Marked())
        assert chain.uuid() is None
        assert _compat._Chain(Marked(), Marked()).uuid() == ("marked", "marked")


def test_explain_compiles_nothing_and_reports():
    with fresh_cache(), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = counters["inductor"]["fxgraph_cache_miss"]
        with inductor_config.patch(SMALL):
            report = flce_inductor.explain(loss_fn, *problem())
        assert counters["inductor"]["fxgraph_cache_miss"] == compiled
    (site,) = report
    assert site.reason is None and site.one_pass and (site.N, site.H, site.V) == ("40", "8", "30")
    assert site.where.startswith(__file__)
    assert site.logits_bytes == 40 * 30 * 4
    assert "1 loss found, 1 rewritten" in str(report) and f"{site.chunk_size} rows a chunk" in str(report)


def test_explain_says_why_not():
    (site,) = flce_inductor.explain(loss_fn, *problem())
    assert site.reason is flce_inductor.Reason.TOO_SMALL
    assert "min_logits_bytes" in str(site)
    assert not flce_inductor.explain(lambda x: x + 1, torch.ones(3))


@pytest.mark.parametrize("hooks", ["checkpoint", "numpy", "forbidden"])
def test_compiled_under_hooks_of_the_user(hooks):
    """An eager checkpoint counts what autograd saves, another hook reads it: the rewrite's examples are none of it."""
    from torch.autograd.graph import saved_tensors_hooks
    from torch.utils.checkpoint import checkpoint

    def fn(h, w):
        return F.cross_entropy(torch.tanh(h @ w.T), t, u, label_smoothing=0.1)

    torch.manual_seed(0)
    h, w = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (11, 160))
    t, u = torch.randint(160, (11,)), torch.rand(160, dtype=torch.float64)
    with fresh():
        compiled = torch.compile(fn, backend=backend.tracing_backend)  # without caches
        if hooks == "checkpoint":
            loss = checkpoint(compiled, h, w, use_reentrant=False)
        elif hooks == "forbidden":
            with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
                loss = compiled(h, w)
        else:
            with saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy):
                loss = compiled(h, w)
        got = torch.autograd.grad(loss, (h, w))
        assert counters["inductor"]["flce_rewritten"] >= 1
    torch.testing.assert_close((loss, *got), (want := fn(h, w), *torch.autograd.grad(want, (h, w))))


def test_uuid_changes_with_sources(monkeypatch, tmp_path):
    from flce_inductor import kernels

    before, donation = backend._PASSES["joint_custom_pre_pass"].uuid()
    assert before == kernels.source_digest.__wrapped__()
    for template in kernels._template_dir().glob("*.jinja"):
        shutil.copy(template, tmp_path)
    monkeypatch.setattr(kernels, "_template_dir", lambda: tmp_path)
    assert kernels.source_digest.__wrapped__() == before
    (tmp_path / "gemm.py.jinja").write_text("changed")
    assert kernels.source_digest.__wrapped__() != before
    with torch._functorch.config.patch(donated_buffer=not donation[0]):  # torch leaves it out of its keys
        assert backend._PASSES["joint_custom_pre_pass"].uuid()[1] != donation
