"""Time and peak memory of forward + backward of mean cross entropy over a linear head, side by side.

    python -m benchmarks.flce --shapes 8192x4096x128256 --providers floor,compile,liger,ours,C=1024
    python -m benchmarks.flce --preset readme                   # H200: 4 minutes
    python -m benchmarks.flce --preset writeups                 # H200: 6 minutes
    python -m benchmarks.flce --preset peers                    # H200: 5 minutes
    python -m benchmarks.flce --over N --shapes 1024x4096x128256 --most 131072 --repeats 5       # H200: 4 minutes
    python -m benchmarks.flce --preset cpu --device cpu --repeats 5         # one thread: 10 minutes

A shape is NxHxV[:dtype][@provider+provider], the latter beside --providers; benchmarks/peers.py lists the providers.
--over N doubles N from that of each shape to --most, at its H and V.

One JSON line per measurement. Before anything is timed, loss and gradients of all rows, from logits with a standard
deviation of 3, are compared with eager in a wider dtype (the correctness gate). benchmarks/measure.py says how time and
memory are taken; gradients_mib is the part of peak_plus_mib that dh and dweight are. A provider that is missing, fails
or runs out of memory is a line that says so.

Presets: readme, the shapes of README's tables; writeups, those of three public write-ups (native and liger at one shape
in three dtypes; 262144 and 128256 classes at 8192 and 32768 rows with 256 and 1024 rows a chunk, and with a cap of 256
rows' bytes); peers, everything that can be installed, at six shapes; cpu, three shapes that a laptop can do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import measure, peers

_ALL = "floor,eager,compile,auto_chunker,auto_chunker=8,native,liger,cce,quack,ours,tuned"
PRESETS = {  # providers, shapes
    "readme": (
        "floor,compile,liger,ours",
        "32768x4096x128256@C=1024 8192x5376x262144@C=512+C=1024 16384x2048x151936@C=1024+C=1000:param "
        "8192x2304x256000@C=512+C=832 8192x4096x128257@C=1024 8192x4096x128256@C=512+C=1024 16384x4096x32001 "
        "8192x768x50257@C=1024+C=416:param 16384x4096x32000 16384x4096x32000:float32 16384x4096x32000:float16",
    ),
    "writeups": (
        "floor,eager,compile,native,liger,ours",
        "16384x4096x32000 16384x4096x32000:float16 16384x4096x32000:float32 "
        "8192x5376x262144@C=256+C=256:param+slab=128+C=1024 32768x5376x262144@C=256+C=256:param+slab=128+C=1024 "
        "8192x4096x128256@C=256+C=256:param+slab=64+C=1024 32768x4096x128256@C=256+C=256:param+slab=64+C=1024",
    ),
    "peers": (
        _ALL,
        "8192x4096x128256 16384x4096x32000 8192x2304x256000 16384x2048x151936 8192x5376x262144 8192x768x50257",
    ),
    "cpu": ("floor,compile,native,ours", "4096x256x50000:float32 1024x768x32000:float32 1024x512x128256:float32"),
}
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)(?::(\w+))?(?:@(.+))?")


class Shape(NamedTuple):
    N: int
    H: int
    V: int
    dtype: str
    providers: list[str]


def parse(text: str, dtype: str, providers: list[str]) -> Shape:
    """NxHxV[:dtype][@provider+provider]."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} isn't NxHxV[:dtype][@provider+provider]")
    N, H, V, own, more = match.groups()
    return Shape(int(N), int(H), int(V), own or dtype, [*providers, *(more.split("+") if more else [])])


def draw(N: int, H: int, V: int, dtype: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """h [N, H] and weight [V, H], whose logits have a standard deviation of 1, and labels [N]."""
    torch.manual_seed(0)
    h = torch.randn(N, H, device=device).to(getattr(torch, dtype)).requires_grad_()
    weight = (torch.randn(V, H, device=device) * H**-0.5).to(h.dtype).requires_grad_()
    return h, weight, torch.randint(V, (N,), device=device)


def trial(h: Tensor, weight: Tensor, target: Tensor, fresh: bool = True) -> measure.Trial:
    """Forward and backward of a loss of peers.py."""
    wide = (measure.SPREAD * h).detach()
    want = measure.reference(wide, weight, target)

    def prepare() -> None:
        h.grad = weight.grad = None

    def step(fn: Callable, _) -> None:
        loss = fn(h, weight, target)
        if loss is not None:
            loss.backward()

    def check(fn: Callable) -> dict[str, float]:
        if fn is peers.floor:
            return {}
        got = measure.gradients(fn, [wide, weight], target)
        errors = map(measure.relative, got, want)
        return dict(zip(("loss_err", "dh_err", "dweight_err"), errors, strict=True))

    return measure.Trial(step, check, prepare, fresh)


def lines(shape: Shape, device: str, repeats: int) -> Iterator[dict]:
    """A line per provider of one shape."""
    N, H, V, name, specs = shape
    dtype = getattr(torch, name)
    sizes = {"N": N, "H": H, "V": V, "dtype": name}
    contenders, missing = peers.contenders(specs, dtype)
    for line in missing:
        yield line | sizes
    tried = trial(*draw(N, H, V, name, device))
    sizes["gradients_mib"] = round((N + V) * H * dtype.itemsize / measure.MIB, 1)
    for line in measure.compare(contenders, tried, device, repeats, measure.TOLERANCE[dtype]):
        yield line | sizes


def run(shapes: list[Shape], device: str, repeats: int) -> int:
    """Print the lines of all shapes; exit status 1 when a provider failed."""
    failed = False
    for shape in shapes:
        failed |= measure.emit(lines(shape, device, repeats), measure.about(device, shape.dtype))
    return int(failed)


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a provider fails the gate."""
    parser = measure.parser(__doc__)
    parser.add_argument("--preset", choices=PRESETS)
    parser.add_argument("--shapes", help="separated by commas or blanks")
    parser.add_argument("--providers", help="separated by commas")
    parser.add_argument("--over", choices=["N"])
    parser.add_argument("--most", type=int, default=131072, help="the last N of --over")
    args = parser.parse_args(argv)
    providers, shapes = PRESETS[args.preset] if args.preset else ("floor,compile,liger,ours", "8192x4096x128256")
    providers, texts = (args.providers or providers).split(","), re.split("[, ]", args.shapes or shapes)
    shapes = [parse(text, args.dtype, providers) for text in texts]
    if args.over:
        shapes = [s._replace(N=s.N << i) for s in shapes for i in range(64) if s.N << i <= args.most]
    return run(shapes, args.device, args.repeats)


if __name__ == "__main__":
    sys.exit(main())
