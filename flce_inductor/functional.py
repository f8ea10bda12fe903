"""linear_cross_entropy for explicit use, in eager and in compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

from . import chunking, config, ops, runtime

_REDUCTIONS = ("mean", "sum", "none")


class _Reduced(torch.autograd.Function):
    """sum_n nll[n] / divisor, with its gradients computed in the forward: 6 NVH in all."""

    @staticmethod
    def forward(ctx, h, weight, target, bias, divisor, ignore_index, chunk_size, accum_dtype, needs):
        # divisor is 0 where no label counts; the op takes no cotangent at ignored rows, so the gradients are 0
        g_nll = torch.ones(h.shape[0], dtype=divisor.dtype, device=h.device) / divisor
        nll, _, _, *grads, unscale = torch.ops.flce_inductor.row_stats_with_grads(
            h, weight, target, bias, g_nll, None, ignore_index, chunk_size, accum_dtype, needs
        )
        ctx.needs = needs
        ctx.save_for_backward(*grads, unscale)
        return nll.sum() / divisor

    @staticmethod
    def backward(ctx, grad_output):
        *grads, unscale = ctx.saved_tensors
        factor = grad_output * unscale
        dh, dweight, dbias = (
            runtime.scaled(grad, factor) if need else None for grad, need in zip(grads, ctx.needs, strict=True)
        )
        if torch.is_grad_enabled():
            dh, dweight, dbias = ops.forbid_second_derivative(dh, dweight, dbias)
        return dh, dweight, None, dbias, None, None, None, None, None


def _not_yet(**arguments: bool) -> None:
    for name, used in arguments.items():
        if used:
            raise NotImplementedError(f"flce_inductor.linear_cross_entropy: {name} is not supported yet")


def linear_cross_entropy(
    input: Tensor,  # [..., H]
    linear_weight: Tensor,  # [V, H]
    target: Tensor,  # [...] int64
    *,
    linear_bias: Tensor | None = None,  # [V]
    weight: Tensor | None = None,  # [V]
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    chunk_size: int | None = None,
    accum_dtype: str | None = None,
    loss_dtype: torch.dtype | None = None,
    in_place_backward: bool = False,
) -> Tensor:
    """cross_entropy(linear(input, linear_weight, linear_bias), target) without the logits.

    The names are those of torch.nn.functional.linear_cross_entropy (torch 2.13); the loss and its gradients equal
    those of ``F.cross_entropy(F.linear(input, linear_weight, linear_bias).flatten(0, -2), target.flatten())`` up to
    rounding. Under autocast the input and the weight are cast as linear casts them.

    Args:
        input: [..., H] hidden states, floating.
        linear_weight: [V, H]; its gradient has its dtype.
        target: [...] int64 labels in [0, V), or ignore_index.
        linear_bias: [V].
        reduction: "mean" over the labels that count, "sum", or "none" (a loss per label, 0 where ignored).
        ignore_index: the label that counts nothing.
        chunk_size: rows per chunk, exactly (clamped to N); None: flce_inductor.chunk_size, or else chosen for the
            device.
        accum_dtype: "param", "float32" or "auto"; None: flce_inductor.accum_dtype.
        loss_dtype: dtype of the result; None: that of the reference, float32 asks for all the precision there is.
        weight, label_smoothing, z_loss, softcap, logit_scale, in_place_backward: not supported yet.

    Returns: a scalar, or a tensor of target's shape for "none".

    Raises:
        ValueError: a reduction, chunk_size or accum_dtype that is not allowed.
        RuntimeError: shapes or dtypes that don't fit, as from linear and cross_entropy; a second derivative.
        IndexError: a label out of range (on CUDA an asynchronous device assertion).
        NotImplementedError: an argument that is not supported yet.
    """
    _not_yet(
        weight=weight is not None,
        label_smoothing=label_smoothing != 0,
        z_loss=z_loss != 0,
        softcap=softcap is not None,
        logit_scale=isinstance(logit_scale, Tensor) or logit_scale != 1,
        in_place_backward=in_place_backward,
    )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction!r} is not a valid value for reduction: allowed are {', '.join(_REDUCTIONS)}")
    settings = config.current()
    config.check_count(chunk_size, "chunk_size")
    accum_dtype = settings.accum_dtype if accum_dtype is None else accum_dtype
    config.check_accum_dtype(accum_dtype, "accum_dtype")

    device_type = input.device.type
    autocast = torch.is_autocast_enabled(device_type)
    if autocast and input.dtype != torch.float64:
        input = input.to(torch.get_autocast_dtype(device_type))
    ops.check_dtypes(input.dtype, linear_weight.dtype, None if linear_bias is None else linear_bias.dtype)
    loss_dtype = loss_dtype or (torch.float32 if autocast else input.dtype)

    h, labels = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    rows = chunking.rows_per_chunk(
        linear_weight.shape[0],
        h.dtype,
        h.device,
        chunk_size=settings.chunk_size if chunk_size is None else chunk_size,
        max_slab_bytes=settings.max_slab_bytes,
    )
    if reduction == "none":
        nll, _, _ = torch.ops.flce_inductor.row_stats(
            h, linear_weight, labels, linear_bias, ignore_index, rows, accum_dtype
        )
        return nll.reshape(target.shape).to(loss_dtype)
    count = (labels != ignore_index).sum() if reduction == "mean" else torch.ones((), device=h.device)
    divisor = count.to(runtime.stat_dtype(h.dtype))
    grad = torch.is_grad_enabled()
    needs = [grad and x is not None and x.requires_grad for x in (h, linear_weight, linear_bias)]
    if any(needs):
        loss = _Reduced.apply(h, linear_weight, labels, linear_bias, divisor, ignore_index, rows, accum_dtype, needs)
    else:
        nll, _, _ = torch.ops.flce_inductor.row_stats(
            h, linear_weight, labels, linear_bias, ignore_index, rows, accum_dtype
        )
        loss = nll.sum() / divisor
    return loss.to(loss_dtype)
