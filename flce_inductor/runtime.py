"""The only chunk loop in the project.

    for each chunk of rows [lo, hi):
        slab  = h[lo:hi] @ weight.T + bias       library GEMM, into the one C x V buffer
        rows kernel, in place                    statistics, then dlogits over the slab (kernels.py)
        dh[lo:hi] = slab @ weight                into the slice of dh
        dweight  (+)= slab.T @ h[lo:hi]          in place: no [V, H] temporary, ever

Nothing here waits for the device: counts, scales and the check of the labels stay on it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels

MAX_CHUNKS_IN_PARAM_DTYPE = 16  # above it "auto" accumulates in float32: 2.7 x eager's rounding error at 16 chunks
_SCRATCH_BYTES = 16 << 20  # what the fallback may allocate at a time to accumulate dweight
_FP16_LIMIT = 2.0**15  # half of float16's largest number
_PAD = 64  # elements; the slab's leading dimension is a multiple of it
_ALIGN = 8  # a 16-bit GEMM whose V is not a multiple of it runs 6 to 8 times slower


class Needs(NamedTuple):
    """Which gradients are wanted."""

    dh: bool
    dweight: bool
    dbias: bool


NOTHING = Needs(False, False, False)


class Statistics(NamedTuple):
    """Row statistics, each [N] in stat_dtype(h): the loss, and logsumexp as a pair (lse = max + logsum)."""

    nll: Tensor
    max: Tensor
    logsum: Tensor


class Gradients(NamedTuple):
    """dh [N, H], dweight [V, H], dbias [V], each empty when not needed, all to be multiplied by unscale [] ."""

    dh: Tensor
    dweight: Tensor
    dbias: Tensor
    unscale: Tensor


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and losses for logits of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def accumulator_dtype(weight: torch.dtype, accum_dtype: str, chunks: int) -> torch.dtype:
    """The dtype of the buffer that dweight is accumulated in over `chunks` chunks."""
    wide = accum_dtype == "float32" or (accum_dtype == "auto" and chunks > MAX_CHUNKS_IN_PARAM_DTYPE)
    return torch.promote_types(weight, torch.float32) if wide else weight


def accumulate_path(
    device_type: str, capability: tuple[int, int] | None, operand: torch.dtype, destination: torch.dtype
) -> str:
    """How `destination += slab.T @ h` is computed.

    | device | operands | destination | path |
    |---|---|---|---|
    | CUDA | fp32, fp64 | the same | direct |
    | CUDA, capability >= 8.0 | fp16, bf16 | the same | direct |
    | CUDA, capability >= 8.0 | fp16, bf16 | fp32 | out_dtype |
    | others | any | the same | direct where the library accumulates in place (CPU), else fallback |
    | any | other combinations | | fallback |

    direct: one GEMM that adds into the destination. out_dtype: the same with 16-bit operands and a float32
    destination. fallback: through a scratch buffer of a bounded size, never one of the destination's.
    """
    sixteen_bit = operand in (torch.float16, torch.bfloat16)
    if device_type == "cpu":
        return "direct" if operand == destination else "fallback"
    if device_type != "cuda" or capability is None or (sixteen_bit and capability < (8, 0)):
        return "fallback"
    if operand == destination:
        return "direct"
    return "out_dtype" if sixteen_bit and destination == torch.float32 else "fallback"


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def accumulate_(dweight: Tensor, slab: Tensor, h: Tensor, first: bool, path: str) -> None:
    """dweight [V, H] = slab.T @ h when first, else += ; slab [C, V], h [C, H]."""
    if path == "direct":
        # beta=0 reads nothing, so the first chunk needs no zeroed destination
        dweight.addmm_(slab.t(), h, beta=0 if first else 1)
    elif path == "out_dtype":
        if first:
            torch.mm(slab.t(), h, out_dtype=dweight.dtype, out=dweight)
        else:
            torch.addmm(dweight, slab.t(), h, out_dtype=dweight.dtype, out=dweight)
    else:
        step = max(1, _SCRATCH_BYTES // (slab.dtype.itemsize * h.shape[1]))
        for block, columns in zip(dweight.split(step), slab.split(step, dim=1), strict=True):
            part = columns.t() @ h
            block.copy_(part) if first else block.add_(part)


def _vocabulary_parts(V: int, dtype: torch.dtype, device: torch.device) -> list[slice]:
    """The columns as one part, or as an aligned part and a tail where a GEMM over all of them would be slow."""
    aligned = V // _ALIGN * _ALIGN
    if device.type == "cuda" and dtype.itemsize == 2 and 0 < aligned < V:
        return [slice(0, aligned), slice(aligned, V)]
    return [slice(0, V)]


def _check_labels(target: Tensor, V: int, ignore_index: int) -> None:
    """Fail as eager does for a label outside [0, V) that isn't ignore_index."""
    bad = (target != ignore_index) & ((target < 0) | (target >= V))
    if target.device.type == "cpu":
        if bad.any():
            label = int(target[bad][0])
            raise IndexError(f"Target {label} is out of bounds: labels must be in [0, {V}) or {ignore_index=}.")
    else:
        torch._assert_async(~bad.any(), f"a label is out of bounds: labels must be in [0, {V}) or {ignore_index=}")


def _fp16_scale(
    h: Tensor, weight: Tensor, valid: Tensor, g_nll: Tensor | None, g_lse: Tensor | None, sums: Tensor | None
) -> Tensor:
    """A power of two [] for the cotangents that uses float16's range without overflow in dlogits, dh or dweight.

    float16 gradients underflow where a GradScaler would have lifted them, because the factor that arrives with the
    backward is unknown when they are computed. With G = sum |g| over the rows: |dweight| <= G max|h|, |dbias| <= G,
    |dh| <= 2 max|g| max|weight|. sums: what G is multiplied by in the sums over rows that are held in float16, if any.
    """
    g = torch.zeros_like(valid, dtype=torch.float32)
    if g_nll is not None:
        g = g + g_nll.abs().where(valid, 0.0)
    if g_lse is not None:
        g = g + g_lse.abs()
    g = g.nan_to_num(posinf=0.0)  # a row that is lost already doesn't choose the scale of the others
    most = g.max() if g.numel() else g.sum()
    bound = 2 * most * _largest(weight)
    if sums is not None:
        bound = torch.maximum(bound, g.sum() * sums)
    exponent = torch.log2(_FP16_LIMIT / bound.clamp(min=2.0**-60)).floor().clamp(-24.0, 24.0)
    return torch.where(bound > 0, torch.exp2(exponent), torch.ones_like(bound))


def _largest(x: Tensor) -> Tensor:
    """max(|x|, 1) [] in float32, of the finite ones."""
    if x.numel() == 0:
        return x.new_ones((), dtype=torch.float32)
    norm = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    return norm.nan_to_num(posinf=1.0).clamp(min=1.0)


def scaled(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """x * factor, multiplied in factor's dtype (float32) and rounded once; factor [] stays on the device."""
    if x.dtype == factor.dtype:
        return torch.mul(x, factor, out=out)
    # torch would round the factor to x's dtype first, so widen x, a bounded part of it at a time
    out = torch.empty_like(x) if out is None else out
    step = max(1, _SCRATCH_BYTES // (factor.dtype.itemsize * max(1, x[:1].numel())))
    for source, destination in zip(x.split(step), out.split(step), strict=True):
        destination.copy_(source.to(factor.dtype).mul_(factor))
    return out


def check_shapes(h: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Raise the errors that eager's linear and cross_entropy give for shapes and dtypes that don't fit."""
    torch._check(h.dim() == 2 and weight.dim() == 2, lambda: "expected hidden states [N, H] and a weight [V, H]")
    torch._check(
        h.shape[1] == weight.shape[1],
        lambda: f"mat1 and mat2 shapes cannot be multiplied ({tuple(h.shape)} and {tuple(weight.shape[::-1])})",
    )
    torch._check(
        target.dim() == 1 and h.shape[0] == target.shape[0],
        lambda: f"Expected input batch_size ({h.shape[0]}) to match target batch_size ({tuple(target.shape)}).",
    )
    torch._check(target.dtype == torch.int64, lambda: f"expected a target of dtype int64, got {target.dtype}")
    if bias is not None:
        torch._check(bias.shape == (weight.shape[0],), lambda: f"expected a bias [V], got {tuple(bias.shape)}")


def run(
    h: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [N] int64
    bias: Tensor | None,  # [V]
    *,
    ignore_index: int,
    chunk_size: int,
    accum_dtype: str = "auto",
    saved: tuple[Tensor, Tensor] | None = None,  # max, logsum, each [N]: known, so nll isn't computed again
    g_nll: Tensor | None = None,  # [N] cotangent of nll
    g_lse: Tensor | None = None,  # [N] cotangent of lse
    needs: Needs = NOTHING,
) -> tuple[Statistics | None, Gradients]:
    """Row statistics (unless saved), and the gradients that are needed for the given cotangents of each row.

    Logits are rounded to h's dtype, as linear rounds them; a weight or bias of another dtype is cast to it once, and
    its gradient is returned in its own dtype.
    """
    check_shapes(h, weight, target, bias)
    with torch.autocast(h.device.type, enabled=False):
        return _rows_major(h, weight, target, bias, ignore_index, chunk_size, accum_dtype, saved, g_nll, g_lse, needs)


def _rows_major(h, weight, target, bias, ignore_index, chunk_size, accum_dtype, saved, g_nll, g_lse, needs):
    N, V, dtype, device = h.shape[0], weight.shape[0], h.dtype, h.device
    rows = max(1, min(chunk_size, N))
    stats = stat_dtype(dtype)
    grad = any(needs)
    _check_labels(target, V, ignore_index)

    h = h if h.stride(-1) == 1 else h.contiguous()
    w = weight.to(dtype)
    w = w if 1 in w.stride() else w.contiguous()
    b = None if bias is None else bias.to(dtype)
    g_nll, g_lse = (None if g is None else g.to(stats).contiguous() for g in (g_nll, g_lse))

    if saved is None:
        nll, max_, logsum = (torch.empty(N, dtype=stats, device=device) for _ in range(3))
    else:
        nll, (max_, logsum) = None, saved
    dh = torch.empty(h.shape if needs.dh else 0, dtype=dtype, device=device)
    accumulator = accumulator_dtype(weight.dtype, accum_dtype, -(-N // rows))
    dweight = torch.empty_like(weight, dtype=accumulator) if needs.dweight else weight.new_empty(0)
    dbias = torch.zeros(V if needs.dbias else 0, dtype=stats, device=device)
    path = accumulate_path(device.type, _capability(device), dtype, accumulator)
    scale = None
    if grad and dtype == torch.float16:
        sums = None
        if needs.dweight and not (path == "out_dtype" and weight.dtype == torch.float32):
            sums = _largest(h)
        elif needs.dbias and bias.dtype == dtype:
            sums = torch.ones((), device=device)
        scale = _fp16_scale(h, w, target != ignore_index, g_nll, g_lse, sums)

    parts = _vocabulary_parts(V, dtype, device)
    slab_rows = torch.empty(rows if N else 0, -(-V // _PAD) * _PAD, dtype=dtype, device=device)
    for lo in range(0, N, rows):
        chunk = slice(lo, min(lo + rows, N))
        slab = slab_rows[: chunk.stop - lo, :V]
        for part in parts:
            if b is None:
                torch.mm(h[chunk], w[part].t(), out=slab[:, part])
            else:
                torch.addmm(b[part], h[chunk], w[part].t(), out=slab[:, part])
        kernels.rows_(
            slab,
            target[chunk],
            kernels.select(kernels.Statistics(nll, max_, logsum), chunk),
            kernels.select(kernels.Cotangents(g_nll, g_lse), chunk),
            ignore_index,
            stats=saved is None,
            grad=grad,
            scale=scale,
        )
        if needs.dh:
            for part in parts:
                dh[chunk].addmm_(slab[:, part], w[part], beta=0 if part.start == 0 else 1)
        if needs.dweight:
            for part in parts:
                accumulate_(dweight[part], slab[:, part], h[chunk], lo == 0, path)
        if needs.dbias:
            dbias += slab.sum(0, dtype=stats)
    if N == 0:
        dweight.zero_()

    unscale = torch.ones((), dtype=stats, device=device) if scale is None else 1.0 / scale
    gradients = Gradients(dh, dweight.to(weight.dtype), dbias if bias is None else dbias.to(bias.dtype), unscale)
    return (None if nll is None else Statistics(nll, max_, logsum)), gradients
