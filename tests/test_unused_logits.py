"""unused_logits="nan": logits that a training step returns beside its loss become NaN that takes no memory.

Programs take hidden states h [B, T, H], a weight w [V, H] and labels t [B, T] and return the loss first.
"""

import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
import util
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from util import INDUCTOR, TRACING, Reason, assert_same, compiled, eager, fresh

import flce_inductor

B, T, H, V = 2, 8, 5, 512
CE, linear = F.cross_entropy, F.linear
OUTSIDE = []
NAN = {"unused_logits": "nan"}


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


torch.utils._pytree.register_dataclass(Output)


def data(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(B, T, H, generator=g).to(dtype).requires_grad_()
    w = nn.Parameter(torch.randn(V, H, generator=g).to(dtype))
    t = torch.randint(V, (B, T), generator=g)
    t[:, ::4] = -100
    return h, w, t


def loss_of(z, t):
    return CE(z.reshape(-1, z.shape[-1]).float(), t.reshape(-1))


def programs(text):
    """Functions (h, w, t) from lines of expressions; a line `a; b; c` has statements before its result."""
    made = []
    for line in filter(None, map(str.strip, text.splitlines())):
        *before, result = [part.strip() for part in line.split(";")]
        body = "\n    ".join([*before, f"return {result}"])
        scope = dict(globals())
        exec(compile(f"def fn(h, w, t):\n    {body}\n", "<program>", "exec"), scope)
        made.append(pytest.param(scope["fn"], id=line))
    return made


def tensors(out):
    return [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]


def check_nan(fn, *args, backend=TRACING, tolerance=None, **how):
    """fn compiled returns its first output and its gradients as in float64 eager mode, and NaN without memory for the
    rest, of the shape and dtype that eager mode returns. Returns what it returned.
    """
    expected = eager(lambda *a: tensors(fn(*a))[0], *args)
    shapes = [(x.shape, x.dtype) for x in tensors(fn(*util.copied(args)))]
    kept = []

    def step(*a):
        kept[:] = tensors(torch.compile(fn, backend=backend, **how)(*a))
        return kept[0]

    with fresh(**NAN), util.collect() as sites:
        actual = util.outcome_of(step, util.copied(args))
        assert_same(actual, expected, tolerance)
        # the second call of a training step runs the same code
        assert_same(util.outcome_of(step, util.copied(args)), expected, tolerance)
    assert sites and all(site.reason is None for site in sites), "\n".join(map(str, sites))
    assert all(site.returns_nan and 'unused_logits="nan"' in str(site) for site in sites)
    assert [(x.shape, x.dtype) for x in kept] == shapes
    for x in kept[1:]:
        assert x.isnan().all()
        assert not x.requires_grad
        assert x.untyped_storage().nbytes() == x.dtype.itemsize
    OUTSIDE.clear()
    return kept


def outside(z, t):
    OUTSIDE.append(z)
    return loss_of(z, t)


FORMS = programs("""
    z = linear(h, w); loss_of(z, t), z
    z = linear(h, w); loss_of(z, t), z, z
    z = linear(h, w); loss_of(z, t), z.detach()
    z = linear(h, w); {"a loss": loss_of(z, t), "logits": z}
    z = linear(h, w).float(); Output(loss_of(z, t), z)
    z = linear(h, w); loss_of(z, t), z.view(-1, V)
    z = linear(h, w); y = z.float(); loss_of(y, t), z, y, y.view(-1, V)
    z = linear(h, w); loss_of(z[:, :-1], t[:, 1:]), z
    z = linear(h, w)[:, :-1].contiguous(); loss_of(z, t[:, 1:]), z
    z = linear(h, w); loss_of(z, t), z[:, -1]
    z = linear(h, w)[..., : V - 3]; CE(z.reshape(-1, V - 3), t.reshape(-1).clamp(max=V - 4)), z
    z = 3 * torch.tanh(linear(h, w) / 3); loss_of(z, t), z
    z = linear(h, w); loss_of(z, t) + 1e-3 * z.logsumexp(-1).pow(2).mean(), z
    z = linear(h, w); CE(z.transpose(1, 2), t), z
    z = linear(h, w).transpose(1, 2); CE(z, t), z
    z = linear(h, w); torch.autograd.grad(loss_of(z, t), w)[0], z.detach()
    outside(linear(h, w), t)
""")


@pytest.mark.parametrize("fn", FORMS)
def test_forms(fn):
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        check_nan(fn, *data(), fullgraph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype):
    def fn(h, w, t):
        z = linear(h, w)
        return loss_of(z, t), z

    check_nan(fn, *data(dtype), tolerance=util._TOLERANCE[dtype])


@pytest.mark.parametrize("backend", [TRACING, INDUCTOR], ids=["tracing", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_backends_and_dynamic_sizes(backend, dynamic):
    """Inductor doesn't give the NaN memory either (check_nan looks at the storages)."""

    def fn(h, w, t):
        z = linear(h, w)
        return loss_of(z[:, :-1], t[:, 1:]), z.float(), z[:, 1:], z.transpose(1, 2)

    with util.fresh_cache():
        check_nan(fn, *data(), backend=backend, dynamic=dynamic)


def test_autocast_that_casts_its_outputs():
    """As accelerate wraps a model: the cast of the logits to float32 is the last thing in the graph."""

    def fn(h, w, t):
        with torch.autocast("cpu", torch.bfloat16):
            z = linear(h, w)
            loss = loss_of(z, t)
        return loss, z.float()

    check_nan(fn, *data(), tolerance=4e-2)


def test_backward_in_the_step():
    """Logits that are alive over the graph break at backward(), though nobody reads them."""

    def fn(h, w, t):
        out = Output(*(lambda z: (loss_of(z, t), z))(linear(h, w)))
        out.loss.backward()
        return out.loss.detach()

    h, w, t = data()
    with fresh(**NAN), util.collect() as sites:
        torch.compile(fn, backend=TRACING)(h, w, t)
    assert [site.reason for site in sites] == [None] and sites[0].returns_nan
    h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
    fn(h64, w64, t)
    torch.testing.assert_close(w.grad.double(), w64.grad, rtol=0, atol=1e-5)


class Allocations(TorchDispatchMode):
    """Bytes of all storages that appear while the mode is on."""

    def __init__(self):
        super().__init__()
        self.keep, self.sizes = {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tensors(out):
            if x.untyped_storage()._cdata not in self.keep:
                self.keep[x.untyped_storage()._cdata] = x
                self.sizes.append(x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("key", ["keep", "nan"])
def test_memory(key):
    """No tensor of a quarter of the logits or more; with "keep" there is one, so the test can fail."""
    N, V, H = 256, 4096, 4

    def fn(h, w, t):
        z = linear(h, w)
        return CE(z.float(), t), z.float()

    h, w, t = torch.randn(N, H, requires_grad=True), nn.Parameter(torch.randn(V, H)), torch.randint(V, (N,))
    seen = Allocations()

    def watched(gm, inputs):  # a mode around compiled code would turn it off
        run = TRACING(gm, inputs)

        def watch(*args):
            with seen:
                return run(*args)

        return watch

    with fresh(unused_logits=key, chunk_size=16):
        loss, logits = torch.compile(fn, backend=watched)(h, w, t)
        with seen:
            loss.backward()
    assert (max(seen.sizes) < N * V * 4 / 4) == (key == "nan")
    assert logits.isnan().all() == (key == "nan")


def test_memory_of_inductors_code():
    def fn(h, w, t):
        z = linear(h, w)
        return loss_of(z, t), z.float(), z

    h, w, t = data()
    with fresh(**NAN, chunk_size=2), util.fresh_cache():
        step = torch.compile(fn, backend=INDUCTOR)
        _, (forward, *backward) = torch._inductor.utils.run_and_get_code(lambda: step(h, w, t)[0].backward())
    for code in (forward, *backward):
        allocations = [eval(size) for size in re.findall(r"empty_strided\w*\((\(.*?\)),", code)]
        assert max(map(math.prod, allocations), default=0) < B * T * V / 2
    assert "row_stats_with_grads" in forward and "empty_strided" in forward
    assert forward.count(", (0, 0, 0), 0)") == 2  # both are returned as views of one number


# ---------------------------------------------------------------- where the logits stay


def check_kept(fn, *args, reason=Reason.RETURNED, detail="", mode=torch.enable_grad):
    """All outputs are eager's, and the site says why."""
    with mode():
        expected = fn(*args)
        with fresh(**NAN), util.collect() as sites:
            actual = torch.compile(fn, backend=TRACING)(*args)
    for a, e in zip(tensors(actual), tensors(expected), strict=True):
        torch.testing.assert_close(a, e)
        assert a.requires_grad == e.requires_grad
    assert {site.reason for site in sites} == {reason}
    assert all(detail in site.detail for site in sites)
    OUTSIDE.clear()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fn", [form for form in FORMS if "autograd.grad" not in form.id])
def test_evaluation(fn, mode):
    check_kept(fn, *data(), mode=mode, detail="no gradient")


def test_training_and_evaluation_in_turn():
    def fn(h, w, t):
        z = linear(h, w)
        return loss_of(z, t), z

    h, w, t = data()
    with fresh(**NAN):
        step = torch.compile(fn, backend=TRACING)
        for _ in range(2):
            assert step(h, w, t)[1].isnan().all()
            with torch.no_grad():
                torch.testing.assert_close(step(h, w, t)[1], linear(h, w))


@torch.no_grad()
def without_gradients(h, w, t):
    z = linear(h, w)
    return loss_of(z, t), z


def frozen(h, w, t):
    z = linear(h.detach(), w.detach())
    return loss_of(z, t), z


def loss_as_a_number_only(h, w, t):
    z = linear(h, w)
    return loss_of(z, t).detach(), z


def loss_that_is_not_returned(h, w, t):
    z = linear(h, w)
    return (loss_of(z, t) > 3) * 1, z


@pytest.mark.parametrize("fn", [without_gradients, frozen, loss_as_a_number_only, loss_that_is_not_returned])
def test_no_gradient_of_the_loss(fn):
    check_kept(fn, *data(), detail="no gradient")


def test_loss_behind_a_graph_break():
    """The z-loss alone isn't what the logits are made for: the loss that reads them comes later."""

    def fn(h, w, t):
        z = linear(h, w)
        regular = z.logsumexp(-1).square().mean()
        torch._dynamo.graph_break()
        return loss_of(z, t) + regular

    args = data()
    with fresh(**NAN):
        actual = compiled(fn, *args, fullgraph=False)
    assert_same(actual, eager(fn, *args))
    assert actual.reasons == [Reason.RETURNED, Reason.NO_HEAD]


def test_log_probabilities_are_not_logits():
    def fn(h, w, t):
        p = linear(h, w).log_softmax(-1)
        return F.nll_loss(p.view(-1, V), t.view(-1)), p

    check_kept(fn, *data(), detail="softmax")


def test_logits_that_a_region_hands_on():
    """The body of checkpoint returns its logits to the function around it, which reads them."""

    def fn(h, w, t):
        def body(h):
            z = linear(h, w)
            return loss_of(z, t), z

        loss, z = checkpoint(body, h, use_reentrant=False)
        return loss + z.abs().mean()

    check_kept(fn, *data(), detail="part")


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        *((p.values[0], Reason.READER) for p in programs("z = linear(h, w); loss_of(z, t) + z.topk(2)[0].mean(), z")),
        *((p.values[0], Reason.READER) for p in programs("z = linear(h, w); loss_of(z, t), z, z.sigmoid().sin()")),
        *((p.values[0], Reason.MUTATION) for p in programs("z = linear(h, w); l = loss_of(z, t); z.mul_(2); l, z")),
        *((p.values[0], Reason.MUTATION) for p in programs("z = linear(h, w); z *= 2; loss_of(z, t), z")),
    ],
    ids=["topk", "sin", "changed behind", "changed before"],
)
def test_refusals(fn, reason):
    args = data()
    expected = eager(fn, *args)
    with fresh(**NAN):
        actual = compiled(fn, *args)
    assert_same(actual, expected)
    assert actual.reasons == [reason]


def test_default_says_what_to_set():
    def fn(h, w, t):
        z = linear(h, w)
        return loss_of(z, t), z

    with fresh():
        report = flce_inductor.explain(fn, *data())
    assert report[0].reason is Reason.RETURNED and 'flce_inductor.unused_logits="nan"' in str(report)


def test_pieces_of_a_split_graph():
    """DDP's optimizer compiles a graph in pieces: what one returns, the next may read."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(H, H), nn.Linear(H, V)

        def forward(self, h, t):
            z = self.head(self.body(h).tanh())
            return loss_of(z, t), z

    h, _, t = data()
    model = Model()
    for cap, reason in ((1, Reason.RETURNED), (1 << 30, None)):
        with fresh(**NAN), util.collect() as sites:
            step = torch.compile(
                model, backend=DDPOptimizer(cap, backend_compile_fn=TRACING, first_bucket_cap=cap).compile_fn
            )
            loss, z = step(h, t)
        assert [site.reason for site in sites] == [reason]
        assert z.isnan().all() == (reason is None) and loss.isfinite()
