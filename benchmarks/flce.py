"""Time and peak memory of forward + backward of mean cross entropy over a linear head, side by side.

    python -m benchmarks.flce --shapes 8192x4096x128256 --providers eager,compile,liger,ours --chunk-sizes 1024,2048
    python -m benchmarks.flce --shapes 8192x4096x128256 --providers compile,tuned,slab64

One JSON line per measurement. Before anything is timed, loss and gradients are compared with eager in float32 on a
part of the rows (a correctness gate). Providers take turns in a seeded random order. ms: as at the end of a model's
forward, the host is ahead of the device, products have run right before (the same for all, as they decide on the card's
clock) and the L2 cache holds something else. idle_ms: the device is idle when the step begins, so the host's way to the
first launch counts. peak+ is the peak allocation above what was allocated before the step, and so includes dh and
dweight.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys

import torch
import triton

import flce_inductor

from .peers import eager, peer


def providers(names: list[str], chunk_sizes: list[int], accum_dtype: str = "auto") -> tuple[dict, list[dict]]:
    """Callables (h, weight, target) -> loss, and a line for each that is missing."""
    made, missing = {}, []
    for name in names:
        if name == "tuned":
            options = {"flce_inductor.autotune": True}
            made["ours tuned"] = torch.compile(eager, backend="flce_inductor", options=options)
        elif name.startswith("slab"):  # of so many MiB
            options = {"flce_inductor.max_slab_bytes": int(name.removeprefix("slab")) << 20}
            made[f"ours {name}"] = torch.compile(eager, backend="flce_inductor", options=options)
        elif name == "ours":
            made["ours C=auto"] = torch.compile(eager, backend="flce_inductor")
            for rows in chunk_sizes:
                options = {"flce_inductor.chunk_size": rows, "flce_inductor.accum_dtype": accum_dtype}
                suffix = "" if accum_dtype == "auto" else f" {accum_dtype}"
                made[f"ours C={rows}{suffix}"] = torch.compile(eager, backend="flce_inductor", options=options)
        elif name == "explicit":
            for rows in chunk_sizes:
                made[f"explicit C={rows}"] = lambda h, w, t, rows=rows: flce_inductor.linear_cross_entropy(
                    h, w, t, chunk_size=rows
                )
        else:
            loss, note = peer(name)
            if loss is None:
                missing.append({"provider": name, **note})
            else:
                made[" ".join([name, *note.values()])] = loss
    return made, missing


def gate(fn, h: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """Relative errors of the loss, dh and dweight against float32 eager on the first 512 rows."""
    h, target = h[:512].detach(), target[:512]
    grads = []
    for run, dtype in ((eager, torch.float32), (fn, h.dtype)):
        x, w = h.to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()
        loss = run(x, w, target)
        loss.backward()
        grads.append([loss.detach().float(), x.grad.float(), w.grad.float()])
    errors = [float((b - a).norm() / a.norm()) for a, b in zip(*grads, strict=True)]
    return dict(zip(("loss_err", "dh_err", "dweight_err"), errors, strict=True))


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a provider fails the gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8192x4096x128256", help="NxHxV or NxHxV@C, separated by commas")
    parser.add_argument("--accum-dtype", default="auto", help="for the chunk sizes given")
    parser.add_argument("--providers", default="eager,compile,ours")
    parser.add_argument("--chunk-sizes", default="", help="of every shape, beside the default, separated by commas")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    about = {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": args.dtype,
    }
    tolerance = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}[dtype]
    failed = False
    for shape in args.shapes.split(","):
        shape, *own = shape.split("@")
        chunk_sizes = list(map(int, filter(None, [*args.chunk_sizes.split(","), *own])))
        contenders, missing = providers(args.providers.split(","), chunk_sizes, args.accum_dtype)
        for row in missing:
            print(json.dumps({**row, **about}), flush=True)
        for row in measure(shape, dtype, contenders, tolerance, args.repeats):
            failed |= not row["gate"]
            print(json.dumps({**row, **about}), flush=True)
    return int(failed)


def measure(shape: str, dtype: torch.dtype, contenders: dict, tolerance: float, repeats: int) -> list[dict]:
    """A row per provider for one shape "NxHxV"."""
    N, H, V = map(int, shape.split("x"))
    torch.manual_seed(0)
    h = torch.randn(N, H, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(V, H, device="cuda") * H**-0.5).to(dtype).requires_grad_()
    target = torch.randint(V, (N,), device="cuda")

    def step(fn) -> None:
        h.grad = weight.grad = None
        fn(h, weight, target).backward()

    def peak_plus(fn) -> float:
        h.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(fn)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    warmed = torch.empty_like(warm)

    def timed(fn) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(fn)
        end.record()
        return start, end

    def rounds(idle: bool) -> dict[str, list[float]]:
        events = {name: [] for name in contenders}
        for _ in range(repeats):
            for name in shuffle.sample(list(contenders), len(contenders)):
                if idle:
                    torch.cuda.synchronize()
                else:
                    for _ in range(20):  # 30 ms on an H200
                        torch.mm(warm, warm, out=warmed)
                    flushed.zero_()
                events[name].append(timed(contenders[name]))
        torch.cuda.synchronize()
        return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}

    torch._dynamo.reset()
    errors = {name: gate(fn, h, weight, target) for name, fn in contenders.items()}
    torch._dynamo.reset()  # what is timed is compiled for its own shape
    peaks = {}
    for name, fn in contenders.items():
        for _ in range(3):
            step(fn)
        peaks[name] = peak_plus(fn)
    shuffle = random.Random(0)
    times, idle_times = rounds(idle=False), rounds(idle=True)
    return [
        {
            "provider": name,
            "N": N,
            "H": H,
            "V": V,
            "ms": round(statistics.median(times[name]), 2),
            "ms_min": round(min(times[name]), 2),
            "idle_ms": round(statistics.median(idle_times[name]), 2),
            "peak_plus_mib": round(peaks[name], 1),
            **errors[name],
            "gate": all(error < tolerance for error in errors[name].values()),
        }
        for name in contenders
    ]


if __name__ == "__main__":
    sys.exit(main())
