"""What the package must not do: load code or data that others may have written, or change what it doesn't rewrite."""

import ast
import json
import math
import shutil
import sys
from pathlib import Path

import jinja2
import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from util import counters

import flce_inductor
from flce_inductor import chunking, config, kernels, lowering, runtime
from flce_inductor.runtime import RowProgram

PACKAGE = Path(flce_inductor.__file__).parent


# what would run text, load code by a name or path, or look into places of the user's
_RUNS = {
    *("eval", "exec", "compile", "__import__", "run_path", "run_module", "spec_from_file_location", "SourceFileLoader"),
    *("system", "popen", "Popen", "run", "load_library", "load_inline", "from_string"),
    *("expanduser", "home", "gettempdir", "mkdtemp"),
}
_UNPICKLES = {"pickle", "marshal", "shelve", "dill", "joblib", "yaml"}
_HARMLESS = {"torch.compile", "re.compile", "runtime.run", "self.run", "finder.run"}


# demo.py is a program of its own, which starts processes and reads what they write
_SOURCES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "demo.py")


@pytest.mark.parametrize("name", _SOURCES)
def test_nothing_runs_text(name):
    tree = ast.parse((PACKAGE / name).read_text())
    called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in called if call.split(".")[-1] in _RUNS and call not in _HARMLESS]
    assert not [call for call in called if call.split(".")[0] in _UNPICKLES or call == "torch.load"]
    assert called.count("open") == (name == "lowering.py")  # the tuner's file, in Inductor's cache


class TestTemplates:
    @pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "missing"])
    def test_only_from_the_package(self, name, tmp_path, monkeypatch):
        """Even where the file is there."""
        shutil.copytree(kernels._template_dir(), tmp_path / "templates")
        (tmp_path / "outside.py.jinja").write_text("outside")
        monkeypatch.setattr(kernels, "_template_dir", lambda: tmp_path / "templates")
        with pytest.raises(jinja2.TemplateNotFound):
            kernels._render(name)

    def test_no_text_of_a_caller_in_a_kernel(self):
        """The only text among what a kernel is rendered for is the epilogue's function, which is checked before."""
        texts = [name for name, kind in kernels.RowsKey.__annotations__.items() if kind not in (bool, "bool")]
        assert texts == ["function"]
        slab, vector = torch.zeros(2, 3), torch.zeros(2)
        stats = kernels.Statistics(vector, vector.clone(), vector.clone())
        epilogue = kernels.Epilogue("tanh') or __import__('os')")
        for rows in (kernels.triton_rows_, kernels.torch_rows_):
            with pytest.raises(ValueError, match="epilogue.function must be one of"):
                rows(slab, torch.zeros(2).long(), stats, None, -100, stats=True, grad=False, epilogue=epilogue)


def _hostile_programs():
    good = RowProgram([["mul", ["r", 0], 2.0]], [5, None, None, None])

    def changed(**fields):
        return good._replace(**fields).text()

    yield "attributes of tensors", changed(steps=[["__reduce__", ["r", 0]]])
    yield "of torch", changed(steps=[["to", ["r", 0], "load"]])
    yield "other operators", changed(steps=[["set_", ["r", 0], ["r", 1]]])
    yield "text among the operands", changed(steps=[["mul", ["r", 0], "__import__('os')"]])
    yield "an operator that is no text", changed(steps=[[["mul"], ["r", 0]]])
    yield "a register from the end", changed(steps=[["mul", ["r", -1], 2.0]])
    yield "a register by name", changed(steps=[["mul", ["r", "nll"], 2.0]])
    yield "a cotangent by name", changed(cotangents=["__class__"])
    yield "other fields", good.text()[:-1] + ", 'hook': 1}"
    yield "not an object", "[1]"
    yield "not JSON", "__import__('os').system('true')"
    yield "nested beyond measure", "[" * 100_000
    # the C++ wrapper writes a program between quotes: nothing may come behind it, or be hidden in its spelling
    yield "a tail", good.text() + '"); system("true'
    yield "double quotes", good.text().replace("'", '"')
    yield "escapes", good.text().replace("mul", "\\u006dul")
    yield "spaces", good.text() + "\n"


class TestSavedGraphs:
    """An exported program or a cached graph holds the ops' arguments; strings among them may be anybody's."""

    @pytest.mark.parametrize("text", [pytest.param(text, id=why) for why, text in _hostile_programs()])
    def test_row_programs(self, text):
        with pytest.raises(ValueError, match="is not a row program"):
            RowProgram.parse(text)

    @pytest.mark.parametrize("fake", [False, True], ids=["run", "traced"])
    @pytest.mark.parametrize(
        ("program", "accum_dtype", "function", "accumulate"),
        [
            ("not a program", "auto", "", "library"),
            ("", 'auto"); system("true', "", "library"),
            ("", "auto", "exp", "library"),
            ("", "auto", "", "other"),
        ],
    )
    def test_strings_of_the_ops(self, program, accum_dtype, function, accumulate, fake):
        with FakeTensorMode() if fake else torch.no_grad():
            head = torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4).long(), None, None
            how = -100, 4, accum_dtype, function, 1.0, 0.0, 1.0
            flags = [False] * 3, [True] * 3, False, accumulate
            with pytest.raises(ValueError, match=r"row program|accum_dtype=|epilogue.function|accumulate="):
                torch.ops.flce_inductor.row_stats_with_grads(*head, *[None] * 4, [], program, *how, *flags)


_CANDIDATES = [lowering.Candidate(size, runtime.Plan()) for size in (8, 16)]


class TestTunersFile:
    """What a file in Inductor's cache says of the time of each candidate."""

    def times(self, tmp_path, content):
        path = tmp_path / "times.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return lowering._kept_times(str(path), _CANDIDATES)

    def test_one_of_ours(self, tmp_path):
        first, second = _CANDIDATES
        assert self.times(tmp_path, {str(first): 0.5, str(second): 0.25}) == {first: 0.5, second: 0.25}
        assert self.times(tmp_path, {str(first): 0.5, "1000 rows by magic": 0.1}) == {first: 0.5}

    @pytest.mark.parametrize("seconds", ["0.5", None, True, -1.0, 0.0, math.nan, math.inf, [0.5], {"a": 1.0}])
    def test_not_a_time(self, seconds, tmp_path):
        first, second = _CANDIDATES
        assert self.times(tmp_path, {str(first): 0.5, str(second): seconds}) == {}

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, [], "text", 3, {}])
    def test_not_a_file_of_ours(self, content, tmp_path):
        assert self.times(tmp_path, content) == {}
        assert self.times(tmp_path, [str(c) for c in _CANDIDATES]) == {}
        assert lowering._kept_times(str(tmp_path), _CANDIDATES) == {}  # a directory

    def test_measured_again(self, tmp_path, monkeypatch):
        """And the file is written anew."""
        problem = lowering._Problem(
            *(16, 4, 8, torch.float32, torch.float32, torch.device("cpu"), False, False, (True, False, False, False)),
            *((-100, "auto", "", 1.0, 0.0, 1.0), (False,) * 3, (True, True, False)),
        )
        monkeypatch.setattr(lowering, "cache_dir", lambda: str(tmp_path))
        monkeypatch.setattr(chunking, "card", lambda device: chunking.Card(1e9, 1e9, 1e9, 1 << 30, 1))
        measured = lowering._times(problem, config.Settings())
        (file,) = (tmp_path / "flce_inductor").iterdir()
        assert measured == lowering._times(problem, config.Settings())  # read
        file.write_text('{"__import__": "os"')
        assert lowering._times(problem, config.Settings()).keys() == measured.keys()
        assert json.loads(file.read_text()).keys() == {str(c) for c in measured}


class Transformer(nn.Module):
    """One layer over a vocabulary too small to be rewritten."""

    def __init__(self, vocabulary=32, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("dynamic", [False, True])
def test_nothing_to_rewrite_is_stock(dynamic, monkeypatch):
    """A training step whose loss is left alone: forward and backward have the text that Inductor generates without any
    of our passes, and a warm step calls the same Python functions in the same order.

    The C++ kernels are not compiled, for time's sake, and compute nothing: only what is generated counts here.
    """
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, arguments, source: lambda *args: None)
    model = Transformer()
    tokens = torch.randint(32, (2, 9))

    def generated(options, **how):
        torch._dynamo.reset()
        compiled = torch.compile(model, dynamic=dynamic, options=options, **how)

        def step():
            model.zero_grad(set_to_none=True)
            compiled(tokens, tokens).backward()

        # caches are off so that both really generate, into one directory, whose name is in the code
        with inductor_config.patch(force_disable_caches=True):
            _, sources = run_and_get_code(step)
        calls = []
        step()
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_qualname) if event == "call" else None)
        try:
            step()
        finally:
            sys.setprofile(None)
        return ["\n".join(line for line in text.splitlines() if "AOT ID" not in line) for text in sources], calls

    stock, stock_calls = generated({"pre_grad_custom_pass": None, "joint_custom_pre_pass": None})
    refused = counters["inductor"]["flce_refused"]
    ours, calls = generated({}, backend="flce_inductor")
    assert counters["inductor"]["flce_refused"] > refused  # the pass has looked at it
    assert len(stock) == 2  # forward and backward
    assert ours == stock
    assert calls == stock_calls
