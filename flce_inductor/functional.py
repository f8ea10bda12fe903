"""linear_cross_entropy and cross_entropy for explicit use, in eager and in compiled code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _compat, chunking, config, kernels, ops, parallel, runtime
from .kernels import Cotangents, Epilogue, Statistics
from .losses import REDUCTIONS, Loss
from .runtime import RowProgram

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _z_program(smoothing: bool) -> str:
    """g_lse = [g_lse +] 2 lse * square, for row inputs [g_nll, square] or, with label smoothing, also g_lse, g_zsum."""
    g_nll, square, g_lse, g_zsum = range(len(runtime.ROW_STATISTICS), len(runtime.ROW_STATISTICS) + 4)
    lse = g_zsum + 1 if smoothing else square + 1  # the first step's register
    steps = [["add", ["r", 1], ["r", 2]], ["mul", ["r", lse], ["r", square]], ["mul", ["r", lse + 1], 2]]
    if smoothing:
        steps.append(["add", ["r", lse + 2], ["r", g_lse]])
    return RowProgram(steps, [g_nll, lse + len(steps) - 1, g_zsum if smoothing else None, None]).text()


_Z_PROGRAMS = {smoothing: _z_program(smoothing) for smoothing in (False, True)}  # Dynamo can't trace json


class _OnePass(torch.autograd.Function):
    """A "mean" or "sum" whose gradients are computed in the forward: 6 NVH in all."""

    @staticmethod
    def forward(ctx, h, weight, target, bias, class_weight, loss, how, needs, in_place, shard):
        stats_dtype, smoothing = runtime.stat_dtype(h.dtype), loss.label_smoothing != 0
        V = weight.shape[0] if shard is None else shard.V
        *known, square = loss.cotangents(target, class_weight, V, stats_dtype)
        if shard is None:
            program, row_inputs, given = "", [], [*known, None]
            if square is not None:
                row_inputs = [g for g in (known[0], square, *known[1:]) if g is not None]
                program, given = _Z_PROGRAMS[smoothing], [None] * 4
            want, last = [smoothing, False, False], []
            if square is None and not any(g is not None for g in known[1:]):
                counted = _counted(target, loss.ignore_index)
                last = [] if counted is None else [*runtime.Plan(), counted]
            nll, top, logsum, zsum, _, _, *grads, unscale = torch.ops.flce_inductor.row_stats_with_grads(
                h, weight, target, bias, class_weight, *given, row_inputs, program, *how, want, needs, *last
            )
        else:
            where = (shard.local(class_weight), shard.start, V, shard.group)
            nll, top, logsum, zsum, *grads = torch.ops.flce_inductor.sharded_row_stats_with_grads(
                h, weight, target, bias, *where, *how, *known, square, smoothing, needs
            )
            unscale = torch.ones((), dtype=stats_dtype, device=h.device)
        ctx.needs, ctx.in_place, ctx.used = needs, in_place, False
        ctx.save_for_backward(*grads, unscale)
        return loss(nll, top + logsum, zsum, target, class_weight, V)

    @staticmethod
    def backward(ctx, grad_output):
        if ctx.in_place:
            _use_once(ctx)
        *grads, unscale = ctx.saved_tensors
        factor = grad_output * unscale
        if ctx.in_place:
            for grad in grads:
                kernels.scale_(grad, factor)
        else:
            grads = [runtime.scaled(grad, factor) for grad in grads]
        dh, dweight, dbias = (grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
        if torch.is_grad_enabled():
            dh, dweight, dbias = ops.forbid_second_derivative(dh, dweight, dbias)
        return dh, dweight, None, dbias, None, None, None, None, None, None


def _counted(target: Tensor, ignore_index: int) -> Tensor | None:
    """How many labels count, if the key skip_ignored has those that don't left out here: see runtime.run."""
    setting = config.current().skip_ignored
    if setting is False or torch.compiler.is_compiling():  # a graph is hoist.py's
        return None
    if target.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return (target != ignore_index).sum() if setting is True else None
    # on a GPU the host waits for its number
    return runtime.count_rows(target, ignore_index) if setting is True or target.device.type == "cpu" else None


def _use_once(ctx) -> None:
    if ctx.used:
        raise RuntimeError(
            "flce_inductor: the second backward through a loss that was computed with in_place_backward=True, whose "
            "first backward has overwritten what it saved. Pass in_place_backward=False to use retain_graph=True."
        )
    ctx.used = True


class _Once(torch.autograd.Function):
    """Identity whose backward may run once."""

    @staticmethod
    def forward(ctx, x):
        ctx.used = False
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        _use_once(ctx)
        return grad_output


class _OverLogits(torch.autograd.Function):
    """Row statistics nll, lse, zsum [N] of logits [N, V] that exist."""

    @staticmethod
    def forward(ctx, logits, target, class_weight, ignore_index, epilogue, smoothing, in_place):
        N = logits.shape[0]
        runtime.check_labels(target, logits.shape[1], ignore_index)

        def vector() -> Tensor:
            return torch.empty(N, dtype=runtime.stat_dtype(logits.dtype), device=logits.device)

        stats = Statistics(vector(), vector(), vector(), vector() if smoothing else None, None, None)
        how = dict(ignore_index=ignore_index, epilogue=epilogue)
        kernels.rows_(logits, target, stats, None, stats=True, grad=False, class_weight=class_weight, **how)
        ctx.how, ctx.in_place, ctx.used = how, in_place, False
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, target, class_weight, stats.max, stats.logsum)
        return stats.nll, stats.max + stats.logsum, stats.zsum

    @staticmethod
    def backward(ctx, g_nll, g_lse, g_zsum):
        if ctx.in_place:
            _use_once(ctx)
        logits, target, class_weight, top, logsum = ctx.saved_tensors
        out = None if ctx.in_place else torch.empty_like(logits)
        g = Cotangents(*(None if x is None else x.contiguous() for x in (g_nll, g_lse, g_zsum)), None)
        stats = Statistics(None, top, logsum, None, None, None)
        kernels.rows_(logits, target, stats, g, stats=False, grad=True, class_weight=class_weight, out=out, **ctx.how)
        if ctx.in_place:
            torch.autograd.graph.increment_version(logits)
            out = logits.detach()
        if torch.is_grad_enabled():
            (out,) = ops.forbid_second_derivative(out)
        return out, None, None, None, None, None, None


# Under torch.compile it runs between two graphs: there is no op of it that a graph could hold.
_over_logits = torch.compiler.disable(_OverLogits.apply, reason="flce_inductor.cross_entropy runs its kernel eagerly")


def linear_cross_entropy(
    input: Tensor,  # [..., H]
    linear_weight: Tensor,  # [V, H], or this rank's [V / ranks, H]
    target: Tensor,  # [...] int64
    *,
    linear_bias: Tensor | None = None,  # [V], or this rank's [V / ranks]
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
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """cross_entropy(softcap(logit_scale * linear(input, linear_weight, linear_bias)), target) without the logits.

    The names are those of torch.nn.functional.linear_cross_entropy (torch 2.13); the loss and its gradients equal
    those of ``F.cross_entropy(F.linear(input, linear_weight, linear_bias).flatten(0, -2), target.flatten(), ...)`` up
    to rounding. Under autocast the input and the weight are cast as linear casts them.

    Args:
        input: [..., H] hidden states, floating.
        linear_weight: [V, H]; its gradient has its dtype.
        target: [...] int64 labels in [0, V), or ignore_index.
        linear_bias: [V].
        weight: [V] factors of the classes, as cross_entropy's; they have no gradient.
        reduction: "mean" over the labels that count (weighted by weight), "sum", or "none" (a loss per label, 0 where
            ignored).
        ignore_index: the label that counts nothing.
        label_smoothing: in [0, 1], as cross_entropy's.
        z_loss: adds z_loss * logsumexp(logits)^2 to the loss of each label that counts ("mean" divides these by the
            number of those labels).
        softcap: logits become softcap * tanh(logits / softcap), after logit_scale.
        logit_scale: multiplies the logits; a tensor [] has a gradient (it is multiplied into input and linear_bias).
        chunk_size: rows per chunk, exactly (clamped to N); None: flce_inductor.chunk_size, or else chosen for the
            device.
        accum_dtype: "param", "float32" or "auto"; None: flce_inductor.accum_dtype.
        loss_dtype: dtype of the result; None: that of the reference, float32 asks for all the precision there is.
        in_place_backward: the backward of "mean" and "sum" scales the saved gradients in place: no second [V, H]. It
            can run once; a second one raises. Under torch.compile it has no effect: the compiler reuses what it may.
        process_group: the weight is sharded over the vocabulary: each rank of the group has [V / ranks, H] of it, in
            the order of the ranks, and as much of linear_bias; input, target and weight [V] are the same on each rank,
            and so are the loss and the gradient of input. A linear_weight that is a DTensor, Shard(0) on a mesh of one
            dimension, says its group itself, if input is a DTensor too (of any placement); with a plain input, which
            may as well be each rank's own, the group must be named. Shards of a DTensor may be of different sizes.
        vocab_size: V, where the shards of a plain linear_weight are padded to one size: columns from it on take no
            part.

    Returns: a scalar, or a tensor of target's shape for "none".

    Raises:
        ValueError: a reduction, label_smoothing, softcap, chunk_size or accum_dtype that is not allowed; a DTensor
            weight that is not sharded over the vocabulary, or over another group; a vocab_size that doesn't fit.
        RuntimeError: shapes or dtypes that don't fit, as from linear and cross_entropy; a second derivative; a
            derivative by torch.func; a second backward with in_place_backward.
        IndexError: a label out of range (on CUDA an asynchronous device assertion).
    """
    loss = _loss(reduction, ignore_index, label_smoothing, z_loss)
    # in compiled code nothing can count the backwards, and a second one would find overwritten gradients
    in_place = in_place_backward and not torch.compiler.is_compiling()
    settings = config.current()
    config.check_count(chunk_size, "chunk_size")
    accum_dtype = settings.accum_dtype if accum_dtype is None else accum_dtype
    config.check_accum_dtype(accum_dtype, "accum_dtype")

    shard = None
    if process_group is not None or any(map(parallel.is_dtensor, (input, linear_weight, linear_bias, target))):
        input, linear_weight, linear_bias, target, shard = parallel.unwrap(
            input, linear_weight, linear_bias, target, process_group, vocab_size
        )
    elif vocab_size is not None:
        raise ValueError("linear_cross_entropy: vocab_size is for a weight that is sharded over a process_group")
    V = linear_weight.shape[0] if shard is None else shard.V
    _check_transforms(input, linear_weight, linear_bias)
    _check_target(target, input.shape)
    weight = _class_weight(weight, V)
    if torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64:
        input = input.to(torch.get_autocast_dtype(input.device.type))
    if isinstance(logit_scale, Tensor):
        if logit_scale.numel() != 1:
            raise ValueError(f"linear_cross_entropy: logit_scale is one number, not a tensor {list(logit_scale.shape)}")
        logit_scale = logit_scale.reshape(())
        input = (input * logit_scale).to(input.dtype)
        if linear_bias is not None:
            factor = logit_scale if shard is None else parallel.summed_gradient(logit_scale, shard)
            linear_bias = (linear_bias * factor).to(linear_bias.dtype)
        logit_scale = 1.0
    if shard is not None:
        input = parallel.summed_gradient(input, shard)
    ops.check_dtypes(input.dtype, linear_weight.dtype, None if linear_bias is None else linear_bias.dtype)
    loss_dtype = loss_dtype or _loss_dtype(input)

    h, labels = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    rows = chunking.rows_per_chunk(
        V if shard is None else shard.width,
        h.dtype,
        h.device,
        chunk_size=settings.chunk_size if chunk_size is None else chunk_size,
        max_slab_bytes=settings.max_slab_bytes,
    )
    how = (ignore_index, rows, accum_dtype, *_epilogue(softcap, logit_scale))
    grad = torch.is_grad_enabled()
    needs = [grad and x is not None and x.requires_grad for x in (h, linear_weight, linear_bias)]
    # float16 can't choose its scale before it knows the cotangents, and those of the z-loss depend on the statistics
    small = chunk_size is None and settings.chunk_size is None and chunking.statistics_first(rows, h.dtype, h.device)
    fits = not small and not (h.dtype == torch.float16 and (z_loss or shard is not None))
    # torch.export, which takes no process groups, keeps the forward only, whose ops must then have the derivative
    exporting = _compat.is_exporting() and shard is None
    one_pass = fits and reduction != "none" and any(needs) and not exporting
    if one_pass:
        result = _OnePass.apply(h, linear_weight, labels, linear_bias, weight, loss, how, needs, in_place, shard)
    elif shard is not None:
        where = (shard.local(weight), shard.start, V, shard.group)
        nll, top, logsum, zsum = torch.ops.flce_inductor.sharded_row_stats(
            h, linear_weight, labels, linear_bias, *where, *how, label_smoothing != 0
        )
        result = loss(nll, top + logsum, zsum, labels, weight, V)
    else:
        want = [label_smoothing != 0, False, False]
        nll, top, logsum, zsum, _, _ = torch.ops.flce_inductor.row_stats(
            h, linear_weight, labels, linear_bias, weight, *how, want
        )
        result = loss(nll, top + logsum, zsum, labels, weight, V)
    if in_place and not one_pass:
        result = _Once.apply(result)
    return (result.reshape(target.shape) if reduction == "none" else result).to(loss_dtype)


def cross_entropy(
    logits: Tensor,  # [..., V]
    target: Tensor,  # [...] int64
    *,
    weight: Tensor | None = None,  # [V]
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    loss_dtype: torch.dtype | None = None,
    in_place_backward: bool = False,
) -> Tensor:
    """cross_entropy over logits that exist anyway: one pass over them forward, one backward.

    In compiled code it runs between two graphs (and fails with fullgraph=True).

    The arguments mean what they mean for linear_cross_entropy, but for:

    Args:
        logits: [..., V], floating.
        logit_scale: a number.
        in_place_backward: the backward writes the gradient over the logits: no [N, V] temporary. It can run once; a
            second one raises, and so does a later backward of anything else that needs the logits. Only on devices that
            have Triton.

    Returns: a scalar, or a tensor of target's shape for "none".

    Raises:
        ValueError: a reduction, label_smoothing or softcap that is not allowed; in_place_backward on a device without
            Triton.
        RuntimeError: shapes or dtypes that don't fit; a second derivative; a second backward with in_place_backward.
        IndexError: a label out of range (on CUDA an asynchronous device assertion).
    """
    loss = _loss(reduction, ignore_index, label_smoothing, z_loss)
    if in_place_backward and logits.device.type not in kernels.TRITON_DEVICES:
        raise ValueError(
            f"flce_inductor.cross_entropy: in_place_backward=True needs a device with Triton "
            f"({', '.join(kernels.TRITON_DEVICES)}), the logits are on {logits.device}; pass False"
        )
    if isinstance(logit_scale, Tensor):
        raise TypeError("flce_inductor.cross_entropy: logit_scale is a number here; multiply the logits by the tensor")
    V = logits.shape[-1]
    _check_transforms(logits)
    _check_target(target, logits.shape)
    if not logits.is_floating_point():
        raise RuntimeError(f"expected floating logits, got {logits.dtype}")
    weight = _class_weight(weight, V)
    flat, labels = logits.reshape(-1, V), target.reshape(-1)
    # rows that share memory (expanded logits) can't be overwritten by their gradients
    usable = flat.stride(-1) == 1 and not (in_place_backward and flat.stride(0) < V)
    nll, lse, zsum = _over_logits(
        flat if usable else flat.contiguous(),
        labels,
        None if weight is None else weight.to(runtime.stat_dtype(logits.dtype)).contiguous(),
        ignore_index,
        Epilogue(*_epilogue(softcap, logit_scale)),
        label_smoothing != 0,
        in_place_backward,
    )
    result = loss(nll, lse, zsum, labels, weight, V)
    loss_dtype = loss_dtype or _loss_dtype(logits)
    return (result.reshape(target.shape) if reduction == "none" else result).to(loss_dtype)


def _check_transforms(*tensors: Tensor | None) -> None:
    """Refuse torch.func's grad, vjp, jvp, ..; vmap goes through the ops one by one where no gradient is wanted."""
    if torch.compiler.is_compiling():
        return
    for x in tensors:
        while x is not None and torch._C._functorch.is_functorch_wrapped_tensor(x):
            if torch._C._functorch.is_gradtrackingtensor(x):
                raise RuntimeError(
                    "flce_inductor: torch.func's derivatives (grad, vjp, jvp, ..) don't go through the fused loss. Use "
                    "loss.backward() or torch.autograd.grad, or torch.nn.functional.cross_entropy inside the transform."
                )
            x = torch._C._functorch.get_unwrapped(x)


def _check_target(target: Tensor, shape: torch.Size) -> None:
    if target.shape != shape[:-1]:
        raise RuntimeError(f"Expected a target of shape {tuple(shape[:-1])}, got {tuple(target.shape)}")
    if target.dtype != torch.int64:
        raise RuntimeError(f"expected a target of dtype int64, got {target.dtype}")


def _class_weight(weight: Tensor | None, V: int) -> Tensor | None:
    if weight is not None and weight.shape != (V,):
        raise RuntimeError(f"expected a class weight [V], V = {V}, got {tuple(weight.shape)}")
    return None if weight is None else weight.detach()


def _loss_dtype(x: Tensor) -> torch.dtype:
    """That of F.cross_entropy over logits of x's dtype: autocast widens 16 bits and leaves float64 alone."""
    return torch.promote_types(x.dtype, torch.float32) if torch.is_autocast_enabled(x.device.type) else x.dtype


def _loss(reduction: str, ignore_index: int, label_smoothing: float, z_loss: float) -> Loss:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{reduction!r} is not a valid value for reduction: allowed are {', '.join(REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    return Loss(reduction, ignore_index, label_smoothing, z_loss)


def _epilogue(softcap: float | None, logit_scale: float) -> tuple[str, float, float, float]:
    """The fields of the Epilogue softcap * tanh(logit_scale / softcap * x), or logit_scale * x."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{softcap=}: allowed are None and a number above 0")
    if softcap is None:
        return "", float(logit_scale), 0.0, 1.0
    return "tanh", logit_scale / softcap, 0.0, float(softcap)
