"""Peak memory of gradient accumulation: k micro-batches, each with a backward, into one weight gradient.

    python -m benchmarks.accumulation --shape 4096x256x50000 --device cpu --dtype float32
    python -m benchmarks.accumulation --shape 8192x4096x128256     # H200: 1 minute

Each provider runs in a process of its own. peak_plus_mib has an entry for each micro-batch: the peak while it ran,
above what was in use before the first, when there was no gradient. From the second on, both the weight gradient [V, H]
that is accumulated into and the one that the backward yields are part of it. On the CPU it is the process's resident
memory (VmHWM, reset before each micro-batch), on CUDA what the allocator gave out. One JSON line per provider.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import torch

from . import measure, peers


def worker(provider: str, N: int, H: int, V: int, micro_batches: int, device: str, dtype: torch.dtype) -> dict:
    """Measure one provider in this process."""
    torch.manual_seed(0)
    weight = (torch.randn(V, H, device=device) * H**-0.5).to(dtype).requires_grad_()
    cuda, (_, compiled) = device == "cuda", peers.make(provider, dtype)

    def micro_batch() -> float:
        h = torch.randn(N, H, device=device, dtype=dtype, requires_grad=True)  # stands for the rest of the model
        target = torch.randint(V, (N,), device=device)
        loss = compiled(h, weight, target) / micro_batches
        loss.backward()
        return float(loss.detach())

    micro_batch()  # compiles
    weight.grad = None
    measure.tidy(cuda)
    torch.manual_seed(1)
    before, loss, peaks = measure.in_use(cuda), 0.0, []
    for _ in range(micro_batches):
        measure.reset_peak(cuda)
        loss += micro_batch()
        peaks.append(round((measure.most_in_use(cuda) - before) / measure.MIB, 1))
    return {
        "provider": provider,
        "N": N,
        "H": H,
        "V": V,
        "micro_batches": micro_batches,
        "loss": loss,
        "dweight_norm": float(weight.grad.float().norm()),
        "dweight_mib": round(weight.nbytes / 2**20, 1),
        "peak_plus_mib": peaks,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the providers; exit status 1 when they disagree."""
    parser = measure.parser(__doc__)
    parser.add_argument("--shape", default="4096x256x50000", help="NxHxV of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    if args.worker:
        shape = map(int, args.shape.split("x"))
        print(json.dumps(worker(args.worker, *shape, args.micro_batches, args.device, dtype)))
        return 0
    rows = []
    for provider in ("compile", "ours"):
        command = [sys.executable, "-m", "benchmarks.accumulation", "--worker", provider, "--shape", args.shape]
        command += ["--device", args.device, "--dtype", args.dtype, "--micro-batches", str(args.micro_batches)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        measure.emit(rows[-1:], measure.about(args.device, args.dtype))
    theirs, ours = rows
    limit = 1e-4 if args.dtype == "float32" else 1e-2
    return int(any(abs(ours[k] / theirs[k] - 1) > limit for k in ("loss", "dweight_norm")))


if __name__ == "__main__":
    sys.exit(main())
