"""The three ops, all in terms of rows.

Everything that training code computes from logits and labels is a function of a few numbers per row of
z = h @ weight.T + bias:

    nll[n] = lse[n] - z[n, t_n]          lse[n] = max[n] + logsum[n] = logsumexp_v z[n, v]

and the gradient is one formula for all of them, with a cotangent per row and statistic:

    dz[n, v] = (g_nll + g_lse)[n] * p[n, v]  -  g_nll[n] * [v == t_n]          p = exp((z - max) - logsum)

| op | returns | cost in N*V*H multiply-adds x 2 |
|---|---|---|
| row_stats | nll, max, logsum | 2 |
| row_stats_backward | dh, dweight, dbias from saved max, logsum | 6 (recomputes the logits) |
| row_stats_with_grads | the statistics, and dh, dweight, dbias for row weights known up front | 6 in all |

Shapes: h [N, H], weight [V, H], target [N] int64, bias [V] or None; nll, max, logsum [N] in float32 (float64 for
float64). nll is 0 and takes no cotangent where target == ignore_index; lse is that of every row. max and logsum are
the two halves of lse, kept apart because p computed from their sum loses precision when all logits share a large
offset; the gradient of lse flows through logsum, max is not differentiable.

h is in the dtype that the logits have; weight may be wider (autocast's float32 parameter): it is cast for the
product, and dweight comes back in its own dtype. chunk_size: rows per chunk, clamped to N. accum_dtype: "param"
accumulates dweight in weight's dtype (one rounding per chunk), "float32" never rounds between chunks, "auto" is "param"
up to 16 chunks and "float32" above. needs: which of dh, dweight, dbias to compute; the others come back empty.

Errors: IndexError (CPU) or an asynchronous device assertion (CUDA) for a label outside [0, V) that is not
ignore_index; RuntimeError for a second derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import runtime
from .runtime import Needs, stat_dtype

_PREFIX = "flce_inductor"
_HEAD = "Tensor h, Tensor weight, Tensor target, Tensor? bias"
_HOW = "int ignore_index, int chunk_size, str accum_dtype"


@torch.library.custom_op(
    f"{_PREFIX}::row_stats", mutates_args=(), schema=f"({_HEAD}, {_HOW}) -> (Tensor nll, Tensor max, Tensor logsum)"
)
def row_stats(h, weight, target, bias, ignore_index, chunk_size, accum_dtype):
    stats, _ = runtime.run(h, weight, target, bias, ignore_index=ignore_index, chunk_size=chunk_size)
    return tuple(stats)


@torch.library.custom_op(
    f"{_PREFIX}::row_stats_backward",
    mutates_args=(),
    schema=f"({_HEAD}, Tensor max, Tensor logsum, Tensor? g_nll, Tensor? g_lse, {_HOW}, bool[3] needs)"
    " -> (Tensor dh, Tensor dweight, Tensor dbias)",
)
def row_stats_backward(
    h, weight, target, bias, max, logsum, g_nll, g_lse, ignore_index, chunk_size, accum_dtype, needs
):
    _, grads = runtime.run(
        h,
        weight,
        target,
        bias,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        accum_dtype=accum_dtype,
        saved=(max, logsum),
        g_nll=g_nll,
        g_lse=g_lse,
        needs=Needs(*needs),
    )
    if h.dtype == torch.float16:
        for grad in grads[:3]:
            runtime.scaled(grad, grads.unscale, out=grad)
    return tuple(grads[:3])


@torch.library.custom_op(
    f"{_PREFIX}::row_stats_with_grads",
    mutates_args=(),
    schema=f"({_HEAD}, Tensor? g_nll, Tensor? g_lse, {_HOW}, bool[3] needs)"
    " -> (Tensor nll, Tensor max, Tensor logsum, Tensor dh, Tensor dweight, Tensor dbias, Tensor unscale)",
)
def row_stats_with_grads(h, weight, target, bias, g_nll, g_lse, ignore_index, chunk_size, accum_dtype, needs):
    """dh, dweight, dbias are to be multiplied by unscale [] (in float32, together with what else is deferred).

    It is 1 except for float16, whose gradients are kept at a power of two that uses its range.
    """
    stats, grads = runtime.run(
        h,
        weight,
        target,
        bias,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        accum_dtype=accum_dtype,
        g_nll=g_nll,
        g_lse=g_lse,
        needs=Needs(*needs),
    )
    return (*stats, *grads)


def _fake_stats(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(h.new_empty(h.shape[0], dtype=stat_dtype(h.dtype)) for _ in range(3))


def _fake_grads(h: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    dh, dweight, dbias = needs
    bias_dtype = stat_dtype(h.dtype) if bias is None else bias.dtype
    return (
        h.new_empty(h.shape) if dh else h.new_empty(0),
        torch.empty_like(weight) if dweight else weight.new_empty(0),
        h.new_empty(weight.shape[0] if dbias else 0, dtype=bias_dtype),
    )


@row_stats.register_fake
def _(h, weight, target, bias, ignore_index, chunk_size, accum_dtype):
    runtime.check_shapes(h, weight, target, bias)
    return _fake_stats(h)


@row_stats_backward.register_fake
def _(h, weight, target, bias, max, logsum, g_nll, g_lse, ignore_index, chunk_size, accum_dtype, needs):
    return _fake_grads(h, weight, bias, needs)


@row_stats_with_grads.register_fake
def _(h, weight, target, bias, g_nll, g_lse, ignore_index, chunk_size, accum_dtype, needs):
    runtime.check_shapes(h, weight, target, bias)
    return (*_fake_stats(h), *_fake_grads(h, weight, bias, needs), h.new_empty((), dtype=stat_dtype(h.dtype)))


def _save(ctx, inputs, output):
    h, weight, target, bias, *ctx.how = inputs
    _, max, logsum = output
    ctx.mark_non_differentiable(max)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h, weight, target, bias, max, logsum)


def _backward(ctx, g_nll, g_max, g_lse):
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    if (g_nll is None and g_lse is None) or not any(needs):
        return (None,) * 7
    grads = torch.ops.flce_inductor.row_stats_backward(*ctx.saved_tensors, g_nll, g_lse, *ctx.how, needs)
    dh, dweight, dbias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dh, dweight, None, dbias, None, None, None


row_stats.register_autograd(_backward, setup_context=_save)


_NO_SECOND_DERIVATIVE = (
    "flce_inductor: the fused linear cross entropy has no second derivative. Compute the loss that you differentiate "
    "twice from explicit logits, or leave that function uncompiled."
)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(_NO_SECOND_DERIVATIVE)


row_stats_backward.register_autograd(_no_second_derivative)
row_stats_with_grads.register_autograd(_no_second_derivative)


def forbid_second_derivative(*grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same gradients, which raise when they are differentiated (create_graph=True)."""
    raising = torch._C._functions.DelayedError(_NO_SECOND_DERIVATIVE.encode(), len(grads))
    return raising(*(None if g is None else g.detach().requires_grad_() for g in grads))


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
