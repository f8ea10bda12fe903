"""Peak memory of gradient accumulation: k micro-batches, each with a backward, into one weight gradient.

    python -m benchmarks.accumulation --shape 4096x256x50000
    python -m benchmarks.accumulation --shape 8192x4096x128256 --device cuda --dtype bfloat16

Each provider runs in a process of its own. peak_plus_mib has an entry for each micro-batch: the peak while it ran,
above what was in use before the first, when there was no gradient. From the second on, both the weight gradient [V, H]
that is accumulated into and the one that the backward yields are part of it. On the CPU it is the process's resident
memory (VmHWM, reset before each micro-batch), on CUDA what the allocator gave out. One JSON line per provider.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys

import torch
import torch.nn.functional as F

from .cpu import resident


def _in_use(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else resident("VmRSS")


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")


def worker(provider: str, N: int, H: int, V: int, micro_batches: int, device: str, dtype: torch.dtype) -> dict:
    """Measure one provider in this process."""
    torch.manual_seed(0)
    weight = (torch.randn(V, H, device=device) * H**-0.5).to(dtype).requires_grad_()
    backend = {"compile": "inductor", "ours": "flce_inductor"}[provider]
    compiled = torch.compile(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), backend=backend)

    def micro_batch() -> float:
        h = torch.randn(N, H, device=device, dtype=dtype, requires_grad=True)  # stands for the rest of the model
        target = torch.randint(V, (N,), device=device)
        loss = compiled(h, weight, target) / micro_batches
        loss.backward()
        return float(loss.detach())

    micro_batch()  # compiles
    weight.grad = None
    torch.manual_seed(1)
    before, loss, peaks = _in_use(device), 0.0, []
    for _ in range(micro_batches):
        _reset_peak(device)
        loss += micro_batch()
        peaks.append(round((_peak(device) - before) / 2**20, 1))
    return {
        "provider": provider,
        "N": N,
        "H": H,
        "V": V,
        "micro_batches": micro_batches,
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "loss": loss,
        "dweight_norm": float(weight.grad.float().norm()),
        "dweight_mib": round(weight.nbytes / 2**20, 1),
        "peak_plus_mib": peaks,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    """Run the providers; exit status 1 when they disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x256x50000", help="NxHxV of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        shape = map(int, args.shape.split("x"))
        row = worker(args.worker, *shape, args.micro_batches, args.device, getattr(torch, args.dtype))
        print(json.dumps(row))
        return 0
    # large tensors go back to the system when they are freed, for both alike
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
    rows = []
    for provider in ("compile", "ours"):
        command = [sys.executable, "-m", "benchmarks.accumulation", *sys.argv[1:], "--worker", provider]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    theirs, ours = rows
    limit = 1e-4 if args.dtype == "float32" else 1e-2
    return int(any(abs(ours[k] / theirs[k] - 1) > limit for k in ("loss", "dweight_norm")))


if __name__ == "__main__":
    sys.exit(main())
