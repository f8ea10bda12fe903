"""Time and memory over the number of rows in a chunk, with the default's and the tuner's choice marked.

    python -m benchmarks.chunk_curve                            # H200: 6 minutes
    python -m benchmarks.chunk_curve --shapes 8192x4096x128256  # H200: 2 minutes

One JSON line per shape and number of rows, from --least to N, and one for torch.compile, gated and timed as
benchmarks.flce's. "chosen" says who chose that number of rows. A tuner that chooses another loop than the library's
over rows is at no point of the curve; the line of "ours tuned" says what it chose, and what it timed.
"""

from __future__ import annotations

import re
import sys

import torch

from . import flce, measure


def lines(shape: flce.Shape, device: str, repeats: int) -> list[dict]:
    """The lines of one shape."""
    found = list(flce.lines(shape, device, repeats))
    of = {line["provider"]: line for line in found}
    tuned = of["ours tuned"].get("tuned", "").partition(", of ")[0]
    chosen = {
        "default": of["ours C=auto"].get("rows"),
        "tuner": int(tuned.split()[0]) if "rows-major library" in tuned else None,
    }
    for line in found:
        size = re.fullmatch(r"ours C=(\d+)", line["provider"])
        if size and "ms" in line:
            C = int(size[1])
            line["slab_mib"] = round(C * shape.V * getattr(torch, shape.dtype).itemsize / measure.MIB, 1)
            line["chosen"] = [name for name, rows in chosen.items() if rows and min(rows, shape.N) == C]
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a line fails its gate."""
    parser = measure.parser(__doc__, repeats=8)
    parser.add_argument("--shapes", default="8192x4096x128256,16384x4096x32000,8192x2304x256000")
    parser.add_argument("--least", type=int, default=128)
    args = parser.parse_args(argv)
    failed = False
    for text in args.shapes.split(","):
        shape = flce.parse(text, args.dtype, ["floor", "compile", "ours", "tuned"])
        sizes = [args.least << i for i in range(32) if args.least << i <= shape.N]
        shape.providers.extend(f"C={rows}" for rows in sizes)
        found = lines(shape, args.device, args.repeats)
        failed |= measure.emit(found, measure.about(args.device, shape.dtype))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
