"""Time until the first gradient of the mean loss, cold and from Inductor's caches, beside torch.compile.

    python -m benchmarks.compile_time --rounds 1 --warm 2       # H200: 3 minutes
    python -m benchmarks.compile_time --rounds 1 --warm 2 --shape 1024x64x4000 --dtype float32 --device cpu

Each measurement is a process of its own: first with an empty cache directory ("cold"), then with what that left
("warm"). seconds: from the call of torch.compile to the end of the first backward, and, as import_seconds, what
importing flce_inductor takes after torch. Providers take turns. One JSON line per provider and state.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from . import peers


def worker(provider: str, shape: str, dtype: str, device: str) -> dict[str, float]:
    """Measure one provider in this process."""
    N, H, V = map(int, shape.split("x"))
    torch.manual_seed(0)
    h = torch.randn(N, H, dtype=getattr(torch, dtype), device=device, requires_grad=True)
    weight = torch.randn(V, H, dtype=h.dtype, device=device).mul_(H**-0.5).requires_grad_()
    target = torch.randint(V, (N,), device=device)
    (weight[:1] @ h[:1].t()).sum().backward()  # start the device and the libraries
    start = time.perf_counter()
    if provider != "compile":
        import flce_inductor  # noqa: F401
    imported = time.perf_counter() - start
    start = time.perf_counter()
    peers.make(provider)[1](h, weight, target).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    return {"seconds": seconds, "import_seconds": imported, "hits": hits}


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a warm process doesn't hit the cache or a cold one does."""
    from . import measure  # not above: the worker imports no more than it measures

    parser = measure.parser(__doc__)
    parser.add_argument("--shape", default="8192x4096x128256", help="NxHxV")
    parser.add_argument("--providers", default="compile,ours,tuned", help="of benchmarks/peers.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=3, help="warm processes in a round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        print(json.dumps(worker(args.worker, args.shape, args.dtype, args.device)))
        return 0
    results: dict[tuple[str, str], list[dict]] = {}
    for _ in range(args.rounds):
        for provider in args.providers.split(","):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", *["warm"] * args.warm):
                    command = [sys.executable, "-m", "benchmarks.compile_time", "--worker", provider]
                    command += ["--shape", args.shape, "--dtype", args.dtype, "--device", args.device]
                    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                    results.setdefault((provider, state), []).append(json.loads(done.stdout.splitlines()[-1]))
    lines = []
    for (provider, state), rows in results.items():
        line = {"provider": provider, "state": state, "shape": args.shape}
        for key in ("seconds", "import_seconds"):
            line[key] = round(statistics.median(row[key] for row in rows), 3)
        line |= {"seconds_min": round(min(row["seconds"] for row in rows), 3), "processes": len(rows)}
        lines.append({**line, "gate": all((row["hits"] > 0) == (state == "warm") for row in rows)})
    return int(measure.emit(lines, measure.about(args.device, args.dtype)))


if __name__ == "__main__":
    sys.exit(main())
