"""Time and memory over the share of labels that are ignored, with rows that are left out and without.

    python -m benchmarks.ignored                                # H200: 3 minutes
    python -m benchmarks.ignored --shape 2048x256x32000 --dtype float32 --device cpu

One JSON line per share, pattern ("random", or "prefix" of each of 8 sequences as prompts are), and provider, gated and
timed as benchmarks.flce's; "ours dense" computes all rows. In CUDA graphs memory is held from step to step, so their
peak_plus_mib says nothing. Contenders are compiled once, for the first pattern and
share. expected_ms: the counted share of the time that the first share took ours with all rows, plus 3 % of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from . import flce, measure, peers


def labels(N: int, V: int, share: float, pattern: str, device: str) -> Tensor:
    """[N] labels of which a share is ignored."""
    target = torch.randint(V, (N,), device=device)
    if pattern == "random":
        target[torch.randperm(N, device=device)[: round(share * N)]] = -100
    else:
        sequences = target.view(8, -1)
        sequences[:, : round(share * sequences.shape[1])] = -100
    return target


def lines(shape: flce.Shape, patterns: list[str], shares: list[float], device: str, repeats: int) -> Iterator[dict]:
    """A line per pattern, share and provider."""
    N, H, V, name, specs = shape
    contenders, missing = peers.contenders(specs, getattr(torch, name))
    for line in missing:
        yield line | {"N": N, "H": H, "V": V}
    h, weight, _ = flce.draw(N, H, V, name, device)
    all_rows = None
    for at, (pattern, share) in enumerate((p, s) for p in patterns for s in shares):
        trial = flce.trial(h, weight, labels(N, V, share, pattern, device), fresh=at == 0)
        found = measure.compare(contenders, trial, device, repeats, measure.TOLERANCE[h.dtype])
        for line in sorted(found, key=lambda line: line["provider"] != "ours dense"):
            if line["provider"] == "ours dense":
                all_rows = all_rows or line["ms"] / (1 - share)
            expected = all_rows and round((1 - share + 0.03) * all_rows, 3)
            yield line | {"pattern": pattern, "ignored": share, "expected_ms": expected, "N": N, "H": H, "V": V}


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a gate fails."""
    parser = measure.parser(__doc__)
    parser.add_argument("--shape", default="16384x4096x128256", help="NxHxV")
    parser.add_argument("--shares", default="0,0.25,0.5,0.75,0.9")
    parser.add_argument("--patterns", default="random,prefix")
    parser.add_argument("--providers", default="compile,liger,cce,dense,ours,dense-graphs,graphs")
    args = parser.parse_args(argv)
    shape = flce.parse(args.shape, args.dtype, args.providers.split(","))
    shares = list(map(float, args.shares.split(",")))
    found = lines(shape, args.patterns.split(","), shares, args.device, args.repeats)
    return int(measure.emit(found, measure.about(args.device, shape.dtype)))


if __name__ == "__main__":
    sys.exit(main())
