"""Speed over the alignment of the vocabulary: classes that a GEMM's 16-byte rows divide, and those that they don't.

    python -m benchmarks.unaligned                              # H200: 3 minutes
    python -m benchmarks.unaligned --offsets 0,1,8 --others ""  # H200: 2 minutes

Vocabularies of --base plus each of --offsets (a token added, or padding), and --others. One JSON line per vocabulary
and provider, as benchmarks.flce's; the floor's products are over V rounded down to a multiple of 8.
"""

from __future__ import annotations

import sys

from . import flce, measure


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a provider fails the gate."""
    parser = measure.parser(__doc__)
    parser.add_argument("--rows", type=int, default=8192, help="N")
    parser.add_argument("--hidden", type=int, default=4096, help="H")
    parser.add_argument("--base", type=int, default=128256)
    parser.add_argument("--offsets", default="0,1,2,4,7,8,64")
    parser.add_argument("--others", default="50257,32001")
    parser.add_argument("--providers", default="floor,compile,liger,ours")
    args = parser.parse_args(argv)
    sizes = [args.base + int(d) for d in args.offsets.split(",") if d] + [int(V) for V in args.others.split(",") if V]
    providers = args.providers.split(",")
    shapes = [flce.Shape(args.rows, args.hidden, V, args.dtype, providers) for V in sizes]
    return flce.run(shapes, args.device, args.repeats)


if __name__ == "__main__":
    sys.exit(main())
