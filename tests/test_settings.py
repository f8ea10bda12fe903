"""Settings of the compile stack that others turn: each works, or is refused clearly, as docs/settings.md says."""

import ast
import contextlib
import functools
import io
import pathlib
import pickle
import re
import subprocess
import sys
import threading

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from util import (
    INDUCTOR,
    TRACING,
    Outcome,
    Reason,
    assert_same,
    check,
    collect,
    compiled,
    copied,
    counters,
    eager,
    fresh,
    fresh_cache,
    outcome_of,
)

import flce_inductor
from flce_inductor import backend, runtime

N, H, V = 64, 16, 256
SMALL = {"flce_inductor.min_logits_bytes": 0}
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_kept():
    with fresh_cache():
        yield


@contextlib.contextmanager
def without_cached_graphs():
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture(autouse=True)
def _graphs_are_not_kept():
    """Graphs are compiled anew under each setting; the C++ kernels that they have in common aren't."""
    with without_cached_graphs():
        yield


def loss_fn(h, w, t):
    return F.cross_entropy(F.linear(h, w), t)


def per_token(h, w, t):
    return F.cross_entropy(F.linear(h, w), t, reduction="none")


def problem(rows=N):
    t = torch.randint(V, (rows,))
    t[::7] = -100
    return torch.randn(rows, H, requires_grad=True), nn.Parameter(torch.randn(V, H)), t


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(H, H), nn.Linear(H, V, bias=False)

    def forward(self, h, t):
        return F.cross_entropy(self.head(torch.tanh(self.body(h))), t)


class Explicit(Model):
    def forward(self, h, t):
        return flce_inductor.linear_cross_entropy(torch.tanh(self.body(h)), self.head.weight, t)


def call(model, h, t):
    return model(h, t)


def hidden_and_labels(rows=N):
    h, _, t = problem(rows)
    return h.detach(), t


def step(fn, h, w, t):
    """The loss and its gradients."""
    loss = fn(h, w, t)
    return Outcome([loss.detach()], [*torch.autograd.grad(loss, (h, w))])


@contextlib.contextmanager
def runs():
    """Counts the runs of the loop over chunks."""
    counted, run = [], runtime.run

    def spy(*args, **kwargs):
        counted.append(1)
        return run(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "run", spy)
        yield counted


# ---------------------------------------------------------------- arguments of torch.compile


def test_options():
    """Each compiled function has its own."""
    args = problem()
    with fresh():
        for rows in (8, 32):
            got = compiled(loss_fn, *args, backend=INDUCTOR, options={"flce_inductor.chunk_size": rows})
            assert [site.chunk_size for site in got.sites] == [rows]
            assert_same(got, eager(loss_fn, *args))


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead"])
def test_mode(mode):
    (site,) = check(loss_fn, *problem(), backend=INDUCTOR, mode=mode).sites
    assert bool(site.tuned) == ("autotune" in mode)


def test_fullgraph():
    """Without it a break parts head and loss, and the report says so; with it torch says so."""

    def broken(h, w, t):
        z = F.linear(h, w)
        torch._dynamo.graph_break()
        return F.cross_entropy(z, t)

    check(broken, *problem(), reasons=Reason.NO_HEAD, fullgraph=False)
    with fresh(), pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        compiled(broken, *problem(), fullgraph=True)


def test_compiled_methods():
    h, t = hidden_and_labels()
    model = Model()
    want = eager(call, model, h, t)

    def forward(model, h, t):
        model.forward = torch.compile(model.forward, backend=TRACING)
        return model(h, t)

    def method(model, h, t):
        model.compile(backend=TRACING)
        return model(h, t)

    for fn in (forward, method):
        with fresh(), collect() as sites:
            assert_same(outcome_of(fn, (model, h, t)), want)
        assert [site.reason for site in sites] == [None]
        del model.__dict__[{forward: "forward", method: "_compiled_call_impl"}[fn]]


def test_regional_compilation():
    """Blocks that are compiled one by one: the head and the loss need a region in common."""
    h, t = hidden_and_labels()
    model = Model()
    want = eager(call, model, h, t)
    model.body.compile(backend=TRACING)

    def apart(model, h, t):
        return F.cross_entropy(model.head(torch.tanh(model.body(h))), t)

    def together(model, h, t):
        region = torch.compile(lambda h, t: F.cross_entropy(model.head(h), t), backend=TRACING)
        return region(torch.tanh(model.body(h)), t)

    with fresh():
        report = str(flce_inductor.explain(apart, model, h, t))
    assert "no loss found" in report and "only parts of the function are compiled" in report
    with fresh(), collect() as sites:
        assert_same(outcome_of(together, (model, h, t)), want)
    assert [site.reason for site in sites] == [None]


def test_disabled_loss():
    """torch.compiler.disable on the loss is a graph break in front of it, which the report names."""
    disabled = torch.compiler.disable(lambda z, t: F.cross_entropy(z, t))

    def fn(h, w, t):
        return disabled(F.linear(h, w), t)

    check(fn, *problem(), reasons=[], fullgraph=False)
    with fresh():
        report = str(flce_inductor.explain(fn, *problem()))
    assert "no loss found" in report and "torch.compiler.disable" in report


def test_compile_disabled():
    """TORCH_COMPILE_DISABLE=1 is this key's default: everything is eager."""
    args = problem()
    with torch._dynamo.config.patch(disable=True), fresh():
        report = str(flce_inductor.explain(loss_fn, *args))
        got = compiled(loss_fn, *args, fullgraph=False)
    assert got.sites == [] and "nothing was compiled" in report and "TORCH_COMPILE_DISABLE" in report
    assert_same(got, eager(loss_fn, *args))


def test_stance():
    known, other = problem(), problem(N + 1)
    with fresh():
        fn = torch.compile(loss_fn, backend=TRACING, dynamic=False)
        with torch.compiler.set_stance("force_eager"), collect() as sites:
            assert_same(outcome_of(fn, known), eager(loss_fn, *known))
        assert sites == []
        with collect() as sites:
            assert_same(outcome_of(fn, known), eager(loss_fn, *known))
        assert len(sites) == 1
        with torch.compiler.set_stance("eager_on_recompile"), collect() as sites, runs() as counted:
            assert_same(outcome_of(fn, other), eager(loss_fn, *other))
            assert not counted
            assert_same(outcome_of(fn, known), eager(loss_fn, *known))
            assert counted
        assert sites == []
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_same(outcome_of(fn, known), eager(loss_fn, *known))
            with pytest.raises(RuntimeError, match="fail_on_recompile"):
                fn(*other)


# ---------------------------------------------------------------- modes and contexts


def test_no_gradients():
    args = problem()
    for context in (torch.no_grad, torch.inference_mode):
        with fresh(), context(), collect() as sites:
            got = torch.compile(loss_fn, backend=TRACING)(*args)
        assert [site.reason for site in sites] == [None]
        assert not got.requires_grad and got.is_inference() == (context is torch.inference_mode)
        torch.testing.assert_close(got.double(), eager(loss_fn, *args).outputs[0], rtol=1e-6, atol=0)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("context", [torch.device("meta"), default_dtype(torch.float64)], ids=["device", "dtype"])
def test_defaults(context):
    """What we make names its device and dtype."""
    args = problem()
    want = step(loss_fn, *copied(args, torch.float64))
    with fresh(), context:
        explicit = step(flce_inductor.linear_cross_entropy, *args)
        got = step(torch.compile(loss_fn, backend=TRACING), *args)
    assert counters["inductor"]["flce_rewritten"] == 1
    for outcome in (explicit, got):
        assert {(x.dtype, x.device.type) for x in (*outcome.outputs, *outcome.grads)} == {(torch.float32, "cpu")}
        assert_same(outcome, want)


def test_autocast():
    """Around the compiled function or inside of it."""

    def inside(h, w, t):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(h, w, t)

    (one,) = check(inside, *problem(), tolerance=2e-2).outputs
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64, the reference, alone
        (other,) = check(loss_fn, *problem(), tolerance=2e-2).outputs
    assert one.dtype == torch.float32 and torch.equal(one, other)


def test_deterministic():
    args = problem()
    keys = {key: True for key in ("deterministic",) if key in inductor_config._config}
    torch.use_deterministic_algorithms(True)
    try:
        with inductor_config.patch(keys):
            one, other = (check(loss_fn, *args, backend=INDUCTOR) for _ in range(2))
            explicit = step(flce_inductor.linear_cross_entropy, *args)  # its buffers are filled with NaN first
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, (*one.outputs, *one.grads), (*other.outputs, *other.grads)))
    assert_same(explicit, step(loss_fn, *copied(args, torch.float64)))


# ---------------------------------------------------------------- Inductor's and AOTAutograd's keys

KEYS = {
    "memory_planning": {"memory_planning": True},
    "graph_partition": {"graph_partition": True},
    "compile_threads": {"compile_threads": 1},  # the other tests: workers, on a machine with several cores
    "nan_asserts": {"nan_asserts": True},
    "emulate_precision_casts": {"emulate_precision_casts": True},
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_keys(keys):
    with inductor_config.patch(keys):
        check(loss_fn, *problem(), backend=INDUCTOR)


@pytest.mark.parametrize(("fn", "backend"), [(loss_fn, INDUCTOR), (per_token, TRACING)])
def test_auto_chunker(fn, backend):
    """Nothing is left for it; on its own it fails, in torch 2.13, over losses per token."""
    keys = {"enable": True, "output_size_threshold": 1, "amplify_ratio_threshold": 1}
    with inductor_config.patch({f"auto_chunker.{key}": value for key, value in keys.items()}):
        check(fn, *problem(), backend=backend)


def test_freezing():
    """Before torch 2.12 the graph that Dynamo gives us doesn't say what a frozen parameter is."""
    reason = Reason.UNKNOWN_SHAPE if VERSION < (2, 12) else None
    with inductor_config.patch(freezing=True), torch.no_grad():
        check(call, Model().eval(), *hidden_and_labels(), backend=INDUCTOR, reasons=reason)


def test_donated_buffers():
    args = problem()
    want = step(loss_fn, *copied(args, torch.float64))
    with fresh(), functorch_config.patch(donated_buffer=False):
        loss = torch.compile(loss_fn, backend=INDUCTOR)(*args)
        for _ in range(2):
            assert_same(Outcome([loss.detach()], [*torch.autograd.grad(loss, args[:2], retain_graph=True)]), want)
    with fresh():
        fn = torch.compile(loss_fn, backend=INDUCTOR)
        step(fn, *args)
        with pytest.raises(RuntimeError, match="donated_buffer=False"):
            fn(*args).backward(retain_graph=True)
    assert counters["inductor"]["flce_rewritten"] == 1


@pytest.mark.parametrize(("key", "value"), [("activation_memory_budget", 0.3), ("aggressive_recomputation", True)])
def test_recomputation(key, value):
    """The one pass over the logits isn't made again in the backward, unless torch can't be told so."""
    with functorch_config.patch({key: value}), runs() as counted:
        check(call, Model(), *hidden_and_labels())
    told = VERSION >= (2, 14) or key == "aggressive_recomputation"
    assert len(counted) in ([1] if told else [1, 2])


@pytest.mark.parametrize("budget", [0.1, 0.9])
def test_memory_budget_of_other_losses(budget):
    def total(h, w, t):
        return F.cross_entropy(F.linear(torch.tanh(h), w), t, reduction="sum")

    def z_loss(h, w, t):
        return F.linear(torch.tanh(h), w).logsumexp(-1).square().mean()

    def checkpointed(h, w, t):
        return torch.utils.checkpoint.checkpoint(total, h, w, t, use_reentrant=False)

    for loss in (total, z_loss, checkpointed):
        with functorch_config.patch(activation_memory_budget=budget):
            check(loss, *problem())


def test_activation_memory_budget_of_nothing():
    """Everything is computed again, as asked."""
    with functorch_config.patch(activation_memory_budget=0.0), runs() as counted:
        check(call, Model(), *hidden_and_labels())
    assert len(counted) == 2


def test_stock_inductor_first():
    """Inductor hands over arguments in another way once it has seen an op without a lowering of ours."""

    def loss(h, w, t):
        return flce_inductor.linear_cross_entropy(h, w, t)

    args = problem()
    want = step(loss_fn, *copied(args, torch.float64))
    with fresh():
        assert_same(step(torch.compile(loss), *args), want)
    with fresh():
        assert_same(step(torch.compile(loss, backend=INDUCTOR), *args), want)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_compiled_autograd(where):
    """Of a backward inside of the compiled function, and of one that is compiled apart."""
    args = problem()
    want = step(loss_fn, *copied(args, torch.float64))
    compiler = functools.partial(torch.compile, backend=INDUCTOR)

    def train(h, w, t):
        loss = loss_fn(h, w, t)
        loss.backward()
        return loss

    with fresh():
        if where == "inside":
            with torch._dynamo.config.patch(compiled_autograd=True):
                loss = compiler(train)(*args)
        else:
            loss = compiler(loss_fn)(*args)
            with torch._dynamo.compiled_autograd._enable(compiler):
                loss.backward()
        assert counters["compiled_autograd"]["captures"] == 1 and counters["inductor"]["flce_rewritten"] == 1
    assert_same(Outcome([loss.detach()], [x.grad for x in args[:2]]), want)


# ---------------------------------------------------------------- threads and processes


def test_threads():
    """The flag counts where it was set, before torch 2.12 in all threads; options and the backend anywhere."""
    args = problem()
    want = eager(loss_fn, *args)
    enabled = {"flce_inductor.enable": True, **SMALL}

    def stock(gm, example_inputs):
        return compile_fx.compile_fx(gm, example_inputs, inner_compile=backend._run_eagerly)

    def here():
        return compiled(loss_fn, *args, backend=stock)

    def flag():
        with inductor_config.patch(enabled):
            return here()

    def options():
        return compiled(loss_fn, *args, backend="inductor", options=enabled)

    def by_backend():
        return compiled(loss_fn, *args, backend=INDUCTOR, options=SMALL)

    def in_a_thread(work):
        found = []

        def run():
            with without_cached_graphs():
                found.append(work())

        torch._dynamo.reset()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert_same(found[0], want)
        return [site.reason for site in found[0].sites]

    with inductor_config.patch(enabled):
        assert in_a_thread(here) == ([] if VERSION >= (2, 12) else [None])
    assert in_a_thread(here) == []
    for work in (flag, options, by_backend):
        assert in_a_thread(work) == [None]


@pytest.mark.parametrize("mode", ["SERIALIZE", "SUBPROCESS"])
def test_fx_compile_mode(mode, monkeypatch):
    """torch sends no graph with operators that aren't its own to another process, and compiles it here.

    test_aot_inductor has what a process needs that receives the others.
    """
    monkeypatch.setattr(compile_fx, "fx_compile_mode", compile_fx.FxCompileMode[mode])
    compile_fx.FxCompile._reset_stats()
    check(loss_fn, *problem(), backend=INDUCTOR)
    stats = compile_fx.FxCompile._compile_stats
    assert {kind: stat.codegen_and_compile for kind, stat in stats.items()} == {compile_fx._InProcessFxCompile: 2}


# ---------------------------------------------------------------- export


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """The explicit function survives it, with its derivative, and a program that is compiled takes one pass."""
    torch.manual_seed(0)
    model, (h, t) = Explicit(), hidden_and_labels()
    plain = Model()
    plain.load_state_dict(model.state_dict())
    rows = torch.export.Dim("rows", min=2, max=1024)
    program = torch.export.export(model, (h, t), dynamic_shapes=({0: rows}, {0: rows}), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for data in ((h, t), (h[:5], t[:5])):
        assert_same(outcome_of(call, (loaded, *data)), eager(call, plain, *data))
    with fresh():
        got = outcome_of(lambda *args: torch.compile(call, backend=TRACING)(*args), (loaded, h, t))
    assert counters["inductor"]["flce_hoisted"] == 1
    assert_same(got, eager(call, plain, h, t))


def test_exported_cross_entropy():
    """Its operators aren't those that the rewrite reads, and the report says that no loss was found."""
    model, (h, t) = Model(), hidden_and_labels()
    loaded = torch.export.export(model, (h, t)).module()
    check(call, loaded, h, t, reasons=[])
    with fresh():
        assert "no loss found in 1 compiled graph" in str(flce_inductor.explain(call, loaded, h, t))


def test_aot_inductor(tmp_path):
    """A package with the explicit function runs where Python has imported flce_inductor, and isn't loaded elsewhere.

    The process also receives Inductor's configuration, as a worker of fx_compile_mode does that imports torch only.
    """
    model, (h, t) = Explicit(), hidden_and_labels()
    rows = torch.export.Dim("rows", min=2, max=1024)
    with torch.no_grad():
        program = torch.export.export(model, (h, t), dynamic_shapes=({0: rows}, {0: rows}))
    with inductor_config.patch({"flce_inductor.enable": True}):
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "loss.pt2"))
    torch.save((h, t, model(h, t).detach()), tmp_path / "data.pt")
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(inductor_config.save_config_portable()))
    code = """if True:
        import pickle, sys, torch
        h, t, want = torch.load(sys.argv[2])
        try:
            torch._inductor.aoti_load_package(sys.argv[1])
        except RuntimeError as error:
            assert "flce_inductor::run_" in str(error), error
        else:
            raise AssertionError("loaded without the operators")
        with open(sys.argv[3], "rb") as file, torch._inductor.config.patch(pickle.load(file)):
            assert not torch._inductor.config.flce_inductor.enable
        import flce_inductor
        loss = torch._inductor.aoti_load_package(sys.argv[1])
        torch.testing.assert_close(loss(h, t), want)
        loss(h[:5], t[:5])
        try:
            value = loss(h, torch.full_like(t, 256))
        except RuntimeError as error:
            assert "Target 256 is out of bounds" in str(error), error
        else:  # torch before 2.13 prints the error only
            assert torch.__version__ < "2.13" and value.isnan(), value
    """
    paths = [package, str(tmp_path / "data.pt"), str(tmp_path / "config.pickle")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    plain = Model()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(h, t), plain(h, t))


# ---------------------------------------------------------------- tools


def test_profiler():
    args = problem()
    with fresh():
        fn = torch.compile(loss_fn, backend=INDUCTOR)
        step(fn, *args)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step(fn, *args)
            step(flce_inductor.linear_cross_entropy, *args)
    names = {event.key for event in seen.key_averages()}
    assert {"flce_inductor::run_", "flce_inductor::scale_", "flce_inductor::row_stats_with_grads"} <= names


def test_debug_trace(tmp_path):
    """TORCH_COMPILE_DEBUG=1: the files of a compilation are written."""
    with inductor_config.patch({"trace.enabled": True, "trace.debug_dir": str(tmp_path)}):
        check(loss_fn, *problem(), backend=INDUCTOR)
    (code,) = tmp_path.rglob("*forward*/output_code.py")
    assert "flce_inductor.run_" in code.read_text()


# ---------------------------------------------------------------- the table

ROOT = pathlib.Path(__file__).parent.parent


def test_export_of_logits():
    class Loss(nn.Module):
        def forward(self, z, t):
            return flce_inductor.cross_entropy(z, t)

    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(Loss(), (torch.randn(8, V), torch.randint(V, (8,))))


def test_table():
    """docs/settings.md has a row for each test here, and names no test that doesn't exist."""
    named = re.findall(r"`tests/(\w+\.py)::(\w+)`", (ROOT / "docs" / "settings.md").read_text())
    defined = {}
    for file in {file for file, _ in named}:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        defined[file] = {x.name for x in tree.body if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
    assert [(file, name) for file, name in named if name not in defined[file]] == []
    ours = pathlib.Path(__file__).name
    tests = {name for name in defined[ours] if name.startswith("test_")} - {test_table.__name__}
    assert tests == {name for file, name in named if file == ours}
