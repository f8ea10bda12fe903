"""What is installed, what importing it costs, and what it does to a torch that it doesn't know."""

import importlib.util
import inspect
import os
import subprocess
import sys
import threading
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

from flce_inductor import _compat, backend, lowering
from flce_inductor.after_import import after_import

ROOT = Path(__file__).resolve().parent.parent


def test_wheel_in_a_clean_place(tmp_path):
    """Built, installed apart from the sources, and a kernel rendered there."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("flce_inductor-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    templates = {f"flce_inductor/templates/{path.name}" for path in (ROOT / "templates").glob("*.jinja")}
    assert len(templates) >= 3 and templates <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "templates/"))]

    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=300)
    code = (
        "import flce_inductor, importlib.metadata as m\n"
        "from flce_inductor import kernels\n"
        f"assert flce_inductor.__file__.startswith({str(site)!r}), flce_inductor.__file__\n"
        f"assert str(kernels._template_dir()).startswith({str(site)!r})\n"
        "assert 'def rows(' in kernels.render(kernels.RowsKey(stats=True, grad=True, g_nll=True))\n"
        "assert 'flce_inductor' in m.entry_points(group='torch_dynamo_backends').names\n"
        "print(flce_inductor.__version__)"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in wheel.name


def fresh(code: str) -> None:
    """Run code, which asserts, in a process of its own."""
    # a graph from a cache would run no passes
    env = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


PROBLEM = """
import sys, threading, time, warnings, torch, torch.nn.functional as F
torch.manual_seed(0)
h, w, t = torch.randn(8, 4), torch.randn(128, 4), torch.randint(128, (8,))
def loss(h, w, t): return F.cross_entropy(F.linear(h, w), t)
def equal(x): torch.testing.assert_close(x.double(), loss(h.double(), w.double(), t), rtol=1e-6, atol=1e-6)
def rewritten(): return torch._dynamo.utils.counters["inductor"]["flce_rewritten"]
def compiled(**how):
    torch._dynamo.reset()
    before = rewritten()
    equal(torch.compile(loss, fullgraph=True, **how)(h, w, t))
    return rewritten() - before
"""


def test_import_is_light_and_complete():
    """The import takes no part of Inductor, Dynamo or their dependencies. Keys, passes and operators are there all the
    same, in each thread, when somebody imports Inductor: here a thread that is not the one that compiles later.
    """
    fresh(
        PROBLEM
        + """
before, start = set(sys.modules), time.process_time()
import flce_inductor
seconds = time.process_time() - start
new = {name for name in set(sys.modules) - before if not name.startswith("flce_inductor")}
assert len(new) < 5, new
assert seconds < 0.5, seconds  # 0.02 where bytecode is kept and nothing else runs
torch.ops.flce_inductor.row_stats.default  # what loads a saved graph needs no more
assert flce_inductor.config.current() == flce_inductor.config.Settings()  # for the explicit functions

for name in ("torch._dynamo", "torch._inductor", "triton", "sympy", "jinja2"):
    assert name not in sys.modules
thread = threading.Thread(target=lambda: torch._inductor.config)
thread.start()
thread.join()
assert "torch._inductor.config" in sys.modules
torch._inductor.config.flce_inductor.enable = True
assert compiled(options={"flce_inductor.min_logits_bytes": 0}) == 1
equal(flce_inductor.linear_cross_entropy(h, w, t))
assert flce_inductor.explain(loss, h, w, t)[0].reason is flce_inductor.Reason.TOO_SMALL
config = sys.modules["torch._inductor.config"]
assert config.__spec__.loader is config.__loader__ and "flce" not in type(config.__loader__).__module__
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("flce_inductor.")]
"""
    )


def test_a_torch_that_does_not_fit():
    """Where the keys can't be grafted there is one warning; both backends, explain and the functions work without."""
    fresh(
        PROBLEM
        + """
import torch._inductor.config as inductor_config
import types
inductor_config.__dict__["_config"] = types.MappingProxyType(inductor_config._config)  # takes no more keys
torch.__version__ = "2.99.0"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import flce_inductor
    assert compiled(backend="flce_inductor", options={"flce_inductor.min_logits_bytes": 0, "max_autotune": False}) == 0
    patches = flce_inductor.backend._patches("max-autotune", None, None)
    assert patches["max_autotune"] and "pre_grad_custom_pass" not in patches
    assert compiled() == 0
    assert not flce_inductor.explain(loss, h, w, t)
    equal(flce_inductor.linear_cross_entropy(h, w, t))
assert not hasattr(inductor_config, "flce_inductor")
ours = [str(w.message) for w in caught if "flce_inductor" in str(w.message)]
assert len(ours) == 1, ours
for part in ("nothing is rewritten", "torch 2.99.0", "AttributeError: 'mappingproxy'", "Use torch 2.11 to 2.15"):
    assert part in ours[0], ours
"""
    )


@pytest.fixture
def attached_again(monkeypatch):
    """The package's part in Inductor's configuration is done anew, and undone."""
    monkeypatch.setattr(backend, "_usable", True)
    with inductor_config.patch({}):
        yield backend._attach


def test_untested_torch_warns(attached_again, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.16.0+cpu")
    with pytest.warns(UserWarning, match=r"not tested with torch 2\.16\.0.*tested 2\.11 to 2\.15.*newer flce_inductor"):
        attached_again()
    assert backend._ready()
    for version in ("2.15.3", "2.11.0a0+git123"):
        monkeypatch.setattr(torch, "__version__", version)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attached_again()


@pytest.mark.parametrize("what", ["an abstract method", "a lowering"])
def test_steps_aside(what, attached_again, monkeypatch):
    """For what turns out to be missing later too."""
    if what == "a lowering":
        monkeypatch.setattr(lowering, "register", lambda: torch._inductor.no_such_function)
    else:
        monkeypatch.setattr(CustomGraphPass, "prepare", lambda self, graph: None, raising=False)
    loss = torch.nn.functional.cross_entropy
    h, w, t = torch.randn(8, 4), torch.randn(128, 4), torch.randint(128, (8,))
    with pytest.warns(UserWarning, match="nothing is rewritten") as caught:
        attached_again()
        for flag in (False, True):  # the backend's own, and that of stock Inductor
            torch._dynamo.reset()
            before = counters["inductor"]["flce_rewritten"]
            with inductor_config.patch({"flce_inductor.enable": flag, "flce_inductor.min_logits_bytes": 0}):
                got = torch.compile(lambda h, w, t: loss(h @ w.t(), t), backend=backend.tracing_backend)(h, w, t)
            torch.testing.assert_close(got, loss(h @ w.t(), t))
            assert counters["inductor"]["flce_rewritten"] == before
    assert len([w for w in caught if "flce_inductor" in str(w.message)]) == 1


class OfTheUser(CustomGraphPass):
    def __call__(self, graph):
        pass

    def uuid(self):
        return "of the user"


@pytest.mark.parametrize("key", backend._PASSES)
def test_a_pass_set_before_the_import_is_kept(key):
    """In the thread that set it; others have ours alone, as they have Inductor's defaults (from torch 2.13 on)."""
    with inductor_config.patch({key: OfTheUser()}):
        _compat.install_pass(key, backend._PASSES[key])
        first, second = _compat.iter_passes(getattr(inductor_config, key))
        assert type(first) is OfTheUser and second is backend._PASSES[key]
        seen = []
        thread = threading.Thread(target=lambda: seen.extend(_compat.iter_passes(getattr(inductor_config, key))))
        thread.start()
        thread.join()
        assert seen[-1] is backend._PASSES[key]
    assert _compat.iter_passes(getattr(inductor_config, key)) == (backend._PASSES[key],)


class TestAfterImport:
    def module(self, tmp_path, monkeypatch, text):
        name = f"module_{len(text)}_for_the_test"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    def test_once_before_anybody_sees_the_module(self, tmp_path, monkeypatch):
        calls = []
        name = self.module(tmp_path, monkeypatch, "import time\ntime.sleep(0.2)\nx = 1\n")
        after_import(name, lambda: calls.append(sys.modules[name].x))
        assert importlib.util.find_spec(name) and not calls  # a question is no import
        seen = []
        threads = [
            threading.Thread(target=lambda: (importlib.import_module(name), seen.append(list(calls)))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert calls == [1] and seen == [[1]] * 4
        assert inspect.getsource(sys.modules[name]).endswith("x = 1\n")

    def test_imported_already(self, tmp_path, monkeypatch):
        calls = []
        name = self.module(tmp_path, monkeypatch, "")
        importlib.import_module(name)
        after_import(name, lambda: calls.append(1))
        assert calls == [1] and not [finder for finder in sys.meta_path if getattr(finder, "name", "") == name]

    def test_twice(self, tmp_path, monkeypatch):
        """As a reload of the package does."""
        calls = []
        name = self.module(tmp_path, monkeypatch, "x = 12\n")
        for i in (1, 2):
            after_import(name, lambda i=i: calls.append(i))
        importlib.import_module(name)
        assert sorted(calls) == [1, 2]
        assert not [finder for finder in sys.meta_path if getattr(finder, "name", "") == name]

    def test_an_import_that_fails_once(self, tmp_path, monkeypatch):
        calls = []
        name = self.module(tmp_path, monkeypatch, "import sys\nif not hasattr(sys, 'x_of_test'): raise ImportError\n")
        after_import(name, lambda: calls.append(1))
        with pytest.raises(ImportError):
            importlib.import_module(name)
        assert not calls
        monkeypatch.setattr(sys, "x_of_test", 1, raising=False)
        importlib.import_module(name)
        assert calls == [1]
