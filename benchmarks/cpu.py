"""Peak memory and time of forward + backward of the mean loss on the CPU, beside torch.compile.

    python -m benchmarks.cpu --shape 4096x256x50000

Each provider runs in a process of its own. peak+ is the process's peak resident memory during a step (VmHWM, reset
before it) above what was resident before, less the two gradients. One JSON line per provider.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F


def resident(key: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def worker(provider: str, N: int, H: int, V: int, repeats: int) -> dict:
    """Measure one provider in this process."""
    torch.manual_seed(0)
    h = torch.randn(N, H, requires_grad=True)
    weight = (torch.randn(V, H) * H**-0.5).requires_grad_()
    target = torch.randint(V, (N,))
    backend = {"compile": "inductor", "ours": "flce_inductor"}[provider]
    compiled = torch.compile(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), backend=backend)

    def step() -> float:
        h.grad = weight.grad = None
        loss = compiled(h, weight, target)
        loss.backward()
        return float(loss)

    step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - start)
    h.grad = weight.grad = None
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = resident("VmRSS")
    step()
    gradients = (N * H + V * H) * 4
    return {
        "provider": provider,
        "N": N,
        "H": H,
        "V": V,
        "dtype": "float32",
        "loss": loss,
        "dweight_norm": float(weight.grad.norm()),
        "seconds": round(statistics.median(times), 3),
        "seconds_min": round(min(times), 3),
        "peak_plus_mib": round((resident("VmHWM") - before - gradients) / 2**20, 1),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    """Run the providers; exit status 1 when they disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x256x50000", help="NxHxV")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    N, H, V = map(int, args.shape.split("x"))
    if args.worker:
        print(json.dumps(worker(args.worker, N, H, V, args.repeats)))
        return 0
    # large tensors go back to the system when they are freed, for both alike
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
    rows = []
    for provider in ("compile", "ours"):
        command = [sys.executable, "-m", "benchmarks.cpu", "--worker", provider, "--shape", args.shape]
        command += ["--repeats", str(args.repeats)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    theirs, ours = rows
    same = all(abs(ours[k] / theirs[k] - 1) < 1e-4 for k in ("loss", "dweight_norm"))
    print(
        json.dumps(
            {
                "memory_ratio": round(ours["peak_plus_mib"] / theirs["peak_plus_mib"], 3),
                "time_ratio": round(ours["seconds"] / theirs["seconds"], 3),
                "gate": same,
            }
        )
    )
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
