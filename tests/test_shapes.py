"""Sequences and batches of changing sizes: few compilations, right values, and memory that is the slab's."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from util import (
    INDUCTOR,
    TRACING,
    CompileCounterWithBackend,
    assert_same,
    collect,
    eager,
    fresh,
    fresh_cache,
    outcome_of,
)

from flce_inductor import backend, runtime

WIDTH, V, CHUNK = 4, 192, 8  # so that the slab is larger than dweight
LENGTHS = [17, 16, 15, 33, 8, 7, 9, 64, 97, 4, 3, 31, 24, 25, 40, 5, 11, 72, 50, 96]  # multiples of CHUNK and not
BATCHES = [2, 3, 5]


def problem(batch, length):
    x = torch.randn(batch, length, WIDTH, requires_grad=True)
    labels = torch.randint(V, (batch, length))
    labels[torch.rand(batch, length) < 0.2] = -100
    labels[0, 0] = 3
    return x, labels


def weights():
    return [torch.nn.Parameter(torch.randn(rows, WIDTH)) for rows in (WIDTH, V)]


def mean(x, labels, inner, head):
    return F.cross_entropy(F.linear(torch.tanh(x @ inner), head).flatten(0, 1), labels.flatten())


def shifted(x, labels, inner, head):
    """As language models do: what a position predicts is compared to the next label."""
    logits = F.linear(torch.tanh(x @ inner), head)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), reduction="sum") / x.size(1)


def per_token(x, labels, inner, head):
    """The gradient comes per token, so the backward computes the logits again, in blocks of at least 64 columns."""
    logits = F.linear(torch.tanh(x @ inner), head)
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


@pytest.fixture
def largest(monkeypatch):
    """Sees the compiled graphs' operations, and into the loop, which is one operation to them."""
    mode = Largest()

    def seen(function):
        def run(*args, **kwargs):
            with mode:
                return function(*args, **kwargs)

        return run

    monkeypatch.setattr(runtime, "run", seen(runtime.run))
    monkeypatch.setattr(backend, "_run_eagerly", lambda graph, *_, **__: make_boxed_func(seen(graph.forward)))
    return mode


def most(fn, rows):
    """The slab, and what is no larger but at many rows: hidden states, and the slab of blocks of columns."""
    return max(CHUNK * V, rows * (64 if fn is per_token else WIDTH))


WAYS = {
    "length marked": ([(2, length) for length in LENGTHS], {"marked": (1,)}, 1),
    "batch and length marked": ([(BATCHES[i % 3], length) for i, length in enumerate(LENGTHS)], {"marked": (0, 1)}, 1),
    "length automatic": ([(2, length) for length in LENGTHS], {}, 2),
    "batch and length automatic": ([(BATCHES[i % 3], length) for i, length in enumerate(LENGTHS)], {}, 2),
    "all dynamic": ([(BATCHES[i % 3], length) for i, length in enumerate(LENGTHS)], {"dynamic": True}, 1),
}


@pytest.mark.parametrize("fn", [mean, shifted, per_token])
@pytest.mark.parametrize("way", WAYS)
def test_lengths(way, fn, largest):
    sizes, how, compilations = WAYS[way]
    marked = how.get("marked", ())
    counter = CompileCounterWithBackend(TRACING)
    parameters = weights()
    with fresh(chunk_size=CHUNK), collect() as sites:
        compiled = torch.compile(fn, backend=counter, fullgraph=True, dynamic=how.get("dynamic"))
        for batch, length in sizes:
            args = (*problem(batch, length), *parameters)
            for dim in marked:
                for x in args[:2]:
                    torch._dynamo.mark_dynamic(x, dim)
            largest.elements = 0
            assert_same(outcome_of(compiled, args), eager(fn, *args))
            assert 0 < largest.elements <= most(fn, batch * length), (batch, length)
        assert counter.frame_count == compilations
    assert sites and {site.reason for site in sites} == {None}


@pytest.mark.parametrize("rows", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 3])
@pytest.mark.parametrize("fn", [mean, per_token])
def test_rows_and_chunks(fn, rows, largest):
    """One row, fewer than a chunk, and chunks with and without a rest."""
    args = (*problem(1, rows), *weights())
    with fresh(chunk_size=CHUNK), collect() as sites:
        assert_same(outcome_of(torch.compile(fn, backend=TRACING, fullgraph=True), args), eager(fn, *args))
    assert [site.reason for site in sites] == [None]
    assert largest.elements <= most(fn, rows)


def test_one_row_among_many_lengths():
    """Dynamo compiles a size of 1 apart, for us as often as for a backend that does nothing."""
    counts = []
    for compiler in ("eager", TRACING):
        counter = CompileCounterWithBackend(compiler)
        parameters = weights()
        with fresh(chunk_size=CHUNK):
            compiled = torch.compile(mean, backend=counter, fullgraph=True)
            for batch, length in [(2, 9), (3, 17), (1, 1), (1, 12), (1, 1), (4, 1), (2, 30), (1, 40)]:
                args = (*problem(batch, length), *parameters)
                assert_same(outcome_of(compiled, args), eager(mean, *args))
        counts.append(counter.frame_count)
    assert counts[1] == counts[0]


def test_generated_code():
    """Inductor's code for a length that isn't known: no buffer of it has both the length and the classes, and one
    compilation serves all lengths.
    """
    counter = CompileCounterWithBackend(INDUCTOR)
    parameters = weights()
    losses = []

    def step(length):
        args = problem(2, length)
        for tensor in args:
            torch._dynamo.mark_dynamic(tensor, 1)
        actual = outcome_of(compiled, (*args, *parameters))
        assert_same(actual, eager(mean, *args, *parameters))
        losses.append(actual.outputs)

    with fresh(chunk_size=CHUNK), fresh_cache():
        compiled = torch.compile(mean, backend=counter, fullgraph=True)
        _, sources = run_and_get_code(step, 19)
        for length in (2, 8, 33):
            step(length)
    assert counter.frame_count == 1 and len(losses) == 4
    assert len(sources) == 2  # forward and backward
    buffers = re.findall(r"empty_strided\w*\(\((.*?)\)", "".join(sources))
    dynamic = [shape for shape in buffers if re.search(r"\bs\d+", shape)]
    assert dynamic and f"{V}, {WIDTH}" in buffers
    assert not [shape for shape in dynamic if str(V) in shape]


def peak_of(work) -> int:
    """Bytes that the allocator had given out at most, above those before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def test_gradient_accumulation():
    """Micro-batches add nothing to the peak: it is one [V, H] that is accumulated into, the one that a backward yields,
    and the slab.
    """
    rows, width, classes = 32, 64, 4096
    head = torch.nn.Parameter(torch.randn(classes, width))
    batches = [(torch.randn(1, rows, width), torch.randint(classes, (1, rows))) for _ in range(8)]
    inner = torch.eye(width)

    def peak(step, count):
        def accumulate():
            for x, labels in batches[:count]:
                (step(x, labels, inner, head) / len(batches)).backward()

        head.grad = None
        return peak_of(accumulate)

    dweight, slab, vectors = head.nbytes, 4 * classes * 4, 2 * rows * width * 4
    assert peak(mean, 8) >= 2 * dweight + rows * classes * 4  # this measure sees the logits
    with fresh(chunk_size=4):
        compiled = torch.compile(mean, backend=INDUCTOR, fullgraph=True)
        peak(compiled, 1)  # compiles
        assert peak(compiled, 1) <= dweight + slab + vectors
        assert peak(compiled, 2) <= 2 * dweight + slab + vectors
        assert peak(compiled, 8) <= 2 * dweight + slab + vectors
    wide = head.detach().double().requires_grad_()
    for x, labels in batches:
        (mean(x.double(), labels, inner.double(), wide) / len(batches)).backward()
    torch.testing.assert_close(head.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)
