"""Inductor's lowering of the three ops: what they write, and the slab, become buffers of Inductor's.

So they show in the generated code and take part in its memory planning. The loop itself is one call of run_ (ops.py),
whatever the number of chunks: neither compile time nor code size depend on it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.codecache import write_atomic
from torch._inductor.lowering import empty_strided, fallback_handler, lowerings, register_lowering, to_dtype
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import _compat, chunking, config, kernels, ops, runtime  # noqa: F401  ops registers the operators
from .explain import count, record_tuning

_OPS = torch.ops.flce_inductor
_scale_ = fallback_handler(_OPS.scale_.default, add_to_fallback_set=False)
_run_ = fallback_handler(_OPS.run_.default, add_to_fallback_set=False)


def _buffer(like: torch.Tensor) -> Any:
    """A buffer of Inductor's with the shape and strides of a fake tensor, not initialised."""
    shape, strides = map(ir.convert_shape_to_inductor, (like.shape, like.stride()))
    return empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def _slab(h: torch.Tensor, classes: Any, chunk_size: int, orders: set[bool]) -> Any:
    """The slab's buffer, if its size is known; orders: whether the loop goes vocabulary-major, or both ways."""
    N = h.shape[0]
    if not isinstance(N, int) or not isinstance(classes, int):
        return None  # run_ allocates it
    size = max(runtime.slab_size(N, classes, chunk_size, order) for order in orders)
    return empty_strided([size], [1], dtype=h.dtype, device=h.device)


def _wide(h: torch.Tensor, weight: torch.Tensor, chunk_size: int, accum_dtype: str) -> bool:
    """Whether the loop over rows may keep an accumulator wider than dweight, which is then its own affair."""
    N = h.shape[0]
    chunks = -(-N // chunk_size) if isinstance(N, int) else 1 << 62
    return runtime.accumulator_dtype(weight.dtype, accum_dtype, chunks) != weight.dtype


def _run(
    head: tuple,
    saved: tuple,
    cotangents: tuple,
    program: tuple,
    how: tuple,
    want: list[bool],
    needs: list[bool],
    plan: runtime.Plan = runtime.Plan(),  # noqa: B008  immutable
    counted: Any = None,
) -> tuple[list, list]:
    """One call of run_: the statistics that the op returns, and dh, dweight, dbias, unscale."""
    node = V.graph.current_node
    h, weight = (node.args[i].meta["val"] for i in (0, 1))
    _, chunk_size, accum_dtype, *_ = how
    recompute, returned = saved[0] is not None, list(node.meta["val"])
    stats = [] if recompute else [_buffer(x) for x in returned[:6]]
    grads = [_buffer(x) for x in returned[len(stats) : len(stats) + 3]]
    count("flce_compiled")  # Inductor counts it again when it loads the graph from a cache
    columns_first = recompute or plan.vocabulary_major
    own = needs[1] and not columns_first and _wide(h, weight, chunk_size, accum_dtype)
    own_dweight, dbias, unscale = _run_(
        *head,
        *saved,
        *cotangents,
        *program,
        *how,
        want,
        needs,
        *plan,
        counted,
        [s for s, wanted in zip(stats, (True, True, True, *want), strict=False) if wanted],
        grads[0] if needs[0] else None,
        grads[1] if needs[1] and not own else None,
        _slab(h, weight.shape[0], chunk_size, {recompute, columns_first or not any(needs)}),
    )
    if grads:
        grads = [grads[0], own_dweight if own else grads[1], dbias, unscale]
    return stats, grads


def _scalable(x: Any) -> bool:
    """Whether x may be overwritten: a tensor that the forward saved for this node only."""
    alone = len(V.graph.current_node.args[0].users) == 1
    return alone and isinstance(x.data, ir.StorageBox) and isinstance(x.data.data, ir.DonatedBuffer)


_NOTHING = [False] * 3


@functools.cache
def register() -> None:
    """Make Inductor lower the ops so; done once, before the first graph that has one."""

    @register_lowering(_OPS.row_stats.default, type_promotion_kind=None)
    def row_stats(*args):
        *how, want = args[5:]
        return tuple(_run(args[:5], (None,) * 3, (None,) * 4, ([], ""), how, want, _NOTHING)[0])

    @register_lowering(_OPS.row_stats_backward.default, type_promotion_kind=None)
    def row_stats_backward(*args):
        *how, needs = args[12:]
        return tuple(_run(args[:5], args[5:8], args[8:12], ([], ""), how, _NOTHING, needs)[1][:3])

    @register_lowering(_OPS.scale.default, type_promotion_kind=None)
    def scale(x, factor):
        if _scalable(x):
            _scale_(x, factor)
            return x
        wide = to_dtype(x, factor.get_dtype())
        return to_dtype(lowerings[torch.ops.aten.mul.Tensor](wide, factor), x.get_dtype())

    @register_lowering(_OPS.row_stats_with_grads.default, type_promotion_kind=None)
    def row_stats_with_grads(*args, **more):
        # where stock Inductor has met the op before, arguments that have defaults come by name
        more |= dict(zip((*runtime.Plan._fields, "counted"), args[20:], strict=False))
        how, want, needs, counted = args[11:18], args[18], args[19], more.pop("counted", None)
        plan = runtime.Plan(**more)
        stats, grads = _run(args[:5], (None,) * 3, args[5:9], args[9:11], how, want, needs, plan, counted)
        return (*stats, *grads)


# ---------------------------------------------------------------- tuning


class Candidate(NamedTuple):
    """One way to run a site's loop."""

    chunk_size: int
    plan: runtime.Plan

    def __str__(self) -> str:
        order = "vocabulary-major" if self.plan.vocabulary_major else "rows-major"
        return f"{self.chunk_size} rows {order} {self.plan.accumulate}"


def tune(graph: torch.fx.Graph) -> None:
    """Give each row_stats_with_grads the fastest way to run on its device, where tuning is switched on.

    N is taken for its value now where it is dynamic; what is chosen is right for every N. Choices are kept in
    Inductor's cache directory: a second process tunes nothing.
    """
    settings = config.current()
    if not (inductor_config.max_autotune if settings.autotune is None else settings.autotune):
        return
    for node in graph.find_nodes(op="call_function", target=_OPS.row_stats_with_grads.default):
        problem = _Problem.of(node)
        if problem is None:
            continue
        times = _times(problem, settings)
        chosen = choose(times, problem, settings.tolerance)
        args = (*node.args[:12], chosen.chunk_size, *node.args[13:20], *chosen.plan, *node.args[22:])
        _compat.set_arguments(node, *args)
        record_tuning(node, str(chosen), {str(c): seconds for c, seconds in times.items()})


class _Problem(NamedTuple):
    """What the time of a site's loop depends on."""

    N: int
    H: int
    V: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    bias: bool
    class_weight: bool
    cotangents: tuple[bool, ...]
    how: tuple
    want: tuple[bool, ...]
    needs: tuple[bool, ...]
    counted: bool = False  # rows whose label is ignored are left out, which the rows-major order can do

    @staticmethod
    def of(node: torch.fx.Node) -> _Problem | None:
        h, weight = (node.args[i].meta["val"] for i in (0, 1))
        N, H, classes = (_compat.size_hint(x) for x in (h.shape[0], h.shape[1], weight.shape[0]))
        if not N or not H or not classes:
            return None
        args = node.args
        return _Problem(
            N,
            H,
            classes,
            h.dtype,
            weight.dtype,
            h.device,
            args[3] is not None,
            args[4] is not None,
            # a program's cotangents are taken for those of a loss
            (True, False, False, False) if args[10] else tuple(g is not None for g in args[5:9]),
            (args[11], *args[13:18]),
            tuple(args[18]),
            tuple(args[19]),
            any(x is not None for x in args[22:]),
        )

    def candidates(self, settings: config.Settings) -> list[Candidate]:
        facts = chunking.card(self.device)
        sizes = chunking.candidates(self.N, self.V, self.dtype, facts, settings.chunk_size, settings.max_slab_bytes)
        accumulate = ["library"]
        if self.needs[1] and runtime.can_accumulate_by_triton(self.device.type, self.dtype, self.weight_dtype):
            accumulate.append("triton")
        plans = [runtime.Plan(False, a) for a in accumulate] + [runtime.Plan(True)] * (not self.counted)
        return [Candidate(size, plan) for size in sizes for plan in plans]

    def timed_rows(self) -> int:
        """Rows over which a loop is timed, if it has so many: a site of many more is extrapolated."""
        return 4 * chunking.default_rows(self.V, self.dtype, chunking.card(self.device))

    def bytes(self, candidate: Candidate) -> int:
        """What timing a candidate allocates: h, weight, dweight, up to all of dh, the slab."""
        some = max(self.timed_rows(), 2 * candidate.chunk_size)
        rows = self.N if candidate.plan.vocabulary_major else min(self.N, some)
        weights = self.V * self.H * (self.dtype.itemsize + self.weight_dtype.itemsize + 4)
        slab = runtime.slab_size(self.N, self.V, candidate.chunk_size, False) * self.dtype.itemsize
        return weights + self.H * (self.N * self.dtype.itemsize + rows * (self.dtype.itemsize + 4)) + slab


def choose(times: dict[Candidate, float], problem: _Problem, tolerance: float) -> Candidate:
    """The candidate with the smallest slab among those within tolerance of the fastest, the faster of equals."""
    fastest = min(times.values())
    good = [c for c, seconds in times.items() if seconds <= (1 + tolerance) * fastest]
    return min(good, key=lambda c: (min(c.chunk_size, problem.N), times[c]))


def _times(problem: _Problem, settings: config.Settings) -> dict[Candidate, float]:
    """Seconds of a whole site for each candidate that fits into memory, from the cache or measured."""
    candidates = problem.candidates(settings)
    key = hashlib.sha256(repr((problem, candidates, _environment(problem.device))).encode()).hexdigest()
    path = os.path.join(cache_dir(), "flce_inductor", f"{key}.json")
    room = 0.9 * _available(problem.device)
    fitting = [c for c in candidates if problem.bytes(c) < room] or candidates[:1]
    kept = _kept_times(path, candidates)
    if kept.keys() >= set(fitting):  # what didn't fit when they were taken may fit now
        return kept
    with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(_devices(problem.device)):
        times = _Benchmark(problem)(fitting)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_atomic(path, json.dumps({str(c): seconds for c, seconds in times.items()}))
    return times


def _kept_times(path: str, candidates: list[Candidate]) -> dict[Candidate, float]:
    """The times in a file of Inductor's cache; none if it is missing, or isn't one that _times has written."""
    try:
        with open(path) as file:
            seconds = json.load(file)
        times = {c: seconds[str(c)] for c in candidates if str(c) in seconds}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return times if all(isinstance(s, float) and 0 < s < math.inf for s in times.values()) else {}


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _environment(device: torch.device) -> tuple[str, ...]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return name, torch.__version__, kernels.source_digest()


def _available(device: torch.device) -> int:
    """Bytes that an allocation may take now."""
    if device.type != "cuda":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


class _Loop(NamedTuple):
    """A loop of so many steps, the last of which may be a part of one, and how to run the first n."""

    steps: float
    timed: int
    work: Callable[[int], Callable[[], None]]

    def seconds(self, one: float, timed: float) -> float:
        """Of all steps, from the seconds of the first and those of the first `timed`."""
        return one + (self.steps - 1) * max(0.0, timed - one) / (min(self.timed, self.steps) - 1 or 1)


class _Benchmark:
    """Times candidates over operands of its own: random, with labels that are valid."""

    def __init__(self, problem: _Problem):
        self.problem = p = problem
        torch.manual_seed(0)

        def normal(*shape, dtype):
            return torch.randn(shape, dtype=dtype, device=p.device)

        self.h = normal(p.N, p.H, dtype=p.dtype)
        self.weight = normal(p.V, p.H, dtype=p.weight_dtype).mul_(p.H**-0.5)
        self.target = torch.randint(p.V, (p.N,), device=p.device)
        self.bias = normal(p.V, dtype=p.weight_dtype) if p.bias else None
        stats = runtime.stat_dtype(p.dtype)
        self.class_weight = torch.ones(p.V, dtype=stats, device=p.device) if p.class_weight else None
        self.g = torch.full((p.N,), 1 / p.N, dtype=stats, device=p.device)

    def __call__(self, candidates: list[Candidate], rounds: int = 3) -> dict[Candidate, float]:
        """Seconds that each takes for all N rows, from medians over rounds.

        In a round all take their turn, as a card's clock depends on what it did before. Another round warms up.
        """
        loops = {c: self.loops(c) for c in candidates}
        works = {c: [loop.work(n) for loop in loops[c] for n in (1, loop.timed)] for c in candidates}
        taken = {c: [[] for _ in works[c]] for c in candidates}
        for _ in range(1 + rounds):
            for c in candidates:
                for times, work in zip(taken[c], works[c], strict=True):
                    times.append(_seconds(work, self.problem.device))
        found = {}
        for c in candidates:
            medians = [statistics.median(times[1:]) for times in taken[c]]
            found[c] = sum(map(_Loop.seconds, loops[c], medians[::2], medians[1::2]))
        return found

    def loops(self, candidate: Candidate) -> list[_Loop]:
        """What to time: chunks, or the statistics of chunks and then blocks of columns."""
        p, rows = self.problem, min(candidate.chunk_size, self.problem.N)

        def loop(steps: float, work: Callable[[int], Callable[[], None]]) -> _Loop:
            return _Loop(steps, min(math.ceil(steps), max(2, round(steps * p.timed_rows() / p.N))), work)

        def chunks(**how) -> _Loop:
            return loop(p.N / rows, lambda n: self.work(candidate, min(n * rows, p.N), p.V, **how))

        if not candidate.plan.vocabulary_major:
            return [chunks()]
        columns = self.columns(rows)
        blocks = loop(p.V / columns, lambda n: self.work(candidate, p.N, min(n * columns, p.V), saved=True))
        return [chunks(needs=runtime.NO_GRADIENTS), blocks]

    def columns(self, rows: int) -> int:
        return min(self.problem.V, runtime.block_columns(self.problem.N, self.problem.V, rows))

    def work(
        self, candidate: Candidate, rows: int, columns: int, *, needs: runtime.Needs | None = None, saved: bool = False
    ) -> Callable[[], None]:
        """The loop over the first rows and columns."""
        p = self.problem
        ignore_index, accum_dtype, function, *numbers = p.how
        # what all N rows make of "auto"
        accumulator = runtime.accumulator_dtype(p.weight_dtype, accum_dtype, -(-p.N // candidate.chunk_size))
        accum_dtype = "param" if accumulator == p.weight_dtype else "float32"
        slab = candidate.chunk_size * p.V // columns if saved else candidate.chunk_size
        how = runtime.How(ignore_index, slab, accum_dtype, kernels.Epilogue(function, *numbers))
        cut = [None if x is None else x[:columns] for x in (self.weight, self.bias, self.class_weight)]
        target = self.target[:rows].remainder(columns)
        zeros = self.g.new_zeros(rows)
        g = kernels.Cotangents(*(self.g[:rows] if given else None for given in p.cotangents))
        needs = runtime.Needs(*p.needs) if needs is None else needs

        def work():
            runtime.run(
                self.h[:rows],
                cut[0],
                target,
                cut[1],
                cut[2],
                how,
                want=runtime.Want(*p.want),
                saved=kernels.Statistics(None, zeros, zeros, None, zeros, None) if saved else None,
                cotangents=g,
                needs=needs,
                plan=candidate.plan,
            )

        return work


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
