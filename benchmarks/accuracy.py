"""Errors of the loss and its gradients against float64, beside eager's, torch.compile's and other fused losses'.

    python -m benchmarks.accuracy --device cuda --shape 4096x1024x32000
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

import argparse
import datetime
import json
import sys

import torch
import torch.nn.functional as F

import flce_inductor

from .peers import peer

NAMES = ("loss", "dh", "dweight", "dbias")
ROUNDING = 2e-7


def eager(h, weight, bias, target):
    """What users write; the loss in float32 as language models compute it."""
    return F.cross_entropy(F.linear(h, weight, bias).float(), target)


def double(h, weight, bias, target):
    """The reference."""
    return F.cross_entropy(F.linear(h, weight, bias), target)


def run(fn, inputs: list[torch.Tensor], target: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """Loss, dh, dweight, dbias in float64, without the scale that the loss had in the backward."""
    xs = [x.detach().requires_grad_() for x in inputs]
    loss = fn(*xs, target)
    (loss * scale).backward()
    return [loss.detach().double(), *(x.grad.double() / scale for x in xs)]


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 above a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="4096x256x8000", help="NxHxV")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--chunks", default="1,4,8,16,32,128")
    args = parser.parse_args(argv)
    N, H, V = map(int, args.shape.split("x"))
    about = {
        "N": N,
        "H": H,
        "V": V,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    failed = False
    for dtype in (getattr(torch, name) for name in args.dtypes.split(",")):
        torch.manual_seed(0)
        h = torch.randn(N, H, device=args.device).to(dtype)
        weight = (torch.randn(V, H, device=args.device) * H**-0.5).to(dtype)
        bias = torch.randn(V, device=args.device).to(dtype)
        target = torch.randint(V, (N,), device=args.device)
        target[::9] = -100
        inputs = [h, weight, bias]
        scale = 2.0**16 if dtype == torch.float16 else 1.0
        want = run(double, [x.double() for x in inputs], target, 1.0)

        def errors(fn, inputs=inputs, target=target, scale=scale, want=want) -> dict[str, float]:
            got = run(fn, inputs, target, scale)
            return {n: float((a - b).norm() / b.norm()) for n, a, b in zip(NAMES, got, want, strict=True)}

        theirs = errors(eager)
        torch._dynamo.reset()
        rows = [("eager", None, None, theirs, {}), ("compile", None, None, errors(torch.compile(eager)), {})]
        for name in ("native", "liger"):
            fused, note = peer(name)
            if fused is None:
                print(json.dumps({"provider": name, "dtype": str(dtype).removeprefix("torch."), **note, **about}))
            else:
                called = " ".join([name, *note.values()])
                rows.append((called, None, None, errors(lambda h, w, b, t, f=fused: f(h, w, t, b)), {}))
        for chunks in map(int, args.chunks.split(",")):
            rows_per_chunk = -(-N // chunks)
            for accum in ("param", "float32", "auto"):
                limits = {"loss": 1.0, "dh": 1.05}
                if accum == "float32" or dtype == torch.float32:
                    limits["dweight"] = 1.02
                elif accum == "auto":
                    limits["dweight"] = 3.0
                elif chunks == 8:
                    limits["dweight"] = 2.2
                options = {
                    "flce_inductor.chunk_size": rows_per_chunk,
                    "flce_inductor.accum_dtype": accum,
                    "flce_inductor.min_logits_bytes": 0,
                }
                torch._dynamo.reset()
                compiled = torch.compile(eager, backend="flce_inductor", options=options)
                rows.append(("ours", chunks, accum, errors(compiled), limits))

            def none(h, w, b, t, rows_per_chunk=rows_per_chunk):
                loss = flce_inductor.linear_cross_entropy(
                    h, w, t, linear_bias=b, reduction="none", chunk_size=rows_per_chunk, loss_dtype=torch.float32
                )
                return loss.sum() / (t != -100).sum()

            rows.append(
                ("ours, none", chunks, "vocabulary-major", errors(none), {"loss": 1.0, "dh": 1.05, "dweight": 1.02})
            )
        for provider, chunks, accum, found, limits in rows:
            ratios = {n: round(found[n] / max(theirs[n], 1e-30), 3) for n in NAMES}
            above = [n for n, most in limits.items() if found[n] > most * theirs[n] + ROUNDING]
            failed |= bool(above)
            row = {"provider": provider, "dtype": str(dtype).removeprefix("torch."), "chunks": chunks, "accum": accum}
            row |= {f"{n}_err": float(f"{found[n]:.3e}") for n in NAMES}
            row |= {f"{n}_ratio": ratios[n] for n in NAMES}
            print(json.dumps({**row, "above_limit": above, **about}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
