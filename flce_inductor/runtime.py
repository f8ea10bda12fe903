"""The only chunk loop in the project, in two orders.

Rows-major, where the statistics aren't known yet:

    for each chunk of rows:
        slab  = h[rows] @ weight.T + bias        library GEMM, into the one C x V buffer
        rows kernel, in place                    statistics, then dlogits over the slab (kernels.py)
        dh[rows] = slab @ weight                 into the slice of dh
        dweight  (+)= slab.T @ h[rows]           in place: no [V, H] temporary, ever

Vocabulary-major, where they are (the backward of row_stats): each block of the vocabulary sees all rows at once, so
its part of dweight is one product, rounded once, and what accumulates is dh, which is small:

    for each block of columns:
        slab = h @ weight[columns].T + bias      N x Vb, as large as the slab above
        rows kernel, in place                    dlogits from the statistics
        dweight[columns] = slab.T @ h
        dh (+)= slab @ weight[columns]           in float32

Statistics alone come from chunks of rows, or, where those are small, from blocks of columns, put together at the end.

Nothing here waits for the device: counts, scales and the check of the labels stay on it.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .kernels import Cotangents, Epilogue, Statistics

MAX_CHUNKS_IN_PARAM_DTYPE = 16  # above it "auto" accumulates in float32: 2.7 x eager's rounding error at 16 chunks
_FP16_LIMIT = 2.0**15  # half of float16's largest number
_PAD = 64  # elements; the slab's leading dimension is a multiple of it
_MOST_BLOCKS = 64  # whose statistics are kept side by side: 12 bytes for a row each
_ALIGN = 8  # a 16-bit GEMM whose V is not a multiple of it runs 6 to 8 times slower


class Needs(NamedTuple):
    """Which gradients are wanted."""

    dh: bool
    dweight: bool
    dbias: bool


class Want(NamedTuple):
    """Which statistics are wanted beside nll, max and logsum."""

    zsum: bool = False
    pz: bool = False
    argmax: bool = False


class How(NamedTuple):
    """What isn't a tensor: see ops.py."""

    ignore_index: int
    chunk_size: int
    accum_dtype: str = "auto"
    epilogue: Epilogue = kernels.IDENTITY


class Plan(NamedTuple):
    """What changes the speed and not the result.

    vocabulary_major: the gradients are computed in a second pass over the logits; implied by saved statistics.
    accumulate: by "library" GEMMs, or by the "triton" kernel of templates/gemm.py.jinja where it can.
    """

    vocabulary_major: bool = False
    accumulate: str = "library"


class Gradients(NamedTuple):
    """dh [N, H], dweight [V, H], dbias [V], each empty when not needed, all to be multiplied by unscale []."""

    dh: Tensor
    dweight: Tensor
    dbias: Tensor
    unscale: Tensor


class Buffers(NamedTuple):
    """Where a caller wants results, and memory that it lends; None: allocated here."""

    stats: Statistics | None = None  # those wanted
    dh: Tensor | None = None  # [N, H]
    dweight: Tensor | None = None  # like weight; only where no wider accumulator is kept (see accumulator_dtype)
    slab: Tensor | None = None  # as large as slab_size says, in h's dtype


NO_GRADIENTS = Needs(False, False, False)
NOTHING_MORE = Want()


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and losses for logits of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------- dweight


def accumulator_dtype(weight: torch.dtype, accum_dtype: str, chunks: int) -> torch.dtype:
    """The precision that dweight is accumulated in over `chunks` chunks."""
    wide = accum_dtype == "float32" or (accum_dtype == "auto" and chunks > MAX_CHUNKS_IN_PARAM_DTYPE)
    return torch.promote_types(weight, torch.float32) if wide else weight


def accumulate_path(
    device_type: str, capability: tuple[int, int] | None, operand: torch.dtype, destination: torch.dtype
) -> str:
    """How `destination += a @ b` is computed, for a and b of dtype operand.

    | device | operands | destination | path |
    |---|---|---|---|
    | CUDA | fp32, fp64 | the same | direct |
    | CUDA, capability >= 8.0 | fp16, bf16 | the same | direct |
    | CUDA, capability >= 8.0 | fp16, bf16 | fp32 | out_dtype |
    | CPU | any | the same | direct |
    | others | any | any | fallback |

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


def can_accumulate_by_triton(device_type: str, operand: torch.dtype, destination: torch.dtype) -> bool:
    """Whether `destination += a @ b` may run on Triton's kernel."""
    return kernels.can_gemm(device_type, operand) and destination.itemsize in (2, 4)


def accumulate_(
    destination: Tensor, a: Tensor, b: Tensor, first: bool, path: str, count: Tensor | None = None, start: int = 0
) -> None:
    """destination [M, P] = a @ b when first, else += ; a [M, K], b [K, P].

    With count [], on the device, only the first count - start of K take part; a and b may become 0 behind them.
    """
    if path == "triton":
        if kernels.gemm_(destination, a, b, first, count=count, start=start, over="" if count is None else "depth"):
            return
        path = accumulate_path(a.device.type, _capability(a.device), a.dtype, destination.dtype)
    if count is not None:
        behind = torch.arange(start, start + a.shape[1], device=a.device) >= count
        a.masked_fill_(behind, 0)
        b.masked_fill_(behind[:, None], 0)
    if path == "direct":
        # beta=0 reads nothing, so the first product needs no zeroed destination
        destination.addmm_(a, b, beta=0 if first else 1)
    elif path == "out_dtype":
        if first:
            torch.mm(a, b, out_dtype=destination.dtype, out=destination)
        else:
            torch.addmm(destination, a, b, out_dtype=destination.dtype, out=destination)
    elif path == "upcast":
        # for a destination that is small and a contraction that is long: exact products, a part of it at a time
        step = max(1, kernels.SCRATCH_BYTES // (destination.dtype.itemsize * max(1, *destination.shape)))
        for i, (columns, rows) in enumerate(zip(a.split(step, 1), b.split(step), strict=True)):
            beta = 0 if first and i == 0 else 1
            destination.addmm_(columns.to(destination.dtype), rows.to(destination.dtype), beta=beta)
    else:
        step = _scratch_rows(destination)
        for block, rows in zip(destination.split(step), a.split(step), strict=True):
            product = rows @ b
            block.copy_(product) if first else block.add_(product)


def _scratch_rows(x: Tensor) -> int:
    """Rows of x that may be held in float32 beside the gradients at a time."""
    return max(1, kernels.SCRATCH_BYTES // (4 * max(1, x.shape[1])))


class _WeightGradient:
    """dweight [V, H] while chunks of rows are added to it, in its own dtype or wider.

    A 16-bit dweight that is accumulated in float32 takes 2 V H bytes more, and no more than that at the end: it is held
    in two float32 halves, the first of which is as large as the 16-bit result and becomes it in place.
    """

    def __init__(self, weight: Tensor, accumulator: torch.dtype, path: str, into: Tensor | None = None):
        self.weight = weight
        strides = torch.empty_like(weight, device="meta").stride()
        self.transposed = strides[1] != 1 and strides[0] == 1  # the parameter is stored as [H, V]
        R, S = weight.shape[:: -1 if self.transposed else 1]
        self.wide = accumulator != weight.dtype
        self.path = "upcast" if self.wide and path == "fallback" else path
        cut = min(R, -(-R // (2 * _PAD)) * _PAD) if self.wide else R
        self.parts = [slice(0, cut), slice(cut, R)] if cut < R else [slice(0, R)]
        if into is not None:
            self.held = [into.t() if self.transposed else into]
            return
        self.held = [
            torch.empty(part.stop - part.start, S, dtype=accumulator, device=weight.device) for part in self.parts
        ]

    def add(self, slab: Tensor, h: Tensor, blocks: list[slice], first: bool, *count: Any) -> None:
        """(+)= slab.T @ h for slab [C, V], h [C, H], a block of the vocabulary at a time; count: see accumulate_."""
        if self.path == "triton" and not self.transposed:  # which takes any number of columns
            blocks = [slice(0, slab.shape[1])]
        for part, held in zip(self.parts, self.held, strict=True):
            for block in blocks:
                if self.transposed:
                    accumulate_(held[:, block], h[:, part].t(), slab[:, block], first, self.path, *count)
                    continue
                lo, hi = max(part.start, block.start), min(part.stop, block.stop)
                if lo < hi:
                    into = held[lo - part.start : hi - part.start]
                    accumulate_(into, slab[:, lo:hi].t(), h, first, self.path, *count)

    def result(self) -> Tensor:
        """dweight in weight's dtype."""
        total = self.held[0]
        if self.wide:
            R, S = self.parts[-1].stop, total.shape[1]
            flat = total.view(-1).view(self.weight.dtype)[: R * S]
            at = 0
            for held in self.held:
                for block in held.view(-1).split(kernels.SCRATCH_BYTES // 4):
                    # a copy in between, as the first blocks lie where they come from; what follows is read later
                    flat[at : at + block.numel()].copy_(block.to(flat.dtype, copy=True))
                    at += block.numel()
            total = flat.view(R, S)
        return total.t() if self.transposed else total


# ---------------------------------------------------------------- checks and scales


def check_shapes(h: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None) -> None:
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
    for vector, called in ((bias, "bias"), (class_weight, "class weight")):
        if vector is not None:
            torch._check(
                vector.shape == (weight.shape[0],),
                lambda v=vector, c=called: f"expected a {c} [V], got {tuple(v.shape)}",
            )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def check_labels(target: Tensor, V: int, ignore_index: int) -> None:
    """Fail as eager does for a label outside [0, V) that isn't ignore_index."""
    bad = (target != ignore_index) & ((target < 0) | (target >= V))
    if target.device.type == "cpu":
        if bad.any():
            label = int(target[bad][0])
            raise IndexError(f"Target {label} is out of bounds: labels must be in [0, {V}) or {ignore_index=}.")
    else:
        torch._assert_async(~bad.any(), f"a label is out of bounds: labels must be in [0, {V}) or {ignore_index=}")


def _fp16_scale(
    h: Tensor,
    weight: Tensor,
    valid: Tensor,
    class_weight: Tensor | None,
    g: Cotangents,
    factor: float,
    sums: Tensor | None,
) -> Tensor:
    """A power of two [] for the cotangents that uses float16's range without overflow in dlogits, dh or dweight.

    float16 gradients underflow where a GradScaler would have lifted them, because the factor that arrives with the
    backward is unknown when they are computed. With B >= sum_v |dlogits| of a row: |dh| <= max B max|weight|,
    |dweight| <= sum B max|h|, |dbias| <= sum B. factor: the largest slope of the epilogue. sums: what sum B is
    multiplied by in the sums over rows that are held in float16, if any.
    """
    V = weight.shape[0]
    bound = torch.zeros(valid.shape, dtype=torch.float32, device=valid.device)
    if g.nll is not None:
        bound += 2 * g.nll.abs().where(valid, 0.0)
    if g.lse is not None:
        bound += g.lse.abs()
    if g.zsum is not None:
        bound += g.zsum.abs() * (V if class_weight is None else class_weight.abs().sum())
    if g.pz is not None:
        bound += g.pz.abs() * (2 * math.log(V) + 2)  # sum_v p |log p + entropy + 1|
    bound = factor * bound.nan_to_num(posinf=0.0)  # a row that is lost already doesn't choose the scale of the others
    most = bound.max() if bound.numel() else bound.sum()
    largest = most * _largest(weight)
    if sums is not None:
        largest = torch.maximum(largest, bound.sum() * sums)
    exponent = torch.log2(_FP16_LIMIT / largest.clamp(min=2.0**-60)).floor().clamp(-24.0, 24.0)
    return torch.where(largest > 0, torch.exp2(exponent), torch.ones_like(largest))


def _largest(x: Tensor) -> Tensor:
    """max(|x|, 1) [] in float32, of the finite ones."""
    if x.numel() == 0:
        return x.new_ones((), dtype=torch.float32)
    norm = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    return norm.nan_to_num(posinf=1.0).clamp(min=1.0)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor, multiplied in factor's dtype (float32) and rounded once; factor [] stays on the device."""
    out = torch.empty_like(x)
    kernels.torch_scale_(x, factor, out)
    return out


# ---------------------------------------------------------------- rows that count

_WORTH = 32  # leaving out less than 1 of so many rows saves less than gathering the others costs
_arrivals: dict[int, torch.cuda.Event] = {}  # by the address of a number in host memory: when it is there


def count_rows(target: Tensor, ignore_index: int) -> Tensor:
    """How many labels aren't ignore_index: [1] int64 in host memory, without waiting for it (see _worth)."""
    count = (target != ignore_index).sum().view(1)
    if target.device.type != "cuda":
        return count.cpu()
    here = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
    here.copy_(count, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(target.device))
    _arrivals[here.data_ptr()] = event
    return here


def _worth(counted: Tensor | None, N: int, needs: Needs) -> int | Tensor | None:
    """The number of rows that count, if leaving out the others pays. One in host memory is waited for, but has been
    there for long if it was asked for early."""
    if counted is None or counted.dim() == 0:
        return None if needs.dbias else counted
    if event := _arrivals.get(counted.data_ptr()):
        event.synchronize()
    count = int(counted)
    return count if count <= N - max(1, N // _WORTH) else None


# ---------------------------------------------------------------- row programs

# What a row program may compute on vectors of one number per row: elementwise, so that a chunk's rows stand alone. The
# operators of torch.ops.aten, unlike torch's functions, take a number first too.
_ROW_OPS = """
    abs add atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min cos cosh div eq erf
    erfc exp exp2 expm1 floor fmod ge gt isinf isnan le log log10 log1p log2 logical_and logical_not logical_or
    logical_xor lt maximum minimum mul ne neg pow reciprocal relu remainder round rsqrt sgn sigmoid sign signbit sin
    sinh sqrt square sub tan tanh trunc where xlogy
"""
ROW_OPS = {name: getattr(torch.ops.aten, name) for name in _ROW_OPS.split()}
ROW_STATISTICS = Statistics._fields[:5]  # the first registers of a row program
_ROW_DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def _check_step(op: str, *operands: Any) -> None:
    """ValueError unless it is a step of a row program."""
    if op == "to":
        operands, dtypes = operands[:1], operands[1:]
        if len(dtypes) != 1 or dtypes[0] not in _ROW_DTYPES:
            raise ValueError(f"dtypes are {', '.join(_ROW_DTYPES)}, not {dtypes}")
    elif op not in ROW_OPS:
        raise ValueError(f"there is no operator {op!r}, only to, {', '.join(ROW_OPS)}")
    for x in operands:
        if isinstance(x, list):
            if len(x) != 2 or x[0] != "r" or type(x[1]) is not int or x[1] < 0:
                raise ValueError(f"{x} is not a register")
        elif x is not None and not isinstance(x, (bool, int, float)):
            raise ValueError(f"{x!r} is not an operand")


class RowProgram(NamedTuple):
    """Cotangents as an elementwise function of the same row's statistics and of vectors known up front.

    Registers: the ROW_STATISTICS, then the row inputs, then each step's result. A step is [op, *operands], an operand
    ["r", register], a number, or None for an argument left out; op is one of ROW_OPS, or "to" with a dtype's name.
    cotangents: the registers of g_nll, g_lse, g_zsum and g_pz, None where there is none. As text it is JSON (with
    Python's Infinity and NaN) in single quotes, which Inductor's C++ wrapper can write down; part of a graph's cache
    key. A saved graph may come from anywhere, so parse takes nothing but what text() can have written.
    """

    steps: list[list[Any]]
    cotangents: list[int | None]

    def text(self) -> str:
        return json.dumps(self._asdict()).replace('"', "'")

    @staticmethod
    @functools.cache
    def parse(text: str) -> RowProgram:
        """The program of a text; ValueError for any other text."""
        try:
            program = RowProgram(**json.loads(text.replace("'", '"')))
            for step in program.steps:
                _check_step(*step)
            if not all(i is None or (type(i) is int and i >= 0) for i in program.cotangents):
                raise ValueError(f"cotangents are registers, not {program.cotangents}")
            if program.text() != text:
                raise ValueError("it is written in another way")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"flce_inductor: {text[:200]!r} is not a row program: {error}") from None
        return program

    def __call__(self, statistics: Sequence[Tensor], row_inputs: Sequence[Tensor]) -> Cotangents:
        registers = [*statistics[: len(ROW_STATISTICS)], *row_inputs]
        dtype = statistics[0].dtype
        for op, *operands in self.steps:
            values = [registers[x[1]] if isinstance(x, list) else x for x in operands]
            if op == "to":
                registers.append(values[0].to(getattr(torch, values[1])))
            else:
                registers.append(ROW_OPS[op](*values))
        return Cotangents(*(None if i is None else registers[i].to(dtype) for i in self.cotangents))


# ---------------------------------------------------------------- the loop


def _padded(columns: Any) -> Any:
    return -(-columns // _PAD) * _PAD


def block_columns(N: Any, V: Any, rows: Any) -> Any:
    """Columns of a block in the vocabulary-major order: its slab is as large as the one of a chunk of rows."""
    return max(_PAD, rows * V // max(1, N) // _PAD * _PAD)


def slab_size(N: int, V: int, chunk_size: int, vocabulary_major: bool) -> int:
    """Elements of the slab."""
    rows = min(chunk_size, N)
    return N * _padded(min(block_columns(N, V, rows), V)) if vocabulary_major else rows * _padded(V)


def run(
    h: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [N] int64
    bias: Tensor | None,  # [V]
    class_weight: Tensor | None,  # [V], weighs zsum
    how: How,
    *,
    want: Want = NOTHING_MORE,
    saved: Statistics | None = None,  # known statistics (max, logsum, and pz with its cotangent), each [N]
    cotangents: Cotangents | None = None,  # each [N]
    # or what computes them: a RowProgram's text, or a function, which may change the statistics that it is given
    program: str | Callable[[Statistics, Sequence[Tensor]], Cotangents] = "",
    row_inputs: Sequence[Tensor] = (),  # each [N], read by program
    needs: Needs = NO_GRADIENTS,
    plan: Plan = Plan(),  # noqa: B008  immutable
    into: Buffers = Buffers(),  # noqa: B008  immutable
    # Rows that don't count may be left out, their max and logsum too: [1] of count_rows, or [] on the device, for whose
    # number nobody waits (with dbias all rows are computed then)
    counted: Tensor | None = None,
) -> tuple[Statistics | None, Gradients]:
    """Row statistics (unless saved), and the gradients that are needed for the cotangents of each row.

    Logits are rounded to h's dtype, as linear rounds them; a weight or bias of another dtype is cast to it once, and
    its gradient is returned in its own dtype.
    """
    check_shapes(h, weight, target, bias, class_weight)
    on_cpu = target.device.type == "cpu"
    if on_cpu:
        check_labels(target, weight.shape[0], how.ignore_index)
    with torch.autocast(h.device.type, enabled=False):
        head = _Head(h, weight, target, bias, class_weight, how, plan, into)
        dtype = stat_dtype(h.dtype)
        g = Cotangents(*(None if x is None else x.to(dtype) for x in cotangents or Cotangents()))
        computed = program if callable(program) else RowProgram.parse(program) if program else None
        if saved is not None:
            stats, grads = None, head.vocabulary_major(saved, g, needs)
            if h.dtype == torch.float16:  # nothing is deferred
                for grad in grads[:3]:
                    kernels.scale_(grad, grads.unscale)
        elif plan.vocabulary_major and any(needs):
            stats = head.statistics(want)
            g = g if computed is None else computed(stats, row_inputs)
            grads = head.vocabulary_major(stats, g, needs)
        elif (count := _worth(counted, len(h), needs)) is not None:
            stats, grads = head.counted(count, g, computed, row_inputs, needs)
        elif any(needs):
            stats, grads = head.rows_major(want, g, computed, row_inputs, needs)
        else:
            stats, grads = head.statistics(want), head.no_gradients()
    if not on_cpu:  # last, as the device has something to do while its launches are prepared
        check_labels(target, weight.shape[0], how.ignore_index)
    return stats, grads


def _merge_(total: Statistics, parts: Statistics, starts: Tensor, target: Tensor) -> None:
    """total [N] becomes the statistics of all columns, from those of blocks of them, parts [blocks, N].

    starts: the first column of each block. nll is that of the block that has the label.
    """
    torch.amax(parts.max, 0, out=total.max)
    below = (parts.max - total.max).add_(parts.logsum)
    torch.logsumexp(below, 0, out=total.logsum)
    block = (torch.bucketize(target, starts, right=True) - 1).clamp_(min=0)[None]
    lse, nll = (x.gather(0, block)[0] for x in (below, parts.nll))
    # of nothing but -inf, nll is the difference of two infinities
    torch.add(torch.where(lse == -torch.inf, 0.0, nll), total.logsum - lse, out=total.nll)
    if total.zsum is not None:
        torch.sum(parts.zsum, 0, out=total.zsum)


class _Head:
    """The operands of the loop, in the dtypes and layouts that its products take."""

    def __init__(self, h, weight, target, bias, class_weight, how, plan, into):
        self.dtype, self.device, self.how, self.plan, self.into = h.dtype, h.device, how, plan, into
        (self.N, self.H), self.V = h.shape, weight.shape[0]
        self.rows = max(1, min(how.chunk_size, self.N))
        self.h = h if h.stride(-1) == 1 else h.contiguous()
        w = weight.to(self.dtype)
        self.w = w if 1 in w.stride() else w.contiguous()
        self.b = None if bias is None else bias.to(self.dtype)
        self.weight, self.bias, self.target = weight, bias, target
        self.stats = stat_dtype(self.dtype)
        self.u = None if class_weight is None else class_weight.to(self.stats).contiguous()
        self.capability = _capability(self.device)
        self.limit: Tensor | None = None  # [] on the device: rows from it on aren't needed
        self.order: Tensor | None = None  # where the loop's rows are in h, if they aren't as they come
        self.gathered: tuple[slice, Tensor] | None = None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def dh(self, needed: bool, dtype: torch.dtype) -> Tensor:
        if needed and self.into.dh is not None and self.into.dh.dtype == dtype:
            return self.into.dh
        return self.empty(*self.h.shape, dtype=dtype) if needed else self.empty(0, dtype=dtype)

    def slab(self, rows: int, columns: int) -> Tensor:
        """[rows, columns and a padding] of the memory lent for it, or new."""
        lent, width = self.into.slab, _padded(columns)
        slab = self.empty(rows, width) if lent is None else lent.as_strided((rows, width), (width, 1))
        if self.device.type == "cpu":
            # bfloat16 products of torch 2.12 to 2.14 read past a row's end, and times 0 a NaN there is a NaN
            slab[:, columns:].zero_()
        return slab

    def path(self, destination: torch.dtype) -> str:
        return accumulate_path(self.device.type, self.capability, self.dtype, destination)

    def blocks(self, columns: int) -> list[slice]:
        """The vocabulary in blocks of `columns`; what is behind the last multiple of _ALIGN is a block of its own where
        a GEMM over all of them would be slow."""
        aligned = self.V
        if self.device.type == "cuda" and self.dtype.itemsize == 2 and self.V > _ALIGN:
            aligned = self.V // _ALIGN * _ALIGN
        ends = [*range(columns, aligned, columns), aligned, *([self.V] if aligned < self.V else [])]
        return [slice(lo, hi) for lo, hi in zip([0, *ends], ends, strict=False)]

    def hidden(self, rows: slice) -> Tensor:
        """h of these rows of the loop."""
        if self.order is None:
            return self.h[rows]
        if self.gathered is None or self.gathered[0] != rows:
            self.gathered = None  # before the next is made
            self.gathered = rows, torch.index_select(self.h, 0, self.order[rows])
        return self.gathered[1]

    def logits_(self, slab: Tensor, rows: slice, columns: slice) -> None:
        """slab = h[rows] @ weight[columns].T + bias[columns], rounded once."""
        h, w, b = self.hidden(rows), self.w[columns].t(), None if self.b is None else self.b[columns]
        if self.limited_(slab, h, w, rows, bias=b):
            return
        if b is None:
            torch.mm(h, w, out=slab)
        else:
            torch.addmm(b, h, w, out=slab)

    def limited_(self, into: Tensor, a: Tensor, b: Tensor, rows: slice, first: bool = True, **bias: Any) -> bool:
        """into (+)= a @ b, the rows that are needed; false if all are, or no kernel can tell them apart."""
        limit = self.limit
        return limit is not None and kernels.gemm_(
            into, a, b, first, count=limit, start=rows.start, over="rows", **bias
        )

    def rows_(self, slab, rows, statistics, g, *, stats, grad, scale=None, columns=slice(0, None)) -> None:
        """The rows kernel over the slab of those rows and columns."""
        ignore_index = self.how.ignore_index - columns.start
        kernels.rows_(
            slab,
            self.target[rows] - columns.start if columns.start else self.target[rows],
            statistics,
            g,
            (ignore_index + 2**63) % 2**64 - 2**63,  # int64, as the labels are
            stats=stats,
            grad=grad,
            scale=scale,
            class_weight=None if self.u is None else self.u[columns],
            epilogue=self.how.epilogue,
            padded=True,  # see slab
            count=self.limit,
            start=rows.start,
        )

    def scale(self, g: Cotangents, needs: Needs, wide_dweight: bool) -> Tensor | None:
        """The power of two for float16, None for other dtypes."""
        if self.dtype != torch.float16 or not any(needs):
            return None
        sums = None
        if needs.dweight and not (wide_dweight and self.weight.dtype == torch.float32):
            sums = _largest(self.h)
        elif needs.dbias and self.bias.dtype == self.dtype:
            sums = torch.ones((), device=self.device)
        valid = self.target != self.how.ignore_index
        return _fp16_scale(self.h, self.w, valid, self.u, g, abs(self.how.epilogue.scale * self.how.epilogue.cap), sums)

    def finish(self, dh: Tensor, dweight: Tensor, dbias: Tensor, scale: Tensor | None) -> Gradients:
        if self.bias is not None:
            dbias = dbias.to(self.bias.dtype)
        unscale = torch.ones((), dtype=self.stats, device=self.device) if scale is None else 1.0 / scale
        return Gradients(dh, dweight, dbias, unscale)

    def no_gradients(self) -> Gradients:
        return self.finish(self.empty(0), self.weight.new_empty(0), self.empty(0, dtype=self.stats), None)

    def new_statistics(self, want: Want) -> Statistics:
        N = self.N
        return Statistics(
            *(self.empty(N, dtype=self.stats) for _ in range(3)),
            self.empty(N, dtype=self.stats) if want.zsum else None,
            self.empty(N, dtype=self.stats) if want.pz else None,
            self.empty(N, dtype=torch.int64) if want.argmax else None,
        )

    def statistics(self, want: Want) -> Statistics:
        """The statistics alone. Where chunks have so few rows that reading the weight for each is what takes the time,
        they are put together from those of blocks of columns."""
        N, V = self.N, self.V
        by_columns = self.rows < N <= V and not (want.pz or want.argmax)
        if by_columns:
            from . import chunking  # imports Dynamo, which one chunk needn't wait for

            by_columns = chunking.statistics_first(self.rows, self.dtype, self.device)
        if not by_columns:
            return self.rows_major(want, Cotangents(), None, (), NO_GRADIENTS)[0]
        width = min(block_columns(N, V, self.rows), V)
        blocks = self.blocks(width)
        total, rows = self.into.stats or self.new_statistics(want), slice(0, N)
        most = min(len(blocks), _MOST_BLOCKS)
        parts = Statistics(*(None if x is None else self.empty(most, N, dtype=self.stats) for x in total))
        slab_columns = self.slab(N, width)
        used = 0
        for i, columns in enumerate(blocks):
            slab = slab_columns[:, : columns.stop - columns.start]
            self.logits_(slab, rows, columns)
            self.rows_(slab, rows, kernels.select(parts, used), None, stats=True, grad=False, columns=columns)
            used += 1
            if used == most or i + 1 == len(blocks):
                starts = torch.arange(i + 1 - used, i + 1, device=self.device) * width
                starts[-1:].fill_(columns.start)
                _merge_(total, kernels.select(parts, slice(0, used)), starts, self.target)
                for x, first in zip(total, parts, strict=True):  # stands for all columns so far
                    if x is not None:
                        first[0].copy_(x)
                used = 1
        total.nll.masked_fill_(self.target == self.how.ignore_index, 0)
        return total

    def rows_major(self, want, g, program, row_inputs, needs) -> tuple[Statistics, Gradients]:
        N, V, rows = self.N, self.V, self.rows
        grad = any(needs)
        one = self.limit is not None and kernels.can_gemm(self.device.type, self.dtype)  # which takes any V
        parts = [slice(0, V)] if one else self.blocks(V)
        slab_rows = self.slab(rows if N else 0, V)

        def logits_of(chunk: slice) -> Tensor:
            slab = slab_rows[: chunk.stop - chunk.start, :V]
            for part in parts:
                self.logits_(slab[:, part], chunk, part)
            return slab

        chunk = slice(0, min(rows, N))
        slab = logits_of(chunk)  # so that the device has something to do while the rest is prepared
        stats = self.into.stats or self.new_statistics(want)
        g = Cotangents(*(None if x is None else x.contiguous() for x in g))
        dh = self.dh(needs.dh, self.dtype)
        accumulator = accumulator_dtype(self.weight.dtype, self.how.accum_dtype, -(-N // rows))
        path = self.path(accumulator)
        can = can_accumulate_by_triton(self.device.type, self.dtype, accumulator)
        by = "triton" if can and (self.limit is not None or self.plan.accumulate == "triton") else path
        dweight = _WeightGradient(self.weight, accumulator, by, self.into.dweight) if needs.dweight else None
        dbias = torch.zeros(V if needs.dbias else 0, dtype=self.stats, device=self.device)
        scale = self.scale(g, needs, path == "out_dtype")
        for lo in range(0, N, rows):
            if lo:
                chunk = slice(lo, min(lo + rows, N))
                slab = logits_of(chunk)
            chunk_stats, chunk_g = kernels.select(stats, chunk), kernels.select(g, chunk)
            if grad and program is not None:
                self.rows_(slab, chunk, chunk_stats, None, stats=True, grad=False)
                chunk_g = program(chunk_stats, [x[chunk] for x in row_inputs])
                self.rows_(slab, chunk, chunk_stats, chunk_g, stats=False, grad=True)
            else:
                self.rows_(slab, chunk, chunk_stats, chunk_g, stats=True, grad=grad, scale=scale)
            if dweight is not None:
                dweight.add(slab, self.hidden(chunk), parts, lo == 0, self.limit, lo)
            if needs.dh:  # after dweight, as it may take the place of h (see counted)
                for part in parts:
                    first = part.start == 0
                    if not self.limited_(dh[chunk], slab[:, part], self.w[part], chunk, first):
                        dh[chunk].addmm_(slab[:, part], self.w[part], beta=0 if first else 1)
            if needs.dbias:
                dbias += slab.sum(0, dtype=self.stats)
        total = self.weight.new_empty(0) if dweight is None else dweight.result()
        if N == 0:
            total.zero_()
        return stats, self.finish(dh, total, dbias, scale)

    def counted(self, count: int | Tensor, g, program, row_inputs, needs) -> tuple[Statistics, Gradients]:
        """rows_major over the `count` rows that have a label, in their order: the others cost nothing.

        Their nll, dh and, though they have some, max and logsum are zero. The rows that count are gathered into the
        buffer of dh, and spread over it again at the end, through the slab: no more memory is needed. Where h learns
        nothing they are gathered chunk by chunk. Where the count is on the device, the loop goes over all rows, and the
        kernels leave out those behind it.
        """
        N, H = self.h.shape
        valid = self.target != self.how.ignore_index
        order = torch.argsort((~valid).to(torch.uint8), stable=True)
        compact = copy.copy(self)
        if isinstance(count, Tensor):
            counts = torch.arange(N, device=self.device) < count
            compact.N, compact.limit = N, count
            # what an ignored row holds, a NaN maybe, is nobody's business
            at = torch.where(counts, order, order[:1]) if N else order
        else:
            counts = None
            compact.N, at = count, order[:count]
            order = at
        dh = self.dh(needs.dh, self.dtype)
        if needs.dh:
            compact.h = torch.index_select(self.h, 0, at, out=dh[: compact.N])
        elif self.dtype == torch.float16:  # whose scale depends on the rows that count alone
            compact.h = torch.index_select(self.h, 0, at)
        else:
            compact.order = at
        compact.rows = max(1, min(self.rows, compact.N))
        compact.target = self.target[order]
        compact.into = self.into._replace(stats=None, dh=compact.h if needs.dh else None)
        g = Cotangents(*(None if x is None else x[order] for x in g))
        stats, grads = compact.rows_major(NOTHING_MORE, g, program, [x[order] for x in row_inputs], needs)
        spread = self.into.stats or Statistics(*(self.empty(N, dtype=self.stats) for _ in range(3)))
        for x in spread[:3]:
            x.zero_()
        spread.nll.index_copy_(0, order, stats.nll if counts is None else stats.nll.where(counts, 0))
        if needs.dh:
            room = self.into.slab
            if room is None or room.numel() < H:
                room = self.empty(compact.rows * H)  # of a chunk; the slab is gone
            source, step = (valid.cumsum(0) - 1).clamp_(min=0), max(1, room.numel() // max(1, H))
            for lo in reversed(range(0, N, step)):  # no row moves forward
                part = slice(lo, min(lo + step, N))
                moved = room[: (part.stop - lo) * H].view(-1, H)
                torch.index_select(dh, 0, source[part], out=moved)
                dh[part].copy_(moved.masked_fill_(~valid[part, None], 0))
            grads = grads._replace(dh=dh)
        return spread, grads

    def vocabulary_major(self, stats: Statistics, g: Cotangents, needs: Needs) -> Gradients:
        N, V = self.N, self.V
        blocks = self.blocks(min(block_columns(N, V, self.rows), V))
        wide = self.path(self.stats)
        wide = "upcast" if wide == "fallback" else wide
        dh = self.dh(needs.dh, self.stats)
        dweight = self.into.dweight if needs.dweight else self.weight.new_empty(0)
        dweight = torch.empty_like(self.weight) if dweight is None else dweight
        path = self.path(self.weight.dtype)
        dbias = self.empty(V if needs.dbias else 0, dtype=self.stats)
        scale = self.scale(g, needs, path == "out_dtype")
        slab_columns = self.slab(N, blocks[0].stop)
        for columns in blocks:
            slab = slab_columns[:, : columns.stop - columns.start]
            self.logits_(slab, slice(0, N), columns)
            self.rows_(slab, slice(0, N), stats, g, stats=False, grad=True, scale=scale, columns=columns)
            if needs.dh:
                accumulate_(dh, slab, self.w[columns], columns.start == 0, wide)
            if needs.dweight:
                accumulate_(dweight[columns], slab.t(), self.h, True, path)
            if needs.dbias:
                torch.sum(slab, 0, dtype=self.stats, out=dbias[columns])
        if needs.dh and self.into.dh is not None and self.into.dh is not dh:
            dh = self.into.dh.copy_(dh)
        return self.finish(dh.to(self.dtype), dweight, dbias, scale)
