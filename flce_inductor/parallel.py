"""Cross entropy of a head that is sharded over the vocabulary: each rank holds [V / ranks, H] of the weight.

The statistics of a row are reductions over v, so those of all V classes follow from each shard's, and they are the only
thing that ranks tell each other about the logits: with m_r, s_r = max, logsum of shard r, and z_t from the one shard
that has the label,

    max = max_r m_r        logsum = log sum_r exp(m_r - max + s_r)        nll = logsum - (z_t - max)

is one all-reduce of [N] maxima and one of a few sums [N]. The gradient of a shard's logits is the formula of ops.py
with these statistics, for the columns that the rank has. A shard has dweight of its own rows and a part of dh, which
`summed_gradient` adds up.

A label of another shard is NO_COLUMN to this one: no column's number, whatever the user's ignore_index is.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from . import _compat, runtime
from .kernels import Cotangents, Statistics
from .ops import _autograd, _fake, _fake_grads, _how, _no_second_derivative, _op
from .runtime import Needs, Want, stat_dtype

NO_COLUMN = -1


@dataclasses.dataclass(frozen=True)
class Shard:
    """The rows [start, start + size) of a weight [V, H] that this rank has.

    width: rows of the largest shard, which all ranks choose the chunks by. group: the name of the process group.
    """

    start: int
    size: int
    width: int
    V: int
    group: str

    def local(self, x: Tensor | None) -> Tensor | None:
        """This rank's part of x [V]."""
        return None if x is None else x[self.start : self.start + self.size]


# ---------------------------------------------------------------- what the user gives


def is_dtensor(x: Tensor | None) -> bool:
    """Whether x is a DTensor, without importing what defines it."""
    return x is not None and hasattr(x, "placements")


def unwrap(
    input: Tensor,  # [..., H]
    weight: Tensor,  # [V / ranks, H], or a DTensor [V, H]
    bias: Tensor | None,  # alike
    target: Tensor,  # [...]
    group: dist.ProcessGroup | None,
    vocab_size: int | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Shard]:
    """The plain tensors of this rank and its shard; ValueError for what isn't sharded over the vocabulary."""
    if is_dtensor(weight):
        group = _group_of(weight, input, group)
        if vocab_size is not None:
            raise ValueError("linear_cross_entropy: vocab_size is for a plain weight; a DTensor knows its size")
        V, ranks = weight.shape[0], dist.get_world_size(group)
        width = -(-V // ranks)
        if is_dtensor(bias) and tuple(bias.placements) != tuple(weight.placements):
            raise ValueError(f"linear_cross_entropy: the weight is {weight.placements}, its bias {bias.placements}")
        weight, bias = weight.to_local(), bias.to_local() if is_dtensor(bias) else bias
    else:
        if group is None:
            raise ValueError("linear_cross_entropy: DTensor arguments need a linear_weight that is a DTensor")
        width, ranks = weight.shape[0], dist.get_world_size(group)
        V = width * ranks if vocab_size is None else vocab_size
        if not 0 < V <= width * ranks:
            raise ValueError(f"linear_cross_entropy: {vocab_size=}, but {ranks} ranks have {width} rows of weight each")
    start = min(V, dist.get_rank(group) * width)
    size = min(V, start + width) - start
    if size < weight.shape[0]:  # padding takes no part
        weight, bias = weight[:size], None if bias is None else bias[:size]
    if weight.shape[0] != size:
        raise ValueError(f"linear_cross_entropy: a shard of {weight.shape[0]} rows, expected {size} of {V}")
    return whole(input), weight, bias, whole(target), Shard(start, size, width, V, group.group_name)


def _group_of(weight: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The process group that a DTensor weight is sharded over."""
    from torch.distributed.tensor import Shard as ShardPlacement

    mesh, placements = weight.device_mesh, tuple(weight.placements)
    if mesh.ndim != 1 or placements != (ShardPlacement(0),):
        raise ValueError(
            f"linear_cross_entropy: a DTensor weight must be sharded over the vocabulary, Shard(0) on a mesh of one "
            f"dimension, and is {placements} on one of {mesh.ndim}"
        )
    own = mesh.get_group()
    if group is not None and group.group_name != own.group_name:
        raise ValueError("linear_cross_entropy: process_group is not the one that the DTensor weight is sharded over")
    if group is None and not is_dtensor(input):
        raise ValueError(
            "linear_cross_entropy: a DTensor weight and plain hidden states. If each rank has all of the hidden "
            "states (tensor parallel), pass process_group=linear_weight.device_mesh.get_group(). If each rank has "
            "its own and the weight is one of fully_shard, compute the loss inside a module that fully_shard wraps."
        )
    return own


def whole(x: Tensor) -> Tensor:
    """All of x on each rank; its gradient is the same on each."""
    if not is_dtensor(x):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate()]).to_local()


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _compat.all_reduced(grad, "sum", ctx.group), None


def summed_gradient(x: Tensor, shard: Shard) -> Tensor:
    """x, which is the same on each rank and of which each computes a part of the gradient: the backward adds them."""
    return _SummedGradient.apply(x, shard.group)


# ---------------------------------------------------------------- statistics over the shards


def _labels(target: Tensor, ignore_index: int, start: int, size: int, V: int) -> tuple[Tensor, Tensor]:
    """Each label as this shard's column or NO_COLUMN, and whether another shard has it."""
    runtime.check_labels(target, V, ignore_index)
    valid = target != ignore_index
    mine = valid & (target >= start) & (target < start + size)
    return torch.where(mine, target - start, NO_COLUMN), valid & ~mine


def _reduce_(stats: Statistics, target: Tensor, foreign: Tensor, group: dist.ProcessGroup) -> None:
    """Make a shard's statistics of some rows those of all V classes, in place; target: as columns of the shard."""
    largest = stats.max.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    lse = stats.max - largest + stats.logsum
    # of a shard of nothing but -inf, nll is the difference of two infinities
    label = torch.where(lse == -torch.inf, lse, lse - stats.nll)
    sums = [torch.exp(lse), torch.where(target == NO_COLUMN, 0.0, label)]
    sums = torch.stack(sums if stats.zsum is None else [*sums, stats.zsum])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    stats.max.copy_(largest)
    torch.log(sums[0], out=stats.logsum)
    stats.nll.copy_(torch.where((target != NO_COLUMN) | foreign, stats.logsum - sums[1], 0.0))
    if stats.zsum is not None:
        stats.zsum.copy_(sums[2])


def _of_no_column(h: Tensor, zsum: bool) -> Statistics:
    """The statistics of an empty shard."""
    nll = h.new_zeros(h.shape[0], dtype=stat_dtype(h.dtype))
    lowest = torch.full_like(nll, torch.finfo(nll.dtype).min)
    return Statistics(nll, lowest, torch.full_like(nll, -torch.inf), torch.zeros_like(nll) if zsum else None)


def _cotangents(
    g_nll: Tensor | None, g_lse: Tensor | None, g_zsum: Tensor | None, foreign: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    """Those of the rows of a shard: a label elsewhere makes nll the row's lse here, up to a constant."""
    if g_nll is not None:
        through = torch.where(foreign, g_nll, 0.0)
        g_lse = through if g_lse is None else g_lse + through
    return g_nll, g_lse, g_zsum, None


_SHARDED = (
    "Tensor h, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, int start, int V, str group,"
    " int ignore_index, int chunk_size, str accum_dtype, str function, float scale, float shift, float cap"
)


@_op("sharded_row_stats", f"({_SHARDED}, bool want_zsum) -> (Tensor nll, Tensor max, Tensor logsum, Tensor zsum)")
def sharded_row_stats(h, weight, target, bias, class_weight, start, V, group, ignore_index, *rest):
    """row_stats of a weight [V, H] of which each rank of the group has some rows, this one those from `start` on.

    h [N, H] and target [N] are the same on each rank, and so are the results. class_weight: of this rank's classes.
    """
    *how, want_zsum = rest
    columns, foreign = _labels(target, ignore_index, start, weight.shape[0], V)
    stats = _of_no_column(h, want_zsum)
    if weight.shape[0]:
        how = _how(NO_COLUMN, *how)
        stats, _ = runtime.run(h, weight, columns, bias, class_weight, how, want=Want(zsum=want_zsum))
    _reduce_(stats, columns, foreign, _compat.process_group(group))
    return *stats[:3], stats.zsum if want_zsum else h.new_empty(0, dtype=stats.nll.dtype)


@_op(
    "sharded_row_stats_backward",
    f"({_SHARDED}, Tensor max, Tensor logsum, Tensor? g_nll, Tensor? g_lse, Tensor? g_zsum, bool[3] needs)"
    " -> (Tensor dh, Tensor dweight, Tensor dbias)",
)
def sharded_row_stats_backward(h, weight, target, bias, class_weight, start, V, group, ignore_index, *rest):
    """This rank's part of dh, and dweight, dbias of its shard."""
    *how, max, logsum, g_nll, g_lse, g_zsum, needs = rest
    needs = Needs(*needs)
    if not weight.shape[0]:
        return _no_gradients(h, weight, bias, needs)
    columns, foreign = _labels(target, ignore_index, start, weight.shape[0], V)
    _, grads = runtime.run(
        h,
        weight,
        columns,
        bias,
        class_weight,
        _how(NO_COLUMN, *how),
        saved=Statistics(None, max, logsum),
        cotangents=Cotangents(*_cotangents(g_nll, g_lse, g_zsum, foreign)),
        needs=needs,
    )
    return tuple(grads[:3])


@_op(
    "sharded_row_stats_with_grads",
    f"({_SHARDED}, Tensor g_nll, Tensor? g_lse, Tensor? g_zsum, Tensor? g_square, bool want_zsum, bool[3] needs)"
    " -> (Tensor nll, Tensor max, Tensor logsum, Tensor zsum, Tensor dh, Tensor dweight, Tensor dbias)",
)
def sharded_row_stats_with_grads(h, weight, target, bias, class_weight, start, V, group, ignore_index, *rest):
    """sharded_row_stats, and what sharded_row_stats_backward gives for cotangents known up front, in one loop.

    g_square: the cotangent of lse^2. The ranks must be given one chunk_size: they reduce each chunk's statistics.
    """
    *how, g_nll, g_lse, g_zsum, g_square, want_zsum, needs = rest
    columns, foreign = _labels(target, ignore_index, start, weight.shape[0], V)
    ranks, needs = _compat.process_group(group), Needs(*needs)
    given = {"nll": g_nll, "lse": g_lse, "zsum": g_zsum, "square": g_square}
    row_inputs = {"columns": columns, "foreign": foreign} | {k: g for k, g in given.items() if g is not None}

    def reduce(stats: Statistics, inputs: list[Tensor]) -> Cotangents:
        x = dict(zip(row_inputs, inputs, strict=True))
        _reduce_(stats, x["columns"], x["foreign"], ranks)
        g_lse = x.get("lse")
        if "square" in x:
            of_square = 2 * (stats.max + stats.logsum) * x["square"]
            g_lse = of_square if g_lse is None else g_lse + of_square
        return Cotangents(*_cotangents(x["nll"], g_lse, x.get("zsum"), x["foreign"]))

    if weight.shape[0]:
        stats, grads = runtime.run(
            h,
            weight,
            columns,
            bias,
            class_weight,
            _how(NO_COLUMN, *how),
            want=Want(zsum=want_zsum),
            program=reduce,
            row_inputs=list(row_inputs.values()),
            needs=needs,
        )
        grads = grads[:3]
    else:  # the others wait for this rank at each of their chunks
        stats, grads = _of_no_column(h, want_zsum), _no_gradients(h, weight, bias, needs)
        rows = max(1, min(how[0], h.shape[0]))
        for lo in range(0, h.shape[0], rows):
            part = slice(lo, lo + rows)
            chunk = Statistics(*(None if x is None else x[part] for x in stats))
            _reduce_(chunk, columns[part], foreign[part], ranks)
    return *stats[:3], stats.zsum if want_zsum else h.new_empty(0, dtype=stats.nll.dtype), *grads


def _no_gradients(h: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs) -> tuple[Tensor, Tensor, Tensor]:
    dh = torch.zeros_like(h) if needs.dh else h.new_empty(0)
    return dh, torch.empty_like(weight), h.new_empty(0) if bias is None else torch.empty_like(bias)


def _fake_stats(h: Tensor, want_zsum: bool) -> list[Tensor]:
    return [h.new_empty(h.shape[0] if wanted else 0, dtype=stat_dtype(h.dtype)) for wanted in (1, 1, 1, want_zsum)]


@_fake("sharded_row_stats")
def _(h, weight, target, bias, class_weight, *rest):
    runtime.check_shapes(h, weight, target, bias, class_weight)
    return tuple(_fake_stats(h, rest[-1]))


@_fake("sharded_row_stats_backward")
def _(h, weight, target, bias, *rest):
    return _fake_grads(h, weight, bias, rest[-1])


@_fake("sharded_row_stats_with_grads")
def _(h, weight, target, bias, class_weight, *rest):
    runtime.check_shapes(h, weight, target, bias, class_weight)
    *_, want_zsum, needs = rest
    return (*_fake_stats(h, want_zsum), *_fake_grads(h, weight, bias, needs))


def _save(ctx, inputs, output):
    *_, max, logsum, _ = output
    *ctx.how, _ = inputs[5:]
    ctx.mark_non_differentiable(max)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], max, logsum)


def _backward(ctx, g_nll, g_max, g_lse, g_zsum):
    nothing = (None,) * len(ctx.needs_input_grad)
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    if all(g is None for g in (g_nll, g_lse, g_zsum)) or not any(needs):
        return nothing
    *head, max, logsum = ctx.saved_tensors
    grads = torch.ops.flce_inductor.sharded_row_stats_backward(
        *head, *ctx.how, max, logsum, g_nll, g_lse, g_zsum, needs
    )
    dh, dweight, dbias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dh, dweight, None, dbias, *nothing[4:]


_autograd("sharded_row_stats", _backward, setup_context=_save)
_autograd("sharded_row_stats_backward", _no_second_derivative)
_autograd("sharded_row_stats_with_grads", _no_second_derivative)
