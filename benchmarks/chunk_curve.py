"""Time and memory over the number of rows in a chunk, with the default's and the tuner's choice marked.

    python -m benchmarks.chunk_curve --shapes 8192x4096x128256,16384x4096x32000 --plot curve
    python -m benchmarks.chunk_curve --from results.jsonl --plot curve

One JSON line per shape and number of rows, from 128 to N, and one for torch.compile; with --plot, curve.svg and
curve.png. "chosen" says who chose that number of rows. Each is gated and timed as in benchmarks.flce. A tuner that
chooses another loop than the library's over rows is a line of its own ("ours tuned").
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time

import torch

import flce_inductor
from flce_inductor import chunking
from flce_inductor.explain import collect

from .flce import measure
from .peers import eager


def curve(shape: str, dtype: torch.dtype, repeats: int) -> list[dict]:
    """The lines of one shape "NxHxV"."""
    N, _, V = map(int, shape.split("x"))
    device = torch.device("cuda", torch.cuda.current_device())
    default = min(N, chunking.rows_per_chunk(V, dtype, device))
    tuned = torch.compile(eager, backend="flce_inductor", options={"flce_inductor.autotune": True})
    with collect() as sites:
        start = time.perf_counter()
        _once(tuned, shape, dtype)
        seconds = time.perf_counter() - start
    choice = sites[0].tuned.partition(", of ")[0]
    sizes = [128 << i for i in range(20) if 128 << i <= N]
    rows = {"compile": torch.compile(eager)}
    for size in sizes:
        rows[f"ours C={size}"] = lambda h, w, t, size=size: flce_inductor.linear_cross_entropy(h, w, t, chunk_size=size)
    rows["ours tuned"] = tuned
    lines = measure(shape, dtype, rows, 2e-2, repeats)
    for line in lines:
        size = re.fullmatch(r"ours C=(\d+)", line["provider"])
        if size:
            line["rows"] = int(size[1])
            line["slab_mib"] = round(line["rows"] * V * dtype.itemsize / 2**20, 1)
            names = {"default": default, "tuner": int(choice.split()[0]) if "rows-major library" in choice else None}
            line["chosen"] = [name for name, chosen in names.items() if chosen == line["rows"]]
        elif line["provider"] == "ours tuned":
            line |= {"choice": choice, "first_step_seconds": round(seconds, 2), "candidates": sites[0].tuned}
    return lines


def _once(fn, shape: str, dtype: torch.dtype) -> None:
    """The first step of a compiled function."""
    torch._dynamo.reset()
    N, H, V = map(int, shape.split("x"))
    h = torch.randn(N, H, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(V, H, device="cuda") * H**-0.5).to(dtype).requires_grad_()
    fn(h, weight, torch.randint(V, (N,), device="cuda")).backward()
    torch.cuda.synchronize()


def plot(lines: list[dict], path: str) -> None:
    """Time relative to torch.compile's, and the slab, over the rows of a chunk; a panel per shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys((line["N"], line["H"], line["V"]) for line in lines))
    figure, axes = plt.subplots(1, len(shapes), figsize=(4.2 * len(shapes), 3.6), sharey=True, layout="constrained")
    for ax, shape in zip([axes] if len(shapes) == 1 else axes, shapes, strict=True):
        of_shape = [line for line in lines if (line["N"], line["H"], line["V"]) == shape]
        base = next(line["ms"] for line in of_shape if line["provider"] == "compile")
        points = [line for line in of_shape if "rows" in line]
        x, y = [p["rows"] for p in points], [p["ms"] / base for p in points]
        ax.plot(x, y, "o-", color="#3b7dd8", label="flce_inductor")
        ax.axhline(1, color="#888888", linestyle="--", label="torch.compile")
        for name, marker, dy in (("default", "D", 14), ("tuner", "*", 28)):
            for p in points:
                if name in p["chosen"]:
                    at = p["rows"], p["ms"] / base
                    ax.plot(*at, marker, color="#e07b39", markersize=11)
                    ax.annotate(name, at, (0, dy), textcoords="offset points", ha="center", color="#e07b39")
        for p in points[:: max(1, len(points) // 4)]:
            at = p["rows"], p["ms"] / base
            ax.annotate(f"{p['slab_mib']:.0f} MiB", at, (4, -14), textcoords="offset points", color="#888888", size=8)
        ax.set_xscale("log", base=2)
        ax.set_title("N={} H={} V={}".format(*shape), color="#888888", size=10)
        ax.set_xlabel("rows in a chunk (slab)", color="#888888")
        ax.tick_params(colors="#888888")
        for spine in ax.spines.values():
            spine.set_color("#888888")
        if ax is ax.figure.axes[0]:
            ax.set_ylabel("time / torch.compile's", color="#888888")
            ax.legend(frameon=False, labelcolor="#888888")
    for kind in ("svg", "png"):
        figure.savefig(f"{path}.{kind}", transparent=True, dpi=150)


def main(argv: list[str] | None = None) -> int:
    """Measure or read; exit status 1 when a line fails its gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8192x4096x128256,16384x4096x32000,8192x2304x256000")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--from", dest="source", help="lines that were measured before")
    parser.add_argument("--plot", help="path of the picture, without its suffix")
    args = parser.parse_args(argv)
    if args.source:
        with open(args.source) as file:
            lines = [json.loads(line) for line in file]
    else:
        about = {"dtype": args.dtype, "card": torch.cuda.get_device_name(), "torch": torch.__version__}
        about["date"] = datetime.date.today().isoformat()
        lines = []
        for shape in args.shapes.split(","):
            for line in curve(shape, getattr(torch, args.dtype), args.repeats):
                lines.append({**line, **about})
                print(json.dumps(lines[-1]), flush=True)
    if args.plot:
        plot(lines, args.plot)
    return int(not all(line["gate"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
