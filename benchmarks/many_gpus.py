"""Time and peak memory per rank of forward + backward of a head and its loss on several GPUs, side by side.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.many_gpus --shape 8192x4096x128256

Modes: one (each rank by itself, no collective), ddp and fsdp (each rank has N rows of its own), vocab (all ranks have
the same N rows and V / ranks rows of the weight), links (what the collectives of these take by themselves). NCCL on
GPUs, gloo on CPUs. One JSON line per measurement, from rank 0; times and peaks are the largest of any rank. Before
anything is timed, the loss and both gradients are compared with float32 eager without a wrapper (a correctness gate);
providers are timed interleaved; peak+ is the peak allocation above what was allocated before the step.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import flce_inductor
from flce_inductor.explain import collect

from . import measure


class Head(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, self.weight), target)


class Provider(NamedTuple):
    """step(h, target): forward and backward, the loss. dweight(): the gradient, of the rows of the weight `rows`."""

    step: Callable[[Tensor, Tensor], Tensor]
    parameter: nn.Parameter
    rows: slice = slice(None)

    def dweight(self) -> Tensor:
        grad = self.parameter.grad
        return grad.full_tensor() if isinstance(grad, DTensor) and self.rows == slice(None) else _local(grad)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _of_module(module: nn.Module, backend: str) -> Provider:
    options = {"flce_inductor.min_logits_bytes": 0} if backend == "flce_inductor" else None
    compiled = torch.compile(module, backend=backend, options=options)

    def step(h, target):
        loss = compiled(h, target)
        loss.backward()
        return loss

    return Provider(step, next(module.parameters()))


BACKENDS = {"torch.compile": "inductor", "ours": "flce_inductor"}


def one(weight: Tensor) -> dict[str, Callable[[], Provider]]:
    return {name: lambda b=b: _of_module(Head(weight), b) for name, b in BACKENDS.items()}


def ddp(weight: Tensor) -> dict[str, Callable[[], Provider]]:
    def wrapped():
        return DistributedDataParallel(Head(weight), gradient_as_bucket_view=True)

    return {name: lambda b=b: _of_module(wrapped(), b) for name, b in BACKENDS.items()}


def fsdp(weight: Tensor) -> dict[str, Callable[[], Provider]]:
    """Float32 parameters, the forward in the benchmark's dtype, gradients reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=weight.dtype, reduce_dtype=torch.float32)

    def wrapped():
        mesh = init_device_mesh(weight.device.type, (dist.get_world_size(),))
        return fully_shard(Head(weight.float()), mesh=mesh, mp_policy=policy)

    return {name: lambda b=b: _of_module(wrapped(), b) for name, b in BACKENDS.items()}


def vocab(weight: Tensor) -> dict[str, Callable[[], Provider]]:
    mesh = init_device_mesh(weight.device.type, (dist.get_world_size(),))
    width = -(-weight.shape[0] // mesh.size())
    rows = slice(mesh.get_local_rank() * width, (mesh.get_local_rank() + 1) * width)

    def shard() -> nn.Parameter:
        local = weight[rows].clone()
        return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], shape=weight.shape, stride=weight.stride()))

    def standard(compiled: bool) -> Provider:
        parameter = shard()

        def loss_of(h, w, target):
            x = DTensor.from_local(h, mesh, [Replicate()], run_check=False)
            return F.cross_entropy(F.linear(x, w), target)

        fn = torch.compile(loss_of) if compiled else loss_of

        def step(h, target):
            with loss_parallel():
                loss = fn(h, parameter, target)
                loss.backward()
            return _local(loss)

        return Provider(step, parameter, rows)

    def ours(compiled: bool, **how: Any) -> Provider:
        parameter = shard()

        def loss_of(h, w, target):
            group = mesh.get_group()
            return flce_inductor.linear_cross_entropy(h, w, target, process_group=group, **how)

        fn = torch.compile(loss_of) if compiled else loss_of

        def step(h, target):
            loss = fn(h, parameter, target)
            loss.backward()
            return loss

        return Provider(step, parameter, rows)

    return {
        "loss_parallel": lambda: standard(False),
        "loss_parallel, torch.compile": lambda: standard(True),
        "ours": lambda: ours(False),
        "ours, in_place_backward": lambda: ours(False, in_place_backward=True),
        "ours, torch.compile": lambda: ours(True),
    }


MODES = {"one": one, "ddp": ddp, "fsdp": fsdp, "vocab": vocab}


# ---------------------------------------------------------------- measuring


class Clock:
    """Times and memory of one rank's device."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.device = device

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def together(self) -> None:
        """All ranks are here, with nothing left to do."""
        dist.all_reduce(torch.ones((), device=self.device))
        self.synchronize()

    def milliseconds(self, work: Callable[[], Any]) -> float:
        self.together()
        start = time.perf_counter()
        work()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3

    def peak_plus(self, work: Callable[[], Any]) -> float | None:
        """MiB that were allocated at most, above what was before."""
        if self.cuda:
            return measure.peak(work, self.cuda)["peak_plus_mib"]
        work()
        return None

    def largest(self, x: float | None) -> float | None:
        """The largest of any rank's numbers."""
        if x is None:
            return None
        number = torch.tensor(x, dtype=torch.float64, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return number.item()


def lines(mode: str, h: Tensor, weight: Tensor, target: Tensor, repeats: int, tolerance: float) -> list[dict]:
    """A row per provider of a mode."""
    clock = Clock(h.device)
    expected = measure.reference(h, weight, target)
    if mode in ("ddp", "fsdp"):
        dist.all_reduce(expected[2])
        expected[2] /= dist.get_world_size()
    rows: dict[str, dict] = {}
    ready: dict[str, Callable[[], Any]] = {}
    torch._dynamo.reset()
    for name, make in MODES[mode](weight).items():
        try:
            with collect() as sites:
                provider = make()

                def step(provider=provider):
                    h.grad = provider.parameter.grad = None
                    return provider.step(h, target)

                loss = step()
            grads = [loss.detach(), h.grad, provider.dweight()]
            wanted = [*expected[:2], expected[2][provider.rows]]
            errors = [clock.largest(measure.relative(a, e)) for a, e in zip(grads, wanted, strict=True)]
            del grads, loss
            rewritten = [site.reason is None for site in sites]
            for site in filter(lambda site: site.reason, sites):
                print(site, file=sys.stderr)
            expect = [True] if name == "ours" and mode != "vocab" else []  # where the pass has something to do
            for _ in range(2):
                step()
            h.grad = provider.parameter.grad = None
            peak = clock.largest(clock.peak_plus(step))
        except Exception:  # the other providers can still be measured, if all ranks failed alike
            traceback.print_exc()
            rows[name] = {"provider": name, "failed": traceback.format_exc().strip().splitlines()[-1][:300]}
            continue
        ready[name] = step
        rows[name] = {
            "provider": name,
            "peak_plus_mib": None if peak is None else round(peak, 1),
            **dict(zip(("loss_err", "dh_err", "dweight_err"), errors, strict=True)),
            "gate": all(error < tolerance for error in errors) and rewritten == expect,
        }
    del expected
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(repeats):
        for name, step in ready.items():
            times[name].append(clock.largest(clock.milliseconds(step)))
    for name, ms in times.items():
        rows[name] |= {"ms": round(statistics.median(ms), 2), "ms_min": round(min(ms), 2)}
    return list(rows.values())


def links(h: Tensor, weight: Tensor, target: Tensor, repeats: int, tolerance: float) -> list[dict]:
    """What the collectives take by themselves."""
    clock, ranks = Clock(h.device), dist.get_world_size()
    width = weight.shape[0] // ranks
    half, wide = torch.zeros_like(weight[: width * ranks]), torch.zeros(width * ranks, weight.shape[1], device=h.device)
    narrow, part = half[:width].clone(), wide[:width].clone()
    states, chunk = torch.zeros_like(h), torch.zeros(2, 2048, device=h.device)
    collectives = {
        "all-reduce [V, H]": (half, lambda: dist.all_reduce(half)),
        "all-gather [V, H]": (half, lambda: dist.all_gather_into_tensor(half, narrow)),
        "reduce-scatter [V, H] float32": (wide, lambda: dist.reduce_scatter_tensor(part, wide)),
        "all-reduce [N, H]": (states, lambda: dist.all_reduce(states)),
        "all-reduce [2, 2048] float32": (chunk, lambda: dist.all_reduce(chunk)),
    }
    rows = []
    for name, (x, work) in collectives.items():
        work()
        ms = statistics.median(clock.largest(clock.milliseconds(work)) for _ in range(repeats))
        rows.append({"provider": name, "mib": round(x.nbytes / 2**20, 2), "ms": round(ms, 3), "gate": True})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a provider fails, or fails the gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8192x4096x128256", help="NxHxV")
    parser.add_argument("--modes", default="links,one,ddp,fsdp,vocab")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend, where = ("nccl", {"device_id": device}) if cuda else ("gloo", {})
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=120), **where)
    N, H, V = map(int, args.shape.split("x"))
    about = {
        "ranks": dist.get_world_size(),
        "N": N,
        "H": H,
        "V": V,
        **measure.about(device.type, args.dtype),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }
    tolerance = measure.TOLERANCE[dtype]
    failed = False
    for mode in args.modes.split(","):
        torch.manual_seed(0)
        weight = (torch.randn(V, H, device=device) * H**-0.5).to(dtype)
        if mode != "vocab":
            torch.manual_seed(1 + dist.get_rank())
        h = torch.randn(N, H, device=device).to(dtype).requires_grad_()
        target = torch.randint(V, (N,), device=device)
        try:
            rows = (links if mode == "links" else lambda *a, mode=mode: lines(mode, *a))(
                h, weight, target, args.repeats, tolerance
            )
        except Exception:  # the other modes can still be measured
            traceback.print_exc()
            rows = [{"provider": None, "failed": traceback.format_exc().strip().splitlines()[-1][:300]}]
        for row in rows:
            failed |= not row.get("gate", False)
            if dist.get_rank() == 0:
                measure.emit([{"mode": mode, **row}], about)
        del h, weight, target
        if cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
