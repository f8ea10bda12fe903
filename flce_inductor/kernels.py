"""The rows kernel: what happens to one chunk of logits between the GEMM that makes them and the GEMMs that use dlogits.

For each row z of the slab and its label t (design: "row statistics are the only primitive")

    max = max_v z[v]        logsum = log sum_v exp(z[v] - max)        nll = (max - z[t]) + logsum
    dlogits[v] = (g_nll + g_lse) * p[v] - g_nll * [v == t],           p[v] = exp((z[v] - max) - logsum)

`rows_` is the entrance. It runs the Triton kernel of `templates/rows.py.jinja` on devices that have Triton, and torch
operations in cache sized blocks of rows everywhere else.
"""

import contextlib
import functools
import importlib.metadata
import subprocess
import warnings
from pathlib import Path
from typing import NamedTuple

import jinja2
import torch
from torch import Tensor

__all__ = ["rows_", "source_hash_files", "torch_rows_", "triton_rows_"]


def rows_(
    slab: Tensor,
    target: Tensor,
    nll: Tensor | None,
    max: Tensor,
    logsum: Tensor,
    g_nll: Tensor | None,
    g_lse: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    *,
    stats: bool,
    grad: bool,
) -> None:
    """Row statistics of a slab of logits and, in place, the gradient with respect to them.

    The *stat dtype* is float64 for a float64 slab and float32 for every other. All tensors are on one device.

        slab    [C, V] float16, bfloat16, float32 or float64, unit stride along V, any row stride: logits;
                overwritten by dlogits, each rounded once, if grad
        target  [C] int64
        nll     [C] stat dtype: written if stats, else not used and may be None
        max     [C] stat dtype: written if stats, else read
        logsum  [C] stat dtype: written if stats, else read
        g_nll   [C] stat dtype, or None for 0: cotangent of nll
        g_lse   [C] stat dtype, or None for 0: cotangent of lse = max + logsum
        scale   [] stat dtype, or None for 1: multiplies both cotangents

    With valid = (target != ignore_index), gn = g_nll * scale where valid and exactly 0 elsewhere (a select: g_nll may
    be inf or NaN there), gl = g_lse * scale:

        nll     = (max - z[target]) + logsum  where valid, 0 elsewhere
        dlogits = (gn + gl) * exp((z - max) - logsum) - gn * [v == target]

    Every row is written, ignored ones too. A -inf logit has p = 0. A NaN or +inf logit, or a row of nothing but -inf,
    makes the nll (where valid) and the dlogits of its own row NaN, for zero cotangents too, as in eager. A row of
    nothing but -inf has the lowest finite number as max and -inf as logsum: its lse is -inf, as in torch.logsumexp.

    Labels outside of [0, V) never access memory: nll is NaN, and dlogits has no column for the second term. So a slab
    that holds the columns [lo, lo + Vb) of the logits takes (target - lo, ignore_index - lo), max and logsum of the
    whole row and stats=False.

    No host synchronisation and no allocation proportional to C * V.

    Raises ValueError for tensors of another shape, dtype or stride. Warns once per device and variant (RuntimeWarning)
    if the Triton kernel cannot be built there, and uses the torch implementation from then on.
    """
    args = (slab, target, nll, max, logsum, g_nll, g_lse, scale, ignore_index)
    if slab.device.type in _TRITON_DEVICES:
        variant = (slab.device, _key(slab, g_nll, g_lse, scale, stats, grad))
        if variant not in _unbuildable:
            try:
                return triton_rows_(*args, stats=stats, grad=grad)
            except Exception as error:
                # A kernel that was not built has not run: the slab still holds logits.
                if not _is_build_error(error):
                    raise
                _unbuildable.add(variant)
                warnings.warn(_fallback_message(slab.device, error), RuntimeWarning, stacklevel=2)
    torch_rows_(*args, stats=stats, grad=grad)


_TRITON_DEVICES = ("cuda", "xpu")  # a ROCm device is "cuda" too
_unbuildable: set[tuple[torch.device, "RowsKey"]] = set()


# ---------------------------------------------------------------- Triton


class RowsKey(NamedTuple):
    """The switches of templates/rows.py.jinja: one rendered kernel for each combination in use."""

    stats: bool
    grad: bool
    g_nll: bool
    g_lse: bool
    scale: bool
    float64: bool


def triton_rows_(slab, target, nll, max, logsum, g_nll, g_lse, scale, ignore_index, *, stats, grad) -> None:
    """`rows_` by the Triton kernel, whatever the device (the CPU works under TRITON_INTERPRET=1)."""
    _check(slab, target, nll, max, logsum, g_nll, g_lse, scale, stats, grad)
    key = _key(slab, g_nll, g_lse, scale, stats, grad)
    C, V = slab.shape
    if C == 0:
        return
    tensors = {
        "slab": slab,
        "target": target,
        "nll": nll,
        "max": max,
        "logsum": logsum,
        "g_nll": g_nll,
        "g_lse": g_lse,
        "scale": scale,
    }
    # Triton launches on the current device, not on that of its arguments.
    on_device = torch.accelerator.device_index(slab.device.index) if slab.device.type != "cpu" else _nothing
    block, num_warps = _config(V, key.float64)
    with on_device:
        load_kernel(key)[(C,)](
            *(tensors[name] if name == "slab" else tensors[name].contiguous() for name in pointer_args(key)),
            slab.stride(0),
            V,
            ignore_index,
            BLOCK=block,
            num_warps=num_warps,
            enable_fp_fusion=True,  # the default until triton 3.9, which warns that 3.10 will change it
        )


_nothing = contextlib.nullcontext()


def _key(slab, g_nll, g_lse, scale, stats, grad) -> RowsKey:
    return RowsKey(
        stats=stats,
        grad=grad,
        g_nll=grad and g_nll is not None,
        g_lse=grad and g_lse is not None,
        scale=grad and scale is not None and not (g_nll is None and g_lse is None),
        float64=slab.dtype == torch.float64,
    )


def _uses_label(key: RowsKey) -> bool:
    return key.stats or key.g_nll


def pointer_args(key: RowsKey) -> list[str]:
    """Names, in order, of the tensors that the kernel for `key` takes (its parameters without "_ptr")."""
    used = {
        "slab": True,
        "target": _uses_label(key),
        "nll": key.stats,
        "max": True,
        "logsum": True,
        "g_nll": key.g_nll,
        "g_lse": key.g_lse,
        "scale": key.scale,
    }
    return [name for name, wanted in used.items() if wanted]


def _config(V: int, float64: bool) -> tuple[int, int]:
    """(BLOCK, num_warps): 8 elements of 4 bytes per thread; 8192 with 32 warps was the best of 60 configurations on an
    H200 at V = 128256. Double precision halves the block: its accumulators take two registers each."""
    largest, per_warp = (4096, 128) if float64 else (8192, 256)
    block = 16
    while block < V and block < largest:
        block *= 2
    # 1024 threads are the most that a block has: 16 warps of 64 lanes on AMD.
    most_warps = 16 if torch.version.hip else 32
    return block, min(block // per_warp or 1, most_warps)


@functools.cache
def load_kernel(key: RowsKey):
    """The `triton.jit` function for `key`, from a file in Inductor's code cache (triton.jit reads its source there)."""
    from torch._inductor.codecache import PyCodeCache  # heavy, and not needed on a CPU

    return PyCodeCache.load(render(key)).rows


def render(key: RowsKey) -> str:
    """Source of the Python module that defines the kernel for `key`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_template_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    vectors = [name for name in pointer_args(key) if name != "slab"]
    return environment.get_template("rows.py.jinja").render(label=_uses_label(key), vectors=vectors, **key._asdict())


def _template_dir() -> Path:
    """Inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for directory in (package / "templates", package.parent / "templates"):
        if (directory / "rows.py.jinja").is_file():
            return directory
    raise FileNotFoundError(
        f"flce_inductor: rows.py.jinja is neither in {package / 'templates'} nor in {package.parent / 'templates'}; "
        "the installation is incomplete, reinstall flce_inductor"
    )


def source_hash_files() -> tuple[str, ...]:
    """Absolute paths of this file and of every template: what a cache of code that calls `rows_` has to hash."""
    return (str(Path(__file__).resolve()), *sorted(str(path) for path in _template_dir().glob("*.jinja")))


# Of the driver's messages, those about the binary and not about what ran before on the device.
_DRIVER_ERRORS = ("CUDA error", "HIP error", "Triton Error [", "out of memory")
_BINARY_ERRORS = ("kernel image", "PTX", "too many resources requested")


def _is_build_error(error: Exception) -> bool:
    """Whether Triton failed to build or load a kernel here: no fast kernel, but nothing wrong with the device or data.

    Running out of memory and errors that kernels queued earlier report at this launch are not such, nor are mistakes
    in a call (TypeError, ValueError).
    """
    if isinstance(error, (ImportError, OSError, subprocess.SubprocessError)):  # no triton; no compiler, cache or ptxas
        return True
    if isinstance(error, RuntimeError):  # MLIR's and LLVM's failures as well as the driver's
        text = str(error)
        return any(s in text for s in _BINARY_ERRORS) or not any(s in text for s in _DRIVER_ERRORS)
    # By name, as triton may be absent: its CompilationError, OutOfResources and PTXASError.
    return any(base.__module__ == "triton.errors" for base in type(error).__mro__)


def _fallback_message(device: torch.device, error: Exception) -> str:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    reason = (str(error).strip().splitlines() or [""])[-1]
    return (
        f"flce_inductor: the Triton rows kernel could not be built for {device} ({type(error).__name__}: {reason}). "
        "Results stay right, but this part of the loss now runs as torch operations, which are slower. "
        f"To get the kernel back: check that triton ({version}) is the version that torch {torch.__version__} asks for "
        "and supports this device, that a C compiler is on PATH (or named by CC) and that TRITON_CACHE_DIR is "
        "writable; then restart the process."
    )


# ---------------------------------------------------------------- torch


def torch_rows_(slab, target, nll, max, logsum, g_nll, g_lse, scale, ignore_index, *, stats, grad) -> None:
    """`rows_` by torch operations in place, a few rows at a time so that they stay in the cache between operations."""
    _check(slab, target, nll, max, logsum, g_nll, g_lse, scale, stats, grad)
    C, V = slab.shape
    dtype = _stat_dtype(slab)

    valid = target != ignore_index
    inside = (target >= 0) & (target < V)
    column = target.clamp(0, V - 1)  # something to index with; what comes from outside labels is not used
    g, g_at_target = _cotangents(slab, valid, g_nll, g_lse, scale) if grad else (None, None)

    # The logits of a block in stat dtype become p and dlogits in place: in the slab itself, where it may be
    # overwritten and holds enough digits.
    in_slab = grad and slab.dtype == dtype
    step = _rows_per_block(slab, dtype)
    work = None if in_slab else torch.empty(min(step, C), V, dtype=dtype, device=slab.device)
    for lo in range(0, C, step):
        block = slice(lo, min(lo + step, C))
        z = slab[block] if in_slab else work[: block.stop - lo].copy_(slab[block])
        index = column[block, None]
        if stats:
            # The lowest finite number for a row of nothing but -inf: no inf - inf, as in the kernel.
            torch.amax(z, 1, out=max[block]).clamp_(min=torch.finfo(dtype).min)
            torch.sub(max[block], z.gather(1, index).squeeze(1), out=nll[block])
        z.sub_(max[block, None]).exp_()
        if stats:
            torch.sum(z, 1, out=logsum[block]).log_()
            nll[block] += logsum[block]
        if grad:
            # p is z * exp(-logsum): one pass less than subtracting logsum before the exp.
            z.mul_((g[block] * torch.exp(-logsum[block]))[:, None])
            if g_at_target is not None:
                hit = torch.where(inside[block], g_at_target[block], 0)
                z.scatter_(1, index, z.gather(1, index) - hit[:, None])
            if not in_slab:
                slab[block].copy_(z)
    if stats:
        nll.masked_fill_(~inside, float("nan")).masked_fill_(~valid, 0)


def _cotangents(slab, valid, g_nll, g_lse, scale) -> tuple[Tensor, Tensor | None]:
    """([C] gn + gl, [C] gn or None), in the words of `rows_`."""
    gn = gl = None
    if g_nll is not None:
        gn = torch.where(valid, g_nll if scale is None else g_nll * scale, 0)
    if g_lse is not None:
        gl = g_lse if scale is None else g_lse * scale
    if gn is None:
        return torch.zeros_like(valid, dtype=_stat_dtype(slab)) if gl is None else gl, None
    return gn if gl is None else gn + gl, gn


# 4 MiB was the fastest of 0.5 to 8 for V = 50000 and 128256 on two cores with 1 MiB of L2 each: smaller blocks pay for
# each operation's start. Any other device has launches to hide instead.
_BLOCK_BYTES = {"cpu": 4 << 20}
_BLOCK_BYTES_ELSEWHERE = 64 << 20


def _rows_per_block(slab: Tensor, dtype: torch.dtype) -> int:
    return _BLOCK_BYTES.get(slab.device.type, _BLOCK_BYTES_ELSEWHERE) // (slab.shape[1] * dtype.itemsize) or 1


# ---------------------------------------------------------------- both


def _stat_dtype(slab: Tensor) -> torch.dtype:
    return torch.float64 if slab.dtype == torch.float64 else torch.float32


def _check(slab, target, nll, max, logsum, g_nll, g_lse, scale, stats, grad) -> None:
    """ValueError unless the tensors are what `rows_` documents: a kernel would read them wrongly without a word."""
    if slab.dim() != 2 or slab.dtype not in _SLAB_DTYPES or slab.shape[1] < 1:
        raise ValueError(f"rows_: slab must be [C, V] of {_SLAB_DTYPES}, got {list(slab.shape)} {slab.dtype}")
    C, V = slab.shape
    if V > 1 and slab.stride(1) != 1:
        raise ValueError(f"rows_: slab must have unit stride along V, got strides {slab.stride()}")
    dtype = _stat_dtype(slab)
    wanted = [("target", target, (C,), torch.int64), ("max", max, (C,), dtype), ("logsum", logsum, (C,), dtype)]
    if stats:
        wanted.append(("nll", nll, (C,), dtype))
        for name, vector in (("nll", nll), ("max", max), ("logsum", logsum)):
            if vector is not None and not vector.is_contiguous():
                raise ValueError(f"rows_: {name} is written and must be contiguous, got strides {vector.stride()}")
    if grad:
        optional = (("g_nll", g_nll, (C,), dtype), ("g_lse", g_lse, (C,), dtype), ("scale", scale, (), dtype))
        wanted += [row for row in optional if row[1] is not None]
    for name, tensor, shape, of_dtype in wanted:
        if tensor is None:
            raise ValueError(f"rows_: {name} is missing")
        if tensor.shape != shape or tensor.dtype != of_dtype or tensor.device != slab.device:
            raise ValueError(
                f"rows_: {name} must be {list(shape)} {of_dtype} on {slab.device}, "
                f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )


_SLAB_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
