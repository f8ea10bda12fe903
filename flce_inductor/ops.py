"""The three ops, all in terms of rows.

Everything that training code computes from logits and labels is a function of a few numbers per row of
z = epilogue(h @ weight.T + bias):

    nll[n] = lse[n] - z[n, t_n]          lse[n] = max[n] + logsum[n] = logsumexp_v z[n, v]
    zsum[n] = sum_v u[v] z[n, v]         pz[n] = sum_v p[n, v] (z[n, v] - max[n])         argmax[n]

and the gradient is one formula for all of them, with a cotangent per row and statistic, p = exp((z - max) - logsum):

    dz[n, v] = (g_nll + g_lse)[n] p - g_nll[n] [v == t_n] + g_zsum[n] u[v] + g_pz[n] p (z - max - pz[n] + 1)
    dlogits = dz * epilogue'

| op | returns | cost in N*V*H multiply-adds x 2 |
|---|---|---|
| row_stats | the statistics | 2 |
| row_stats_backward | dh, dweight, dbias from saved statistics | 6 (recomputes the logits) |
| row_stats_with_grads | the statistics, and dh, dweight, dbias for row weights known up front | 6 in all |

Shapes: h [N, H], weight [V, H], target [N] int64, bias [V] or None, class_weight u [V] or None (1); statistics [N] in
float32 (float64 for float64), argmax int64. zsum, pz and argmax are computed when `want` asks for them, else empty.
nll is 0 and takes no cotangent where target == ignore_index; the other statistics are those of every row. max and
logsum are the two halves of lse, kept apart because p computed from their sum loses precision when all logits share a
large offset, and pz is taken from max for the same reason; the gradient of lse flows through logsum, that of
sum_v p z = max + pz through pz, and max is not differentiable. class_weight has no gradient.

h is in the dtype that the logits have; weight may be wider (autocast's float32 parameter): it is cast for the
product, and dweight comes back in its own dtype. The epilogue is cap * function(scale * (x + shift)) on each logit x,
in float32, function "tanh", "sigmoid" or "" (identity). chunk_size: rows per chunk, clamped to N. accum_dtype: "param"
accumulates dweight in weight's dtype (one rounding per chunk), "float32" never rounds between chunks, "auto" is "param"
up to 16 chunks and "float32" above. needs: which of dh, dweight, dbias to compute; the others come back empty.

Errors: IndexError (CPU) or an asynchronous device assertion (CUDA) for a label outside [0, V) that is not
ignore_index; RuntimeError for a second derivative.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from . import config, kernels, runtime
from .explain import record_run
from .kernels import Cotangents, Epilogue, Statistics
from .runtime import Buffers, How, Needs, Plan, Want, stat_dtype

_HEAD = "Tensor h, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight"
_HOW = "int ignore_index, int chunk_size, str accum_dtype, str function, float scale, float shift, float cap"
_WANT = "bool[3] want"
_STATS = "Tensor nll, Tensor max, Tensor logsum, Tensor zsum, Tensor pz, Tensor argmax"
_COTANGENTS = "Tensor? g_nll, Tensor? g_lse, Tensor? g_zsum, Tensor? g_pz"
_GRADS = "Tensor dh, Tensor dweight, Tensor dbias"


_LIBRARY = torch.library.Library("flce_inductor", "DEF")


def _op(name: str, schema: str):
    """Define an op at the dispatcher: torch.library.custom_op would do more at each call."""
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))

    def implement(function):
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return function

    return implement


def _fake(name: str):
    def register(function):
        # register_fake asks inspect whose call this is, which else looks at every module: a third of our import's time
        vars(inspect).get("modulesbyfile", {})[__file__] = __name__
        return torch.library.register_fake(f"flce_inductor::{name}", function, lib=_LIBRARY)

    return register


def _how(ignore_index, chunk_size, accum_dtype, function, *numbers) -> How:
    """ValueError for strings that the ops don't take: a saved graph may come from anywhere."""
    config.check_accum_dtype(accum_dtype, "accum_dtype")
    kernels.check_function(function)
    return How(ignore_index, chunk_size, accum_dtype, Epilogue(function, *numbers))


def _plan(vocabulary_major=False, accumulate="library") -> Plan:
    if accumulate not in ("library", "triton"):
        raise ValueError(f"accumulate={accumulate!r}: allowed are 'library' and 'triton'")
    return Plan(vocabulary_major, accumulate)


def _autograd(name: str, backward, setup_context=None) -> None:
    torch.library.register_autograd(f"flce_inductor::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def _filled(h: Tensor, stats: Statistics) -> tuple[Tensor, ...]:
    """The statistics with an empty tensor for each that wasn't wanted."""
    nothing = (h.new_empty(0, dtype=torch.int64 if i == 5 else stat_dtype(h.dtype)) for i in range(6))
    return tuple(e if s is None else s for s, e in zip(stats, nothing, strict=True))


@_op("row_stats", f"({_HEAD}, {_HOW}, {_WANT}) -> ({_STATS})")
def row_stats(h, weight, target, bias, class_weight, *how_want):
    *how, want = how_want
    stats, _ = runtime.run(h, weight, target, bias, class_weight, _how(*how), want=Want(*want))
    return _filled(h, stats)


@_op(
    "row_stats_backward",
    f"({_HEAD}, Tensor max, Tensor logsum, Tensor? pz, {_COTANGENTS}, {_HOW}, bool[3] needs) -> ({_GRADS})",
)
def row_stats_backward(h, weight, target, bias, class_weight, max, logsum, pz, g_nll, g_lse, g_zsum, g_pz, *how_needs):
    *how, needs = how_needs
    _, grads = runtime.run(
        h,
        weight,
        target,
        bias,
        class_weight,
        _how(*how),
        saved=Statistics(None, max, logsum, None, pz, None),
        cotangents=Cotangents(g_nll, g_lse, g_zsum, g_pz),
        needs=Needs(*needs),
    )
    return tuple(grads[:3])


@_op(
    "row_stats_with_grads",
    f"({_HEAD}, {_COTANGENTS}, Tensor[] row_inputs, str row_program, {_HOW}, {_WANT}, bool[3] needs,"
    f" bool vocabulary_major=False, str accumulate='library', Tensor? counted=None)"
    f" -> ({_STATS}, {_GRADS}, Tensor unscale)",
)
def row_stats_with_grads(
    h, weight, target, bias, class_weight, g_nll, g_lse, g_zsum, g_pz, row_inputs, row_program, *rest
):
    """Cotangents are given, or computed by row_program (runtime.RowProgram) from each row's statistics and row_inputs.

    dh, dweight, dbias are to be multiplied by unscale [] (in float32, together with what else is deferred). It is 1
    except for float16, whose gradients are kept at a power of two that uses its range; float16 takes no row_program.
    vocabulary_major and accumulate: how lowering.py's tuner found it fastest, see runtime.Plan. counted: of count_rows,
    for a caller who reads no statistic but nll, and nothing of rows whose label is ignored: they may be left out.
    """
    how, want, needs, plan, counted = rest[:7], rest[7], rest[8], rest[9:11], rest[11:]
    stats, grads = runtime.run(
        h,
        weight,
        target,
        bias,
        class_weight,
        _how(*how),
        want=Want(*want),
        cotangents=Cotangents(g_nll, g_lse, g_zsum, g_pz),
        program=row_program,
        row_inputs=row_inputs,
        needs=Needs(*needs),
        plan=_plan(*plan),
        counted=next(iter(counted), None),
    )
    return (*_filled(h, stats), *grads)


@_op("count_rows", "(Tensor target, int ignore_index) -> Tensor")
def count_rows(target, ignore_index):
    """How many labels aren't ignore_index: [1] int64 in host memory, which a GPU fills in later."""
    return runtime.count_rows(target, ignore_index)


@_fake("count_rows")
def _(target, ignore_index):
    return torch.empty(1, dtype=torch.int64)


_INTO = "Tensor(a!)[] stats, Tensor(b!)? dh, Tensor(c!)? dweight, Tensor(d!)? slab"


@_op(
    "run_",
    f"({_HEAD}, Tensor? max, Tensor? logsum, Tensor? pz, {_COTANGENTS}, Tensor[] row_inputs, str row_program, {_HOW},"
    f" {_WANT}, bool[3] needs, bool vocabulary_major, str accumulate, Tensor? counted, {_INTO})"
    " -> (Tensor own_dweight, Tensor dbias, Tensor unscale)",
)
def run_(h, weight, target, bias, class_weight, max, logsum, pz, g_nll, g_lse, g_zsum, g_pz, *rest):
    """All three ops as compiled code calls them (lowering.py), with results and slab in buffers of Inductor's.

    max, logsum [N] (and pz with its cotangent) are the saved statistics of row_stats_backward, else None. stats: the
    wanted ones, written; none if saved. A gradient that is needed but has no buffer is returned, the others are empty.
    """
    row_inputs, program, *how, want, needs, vocabulary_major, accumulate, counted, stats, dh, dweight, slab = rest
    want, needs = Want(*want), Needs(*needs)
    passes = "its backward" if max is not None else "loss and gradients" if any(needs) else "its statistics"
    record_run(passes, h.shape[1], weight.shape[0], h.dtype, how[1])
    saved = None if max is None else Statistics(None, max, logsum, None, pz, None)
    written = iter(stats)
    into = Buffers(
        None if saved else Statistics(*(next(written) if w else None for w in (True, True, True, *want))),
        dh,
        dweight,
        slab,
    )
    try:
        _, grads = runtime.run(
            h,
            weight,
            target,
            bias,
            class_weight,
            _how(*how),
            want=want,
            saved=saved,
            cotangents=Cotangents(g_nll, g_lse, g_zsum, g_pz),
            program=program,
            row_inputs=row_inputs,
            needs=needs,
            plan=_plan(vocabulary_major, accumulate),
            into=into,
            counted=counted,
        )
    except Exception:
        for x in stats:  # before torch 2.13 AOTInductor's code prints the error and goes on with what it finds here
            if x.is_floating_point():
                x.fill_(float("nan"))
        raise
    own_dweight = grads.dweight if dweight is None else weight.new_empty(0)
    return own_dweight, grads.dbias, grads.unscale


@_fake("run_")
def _(h, weight, target, bias, class_weight, *rest):
    *_, needs, _vocabulary_major, _accumulate, _counted, _stats, _dh, dweight, _slab = rest
    _, own_dweight, dbias = _fake_grads(h, weight, bias, [False, needs[1] and dweight is None, needs[2]])
    return own_dweight, dbias, h.new_empty((), dtype=stat_dtype(h.dtype))


@_op("scale", "(Tensor x, Tensor factor) -> Tensor")
def scale(x, factor):
    """x * factor [], which is 1 more often than not; compiled code scales in place where nobody else needs x."""
    return runtime.scaled(x, factor)


@_fake("scale")
def _(x, factor):
    return torch.empty_like(x)


@_op("scale_", "(Tensor(a!) x, Tensor factor) -> ()")
def scale_(x, factor):
    kernels.scale_(x, factor)


@_fake("scale_")
def _(x, factor):
    return None


def _fake_stats(h: Tensor, want: list[bool]) -> tuple[Tensor, ...]:
    wanted = (True, True, True, *want)
    dtypes = [stat_dtype(h.dtype)] * 5 + [torch.int64]
    return tuple(h.new_empty(h.shape[0] if w else 0, dtype=d) for w, d in zip(wanted, dtypes, strict=True))


def _fake_grads(h: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    dh, dweight, dbias = needs
    bias_dtype = stat_dtype(h.dtype) if bias is None else bias.dtype
    return (
        h.new_empty(h.shape) if dh else h.new_empty(0),
        torch.empty_like(weight) if dweight else weight.new_empty(0),
        h.new_empty(weight.shape[0] if dbias else 0, dtype=bias_dtype),
    )


@_fake("row_stats")
def _(h, weight, target, bias, class_weight, *how_want):
    runtime.check_shapes(h, weight, target, bias, class_weight)
    *how, want = how_want
    _how(*how)
    return _fake_stats(h, want)


@_fake("row_stats_backward")
def _(h, weight, target, bias, *rest):
    *how, needs = rest[8:]
    _how(*how)
    return _fake_grads(h, weight, bias, needs)


@_fake("row_stats_with_grads")
def _(h, weight, target, bias, class_weight, *rest):
    runtime.check_shapes(h, weight, target, bias, class_weight)
    program, how, want, needs, plan = rest[5], rest[6:13], rest[13], rest[14], rest[15:17]
    _how(*how)
    _plan(*plan)
    if program:
        runtime.RowProgram.parse(program)
    unscale = h.new_empty((), dtype=stat_dtype(h.dtype))
    return (*_fake_stats(h, want), *_fake_grads(h, weight, bias, needs), unscale)


def _save(ctx, inputs, output):
    h, weight, target, bias, class_weight, *how, want = inputs
    _, max, logsum, _, pz, argmax = output
    ctx.how, ctx.want = how, want
    ctx.mark_non_differentiable(max, argmax)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h, weight, target, bias, class_weight, max, logsum, pz)


def _backward(ctx, g_nll, g_max, g_lse, g_zsum, g_pz, g_argmax):
    nothing = (None,) * len(ctx.needs_input_grad)
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    # a caller may send a gradient to the empty tensor that stands for an unwanted statistic
    zsum, pz, _ = ctx.want
    cotangents = (g_nll, g_lse, g_zsum if zsum else None, g_pz if pz else None)
    if all(g is None for g in cotangents) or not any(needs):
        return nothing
    *head, pz = ctx.saved_tensors
    pz = None if cotangents[-1] is None else pz
    grads = torch.ops.flce_inductor.row_stats_backward(*head, pz, *cotangents, *ctx.how, needs)
    dh, dweight, dbias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dh, dweight, None, dbias, *nothing[4:]


_autograd("row_stats", _backward, setup_context=_save)
_NO_SECOND_DERIVATIVE = (
    "flce_inductor: the fused linear cross entropy has no second derivative. Compute the loss that you differentiate "
    "twice from explicit logits, or leave that function uncompiled."
)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(_NO_SECOND_DERIVATIVE)


_autograd("row_stats_backward", _no_second_derivative)
_autograd("row_stats_with_grads", _no_second_derivative)


def forbid_second_derivative(*grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same gradients, which raise when they are differentiated (create_graph=True)."""
    raising = torch._C._functions.DelayedError(_NO_SECOND_DERIVATIVE.encode(), len(grads))
    raised = raising(*(None if g is None else g.detach().requires_grad_() for g in grads))
    return raised if isinstance(raised, tuple) else (raised,)


def check_dtypes(h: torch.dtype, weight: torch.dtype, bias: torch.dtype | None) -> None:
    """Raise RuntimeError for dtypes that the ops don't take together."""
    if not dtypes_fit(h, weight, bias):
        raise RuntimeError(
            f"expected the input, weight and bias in one floating dtype, or a 16-bit input with float32 parameters, "
            f"got {h}, {weight} and {bias}"
        )


def dtypes_fit(h: torch.dtype, weight: torch.dtype, bias: torch.dtype | None) -> bool:
    """Whether the ops take these dtypes: all the same, or 16-bit hidden states with float32 parameters (autocast)."""
    if h not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return False
    wide = (h, torch.float32) if h.itemsize == 2 else (h,)
    return weight in wide and (bias is None or bias in wide)
