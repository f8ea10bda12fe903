"""What happens to one chunk of logits between the GEMM that makes them and the GEMMs that use dlogits.

For each row of the slab, z = epilogue(logits), and its label t (design: "row statistics are the only primitive")

    max = max_v z[v]        logsum = log sum_v exp(z[v] - max)        nll = (max - z[t]) + logsum
    zsum = sum_v u[v] z[v]        pz = sum_v p[v] (z[v] - max)        argmax,        p[v] = exp((z[v] - max) - logsum)
    dz[v] = (g_nll + g_lse) * p[v] - g_nll * [v == t] + g_zsum * u[v] + g_pz * p[v] * (z[v] - max - pz + 1)
    dlogits = dz * dz/dlogits

`rows_` is the entrance. It runs the Triton kernel of `templates/rows.py.jinja` on devices that have Triton, and torch
operations in cache sized blocks of rows everywhere else.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "IDENTITY",
    "Cotangents",
    "Epilogue",
    "Statistics",
    "rows_",
    "scale_",
    "select",
    "source_digest",
    "torch_rows_",
    "triton_rows_",
]


class Epilogue(NamedTuple):
    """What turns a raw logit x into z = cap * f(scale * (x + shift)), with f named by `function`.

        tanh softcap           Epilogue("tanh", scale=1 / cap, cap=cap)
        modded-nanogpt's       Epilogue("sigmoid", scale=1 / 7.5, shift=5, cap=23)
        temperature T          Epilogue(scale=1 / T)

    Other numbers compile nothing; another function does.
    """

    function: str = ""  # "", "tanh" or "sigmoid"; "" is the identity
    scale: float = 1.0
    shift: float = 0.0
    cap: float = 1.0


IDENTITY = Epilogue()


class Statistics(NamedTuple):
    """Row statistics, each [C] in stat dtype but argmax, which is int64; None for those not wanted."""

    nll: Tensor | None
    max: Tensor
    logsum: Tensor
    zsum: Tensor | None = None
    pz: Tensor | None = None
    argmax: Tensor | None = None


class Cotangents(NamedTuple):
    """Cotangents of the statistics of these names (lse = max + logsum), each [C] in stat dtype, or None for 0."""

    nll: Tensor | None = None
    lse: Tensor | None = None
    zsum: Tensor | None = None
    pz: Tensor | None = None


def select(vectors: Statistics | Cotangents, rows: slice | int) -> Statistics | Cotangents:
    """Views of those rows of each vector, or of each matrix of them."""
    return type(vectors)(*(None if vector is None else vector[rows] for vector in vectors))


def rows_(
    slab: Tensor,
    target: Tensor,
    statistics: Statistics,
    cotangents: Cotangents | None,
    ignore_index: int,
    *,
    stats: bool,
    grad: bool,
    scale: Tensor | None = None,
    class_weight: Tensor | None = None,
    epilogue: Epilogue = IDENTITY,
    out: Tensor | None = None,
    padded: bool = False,
    count: Tensor | None = None,
    start: int = 0,
) -> None:
    """Row statistics of a slab of logits and, in place unless `out` is given, the gradient with respect to them.

    The *stat dtype* is float64 for a float64 slab and float32 for every other. All tensors are on one device.

        slab          [C, V] float16, bfloat16, float32 or float64, unit stride along V, any row stride: logits;
                      overwritten by dlogits, each rounded once, if grad and out is None
        target        [C] int64
        statistics    written if stats: nll, max, logsum and those of zsum, pz and argmax that are not None.
                      Else max, logsum and, if cotangents.pz is not None, pz are read and the others not used
        cotangents    used if grad; None for Cotangents(), zeros
        scale         [] stat dtype, or None for 1: multiplies all cotangents
        class_weight  [V] stat dtype: u, or None for 1
        out           [C, V] like the slab, which it does not overlap: if grad, dlogits are written here instead
        padded        whether the columns from V to the next multiple of 16 are the slab's too, and may be overwritten
        count, start  [] int64: the rows from count - start on aren't needed, and may be left as they are

    With z = epilogue(slab), computed in stat dtype, p = exp((z - max) - logsum), valid = (target != ignore_index),
    gn = g_nll * scale where valid and exactly 0 elsewhere (a select: g_nll may be inf or NaN there), and gl, gz, gp
    the other cotangents times scale, which are not masked:

        nll    = (max - z[target]) + logsum  where valid, 0 elsewhere
        zsum   = sum(u * z)
        pz     = sum(p * (z - max)), to which z = -inf adds 0
        argmax = first index of the largest z, or of the first NaN, as torch.argmax
        dz     = (gn + gl) * p - gn * [v == target] + gz * u + gp * p * (z - max - pz + 1), the last term 0 where p is
        dlogits = dz * dz/dslab

    u has no part in nll: a class-weighted loss is nll times u[target], which belongs into g_nll. Where stats and grad
    are asked for together and cotangents.pz is given, statistics.pz must be too.

    Every row is written, ignored ones too. z = -inf has p = 0. z = NaN or +inf, or a row of nothing but -inf, makes the
    nll (where valid), pz and the dlogits of its own row NaN, for zero cotangents too, as in eager. A row of nothing but
    -inf has the lowest finite number as max and -inf as logsum: its lse is -inf, as in torch.logsumexp. zsum is what
    the sum gives: -inf for an excluded logit, NaN if its u is 0.

    tanh and sigmoid may differ from torch's in the last digit: argmax may then choose another of two logits that are
    as good as equal.

    Labels outside of [0, V) never access memory: nll is NaN, and dlogits has no column for the second term. So a slab
    that holds the columns [lo, lo + Vb) of the logits takes (target - lo, ignore_index - lo), class_weight[lo:lo + Vb],
    max, logsum and pz of the whole row and stats=False.

    No host synchronisation and no allocation proportional to C * V.

    Raises ValueError for tensors of another shape, dtype or stride and for an unknown epilogue. Warns once per device
    and variant (RuntimeWarning) if the Triton kernel cannot be built there, and uses the torch implementation from then
    on.
    """
    cotangents = cotangents or Cotangents()
    options = dict(stats=stats, grad=grad, scale=scale, class_weight=class_weight, epilogue=epilogue, out=out)
    if slab.device.type in TRITON_DEVICES:
        key = _key(slab, statistics, cotangents, **options, padded=padded, counted=count is not None)
        args = (key, slab, target, statistics, cotangents, ignore_index, count, start)
        if _launched("rows", (slab.device, key), slab.device, lambda: _launch_rows(*args, **options)):
            return
    torch_rows_(slab, target, statistics, cotangents, ignore_index, **options)


# ---------------------------------------------------------------- Triton


class RowsKey(NamedTuple):
    """The switches of templates/rows.py.jinja: one rendered kernel for each combination in use."""

    stats: bool
    grad: bool
    g_nll: bool = False
    g_lse: bool = False
    g_zsum: bool = False
    g_pz: bool = False
    scale: bool = False
    zsum: bool = False  # statistics that are written; pz also if it is read
    pz: bool = False
    argmax: bool = False
    class_weight: bool = False
    out: bool = False
    padded: bool = False
    counted: bool = False
    function: str = ""  # of the epilogue; "affine" if it has none but is not the identity
    float64: bool = False


TRITON_DEVICES = ("cuda", "xpu")  # a ROCm device is "cuda" too
_unbuildable: set[tuple | str] = set()


def triton_rows_(
    slab,
    target,
    statistics,
    cotangents,
    ignore_index,
    *,
    stats,
    grad,
    scale=None,
    class_weight=None,
    epilogue=IDENTITY,
    out=None,
    padded=False,
    count=None,
    start=0,
) -> None:
    """`rows_` by the Triton kernel, whatever the device (the CPU works under TRITON_INTERPRET=1)."""
    cotangents = cotangents or Cotangents()
    options = dict(stats=stats, grad=grad, scale=scale, class_weight=class_weight, epilogue=epilogue, out=out)
    key = _key(slab, statistics, cotangents, **options, padded=padded, counted=count is not None)
    _launch_rows(key, slab, target, statistics, cotangents, ignore_index, count, start, **options)


def _launch_rows(key, slab, target, statistics, cotangents, ignore_index, count, start, **options) -> None:
    _check(slab, target, statistics, cotangents, **options)
    C, V = slab.shape
    if C == 0:
        return
    epilogue, out = options["epilogue"], options["out"]
    tensors = {"slab": slab, "out": out, "target": target, "count": count}
    tensors |= {"scale": options["scale"], "class_weight": options["class_weight"]}
    tensors |= statistics._asdict() | {f"g_{name}": g for name, g in cotangents._asdict().items()}
    block, num_warps = _config(V, key, slab.itemsize)
    pointers = [tensors[name] for name in pointer_args(key)]
    with _on_device(slab.device):
        load_kernel(key)[(C,)](
            *(x if x.dim() == 2 or x.is_contiguous() else x.contiguous() for x in pointers),
            slab.stride(0),
            *([out.stride(0)] if key.out else []),
            V,
            ignore_index,
            *([start] if key.counted else []),
            *([float(epilogue.scale), float(epilogue.shift), float(epilogue.cap)] if key.function else []),
            BLOCK=block,
            GROUP=min(block, _group(slab)),
            num_warps=num_warps,
            enable_fp_fusion=True,  # the default until triton 3.9, which warns that 3.10 will change it
        )


def _on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, not on that of its arguments."""
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def _key(slab, statistics, cotangents, *, stats, grad, scale, class_weight, epilogue, out, padded, counted) -> RowsKey:
    g = Cotangents(*(grad and vector is not None for vector in cotangents))
    zsum = stats and statistics.zsum is not None
    return RowsKey(
        stats=stats,
        grad=grad,
        g_nll=g.nll,
        g_lse=g.lse,
        g_zsum=g.zsum,
        g_pz=g.pz,
        scale=scale is not None and any(g),
        zsum=zsum,
        pz=statistics.pz is not None if stats else g.pz,
        argmax=stats and statistics.argmax is not None,
        class_weight=class_weight is not None and (zsum or g.zsum),
        out=grad and out is not None,
        padded=padded and (out is None or not grad),
        counted=counted,
        function=epilogue.function or ("" if _is_identity(epilogue) else "affine"),
        float64=slab.dtype == torch.float64,
    )


def _is_identity(epilogue: Epilogue) -> bool:
    return not epilogue.function and epilogue.shift == 0 and epilogue.scale * epilogue.cap == 1


def _uses_label(key: RowsKey) -> bool:
    return key.stats or key.g_nll


_MATRICES = ("slab", "out")


@functools.cache
def pointer_args(key: RowsKey) -> list[str]:
    """Names, in order, of the tensors that the kernel for `key` takes (its parameters without "_ptr")."""
    used = {
        "slab": True,
        "out": key.out,
        "target": _uses_label(key),
        "class_weight": key.class_weight,
        "nll": key.stats,
        "max": True,
        "logsum": True,
        "zsum": key.zsum,
        "pz": key.pz,
        "argmax": key.argmax,
        "g_nll": key.g_nll,
        "g_lse": key.g_lse,
        "g_zsum": key.g_zsum,
        "g_pz": key.g_pz,
        "scale": key.scale,
        "count": key.counted,
    }
    return [name for name, wanted in used.items() if wanted]


@functools.cache
def _config(V: int, key: RowsKey, itemsize: int) -> tuple[int, int]:
    """(BLOCK, num_warps): 16 elements of a 16-bit slab per thread and 32 warps were the best of 14 configurations on an
    H200 for V from 32000 to 262144, within 2 %, but where half of it leaves less of the last block unused (50257).
    Twice the bytes halve the block, and so do float64, and argmax or zsum with pz, for want of registers: 1024 threads
    have 64 each. With 16 bits zsum and pz take half the threads, too."""
    per_warp = 1024 // itemsize
    sums = key.zsum and key.pz
    if key.float64 or key.argmax or sums:
        per_warp //= 2
    block = 16
    while block < V and block < 32 * per_warp:
        block *= 2
    if block > 16 and -(-V // block) * block > 1.05 * (-(-V // (block // 2)) * (block // 2)):
        block //= 2
    # 1024 threads are the most that a block has: 16 warps of 64 lanes on AMD.
    most_warps = 16 if torch.version.hip or (sums and itemsize == 2) else 32
    return block, min(block // (per_warp // 2) or 1, most_warps)


def _group(slab: Tensor) -> int:
    """Neighbours in a row that one thread loads together: 16 bytes where all rows are aligned so."""
    aligned = slab.data_ptr() % 16 == 0 == slab.stride(0) * slab.itemsize % 16
    return 16 // slab.itemsize if aligned else 1


@functools.cache
def load_kernel(key: RowsKey):
    """The `triton.jit` function for `key`, from a file in Inductor's code cache (triton.jit reads its source there)."""
    return _load(render(key)).rows


def _load(source: str):
    from torch._inductor.codecache import PyCodeCache  # heavy, and not needed on a CPU

    return PyCodeCache.load(source)


def render(key: RowsKey) -> str:
    """Source of the Python module that defines the kernel for `key`."""
    # class_weight may be specialised on its alignment: a vector load of it matters, and there are two cases of it only
    vectors = [name for name in pointer_args(key) if name not in (*_MATRICES, "class_weight")]
    return _render("rows", label=_uses_label(key), vectors=vectors, **key._asdict())


def _render(template: str, **switches) -> str:
    import jinja2  # not for a process that renders nothing

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_template_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(f"{template}.py.jinja").render(**switches)


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


@functools.cache
def source_digest() -> str:
    """Identifies the package's sources and templates in the keys of caches."""
    package = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *_template_dir().glob("*.jinja")], key=lambda path: path.name):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


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


def _launched(kernel: str, variant: tuple | str, device: torch.device, launch: Callable[[], None]) -> bool:
    """Whether launch ran. A variant that can't be built warns once and isn't tried again; what was not built has not
    run, so its operands are as they were."""
    if variant in _unbuildable:
        return False
    try:
        launch()
    except Exception as error:
        if not _is_build_error(error):
            raise
        _unbuildable.add(variant)
        warnings.warn(_fallback_message(device, error, kernel), RuntimeWarning, stacklevel=3)
        return False
    return True


def _fallback_message(device: torch.device, error: Exception, kernel: str) -> str:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    reason = (str(error).strip().splitlines() or [""])[-1]
    return (
        f"flce_inductor: the Triton kernel `{kernel}` could not be built for {device} "
        f"({type(error).__name__}: {reason}). "
        "Results stay right, but this part of the loss now runs as torch operations, which are slower. "
        f"To get the kernel back: check that triton ({version}) is the version that torch {torch.__version__} asks for "
        "and supports this device, that a C compiler is on PATH (or named by CC) and that TRITON_CACHE_DIR is "
        "writable; then restart the process."
    )


# ---------------------------------------------------------------- scale


def scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor in place, in factor's dtype and rounded once; a factor of 1 costs no pass over x.

        x       any shape, floating, without overlap or holes
        factor  [] float32 (float64 for a float64 x), stays on the device

    No host synchronisation on a GPU.
    """
    triton = x.device.type in TRITON_DEVICES
    if not triton or not _launched("scale", "scale", x.device, lambda: triton_scale_(x, factor)):
        torch_scale_(x, factor)


_SCALE_BLOCK, _SCALE_PROGRAMS = 4096, 2048


def triton_scale_(x: Tensor, factor: Tensor) -> None:
    """`scale_` by the Triton kernel, whatever the device."""
    flat = x.as_strided((x.numel(),), (1,))
    programs = min(_SCALE_PROGRAMS, -(-x.numel() // _SCALE_BLOCK))
    if programs:
        with _on_device(x.device):
            _load_scale()[(programs,)](flat, factor, x.numel(), BLOCK=_SCALE_BLOCK, num_warps=8, enable_fp_fusion=True)


@functools.cache
def _load_scale():
    return _load(_render("scale")).scale


def torch_scale_(x: Tensor, factor: Tensor, out: Tensor | None = None) -> None:
    """`scale_` by torch operations, or into `out`, like x; where looking at the factor needs no waiting, it does."""
    if out is None and factor.device.type == "cpu" and factor == 1:
        return
    out = x if out is None else out
    if x.dtype == factor.dtype:
        torch.mul(x, factor, out=out)
        return
    # torch would round the factor to x's dtype first, so widen x, a bounded part of it at a time
    parts = [y.as_strided((y.numel(),), (1,)).split(SCRATCH_BYTES // factor.dtype.itemsize) for y in (x, out)]
    for source, destination in zip(*parts, strict=True):
        destination.copy_(source.to(factor.dtype).mul_(factor))


SCRATCH_BYTES = 16 << 20  # what may be allocated at a time beside slab and gradients


# ---------------------------------------------------------------- products


def gemm_(into: Tensor, a: Tensor, b: Tensor, first: bool, **options) -> bool:
    """triton_gemm_, and whether it ran: where Triton, or 16-bit operands for tensor cores, aren't there it doesn't."""
    if not can_gemm(a.device.type, a.dtype):
        return False
    variant = ("gemm", a.dtype, options.get("over", ""))
    return _launched("gemm", variant, a.device, lambda: triton_gemm_(into, a, b, first, **options))


def can_gemm(device_type: str, operand: torch.dtype) -> bool:
    """Whether gemm_ may run on such a device."""
    return device_type in TRITON_DEVICES and operand.itemsize == 2


def triton_gemm_(
    into: Tensor,
    a: Tensor,
    b: Tensor,
    first: bool,
    *,
    bias: Tensor | None = None,
    count: Tensor | None = None,
    start: int = 0,
    over: str = "",
) -> None:
    """into (+)= a @ b + bias by a Triton kernel: += or, if first, =. Products and sum in float32, one rounding.

        into    [M, P] float16, bfloat16 or float32, unit stride along its rows
        a, b    [M, K], [K, P] of one dtype of these three, each with unit stride along one of its dimensions
        bias    [P]
        count   [] int64. over="rows": the rows of into from count - start on aren't needed, and tiles of nothing else
                not computed. over="depth": the sum is over the first count - start of K only, whatever the others hold

    On cards that have tensor descriptors (capability 9.0 and up) tiles move by them where addresses and row strides are
    multiples of 16 bytes.
    """
    (M, K), P = a.shape, b.shape[1]
    layout = ("mk" if a.stride(1) == 1 else "km", "kp" if b.stride(1) == 1 else "pk")
    a, b = (x if x.stride(1) == 1 else x.t() for x in (a, b))  # as they lie in memory
    descriptors = a.device.type == "cuda" and torch.cuda.get_device_capability(a.device) >= (9, 0)
    descriptors = descriptors and torch.version.hip is None and a.dtype.itemsize == 2
    descriptors = descriptors and all(x.data_ptr() % 16 == 0 == x.stride(0) * x.itemsize % 16 for x in (into, a, b))
    block_m, block_p, block_k, num_warps, num_stages = _gemm_config(a.dtype)
    if descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor

        sizes = {"m": block_m, "p": block_p, "k": block_k}
        places = ((into, "mp"), (a, layout[0]), (b, layout[1]))
        operands = [TensorDescriptor(x, [*x.shape], [*x.stride()], [sizes[d] for d in at]) for x, at in places]
    else:
        operands = [into, a, b, into.stride(0), a.stride(0), b.stride(0)]
    operands += [] if bias is None else [bias]
    operands += [count, start] if over else []
    tiles = -(-M // block_m) * -(-P // block_p)
    with _on_device(a.device):
        load_gemm(descriptors, a.dtype == torch.float32, layout, bias is not None, over)[(tiles,)](
            *operands,
            M,
            P,
            K,
            FIRST=first,
            BLOCK_M=block_m,
            BLOCK_P=block_p,
            BLOCK_K=block_k,
            GROUP=8,
            num_warps=num_warps,
            num_stages=num_stages,
            enable_fp_fusion=True,
        )


def _gemm_config(operand: torch.dtype) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_P, BLOCK_K, num_warps, num_stages)"""
    if operand == torch.float32:
        return 64, 64, 32, 4, 3
    # of 7 for dweight on an H200 the fastest at 256 and 512 rows, and within 3 % at 2048
    return 128, 128, 64, 8, 3


@functools.cache
def load_gemm(descriptors: bool, ieee: bool, layout: tuple[str, str], bias: bool = False, over: str = ""):
    """The `triton.jit` function of templates/gemm.py.jinja."""
    source = _render("gemm", descriptors=descriptors, ieee=ieee, layout=layout, bias=bias, counted=over)
    return _load(source).gemm


# ---------------------------------------------------------------- torch


def torch_rows_(
    slab,
    target,
    statistics,
    cotangents,
    ignore_index,
    *,
    stats,
    grad,
    scale=None,
    class_weight=None,
    epilogue=IDENTITY,
    out=None,
) -> None:
    """`rows_` by torch operations in place, a few rows at a time so that they stay in the cache between operations."""
    cotangents = cotangents or Cotangents()
    options = dict(scale=scale, class_weight=class_weight, epilogue=epilogue, out=out)
    _check(slab, target, statistics, cotangents, stats=stats, grad=grad, **options)
    C, V = slab.shape
    dtype = _stat_dtype(slab)
    nll, max, logsum, zsum, pz, argmax = statistics

    valid = target != ignore_index
    inside = (target >= 0) & (target < V)
    column = target.clamp(0, V - 1)  # something to index with; what comes from outside labels is not used
    g = gn = gz = gp = None
    if grad:
        g, gn, gz, gp = _scaled(cotangents, valid, scale, dtype)
    wants_pz = (stats and pz is not None) or gp is not None

    # The logits of a block in stat dtype become p and dlogits in place: in the destination itself, where that may be
    # overwritten and holds enough digits.
    destination = slab if out is None else out
    in_place = grad and slab.dtype == dtype
    step = _rows_per_block(slab, dtype)
    work = None if in_place else torch.empty(min(step, C), V, dtype=dtype, device=slab.device)
    for lo in range(0, C, step):
        block = slice(lo, min(lo + step, C))
        z = destination[block] if in_place else work[: block.stop - lo]
        if out is not None or not in_place:
            z.copy_(slab[block])
        slope = _apply_(epilogue, z, grad)
        index = column[block, None]
        if stats:
            # The lowest finite number for a row of nothing but -inf: no inf - inf, as in the kernel.
            torch.amax(z, 1, out=max[block]).clamp_(min=torch.finfo(dtype).min)
            torch.sub(max[block], z.gather(1, index).squeeze(1), out=nll[block])
            if zsum is not None:
                torch.sum(z if class_weight is None else z * class_weight, 1, out=zsum[block])
            if argmax is not None:
                torch.argmax(z, 1, out=argmax[block])
        z.sub_(max[block, None])
        # Where z is -inf, any finite number: p is 0 there.
        below = z.clamp(min=-_FAR) if wants_pz else None
        z.exp_()
        if stats:
            total = z.sum(1)
            torch.log(total, out=logsum[block])
            nll[block] += logsum[block]
            if pz is not None:
                mean = (z * below).sum(1).div_(total)
                pz[block] = mean
        if grad:
            # p is z * exp(-logsum): one pass less than subtracting logsum before the exp.
            if gp is None:
                z.mul_((g[block] * torch.exp(-logsum[block]))[:, None])
            else:
                if not stats:
                    mean = pz[block]
                along = below.sub_((mean - 1)[:, None]).mul_(gp[block, None]).add_(g[block, None])
                z.mul_(along).mul_(torch.exp(-logsum[block])[:, None])
            if gn is not None:
                hit = torch.where(inside[block], gn[block], 0)
                z.scatter_(1, index, z.gather(1, index) - hit[:, None])
            if gz is not None:
                if class_weight is None:
                    z.add_(gz[block, None])
                else:
                    z.addcmul_(gz[block, None], class_weight)
            if slope is not None:
                z.mul_(slope)
            if not in_place:
                destination[block].copy_(z)
    if stats:
        nll.masked_fill_(~inside, float("nan")).masked_fill_(~valid, 0)


_FAR = 1e4  # exp(-_FAR) is 0


def _apply_(epilogue: Epilogue, x: Tensor, grad: bool) -> Tensor | float | None:
    """x becomes z in place. Returns dz/dx if grad, or None for 1."""
    function, scale, shift, cap = epilogue
    if _is_identity(epilogue):
        return None
    if not function:
        x.add_(shift).mul_(scale * cap)
        return scale * cap
    x.add_(shift).mul_(scale)
    if function == "tanh":
        x.tanh_()
        slope = x.square().neg_().add_(1).mul_(scale * cap) if grad else None
    else:
        x.sigmoid_()
        slope = torch.addcmul(x, x, x, value=-1).mul_(scale * cap) if grad else None
    x.mul_(cap)
    return slope


def _scaled(cotangents: Cotangents, valid, scale, dtype) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """[C] gn + gl, gn, gz, gp in the words of `rows_`; None for 0 but for the first."""
    gn, gl, gz, gp = (g if g is None or scale is None else g * scale for g in cotangents)
    if gn is not None:
        gn = torch.where(valid, gn, 0)
    if gn is None or gl is None:
        g = gn if gl is None else gl
        return torch.zeros_like(valid, dtype=dtype) if g is None else g, gn, gz, gp
    return gn + gl, gn, gz, gp


# 4 MiB was the fastest of 0.5 to 8 for V = 50000 and 128256 on two cores with 1 MiB of L2 each: smaller blocks pay for
# each operation's start. Any other device has launches to hide instead.
_BLOCK_BYTES = {"cpu": 4 << 20}
_BLOCK_BYTES_ELSEWHERE = 64 << 20


def _rows_per_block(slab: Tensor, dtype: torch.dtype) -> int:
    return _BLOCK_BYTES.get(slab.device.type, _BLOCK_BYTES_ELSEWHERE) // (slab.shape[1] * dtype.itemsize) or 1


# ---------------------------------------------------------------- both


def _stat_dtype(slab: Tensor) -> torch.dtype:
    return torch.float64 if slab.dtype == torch.float64 else torch.float32


def _check(slab, target, statistics, cotangents, *, stats, grad, scale, class_weight, epilogue, out) -> None:
    """ValueError unless the arguments are what `rows_` documents: a kernel would read them wrongly without a word."""
    if slab.dim() != 2 or slab.dtype not in _SLAB_DTYPES or slab.shape[1] < 1:
        raise ValueError(f"rows_: slab must be [C, V] of {_SLAB_DTYPES}, got {list(slab.shape)} {slab.dtype}")
    C, V = slab.shape
    check_function(epilogue.function)
    dtype = _stat_dtype(slab)
    needed = {"nll", "max", "logsum"} if stats else {"max", "logsum"}
    if grad and cotangents.pz is not None:
        needed.add("pz")
    for name, vector in statistics._asdict().items():
        if vector is None and name in needed:
            raise ValueError(f"rows_: {name} is missing")
        if stats and vector is not None and not vector.is_contiguous():
            raise ValueError(f"rows_: {name} is written and must be contiguous, got strides {vector.stride()}")
        if stats or name in needed:
            _check_tensor(name, vector, (C,), torch.int64 if name == "argmax" else dtype, slab.device)
    _check_tensor("target", target, (C,), torch.int64, slab.device)
    _check_tensor("class_weight", class_weight, (V,), dtype, slab.device)
    _check_unit_stride("slab", slab)
    if grad:
        for name, vector in cotangents._asdict().items():
            _check_tensor(f"g_{name}", vector, (C,), dtype, slab.device)
        _check_tensor("scale", scale, (), dtype, slab.device)
        if out is not None:
            _check_tensor("out", out, (C, V), slab.dtype, slab.device)
            _check_unit_stride("out", out)


def check_function(name: str) -> None:
    """Raise ValueError for what is no function of an epilogue."""
    if name not in _FUNCTIONS:
        raise ValueError(f"rows_: epilogue.function must be one of {_FUNCTIONS}, got {name!r}")


def _check_tensor(name: str, tensor: Tensor | None, shape, dtype, device) -> None:
    if tensor is None or (tensor.shape == shape and tensor.dtype == dtype and tensor.device == device):
        return
    raise ValueError(
        f"rows_: {name} must be {list(shape)} {dtype} on {device}, "
        f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
    )


def _check_unit_stride(name: str, matrix: Tensor) -> None:
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        raise ValueError(f"rows_: {name} must have unit stride along its rows, got strides {matrix.stride()}")


_FUNCTIONS = ("", "tanh", "sigmoid")
_SLAB_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
