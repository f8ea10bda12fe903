"""Errors of the loss and its gradients against float64, beside eager's, torch.compile's and other fused losses'.

    python -m benchmarks.accuracy --shape 4096x1024x32000       # H200: 5 minutes
    python -m benchmarks.accuracy --device cpu --shape 1024x64x4000 --dtypes bfloat16

For each dtype, number of chunks and accum_dtype: the relative errors (Frobenius norm) of the loss, dh, dweight and
dbias of the mean loss, and their ratios to eager's in the same dtype. The inputs are rounded to the dtype first, so
that what is measured is the computation. float16 runs as under a GradScaler: the loss is multiplied by 2^16 before the
backward.
Exit status 1 when a ratio is above its limit:

    loss 1; dh 1.05; dweight in float32, or vocabulary-major (the backward of reduction="none"), 1.02; dweight in the
    parameter's dtype 2.2 at 8 chunks; by default 3

with 2e-7 allowed beside them, a rounding of float32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

import flce_inductor

from . import measure, peers

NAMES = ("loss", "dh", "dweight", "dbias")
ROUNDING = 2e-7


def eager(h, weight, bias, target):
    """What users write; the loss in float32 as language models compute it."""
    return F.cross_entropy(F.linear(h, weight, bias).float(), target)


def double(h, weight, bias, target):
    """The reference."""
    return F.cross_entropy(F.linear(h, weight, bias), target)


def lines(N: int, H: int, V: int, dtype: torch.dtype, device: str, counts: list[int]) -> Iterator[dict]:
    """The lines of one dtype; "gate" is false above a limit."""
    torch.manual_seed(0)
    h = torch.randn(N, H, device=device).to(dtype)
    weight = (torch.randn(V, H, device=device) * H**-0.5).to(dtype)
    bias = torch.randn(V, device=device).to(dtype)
    target = torch.randint(V, (N,), device=device)
    target[::9] = -100
    inputs, scale = [h, weight, bias], 2.0**16 if dtype == torch.float16 else 1.0
    want = measure.gradients(double, [x.double() for x in inputs], target)

    def errors(fn) -> dict[str, float]:
        torch._dynamo.reset()
        got = measure.gradients(fn, inputs, target, scale=scale)
        return {n: measure.relative(a, b) for n, a, b in zip(NAMES, got, want, strict=True)}

    theirs = errors(eager)

    def line(provider: str, found: dict, limits: dict, chunks: int | None = None, accum: str | None = None) -> dict:
        above = [n for n, most in limits.items() if not found[n] <= most * theirs[n] + ROUNDING]
        row = {"provider": provider, "chunks": chunks, "accum": accum}
        row |= {f"{n}_err": float(f"{found[n]:.3e}") for n in NAMES}
        row |= {f"{n}_ratio": round(found[n] / max(theirs[n], 1e-30), 3) for n in NAMES}
        return {**row, "above_limit": above, "gate": not above}

    yield line("eager", theirs, {})
    yield line("compile", errors(peers.compiled(eager)), {})
    for name in ("native", "liger", "cce"):
        try:
            fused = peers.make(name, dtype)[1]
        except peers.Missing as why:
            yield {"provider": name, "missing": str(why)}
        else:
            yield line(name, errors(lambda h, w, b, t, f=fused: f(h, w, t, b)), {})
    for chunks in counts:
        rows = -(-N // chunks)
        for accum in ("param", "float32", "auto"):
            limits = {"loss": 1.0, "dh": 1.05}
            if accum == "float32" or dtype == torch.float32:
                limits["dweight"] = 1.02
            elif accum == "auto":
                limits["dweight"] = 3.0
            elif chunks == 8:
                limits["dweight"] = 2.2
            compiled = peers.ours(eager, chunk_size=rows, accum_dtype=accum)
            yield line("ours", errors(compiled), limits, chunks, accum)

        def none(h, w, b, t, rows=rows):
            loss = flce_inductor.linear_cross_entropy(
                h, w, t, linear_bias=b, reduction="none", chunk_size=rows, loss_dtype=torch.float32
            )
            return loss.sum() / (t != -100).sum()

        limits = {"loss": 1.0, "dh": 1.05, "dweight": 1.02}
        yield line("ours, none", errors(none), limits, chunks, "vocabulary-major")


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 above a limit."""
    parser = measure.parser(__doc__, timed=False)
    parser.add_argument("--shape", default="4096x256x8000", help="NxHxV")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--chunks", default="1,4,8,16,32,128")
    args = parser.parse_args(argv)
    N, H, V = map(int, args.shape.split("x"))
    failed, counts = False, list(map(int, args.chunks.split(",")))
    for name in args.dtypes.split(","):
        found = lines(N, H, V, getattr(torch, name), args.device, counts)
        failed |= measure.emit(found, {"N": N, "H": H, "V": V, **measure.about(args.device, name)})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
