"""Time, peak memory and errors of cross entropy over logits that exist: forward and backward.

    python -m benchmarks.cross_entropy                          # H200: 3 minutes
    python -m benchmarks.cross_entropy --shapes 256x5000 --device cpu

One JSON line per shape, form of the loss and provider. Forms: none+mean (losses of rows, averaged by torch), mean, sum,
weighted (class weights, mean). Before anything is timed, losses and dlogits are compared with float64 eager, from
logits with a standard deviation of 3: token_err is the largest difference of one row's loss, where a loss has rows. The
logits are copied before each step, as some providers overwrite them; peak_plus_mib is above logits and copy.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from . import measure, peers

ROWS = 256  # of the reference at a time
FORMS = ("none+mean", "mean", "sum", "weighted")
Loss = Callable[[Tensor, Tensor], Tensor]  # (logits [N, V], target [N]) -> [] or [N]


def arguments(form: str, class_weight: Tensor) -> dict:
    """Of torch's cross_entropy."""
    reduction = {"none+mean": "none", "weighted": "mean"}.get(form, form)
    return {"reduction": reduction, "weight": class_weight if form == "weighted" else None}


def provider(name: str, how: dict) -> Loss:
    """One of eager, compile, liger, ours, in_place. Raises peers.Missing."""
    if name == "eager":
        return lambda z, t: F.cross_entropy(z, t, **how)
    if name == "compile":
        return peers.compiled(lambda z, t: F.cross_entropy(z, t, **how))
    if name == "liger":
        return peers.liger_over_logits(**how)
    import flce_inductor

    if name == "in_place" and not torch.cuda.is_available():
        raise peers.Missing("in_place_backward needs a GPU")
    return lambda z, t: flce_inductor.cross_entropy(z, t, in_place_backward=name == "in_place", **how)


def reference(logits: Tensor, target: Tensor, how: dict) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Losses of the rows times their weight in the loss [N], the loss [], dlogits by blocks of rows; float64."""
    class_weight = None if how["weight"] is None else how["weight"].double()
    total = len(target) if class_weight is None else class_weight[target].sum()
    share = 1.0 if how["reduction"] == "sum" else 1 / total
    per_row, dlogits = [], []
    for z, t in zip(logits.split(ROWS), target.split(ROWS), strict=True):
        z = z.double().requires_grad_()
        loss = F.cross_entropy(z, t, weight=class_weight, reduction="none")
        (loss.sum() * share).backward()
        per_row.append(loss.detach())
        dlogits.append(z.grad)
    return torch.cat(per_row), torch.cat(per_row).sum() * share, dlogits


def check(fn: Loss, logits: Tensor, target: Tensor, scale: float | None, want: tuple) -> dict[str, float]:
    """Relative errors of the loss and dlogits, and the largest error of a row's loss relative to the largest loss."""
    returned = []

    def scalar(z: Tensor) -> Tensor:
        loss = fn(z.clone(), target)  # it may be overwritten
        returned.append(loss.detach())
        return loss.mean() if loss.dim() else loss

    loss, dlogits = measure.gradients(scalar, [logits], scale=scale)
    per_row, total, blocks = want
    pairs = zip(dlogits.split(ROWS), blocks, strict=True)
    squares = [((a.double() - b).square().sum(), b.square().sum()) for a, b in pairs]
    errors = {"loss_err": measure.relative(loss, total)}
    errors["dlogits_err"] = float((sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt())
    if returned[0].dim():
        errors["token_err"] = float((returned[0].double() - per_row).abs().max() / per_row.abs().max())
    return errors


def lines(N: int, V: int, args: argparse.Namespace) -> Iterator[dict]:
    """The lines of one shape."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    logits = torch.randn(N, V, device=args.device).to(dtype)
    target = torch.randint(V, (N,), device=args.device)
    class_weight = torch.rand(V, device=args.device).add_(0.5).to(dtype)
    wide = measure.SPREAD * logits

    def step(fn: Loss, z: Tensor) -> None:
        loss = fn(z, target)
        (loss.mean() if loss.dim() else loss).backward()

    for form in args.forms.split(","):
        torch._dynamo.reset()
        how, contenders, sizes = arguments(form, class_weight), {}, {"form": form, "N": N, "V": V}
        for name in args.providers.split(","):
            try:
                contenders["ours in place" if name == "in_place" else name] = provider(name, how)
            except peers.Missing as why:
                yield {"provider": name, "missing": str(why)} | sizes
        scale = 1.0 if form == "sum" else None  # of float16, whose sums need none
        gate = functools.partial(check, logits=wide, target=target, scale=scale, want=reference(wide, target, how))
        trial = measure.Trial(step, gate, lambda: logits.clone().requires_grad_(), fresh=False)
        for line in measure.compare(contenders, trial, args.device, args.repeats, measure.TOLERANCE[dtype]):
            yield line | sizes


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a provider fails the gate."""
    parser = measure.parser(__doc__)
    parser.add_argument("--shapes", default="8192x32000,8192x128256,8192x151936", help="NxV, separated by commas")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--providers", default="eager,compile,liger,ours,in_place")
    args = parser.parse_args(argv)
    found = (line for shape in args.shapes.split(",") for line in lines(*map(int, shape.split("x")), args))
    return int(measure.emit(found, measure.about(args.device, args.dtype)))


if __name__ == "__main__":
    sys.exit(main())
