"""Time and memory over the share of labels that are ignored, with rows that are left out and without.

    python -m benchmarks.ignored --shape 16384x4096x128256
    python -m benchmarks.ignored --shape 2048x256x32000 --dtype float32 --device cpu

One JSON line per share, pattern ("random", or "prefix" of each of 8 sequences as prompts are), and provider. Loss and
gradients of every provider are compared with those of all rows computed (a correctness gate); providers are timed
interleaved in a seeded random order. expected_ms: the counted share of the time of all rows, plus 3 % of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import time

import torch

from .peers import eager, peer


def labels(N: int, V: int, share: float, pattern: str, device: str) -> torch.Tensor:
    """[N] labels of which a share is ignored."""
    target = torch.randint(V, (N,), device=device)
    if pattern == "random":
        target[torch.randperm(N, device=device)[: round(share * N)]] = -100
    else:
        sequences = target.view(8, -1)
        sequences[:, : round(share * sequences.shape[1])] = -100
    return target


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a gate fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="16384x4096x128256", help="NxHxV")
    parser.add_argument("--shares", default="0,0.25,0.5,0.75,0.9")
    parser.add_argument("--patterns", default="random,prefix")
    parser.add_argument("--providers", default="compile,liger,dense,ours")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args(argv)
    N, H, V = map(int, args.shape.split("x"))
    dtype, cuda = getattr(torch, args.dtype), args.device == "cuda"
    about = {"shape": args.shape, "dtype": args.dtype, "date": datetime.date.today().isoformat()}
    about |= {"card": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__}
    torch.manual_seed(0)
    h = torch.randn(N, H, device=args.device).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, device=args.device) * H**-0.5).to(dtype).requires_grad_()
    target = labels(N, V, 0.5, "random", args.device)
    contenders = {}
    for name in args.providers.split(","):
        if name in ("dense", "ours"):
            options = {"flce_inductor.skip_ignored": name == "ours" and "auto"}
            contenders[name] = torch.compile(eager, backend="flce_inductor", options=options)
        else:
            loss, note = peer(name)
            if loss is None:
                print(json.dumps({"provider": name, **note, **about}), flush=True)
            else:
                contenders[" ".join([name, *note.values()])] = loss

    def step(fn) -> torch.Tensor:
        h.grad = weight.grad = None
        loss = fn(h, weight, target)
        loss.backward()
        return loss.detach()

    def milliseconds(fn) -> float:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step(fn)
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    def peak_plus(fn) -> float | None:
        if not cuda:
            return None
        h.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(fn)
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)

    shuffle, failed, all_rows = random.Random(0), False, None
    for pattern in args.patterns.split(","):
        for share in map(float, args.shares.split(",")):
            target = labels(N, V, share, pattern, args.device)
            want = [step(contenders["dense"]), h.grad, weight.grad]
            errors, peaks, times = {}, {}, {name: [] for name in contenders}
            for name, fn in contenders.items():
                got = [step(fn), h.grad, weight.grad]
                pairs = zip(got, want, strict=True)
                errors[name] = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
                del got
                peaks[name] = peak_plus(fn)
            del want
            for _ in range(args.repeats):
                for name in shuffle.sample(list(contenders), len(contenders)):
                    times[name].append(milliseconds(contenders[name]))
            all_rows = all_rows or statistics.median(times["dense"])
            for name in contenders:
                line = {"provider": name, "pattern": pattern, "ignored": share}
                line |= {"ms": round(statistics.median(times[name]), 2), "ms_min": round(min(times[name]), 2)}
                line |= {"expected_ms": round((1 - share + 0.03) * all_rows, 2), "peak_plus_mib": peaks[name]}
                line |= dict(zip(("loss_err", "dh_err", "dweight_err"), errors[name], strict=True))
                line["gate"] = all(e < (2e-2 if dtype.itemsize == 2 else 1e-4) for e in errors[name])
                failed |= not line["gate"]
                print(json.dumps({**line, **about}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
