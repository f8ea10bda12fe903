"""The report: what was found, what became of it, and why.

Every decision of match/ and hoist.py is recorded here: counted, logged on the logger "flce_inductor"
(TORCH_LOGS="+flce_inductor"), and collected by explain().
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

log = logging.getLogger("flce_inductor")


class Reason(enum.Enum):
    """Why a site was left alone, or takes the recompute path. Each text says what to change."""

    # match: the graph was left exactly as it was
    NO_HEAD = (
        "the logits do not come from a linear or matmul in this graph",
        "compile the head and the loss in one function without a graph break between them",
    )
    LINK = (
        "an operation between the head and the loss is not known to keep rows apart",
        "move it out of the path from the head to the loss, or report the spelling",
    )
    READER = (
        "something else reads the logits, so they must exist",
        "compute it from the hidden states outside the training step, or do not ask for it while training",
    )
    ADAPTER = (
        "the logits are a sum of two linears, such as a LoRA adapter on the head",
        "merge the adapter into the head's weight, or leave the head (lm_head) out of the adapter's target modules",
    )
    RETURNED = (
        "the logits are returned from the compiled function, so they must exist",
        "return only the loss from the compiled step (for example torch.compile a function that returns model(x).loss),"
        ' or set flce_inductor.unused_logits="nan" if nobody reads them while training',
    )
    BY_HAND = (
        "the loss is written by hand with exp and log, which overflow and underflow where log_softmax doesn't",
        "use cross_entropy, log_softmax or logsumexp of the logits",
    )
    SYMBOLIC_NUMBER = (
        "a number that shifts or caps the logits is a symbol to the compiler, which has seen it change",
        "make it a constant: an attribute of the module, say, instead of an argument of the compiled function",
    )
    CLASS_PROBABILITIES = (
        "the target holds class probabilities, not class indices",
        "only labels (int64 indices) are rewritten; keep stock compile for soft targets",
    )
    TARGET_DTYPE = (
        "the labels are not int64",
        "pass labels.long()",
    )
    LEGACY_REDUCTION = (
        "the deprecated arguments size_average or reduce are used",
        'pass reduction="mean", "sum" or "none" instead',
    )
    CLASS_WEIGHT = (
        "the class weight requires a gradient, or is not [V]",
        "pass a class weight that is a constant: weight.detach()",
    )
    LOGITS_SHAPE = (
        "the logits are not [N, V] where they meet the loss",
        "flatten to cross_entropy(logits.view(-1, V), labels.view(-1))",
    )
    SUBCLASS = (
        "a tensor subclass (such as DTensor) or a transform of torch.func (grad, vmap, jvp) takes part",
        "compile on plain tensors outside of transforms, or keep stock compile",
    )
    SHARDED = (
        "the head or its logits are a DTensor, in a form that is not known",
        "hand the logits of a ColwiseParallel linear to cross_entropy as they are (under loss_parallel), or"
        " call flce_inductor.linear_cross_entropy with the DTensor weight",
    )
    DTYPE = (
        "the dtypes of the hidden states, weight and bias are not a combination that the ops take",
        "use one floating dtype, or float32 parameters with 16-bit hidden states (autocast)",
    )
    GRAD_MODE = (
        "gradients are switched on or off between the head and the loss",
        "compute the head and the loss under the same grad mode",
    )
    MUTATION = (
        "the hidden states, the weight or the logits are changed in place after the head",
        "use the out-of-place operation",
    )
    TOO_SMALL = (
        "the logits are smaller than flce_inductor.min_logits_bytes or min_vocab_size, so there is nothing to gain",
        "lower that key to rewrite it all the same",
    )
    UNKNOWN_SHAPE = (
        "the graph does not say the shape or dtype of a tensor that takes part",
        "report the spelling",
    )

    # hoist: rewritten, but rows whose label is ignored are computed, too
    ALL_ROWS = (
        "a statistic other than the loss is wanted of every row",
        "nothing is wrong; without label smoothing, z-loss, accuracy and the like ignored rows would cost nothing",
    )
    LATE_COUNT = (
        "how many labels count isn't known before the model has run",
        "pass labels into the compiled function, or set flce_inductor.skip_ignored=True, which waits for the device",
    )
    LATE_LAUNCHES = (
        "the host would wait for how many labels count, while the device has too little to do before the head",
        "compile model and loss as one graph, or set flce_inductor.skip_ignored=True if most labels are ignored",
    )
    CUDA_GRAPHS = (
        "a CUDA graph runs the same launches whatever the labels are",
        "if most labels are ignored, compile without CUDA graphs, or set flce_inductor.skip_ignored=True: 16-bit heads "
        "without a bias that learns then use Triton's products, which end at the count that they find on the device",
    )

    # hoist: rewritten, but forward and backward both compute the logits (8 NVH instead of 6)
    NO_BACKWARD = ("no gradient reaches this loss in the graph", "nothing to do for inference")
    TWO_BACKWARDS = (
        "the loss is differentiated more than once in the graph",
        "sum the losses and differentiate once",
    )
    TANGENTS = (
        "its cotangent depends on more than one incoming gradient",
        "return one loss from the compiled function",
    )
    VECTOR_TANGENT = (
        "the incoming gradient is not one number: the per-token loss leaves the compiled function",
        "reduce the loss to one number inside the compiled function",
    )
    NOT_LINEAR = (
        "its cotangent is not the incoming gradient times something known in the forward",
        "nothing is wrong; a loss that is linear in the per-token losses would save a quarter of the work",
    )
    OWN_OUTPUT = (
        "its cotangent depends on the loss itself, or on other rows' losses",
        "nothing is wrong; per-token weights known up front would save a quarter of the work",
    )
    SMALL_CHUNKS = (
        "chunks are so small, for the memory there is, that computing the logits twice is faster",
        "raise flce_inductor.max_slab_bytes, or set flce_inductor.chunk_size",
    )
    SHARED_WEIGHT = (
        "another loss over the same weight already holds a weight gradient until the backward",
        "sum the losses into one incoming gradient",
    )

    @property
    def text(self) -> str:
        return self.value[0]

    @property
    def advice(self) -> str:
        return self.value[1]


def count(key: str) -> None:
    """Count up one of torch._dynamo.utils.counters["inductor"]."""
    from torch._dynamo.utils import counters  # importing Dynamo takes a second

    counters["inductor"][key] += 1


# what isn't the user's code, though it shows in its frames
_OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.join(os.path.dirname(__file__), "functional.py"))


def frames(node: torch.fx.Node) -> list[tuple[str, str, str]]:
    """File, line and function of the frames that a node was traced in, the one that Dynamo compiled first."""
    return re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")


def where(node: torch.fx.Node) -> str:
    """The user's file:line of a node: the innermost frame of its stack that isn't torch's or ours."""
    all_frames = frames(node)
    outside = [frame for frame in all_frames if not frame[0].startswith(_OWN)]
    return ":".join((outside or all_frames or [("unknown place", "0", "")])[-1][:2])


def given_by(node: torch.fx.Node) -> str:
    """Where the inputs of a node's graph come from, for the report."""
    for file, line, function in frames(node)[:1]:
        if resumed := re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", function):
            return f"from before the graph break in {resumed[1]} at {file}:{resumed[2]}"
        return f"from outside of {function}, {file}:{line}"
    return "from outside of the compiled function"


def given_to(node: torch.fx.Node) -> str:
    """Where the outputs of a node's graph go to, for the report."""
    if _ended(node.graph):
        return f"to what follows {_ended(node.graph)}"
    for file, line, function in frames(node)[:1]:
        return f"by {function}, {file}:{line}"
    return "by the compiled function"


def _ended(graph: torch.fx.Graph) -> str:
    """The graph break that ended a graph, or nothing."""
    reason = getattr(graph.owning_module, "compile_subgraph_reason", None)
    return f"the graph break at {_break(reason)}" if reason is not None and reason.graph_break else ""


def _break(reason: Any) -> str:
    """A graph break of Dynamo in one line: the user's file:line and why."""
    outside = [frame for frame in reason.user_stack if not frame.filename.startswith(_OWN)]
    places = [f"{frame.filename}:{frame.lineno}" for frame in (outside or reason.user_stack)[-1:]]
    return ": ".join([*places, _short(reason.reason)])


def _short(text: str) -> str:
    """Dynamo's text about a graph break in one line."""
    explained = re.search(r"Explanation: (.*)", text)
    return ": ".join([text.strip().partition("\n")[0], *(explained.groups() if explained else ())])


def compilation() -> tuple[Any, int]:
    """Dynamo's identifier of the compilation under way, and how often Dynamo started it anew."""
    trace = torch._guards.CompileContext.current_trace_id()
    return (None, 0) if trace is None else (trace.compile_id, trace.attempt)


@dataclasses.dataclass
class Site:
    """One loss that was found in a graph."""

    where: str  # file:line in the user's code
    loss: str  # what was found, e.g. "cross_entropy(mean)"
    reason: Reason | None = None  # None: rewritten
    detail: str = ""
    N: str = "?"
    H: str = "?"
    V: str = "?"
    dtype: str = "?"
    chunk_size: int | None = None
    logits_bytes: int | None = None  # None: unknown until run time (dynamic N)
    one_pass: bool | None = None  # None: not known (no backward seen)
    pass_reason: Reason | None = None
    tuned: str = ""  # what was chosen by timing, and all times
    skips: bool | None = None  # whether ignored rows cost nothing; None: nobody asked
    skip_reason: Reason | None = None
    returns_nan: bool = False  # logits that the function returns are NaN, as unused_logits="nan" asks
    attempt: tuple[Any, int] = dataclasses.field(default_factory=compilation, repr=False)
    frames: list[tuple[str, str, str]] = dataclasses.field(default_factory=list, repr=False)

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.loss}: {'rewritten' if self.reason is None else 'left alone'}"]
        if self.reason is not None:
            lines.append(f"    because {self.reason.text}" + (f" ({self.detail})" if self.detail else ""))
            lines.append(f"    to change that: {self.reason.advice}")
            return "\n".join(lines)
        size = "N x V"
        if self.logits_bytes is not None:
            mib = self.logits_bytes / 2**20
            size = f"{mib:.0f} MiB" if mib >= 1 else f"{self.logits_bytes} bytes"
        lines.append(f"    N={self.N} H={self.H} V={self.V} {self.dtype}, {self.chunk_size} rows a chunk")
        if self.N.isdigit() and self.chunk_size is not None and self.chunk_size >= int(self.N):
            lines.append(f"    {size} of logits exist: all rows are one chunk, whose gradient takes its place")
        else:
            lines.append(f"    {size} of logits never exist")
        if self.returns_nan:
            lines.append('    the logits that the function returns are NaN (flce_inductor.unused_logits="nan")')
        if self.one_pass:
            lines.append("    gradients are computed in the forward (6 NVH)")
        elif self.pass_reason is not None:
            lines.append(f"    the backward computes the logits again (8 NVH) because {self.pass_reason.text}")
            lines.append(f"    to change that: {self.pass_reason.advice}")
        if self.skips:
            lines.append("    rows whose label is ignored cost nothing")
        elif self.skip_reason is not None:
            lines.append(f"    rows whose label is ignored are computed, too, because {self.skip_reason.text}")
            lines.append(f"    to change that: {self.skip_reason.advice}")
        if self.tuned:
            lines.append(f"    tuned: {self.tuned}")
        return "\n".join(lines)


_collectors: list[list[Site]] = []


@contextlib.contextmanager
def collect() -> Iterator[list[Site]]:
    """Collect the sites that are decided on while the context is open."""
    sites: list[Site] = []
    _collectors.append(sites)
    try:
        yield sites
    finally:
        _collectors[:] = [other for other in _collectors if other is not sites]  # equal ones may be open


def record_graph(graph: torch.fx.Graph, losses: int) -> None:
    """What the log says, in detail, about a graph."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    outermost = (frame for node in graph.nodes for frame in frames(node)[:1])
    for file, line, function in itertools.islice(outermost, 1):
        ended = f", which ends at {_ended(graph)}" if _ended(graph) else ""
        log.debug("%s:%s: %d losses in a graph of %s%s", file, line, losses, function, ended)


def record(site: Site) -> None:
    """A decision of match/."""
    count("flce_rewritten" if site.reason is None else "flce_refused")
    log.info("%s", site)
    compilation, attempt = site.attempt
    for sites in _collectors:
        # what an attempt made that Dynamo then threw away doesn't count
        sites[:] = [s for s in sites if s.attempt[0] != compilation or s.attempt[1] >= attempt] + [site]


def _rewritten(node: torch.fx.Node) -> list[Site]:
    """The collected sites that a node was made for: those traced in the same frames, or of several the one that is as
    far down as the node is among its like."""
    at, found = frames(node), []
    alike = [n for n in node.graph.find_nodes(op="call_function", target=node.target) if frames(n) == at]
    for sites in _collectors:
        here = [site for site in sites if site.frames == at and site.reason is None]
        found += [here[alike.index(node)]] if len(here) == len(alike) else here
    return found


def record_pass(node: torch.fx.Node, reason: Reason | None, detail: str = "") -> None:
    """A decision of hoist.py about the row_stats node: reason None means that it was hoisted."""
    if reason is Reason.NO_BACKWARD:
        return
    count("flce_hoisted" if reason is None else "flce_recomputed")
    place = where(node)
    if reason is None:
        log.info("%s: gradients are computed in the forward", place)
    else:
        log.info("%s: not in one pass: %s%s", place, reason.text, f" ({detail})" if detail else "")
    for site in _rewritten(node):
        site.one_pass, site.pass_reason = reason is None, reason


def record_skip(node: torch.fx.Node, reason: Reason | None) -> None:
    """Whether a hoisted node leaves ignored rows out (None), or why not."""
    place = where(node)
    log.info("%s: ignored rows %s", place, f"are computed, too: {reason.text}" if reason else "cost nothing")
    for site in _rewritten(node):
        site.skips, site.skip_reason = reason is None, reason


def record_tuning(node: torch.fx.Node, chosen: str, seconds: dict[str, float]) -> None:
    """What lowering.py chose for a hoisted node, and the time of each way it tried."""
    place, table = where(node), ", ".join(f"{name} {s * 1e3:.3g} ms" for name, s in sorted(seconds.items()))
    log.info("%s: tuned: %s, of %s", place, chosen, table)
    for site in _rewritten(node):
        site.tuned = f"{chosen}, of {table}"


@functools.lru_cache(maxsize=1024)
def record_run(passes: str, H: int, V: int, dtype: torch.dtype, chunk_size: int) -> None:
    """Log, once for each loop, that compiled code runs it: of a graph from a cache nothing else is heard."""
    log.info("compiled code runs a fused loss (%s): H=%d V=%d %s, %d rows a chunk", passes, H, V, dtype, chunk_size)


class Report(list[Site]):
    """The sites of a function, printable.

    graphs: how many graphs Dynamo made. breaks: its graph breaks, each as the user's file:line and why. parts: whether
    only functions or modules that the function calls are compiled. enabled: false if the rewrite is off, but for
    explain, where a loss is compiled. fused: how often the graphs call linear_cross_entropy.
    """

    def __init__(
        self,
        sites: Iterable[Site] = (),
        graphs: int = 0,
        breaks: Iterable[str] = (),
        parts: bool = False,
        enabled: bool = True,
        fused: int = 0,
    ):
        super().__init__(sites)
        self.graphs, self.breaks, self.parts, self.enabled, self.fused = graphs, list(breaks), parts, enabled, fused

    def __str__(self) -> str:
        made = f"{self.graphs} compiled graph{'s' * (self.graphs != 1)}"
        rewritten = sum(site.reason is None for site in self)
        if self:
            losses = "1 loss" if len(self) == 1 else f"{len(self)} losses"
            lines = [f"flce_inductor: {losses} found, {rewritten} rewritten", *map(str, self)]
        elif not self.graphs:
            lines = [
                "flce_inductor: no loss found, because nothing was compiled by Inductor",
                "    to check: that the function computes with tensors, is not under torch.compiler.disable or "
                'TORCH_COMPILE_DISABLE, and is not compiled for a backend other than "inductor" and "flce_inductor"',
            ]
        elif self.fused:
            lines = [f"flce_inductor: no loss to rewrite in {made}"]
        else:
            lines = [
                f"flce_inductor: no loss found in {made}",
                "    to check: that the loss is computed inside the compiled function, and that it is written with "
                "cross_entropy, log_softmax or logsumexp of the logits",
            ]
        if self and not self.enabled:
            lines.append(
                "    but the rewrite is off where this is compiled: outside of explain nothing is rewritten until you "
                'set backend="flce_inductor", options={"flce_inductor.enable": True} or '
                "torch._inductor.config.flce_inductor.enable = True"
            )
        if self.fused:
            calls = f"{self.fused} call{'s' * (self.fused != 1)}"
            lines.append(f"    {calls} of linear_cross_entropy, fused with the rewrite on or off")
        if self.parts:
            lines.append(
                "    only parts of the function are compiled; explain(torch.compile(function), ...) is about all of it"
            )
        if self.breaks:
            lines.append(f"graph breaks ({made}), each of which may keep a head apart from its loss:")
            lines += [f"    {text}" for text in self.breaks]
        return "\n".join(lines)


def _breaks(reasons: list, counted: Iterable[str]) -> list[str]:
    """Dynamo's graph breaks in a line each: those that ended a graph, and those for which a frame wasn't compiled."""
    known = {_short(reason.reason) for reason in reasons}
    return [
        *dict.fromkeys(map(_break, reasons)),
        *dict.fromkeys(text for text in map(_short, counted) if text not in known),
    ]


def _skipped(text: str) -> list[str]:
    """The functions that Dynamo left uncompiled for a graph break in a loop, as it says in one of its texts."""
    frames = re.findall(r"frame skipped: (.*)", text) if "graph break in loop" in text else []
    return [f"{frame}: a graph break in a loop, for which all of this function is left uncompiled" for frame in frames]


def _is_compiled(x: object) -> bool:
    """Whether a function or module is compiled with torch.compile, or a module holds one that is."""
    if isinstance(x, torch.nn.Module):
        compiled = (torch._dynamo.eval_frame.OptimizedModule, "_compiled_call_impl")
        return any(isinstance(m, compiled[0]) or getattr(m, compiled[1], None) is not None for m in x.modules())
    attributes = ("_torchdynamo_orig_callable", "_torchdynamo_disable")
    compiled, disabled = (inspect.getattr_static(x, name, None) for name in attributes)
    return compiled is not None and not disabled


def _names_compiled(fn: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether a function names, holds or is given functions or modules that are compiled."""
    owner, function = getattr(fn, "__self__", None), getattr(fn, "__func__", fn)
    found = [owner, *args, *kwargs.values(), *getattr(owner, "__dict__", {}).values()]
    if inspect.isfunction(function):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            named = inspect.getclosurevars(function)
            found += [*named.nonlocals.values(), *named.globals.values()]
    return any(map(_is_compiled, found))


def explain(fn: Callable, *args, **kwargs) -> Report:
    """Say for every loss in fn what the rewrite does with it, and why not where it doesn't.

    fn is compiled as a whole and run once on the arguments, in eager mode: no kernel is compiled. If it is compiled
    already, or calls functions or modules that are, it is run as it is, with the options that they were compiled with;
    the rewrite is enabled for them meanwhile (in all threads); the report says so where it is off otherwise.

    Returns: a printable list of sites: the user's file and line; rewritten or the reason why not and what to change;
    N, H, V and dtype of the head; rows a chunk; bytes of logits avoided; whether the gradients are computed in one
    pass. Then how many calls of linear_cross_entropy the graphs hold, and Dynamo's graph breaks.
    """
    from torch._dynamo.utils import counters, graph_break_reasons

    from .backend import flce_inductor, tracing

    torch._dynamo.reset()
    parts = not _is_compiled(fn) and _names_compiled(fn, args, kwargs)
    compiled = fn if parts or _is_compiled(fn) else torch.compile(fn, backend=flce_inductor)
    counted, first = dict(counters["graph_break"]), len(graph_break_reasons)
    met = dict(counters["unimplemented"])
    try:
        with collect() as sites, tracing() as graphs:
            compiled(*args, **kwargs)
        new = [text for text, times in counters["graph_break"].items() if times != counted.get(text, 0)]
        skipped = [
            line
            for text, times in counters["unimplemented"].items()
            if times != met.get(text, 0)
            for line in _skipped(text)
        ]
        breaks = [*_breaks(graph_break_reasons[first:], new), *skipped]
        found = [graphs[site.attempt[0]] for site in sites if site.attempt[0] in graphs]
        enabled, fused = all(graph.enabled for graph in found), sum(graph.fused for graph in graphs.values())
        return Report(sites, len(graphs), breaks, parts, enabled, fused)
    finally:
        torch._dynamo.reset()
