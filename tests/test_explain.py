"""explain() and the log answer "why not?": the reason, the user's file and line, and what to change."""

import math
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import compile_fx
from util import Reason, collect, counters, fresh

import flce_inductor

V, H = 160, 8


def data(rows=6):
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(rows, H, generator=g, requires_grad=True), nn.Parameter(torch.randn(V, H, generator=g))
    return h, w, torch.randint(V, (rows,), generator=g)


def line_of(fn, text):
    """file:line of the first line of a function's source that holds text."""
    code = fn.__code__
    with open(code.co_filename) as file:
        lines = file.readlines()
    number = next(i for i in range(code.co_firstlineno, len(lines) + 1) if text in lines[i - 1])
    return f"{code.co_filename}:{number}"


def check(fn, *args, reason, place, says=(), **keys):
    """The only site of fn is left alone for a reason, and its report says where, why, and what would change that."""
    with fresh(**keys):
        report = flce_inductor.explain(fn, *args)
    (site,) = report
    text = str(report)
    assert (site.reason, site.where) == (reason, place)
    assert f"{place}: cross_entropy(mean): left alone" in text
    assert f"because {reason.text}" in text and f"to change that: {reason.advice}" in text
    for part in says:
        assert part in text
    assert compile_fx.compile_fx.__module__ == "torch._inductor.compile_fx"  # Inductor is itself again
    return report


def broken(h, w, t):
    z = F.linear(h, w)
    print(end="")
    return F.cross_entropy(z, t)


def test_graph_break_between_head_and_loss():
    """Named by the loss that was found, with its line, and by Dynamo's words about it."""
    place = line_of(broken, "print")
    report = check(
        broken,
        *data(),
        reason=Reason.NO_HEAD,
        place=line_of(broken, "F.cross"),
        says=[f"from before the graph break in broken at {place}", "graph breaks (2 compiled graphs)"],
    )
    assert report.graphs == 2 and len(report.breaks) == 1
    assert report.breaks[0].startswith(f"{place}: ") and "`print`" in report.breaks[0]


def test_without_the_graph_break():
    """What the report asks for makes it match."""

    def mended(h, w, t):
        return F.cross_entropy(F.linear(h, w), t)

    with fresh():
        (site,) = flce_inductor.explain(mended, *data())
    assert site.reason is None


compiled_head = torch.compile(F.linear, backend="flce_inductor")


@torch.compile(backend="flce_inductor")
def compiled_loss(z, t):
    return F.cross_entropy(z, t)


def plain_loss(z, t):
    return F.cross_entropy(z, t)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(H, V)

    def forward(self, h):
        return self.linear(h)


class Trainer:
    """Holds a compiled model, and computes the loss outside of it or in another compiled function."""

    def __init__(self, how):
        self.model = Head()
        if how == "in place":
            self.model.compile(backend="flce_inductor")
        else:
            self.model = torch.compile(self.model, backend="flce_inductor")

    def step(self, h, w, t):
        return compiled_loss(self.model(h), t)

    def eager_loss(self, h, w, t):
        return plain_loss(self.model(h), t)


def apart(h, w, t):
    return compiled_loss(compiled_head(h, w), t)


@pytest.mark.parametrize(
    "fn", [apart, Trainer("wrapped").step, Trainer("in place").step], ids=["functions", "module", "module in place"]
)
def test_head_compiled_apart_from_its_loss(fn):
    """As they are called they are two graphs, though torch.compile of both together would be one."""
    loss = compiled_loss._torchdynamo_orig_callable
    place = line_of(loss, "return F.cross")
    report = check(
        fn, *data(), reason=Reason.NO_HEAD, place=place, says=[f"they come from outside of compiled_loss, {place}"]
    )
    assert report.graphs == 2 and not report.breaks
    assert "explain(torch.compile(function), ...)" in str(report)
    with fresh():
        together = flce_inductor.explain(torch.compile(fn), *data())
    assert [site.reason for site in together] == [None] and together.graphs == 1


def test_eager_loss_of_a_compiled_model():
    with fresh():
        report = flce_inductor.explain(Trainer("wrapped").eager_loss, *data())
    assert not report and "no loss found in 1 compiled graph" in str(report)
    assert "that the loss is computed inside the compiled function" in str(report)


def test_calls_of_the_explicit_function():
    """They need no rewrite; each is counted once, and a loss beside them is reported as ever."""

    def calls(h, w, t):
        loss = flce_inductor.linear_cross_entropy(h, w, t)
        return loss + flce_inductor.linear_cross_entropy(h, w, t, reduction="none", z_loss=1e-4).sum()

    def beside(h, w, t):
        return calls(h, w, t) + F.cross_entropy(h @ w.T, t)

    def inference(h, w, t):
        with torch.no_grad():
            return flce_inductor.linear_cross_entropy(h, w, t)

    for fn, number, sites in ((calls, "2 calls", 0), (inference, "1 call", 0), (beside, "2 calls", 1)):
        with fresh():
            report = flce_inductor.explain(fn, *data())
        assert len(report) == sites and f"    {number} of linear_cross_entropy" in str(report)
        assert ("no loss to rewrite in 1 compiled graph" in str(report)) == (sites == 0)
        assert "no loss found" not in str(report)
    with fresh():
        assert "linear_cross_entropy" not in str(
            flce_inductor.explain(lambda h, w, t: F.cross_entropy(h @ w.T, t), *data())
        )


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_calls_in_graphs_that_ddp_cuts(tmp_path):
    """Its pieces are compiled one after the other, as parts of one graph."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))  # 1.4 MB each

        def forward(self, h, w, t):
            first = flce_inductor.linear_cross_entropy(h, w, t)
            return F.cross_entropy(self.layers(h) @ w.T, t) + first

    h, w, t = torch.randn(12, 600), torch.randn(140, 600), torch.randint(140, (12,))
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=1)
        with fresh():
            report = flce_inductor.explain(torch.compile(model, backend="flce_inductor"), h, w, t)
    finally:
        torch.distributed.destroy_process_group()
    assert "DDPOptimizer" in str(report)
    assert [site.reason for site in report] == [None] and report.fused == 1


def test_what_is_rewritten_hides_no_graph_break():
    """There may be a loss behind it that explain can't see."""
    apart = torch.compiler.disable(lambda y, t: F.cross_entropy(y, t))

    def explicit(h, w, t):
        return flce_inductor.linear_cross_entropy(h, w, t) + apart(h @ w.T, t)

    def rewritten(h, w, t):
        return F.cross_entropy(h @ w.T, t) + apart(h @ w.T, t)

    for fn in (explicit, rewritten):
        with fresh():
            report = flce_inductor.explain(fn, *data())
        assert all(site.reason is None for site in report) and len(report.breaks) == 1
        assert "graph breaks (2 compiled graphs)" in str(report) and report.breaks[0] in str(report)


def test_a_graph_break_of_ours_is_told_where_the_user_called():
    def fn(h, w, t):
        return flce_inductor.cross_entropy(h @ w.T, t)

    with fresh():
        report = flce_inductor.explain(fn, *data())
    assert report.breaks[0].startswith(line_of(fn, "return")) and "runs its kernel eagerly" in report.breaks[0]


def test_logits_of_one_chunk_exist():
    for chunk_size, says in ((6, "exist: all rows are one chunk"), (5, "never exist")):
        with fresh(chunk_size=chunk_size):
            report = flce_inductor.explain(lambda h, w, t: F.cross_entropy(h @ w.T, t), *data(rows=6))
        assert f"{6 * V * 4} bytes of logits {says}" in str(report)


def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_dtensor_weight():
    from torch.distributed.tensor import Replicate, distribute_tensor

    def fn(h, w, t):
        return F.cross_entropy(F.linear(h, w), t).to_local()

    h, w, t = data()
    try:
        on = mesh()
        h, w, t = (distribute_tensor(x.detach(), on, [Replicate()]) for x in (h, w, t))
        w = nn.Parameter(w)
        check(fn, h, w, t, reason=Reason.SHARDED, place=line_of(fn, "F.cross"), says=["DTensor", "the weight is"])
    finally:
        torch.distributed.destroy_process_group()


def probabilities(h, w, t):
    return F.cross_entropy(F.linear(h, w), F.one_hot(t, V).float())


def small(h, w, t):
    return F.cross_entropy(F.linear(h, w), t)


def returned(h, w, t):
    z = F.linear(h, w)
    return F.cross_entropy(z, t), z


def alive_at_a_break(h, w, t):
    z = F.linear(h, w)
    loss = F.cross_entropy(z, t)
    print(end="")
    return loss + z.topk(2)[0].sum()


def reader(h, w, t):
    z = F.linear(h, w)
    return F.cross_entropy(z, t) + z.topk(2)[0].sum()


@pytest.mark.parametrize(
    ("fn", "reason", "says", "keys"),
    [
        (probabilities, Reason.CLASS_PROBABILITIES, [], {}),
        (small, Reason.TOO_SMALL, ["3840 bytes, min_logits_bytes=3841"], {"min_logits_bytes": 3841}),
        (small, Reason.TOO_SMALL, ["160 classes, min_vocab_size=161"], {"min_vocab_size": 161}),
        (returned, Reason.RETURNED, ["by returned, ", 'flce_inductor.unused_logits="nan"'], {}),
        (alive_at_a_break, Reason.RETURNED, ["to what follows the graph break at ", "`print`"], {}),
        (reader, Reason.READER, ["(topk, "], {}),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_reasons(fn, reason, says, keys):
    check(fn, *data(), reason=reason, place=line_of(fn, "F.cross"), says=says, **keys)


def test_int32_labels():
    """Stock compile takes them, eager mode doesn't."""
    h, w, t = data()
    with fresh(), pytest.raises((RuntimeError, NotImplementedError)):
        small(h, w, t.int())
    check(small, h, w, t.int(), reason=Reason.TARGET_DTYPE, place=line_of(small, "F.cross"), says=["torch.int32"])


class Body(nn.Module):
    """A model that Dynamo can't capture in one graph, so that it compiles the rest of forward by itself."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(H, V)

    def forward(self, h, t):
        print(end="")
        z = self.head(h)
        return {"loss": F.cross_entropy(z, t), "logits": z}


def test_graph_break_inside_a_model():
    """The function returns the loss alone, but what Dynamo compiles returns the logits to it."""
    model = Body()

    def step(h, t):
        return model(h, t)["loss"]

    h, _, t = data()
    place = line_of(Body.forward, "print")
    says = ["by torch_dynamo_resume_in_forward_at_", f"{place}: ", 'flce_inductor.unused_logits="nan"']
    check(step, h, t, reason=Reason.RETURNED, place=line_of(Body.forward, "F.cross"), says=says)
    with fresh(unused_logits="nan"):
        (site,) = flce_inductor.explain(step, h, t)
    assert site.reason is None and site.returns_nan


class Fused(torch.autograd.Function):
    """A loss of its own, which nothing recognises."""

    @staticmethod
    def forward(ctx, h, w, t):
        return h.sum()

    @staticmethod
    def backward(ctx, g):
        return None, None, None


def test_no_loss():
    with fresh():
        report = flce_inductor.explain(lambda h, w, t: (h @ w.t()).sum(), *data())
        own = flce_inductor.explain(lambda h, w, t: Fused.apply(h, w, t), *data())
    for text in (str(report), str(own)):
        assert "torch.compile(function)" not in text
        assert "no loss found in 1 compiled graph\n" in text
        assert "cross_entropy, log_softmax or logsumexp" in text
        assert "graph breaks" not in text


def test_loss_written_by_hand():
    """What isn't called a loss, but computes the logarithm of softmax or exp, is named all the same."""

    def fn(h, w, t):
        z = F.linear(h, w)
        p = z.exp()
        loss = -(z.gather(1, t[:, None]).squeeze(1) - torch.log(p.sum(-1)))
        return loss.mean()

    def apart(h, w, t):
        z = F.linear(h, w)
        print(end="")
        return -torch.log(z.softmax(-1)[range(6), t]).mean()

    with fresh():
        text, other = str(flce_inductor.explain(fn, *data())), str(flce_inductor.explain(apart, *data()))
    assert f"{line_of(fn, 'loss =')}: log of exp: left alone" in text
    assert f"because {Reason.BY_HAND.text} (exp, " in text
    assert line_of(fn, "p =") in text and Reason.BY_HAND.advice in text
    assert f"{line_of(apart, 'torch.log')}: log of softmax: left alone\n    because {Reason.NO_HEAD.text}" in other


def test_no_loss_because_of_a_graph_break():
    def fn(h, w, t):
        z = F.linear(h, w)
        print(end="")
        return z.sum()

    with fresh():
        report = flce_inductor.explain(fn, *data())
    assert "no loss found in 2 compiled graphs" in str(report)
    assert f"{line_of(fn, 'print')}: " in str(report)


def test_nothing_is_compiled():
    with fresh():
        report = flce_inductor.explain(lambda: None)
        other = flce_inductor.explain(torch.compile(small, backend="eager"), *data())
    for text in (str(report), str(other)):
        assert "nothing was compiled by Inductor" in text and "torch.compiler.disable" in text


def test_runs_once_and_compiles_no_kernel():
    runs = []

    @torch.compiler.disable
    def count():
        runs.append(1)

    def fn(h, w, t):
        count()
        return small(h, w, t)

    with fresh():
        before = counters["inductor"]["fxgraph_cache_miss"]
        for step in (fn, torch.compile(fn), torch.compile(fn, backend="flce_inductor", mode="reduce-overhead")):
            runs.clear()
            (site,) = flce_inductor.explain(step, *data())
            assert site.reason is None and runs == [1]
        assert counters["inductor"]["fxgraph_cache_miss"] == before


@pytest.mark.parametrize("how", [{"backend": "flce_inductor"}, {}])
def test_options_of_a_compiled_function(how):
    """The report is about the function as it is compiled."""
    options = {"flce_inductor.chunk_size": 3, "flce_inductor.min_logits_bytes": 0}
    step = torch.compile(small, options=options, dynamic=False, **how)
    (site,) = flce_inductor.explain(step, *data())
    assert site.reason is None and site.chunk_size == 3


def test_a_rewrite_that_is_switched_off():
    """explain switches it on to look; that it is off otherwise is in the report."""

    def loss(h, w, t):
        return F.cross_entropy(F.linear(h, w), t)

    def part(h, w, t):
        return compiled(h, w, t)

    text, on = "but the rewrite is off where this is compiled", {"flce_inductor.enable": True}
    with fresh():
        compiled = torch.compile(loss)
        for fn in (compiled, part):
            report = flce_inductor.explain(fn, *data())
            assert [site.reason for site in report] == [None] and not report.enabled
            assert text in str(report) and 'backend="flce_inductor"' in str(report)
        for fn in (loss, torch.compile(loss, backend="flce_inductor"), torch.compile(loss, options=on)):
            report = flce_inductor.explain(fn, *data())
            assert report.enabled and text not in str(report)
        with torch._inductor.config.patch(on):
            assert flce_inductor.explain(compiled, *data()).enabled


def test_each_collector_keeps_its_own():
    with collect() as outer:
        with collect() as inner:
            pass
        with fresh():
            flce_inductor.explain(lambda h, w, t: plain_loss(F.linear(h, w), t), *data())
    assert (len(outer), inner) == (1, [])


def test_what_dynamo_starts_anew_counts_once():
    """A number that turns out to be fixed makes Dynamo throw away what it has compiled, and trace again."""

    def fn(h, w, t, scale):
        return F.cross_entropy(F.linear(h, w) * math.floor(scale), t)

    with fresh():
        report = flce_inductor.explain(torch.compile(fn, dynamic=True), *data(), 2.5)
    (site,) = report
    assert site.attempt[1] > 0 and report.graphs == 1


def test_errors_of_the_function_are_its_own():
    def fn(h, w, t):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        flce_inductor.explain(fn, *data())
    assert compile_fx.compile_fx.__module__ == "torch._inductor.compile_fx"


def test_log(tmp_path):
    """TORCH_LOGS="+flce_inductor" says the same while training."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        import torch.nn.functional as F
        from flce_inductor.backend import tracing_backend

        def step(h, w, t):
            z = F.linear(h, w)
            print(end="")
            return F.cross_entropy(z, t) + F.cross_entropy(F.linear(h, w), t)

        torch._inductor.config.flce_inductor.min_logits_bytes = 0
        step = torch.compile(step, backend=tracing_backend)
        h, w = torch.randn(6, 8, requires_grad=True), torch.nn.Parameter(torch.randn(160, 8))
        step(h, w, torch.zeros(6, dtype=torch.int64))
        """)
    )
    paths = [os.path.dirname(os.path.dirname(flce_inductor.__file__)), os.environ.get("PYTHONPATH", "")]
    environment = {"TORCH_LOGS": "+flce_inductor", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    log = re.sub(r"^\S+ \S+ \d+ \S+\] (\[\S+\] )?", "", run.stderr, flags=re.MULTILINE)
    assert f"{script}:9: cross_entropy(mean): left alone\n    because {Reason.NO_HEAD.text}" in log
    assert f"from before the graph break in step at {script}:8)\n    to change that: {Reason.NO_HEAD.advice}" in log
    assert f"{script}:9: cross_entropy(mean): rewritten\n    N=6 H=8 V=160 float32" in log
    assert f"{script}:7: 0 losses in a graph of step, which ends at the graph break at {script}:8: " in log
