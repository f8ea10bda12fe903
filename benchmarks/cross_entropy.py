"""Time and peak memory of cross_entropy over logits that exist: forward + backward of the mean.

    python -m benchmarks.cross_entropy --shape 8192x128256

One JSON line per provider. Before anything is timed the gradient is compared with float64 eager on the first 256 rows;
peak+ is the peak allocation above the logits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys

import torch
import torch.nn.functional as F

import flce_inductor


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a provider fails the gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8192x128256", help="NxV")
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args(argv)
    N, V = map(int, args.shape.split("x"))
    torch.manual_seed(0)
    logits = torch.randn(N, V, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(V, (N,), device="cuda")
    providers = {
        "eager": F.cross_entropy,
        "compile": torch.compile(F.cross_entropy, dynamic=False),
        "ours": flce_inductor.cross_entropy,
        "ours in place": lambda z, t: flce_inductor.cross_entropy(z, t, in_place_backward=True),
    }
    failed = False
    rows = {}
    for name, fn in providers.items():
        z = logits[:256].clone().requires_grad_()
        fn(z, target[:256]).backward()
        want = logits[:256].double().requires_grad_()
        F.cross_entropy(want, target[:256]).backward()
        error = float((z.grad.double() - want.grad).norm() / want.grad.norm())
        rows[name] = {"provider": name, "N": N, "V": V, "grad_err": error, "gate": error < 1e-2}
        failed |= not rows[name]["gate"]
    times = {name: [] for name in providers}
    for repeat in range(args.repeats + 3):
        for name, fn in providers.items():
            z = logits.clone().requires_grad_()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn(z, target).backward()
            end.record()
            torch.cuda.synchronize()
            if repeat >= 3:
                times[name].append(start.elapsed_time(end))
                rows[name]["peak_plus_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
            del z
    about = {
        "dtype": "bfloat16",
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    for name, row in rows.items():
        print(json.dumps({**row, "ms": round(statistics.median(times[name]), 3), **about}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
