"""How everything here is measured: what a result line says of its origin, the correctness gate, time, and memory.

A trial puts every contender through the same: a first step, with nothing compiled and Inductor's caches empty; the
gate; two more steps; one whose peak memory is taken alone; then timed steps, contenders taking turns in a seeded random
order. On a GPU there are two series of these.

ms        as at the end of a model's forward: the host is ahead of the device, products have run right before (the same
          for all, as they decide on the card's clock), and the L2 cache holds something else
idle_ms   the device is idle when the step begins, so the host's way to the first launch counts

On a CPU there is one series, ms. peak_plus_mib is the peak during a step above what was in use before it, so it
includes the gradients: on a GPU what the allocator gave out, on a CPU the process's resident memory.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
import gc
import importlib.metadata
import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PEERS = ("triton", "liger_kernel", "cut_cross_entropy", "quack_kernels")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
SPREAD = 3.0  # of the logits in the gate: at 1, softmax's part of the gradients would be less than the tolerance
MIB = 2**20


# ------------------------------------------------------------------------------------------------------ command lines


def parser(doc: str, timed: bool = True, repeats: int = 10) -> argparse.ArgumentParser:
    """With what every command takes, or every one that takes times."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    if timed:
        made.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
        made.add_argument("--repeats", type=int, default=repeats)
    return made


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _processor() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        return next((x.partition(":")[2].strip() for x in cpuinfo if x.startswith("model name")), platform.machine())


def about(device: str, dtype: str) -> dict[str, Any]:
    """The end of every line: when, where and with what it was measured."""
    import flce_inductor  # not above: benchmarks.compile_time measures what this takes

    cuda = device == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {
        "dtype": dtype,
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name() if cuda else _processor(),
        "driver": _output(*query) if cuda else None,
        "threads": None if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        **{name: version for name in PEERS if (version := _version(name))},
        "flce_inductor": flce_inductor.__version__,
        "commit": _output("git", "describe", "--always", "--dirty"),
    }


def emit(lines: Iterable[dict], origin: dict) -> bool:
    """Print each line as soon as it is known; whether one failed, by its gate or by an exception."""
    failed = False
    for line in lines:
        print(json.dumps({**line, **origin}), flush=True)
        failed |= not line.get("gate", True) or "failed" in line
    return failed


# -------------------------------------------------------------------------------------------------------------- memory


def _status(key: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def in_use(cuda: bool) -> int:
    """Bytes."""
    return torch.cuda.memory_allocated() if cuda else _status("VmRSS")


def reset_peak(cuda: bool) -> None:
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")


def most_in_use(cuda: bool) -> int:
    """Bytes, since the last reset."""
    return torch.cuda.max_memory_allocated() if cuda else _status("VmHWM")


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """glibc, told to give every freed tensor of a MiB and more back to the system."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return None
    libc.mallopt(-3, MIB)  # M_MMAP_THRESHOLD
    libc.mallopt(-1, MIB)  # M_TRIM_THRESHOLD
    return libc


def tidy(cuda: bool) -> None:
    """Free what nobody uses, and give it back to the system, so that using it again counts."""
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    elif _libc() is not None:
        _libc().malloc_trim(0)


def peak(work: Callable[[], Any], cuda: bool) -> dict[str, float]:
    """MiB in use at most while work runs: in all, and above what was before."""
    tidy(cuda)
    before = in_use(cuda)
    reset_peak(cuda)
    work()
    synchronize(cuda)
    most = most_in_use(cuda)
    return {"peak_mib": round(most / MIB, 1), "peak_plus_mib": round((most - before) / MIB, 1)}


# ---------------------------------------------------------------------------------------------------------------- gate


def reference(h: Tensor, weight: Tensor, target: Tensor, rows: int = 512) -> list[Tensor]:
    """Mean loss, dh [N, H], dweight [V, H], by eager on some rows at a time: in float64 for float32, else float32."""
    wide = torch.float64 if h.dtype == torch.float32 else torch.float32
    w = weight.detach().to(wide).requires_grad_()
    counted, total, dh = (target != -100).sum(), 0.0, []
    for x, t in zip(h.detach().split(rows), target.split(rows), strict=True):
        x = x.to(wide).requires_grad_()
        loss = F.cross_entropy(F.linear(x, w), t, reduction="sum") / counted
        loss.backward()
        total, dh = total + loss.detach(), [*dh, x.grad]
    return [total, torch.cat(dh), w.grad]


def gradients(fn: Callable[..., Tensor], inputs: list[Tensor], *rest: Any, scale: float | None = None) -> list[Tensor]:
    """fn's loss and the gradients of its inputs; in float16 as under a GradScaler, whose scale is taken out again."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    loss = fn(*leaves, *rest)
    if scale is None:
        scale = 2.0**12 if inputs[0].dtype == torch.float16 else 1.0
    (loss * scale).backward()
    return [loss.detach(), *(x.grad if scale == 1 else x.grad.float() / scale for x in leaves)]


def relative(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of what is wanted."""
    want = want if want.dtype == torch.float64 else want.float()
    return float((got.to(want.dtype) - want).norm() / want.norm())


# ---------------------------------------------------------------------------------------------------------------- time


def synchronize(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], cuda: bool) -> float:
    """Of the host, from an idle device to an idle device."""
    synchronize(cuda)
    start = time.perf_counter()
    work()
    synchronize(cuda)
    return time.perf_counter() - start


class Trial(NamedTuple):
    """What contenders are put through."""

    step: Callable[[Callable, Any], Any]  # (contender, what prepare returned): timed
    check: Callable[[Callable], dict[str, float]]  # relative errors of a contender; none for one without a result
    prepare: Callable[[], Any] = lambda: None  # before each step, not timed
    fresh: bool = True  # contenders are compiled anew, and those called "ours .." must find their loss rewritten


def _timed(work: Callable[[], Any], cuda: bool) -> Callable[[], float]:
    """Run work; milliseconds, to be asked for when the device is done."""
    if not cuda:
        ms = seconds(work, cuda) * 1e3
        return lambda: ms
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    return lambda: start.elapsed_time(end)


def times(contenders: dict[str, Callable], trial: Trial, cuda: bool, repeats: int) -> dict[str, dict]:
    """Per contender ms (the median), ms_min, ms_p20, ms_p80, idle_ms."""
    shuffle = random.Random(0)
    if cuda:
        flushed = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        warmed = torch.empty_like(warm)

    def products() -> None:
        for _ in range(20):  # 30 ms on an H200
            torch.mm(warm, warm, out=warmed)
        flushed.zero_()

    def series(before: Callable[[], Any]) -> dict[str, list[float]]:
        taken: dict[str, list] = {name: [] for name in contenders}
        for _ in range(repeats):
            for name in shuffle.sample(list(contenders), len(contenders)):
                prepared = trial.prepare()
                before()
                taken[name].append(_timed(lambda n=name, p=prepared: trial.step(contenders[n], p), cuda))
                del prepared
        synchronize(cuda)
        return {name: sorted(ms() for ms in taken[name]) for name in contenders}

    ahead = series(products if cuda else lambda: None)
    idle = series(torch.cuda.synchronize) if cuda else {}
    found = {}
    for name, ms in ahead.items():
        at = {"ms": statistics.median(ms), "ms_min": ms[0]}
        at |= {f"ms_p{p}": ms[round(p / 100 * (len(ms) - 1))] for p in (20, 80)}
        at |= {"idle_ms": statistics.median(idle[name]) if cuda else None}
        found[name] = {key: x if x is None else round(x, 3) for key, x in at.items()}
    return found


def failure(error: Exception) -> dict[str, Any]:
    """What a line says of it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return {"out_of_memory": True}
    return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


@functools.cache
def _start_compiler(device: str) -> None:
    """So that the first contender's first step isn't charged with Inductor's imports and what it finds out once."""
    torch.compile(lambda x: x.sin() + 1)(torch.zeros(64, device=device))


def compare(
    contenders: dict[str, Callable], trial: Trial, device: str, repeats: int, tolerance: float
) -> Iterator[dict]:
    """A line per contender; of one that fails, at once."""
    from torch._inductor import metrics
    from torch._inductor.utils import fresh_cache

    from flce_inductor.explain import collect

    cuda, ready = device == "cuda", {}
    if trial.fresh:
        torch._dynamo.reset()
    _start_compiler(device)
    tidy(cuda)
    for name, fn in contenders.items():
        line: dict[str, Any] = {"provider": name}
        chunked = metrics.num_auto_chunking
        try:
            with collect() as sites, fresh_cache():
                first = seconds(lambda fn=fn: trial.step(fn, trial.prepare()), cuda)
            line["first_step_s"] = round(first, 3)
            rewritten = bool(sites) and all(site.reason is None for site in sites)
            if sites:
                line |= {"rewritten": rewritten, "rows": sites[0].chunk_size}
                line |= {"tuned": sites[0].tuned} if sites[0].tuned else {}
            if name.startswith("auto_chunker"):
                line["chunked"] = metrics.num_auto_chunking > chunked
            errors = trial.check(fn)
            if errors:
                right = rewritten or not (trial.fresh and name.startswith("ours"))
                line |= {**errors, "gate": right and all(error < tolerance for error in errors.values())}
            for _ in range(2):
                trial.step(fn, trial.prepare())
            prepared = trial.prepare()
            line |= peak(lambda fn=fn, prepared=prepared: trial.step(fn, prepared), cuda)
        except Exception as error:  # the others can still be measured
            line |= failure(error)
        prepared = None
        if "failed" in line or "out_of_memory" in line:
            tidy(cuda)
            yield line
        else:
            ready[name] = line
    found = times({name: contenders[name] for name in ready}, trial, cuda, repeats)
    for name, line in ready.items():
        yield line | found[name]
