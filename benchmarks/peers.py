"""What there is for the mean cross entropy of a linear head, each as (h, weight, target, bias=None) -> loss [].

h [N, H], weight [V, H], target [N] int64 with -100 for rows that don't count, bias [V].

    eager             cross_entropy(linear(..)), nothing compiled
    compile           torch.compile of that
    auto_chunker      torch.compile with Inductor's own chunking pass on, at its defaults
    auto_chunker=8    the same with its threshold off and so many chunks
    native            torch.nn.functional.linear_cross_entropy, where the torch has it
    liger, cce, quack liger-kernel, cut-cross-entropy, quack-kernels, called by hand
    ours              torch.compile(backend="flce_inductor") at its defaults
    tuned             with autotune
    C=1024            with chunk_size; C=1024:param also with accum_dtype
    slab=64           with max_slab_bytes, in MiB
    dense             with skip_ignored off
    graphs            with skip_ignored=True under CUDA graphs, where the count of rows stays on the device
    dense-graphs      with skip_ignored off under CUDA graphs
    floor             the three matrix products alone, all rows at once, over V rounded down to a multiple of 8: no loss
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[..., Tensor]


class Missing(Exception):
    """A peer can't be measured here; the text says why."""


def eager(h: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
    """What users write."""
    return F.cross_entropy(F.linear(h, weight, bias), target)


def floor(h: Tensor, weight: Tensor, target: Tensor) -> None:
    """What no way of computing the loss can leave out."""
    with torch.no_grad():
        aligned = weight[: len(weight) // 8 * 8]
        logits = h @ aligned.t()
        torch.mm(logits, aligned)
        torch.mm(logits.t(), h)


def own(fn: Callable) -> Callable:
    """fn with a code object of its own: Dynamo gives up a code object that it has compiled eight times."""
    return types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def compiled(fn: Callable, backend: str = "inductor", dynamic: bool | None = None, **options: Any) -> Callable:
    """torch.compile of fn's copy."""
    return torch.compile(own(fn), backend=backend, dynamic=dynamic, options=options or None)


def ours(fn: Callable = eager, dynamic: bool | None = None, graphs: bool = False, **keys: Any) -> Callable:
    """fn by flce_inductor, however small its head; graphs: in CUDA graphs."""
    import flce_inductor  # noqa: F401  the backend, also where the package isn't installed

    keys = {"min_logits_bytes": 0, "min_vocab_size": 0, **keys}
    options = {f"flce_inductor.{key}": value for key, value in keys.items()}
    return compiled(fn, "flce_inductor", dynamic, **options, **({"triton.cudagraphs": True} if graphs else {}))


def auto_chunker(chunks: int | None = None) -> Loss:
    """Inductor's pass; with a number of chunks, wherever it can."""
    import torch._inductor.config as inductor

    if not hasattr(inductor, "auto_chunker"):
        raise Missing(f"torch {torch.__version__} has no torch._inductor.config.auto_chunker")
    options: dict[str, Any] = {"auto_chunker.enable": True}
    if chunks is not None:
        options |= {"auto_chunker.amplify_ratio_threshold": 0, "auto_chunker.num_chunk": chunks}
    return compiled(eager, **options)


def native() -> Loss:
    """torch's own, from 2.13 on."""
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Missing(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    return lambda h, weight, target, bias=None: function(h, weight, target, linear_bias=bias)


def _gpu(package: str) -> None:
    if not torch.cuda.is_available():
        raise Missing(f"{package} runs on a GPU")


def liger() -> Loss:
    """liger-kernel's fused linear cross entropy."""
    _gpu("liger-kernel")
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda h, weight, target, bias=None: loss(weight, h, target, bias)


def liger_over_logits(weight: Tensor | None, reduction: str) -> Loss:
    """liger-kernel's cross entropy, as (logits, target) -> loss; it overwrites the logits."""
    _gpu("liger-kernel")
    try:
        from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
    except ImportError as error:
        raise Missing(f"can't be imported: {error}") from None
    return LigerCrossEntropyLoss(weight=weight, reduction=reduction)


def cce() -> Loss:
    """Apple's cut cross entropy, which has no bias."""
    _gpu("cut-cross-entropy")
    from cut_cross_entropy import linear_cross_entropy

    return lambda h, weight, target: linear_cross_entropy(h, weight, target)


def quack() -> Loss:
    """quack's chunked linear cross entropy, which has no bias."""
    _gpu("quack-kernels")
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda h, weight, target: chunked_linear_cross_entropy(h, weight, target)


_PEERS = {
    "eager": lambda: eager,
    "compile": lambda: compiled(eager),
    "auto_chunker": auto_chunker,
    "native": native,
    "liger": liger,
    "cce": cce,
    "quack": quack,
    "floor": lambda: floor,
}
_SIXTEEN_BITS = {"cce": "cut-cross-entropy", "quack": "quack-kernels"}


def make(spec: str, dtype: torch.dtype = torch.bfloat16) -> tuple[str, Loss]:
    """The name that lines give it, and the loss. Raises Missing, and ValueError for a spec that isn't above."""
    kind, _, value = spec.partition("=")
    if kind in _SIXTEEN_BITS and dtype.itemsize != 2:
        raise Missing(f"{_SIXTEEN_BITS[kind]} takes float16 and bfloat16")
    try:
        if kind == "C":
            rows, _, accum = value.partition(":")
            name = f"ours C={rows} {accum}".strip()
            return name, ours(chunk_size=int(rows), **({"accum_dtype": accum} if accum else {}))
        if kind == "slab":
            return f"ours slab{value}", ours(max_slab_bytes=int(value) << 20)
        if kind == "auto_chunker" and value:
            return f"auto_chunker forced {value}", auto_chunker(int(value))
        if spec == "ours":
            return "ours C=auto", ours()
        if spec == "tuned":
            return "ours tuned", ours(autotune=True)
        if spec == "dense":
            return "ours dense", ours(skip_ignored=False)
        if spec in ("graphs", "dense-graphs"):
            _gpu("a CUDA graph")
            return f"ours {spec}", ours(graphs=True, skip_ignored=spec == "graphs")
        if spec in _PEERS:
            return spec, _PEERS[spec]()
    except ImportError as error:
        raise Missing(f"can't be imported: {error}") from None
    raise ValueError(f"no provider {spec!r}: see benchmarks/peers.py")


def contenders(specs: list[str], dtype: torch.dtype) -> tuple[dict[str, Loss], list[dict]]:
    """Losses by name, and a line for each that is missing."""
    made, missing = {}, []
    for spec in specs:
        try:
            name, loss = make(spec, dtype)
            made[name] = loss
        except Missing as why:
            missing.append({"provider": spec, "missing": str(why)})
    return made, missing
