"""A whole training step of a Llama-shaped model: tokens per second, peak memory, and what fits.

    python -m benchmarks.train --preset 1B-like --lengths 2048,8192,32768              # H200: 5 minutes
    python -m benchmarks.train --preset 8B-head --lengths 2048,8192,32768              # H200: 5 minutes
    python -m benchmarks.train --preset 8B-head --lengths 8192 --largest batch         # H200: 5 minutes
    python -m benchmarks.train --preset 8B-head --lengths 8192 --timeline              # H200: 2 minutes
    python -m benchmarks.train --preset tiny --lengths 64,128 --device cpu

A step is the forward, the backward, a fused AdamW and the freeing of gradients. The model is plain PyTorch (RMSNorm,
rotary attention, SwiGLU, a head without bias), its parameters in --dtype or, with --autocast, in float32. compile, ours
and dense (ours, that leaves no row out) compile the function from the tokens to the loss; of providers that are called
by hand (benchmarks/peers.py) the model up to the hidden states is compiled. All share one model and one optimizer, and
take turns.

One JSON line per length, or per length and provider with --largest and --timeline. Before anything is timed the loss
and the gradients of the head and of the first layer are compared with those of eager whose head and loss are computed
in float32, some rows at a time. --largest searches, with dynamic shapes, the largest batch of sequences of each length,
or (--largest length) the longest single sequence in steps of that length, that fits into the card or --memory MiB.
--timeline records what is in use during one step: every allocation on a GPU, samples of resident memory on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import measure, peers

STD = 0.02  # of the weights


class Preset(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    classes: int
    tied: bool


PRESETS = {
    "tiny": Preset(64, 2, 4, 2, 128, 2000, True),
    "1B-like": Preset(2048, 16, 32, 8, 8192, 128256, True),
    "8B-head": Preset(4096, 4, 32, 8, 14336, 128256, False),
}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, D] turned by its position's angles [T, D / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, p: Preset):
        super().__init__()
        self.p, width = p, p.hidden // p.heads
        self.norm1, self.norm2 = nn.RMSNorm(p.hidden), nn.RMSNorm(p.hidden)
        self.qkv = nn.Linear(p.hidden, (p.heads + 2 * p.kv_heads) * width, bias=False)
        self.out = nn.Linear(p.hidden, p.hidden, bias=False)
        self.gate_up = nn.Linear(p.hidden, 2 * p.inner, bias=False)
        self.down = nn.Linear(p.inner, p.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T, H]
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.p.hidden // self.p.heads)).transpose(1, 2)
        q, k, v = heads.split([self.p.heads, self.p.kv_heads, self.p.kv_heads], 1)
        k, v = (z.repeat_interleave(self.p.heads // self.p.kv_heads, 1) for z in (rotated(k, cos, sin), v))
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, p: Preset, checkpointed: bool):
        super().__init__()
        self.p, self.checkpointed = p, checkpointed
        self.embedding = nn.Embedding(p.classes, p.hidden)
        self.layers = nn.ModuleList(Layer(p) for _ in range(p.layers))
        self.norm = nn.RMSNorm(p.hidden)
        self.head = nn.Linear(p.hidden, p.classes, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=STD)
        if p.tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        """[B, T, H]"""
        width = self.p.hidden // self.p.heads
        position = torch.arange(tokens.shape[1], device=tokens.device)
        rate = 5e5 ** (-torch.arange(0, width, 2, device=tokens.device) / width)
        angle = position[:, None] * rate
        x, cos, sin = self.embedding(tokens), angle.cos(), angle.sin()
        for layer in self.layers:
            run = functools.partial(checkpoint, layer, use_reentrant=False) if self.checkpointed else layer
            x = run(x, cos, sin)
        return self.norm(x)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """What users write."""
        return F.cross_entropy(self.head(self.hidden(tokens)).flatten(0, 1), labels.flatten())


class Bench:
    """One model and its optimizer on a device."""

    def __init__(self, preset: Preset, device: str, dtype: torch.dtype, autocast: bool, checkpointed: bool):
        torch.manual_seed(0)
        self.cuda, self.device, self.dtype, self.autocast = device == "cuda", device, dtype, autocast
        with torch.device(device):
            self.model = Model(preset, checkpointed).to(torch.float32 if autocast else dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)  # all see the same parameters
        self.preset = preset

    def batch(self, sequences: int, length: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.preset.classes, (sequences, length + 1), device=self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def watched(self) -> list[Tensor]:
        """Parameters whose gradients the gate looks at."""
        return [self.model.head.weight, self.model.layers[0].qkv.weight]

    def cast(self) -> torch.autocast:
        return torch.autocast(self.device, self.dtype, enabled=self.autocast)

    @contextlib.contextmanager
    def gate(self) -> Iterator[None]:
        """While the logits are spread as benchmarks.measure wants them; no gradients are left behind."""
        with torch.no_grad():
            self.model.norm.weight.fill_(measure.SPREAD / (STD * self.preset.hidden**0.5))
        try:
            yield
        finally:
            with torch.no_grad():
                self.model.norm.weight.fill_(1)
            self.optimizer.zero_grad()

    def contender(self, spec: str, dynamic: bool | None = None) -> tuple[str, Callable]:
        """Its name, and (tokens, labels) -> loss. Raises peers.Missing."""
        model = self.model

        def loss(tokens, labels):
            return model.loss(tokens, labels)

        def hidden(tokens):
            return model.hidden(tokens)

        if spec == "eager":
            return spec, loss
        if spec == "compile":
            return spec, peers.compiled(loss, dynamic=dynamic)
        if spec == "ours":
            return "ours C=auto", peers.ours(loss, dynamic=dynamic)
        if spec == "dense":
            return "ours dense", peers.ours(loss, dynamic=dynamic, skip_ignored=False)
        name, by_hand = peers.make(spec, self.dtype)
        body = peers.compiled(hidden, dynamic=dynamic)

        def step(tokens, labels):
            h = body(tokens).flatten(0, 1)
            return by_hand(h.to(self.dtype), model.head.weight.to(self.dtype), labels.flatten())

        return name, step

    def backward(self, fn: Callable, batch: tuple[Tensor, Tensor]) -> Tensor:
        with self.cast():
            loss = fn(*batch)
        loss.backward()
        return loss.detach()

    def step(self, fn: Callable, batch: tuple[Tensor, Tensor]) -> None:
        """What is measured."""
        self.backward(fn, batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def reference(self, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        """The loss and the watched gradients."""
        was, self.model.checkpointed = self.model.checkpointed, True
        with self.gate():
            with self.cast():
                h = self.model.hidden(batch[0])
            loss, dh, dweight = measure.reference(h.flatten(0, 1), self.model.head.weight, batch[1].flatten())
            h.backward(dh.view_as(h).to(h.dtype))
            head, first = (x.grad for x in self.watched())
        self.model.checkpointed = was
        return [loss, dweight if head is None else dweight + head, first]

    def errors(self, fn: Callable, batch: tuple[Tensor, Tensor], want: list[Tensor]) -> dict[str, float]:
        with self.gate():
            got = [self.backward(fn, batch), *(x.grad for x in self.watched())]
        return dict(zip(("loss_err", "dhead_err", "dfirst_err"), map(measure.relative, got, want), strict=True))


def compared(bench: Bench, sizes: tuple[int, int], contenders: dict[str, Callable], repeats: int) -> Iterator[dict]:
    """A line per contender for one number of sequences and their length."""
    sequences, length = sizes
    batch = bench.batch(sequences, length)
    want = bench.reference(batch)
    trial = measure.Trial(bench.step, lambda fn: bench.errors(fn, batch, want), lambda: batch)
    tolerance = {torch.float32: 1e-3}.get(bench.dtype, 5e-2)
    for line in measure.compare(contenders, trial, bench.device, repeats, tolerance):
        bench.optimizer.zero_grad()  # one that failed may have left some
        if "ms" in line:
            line["tokens_per_s"] = round(sequences * length / line["ms"] * 1e3, 1)
        yield line


def largest(bench: Bench, length: int, along: str, fn: Callable, memory: float | None) -> dict:
    """The most sequences of a length, or the most lengths in one sequence, whose step fits."""
    tried: dict[int, dict] = {}

    def fits(count: int) -> bool:
        sizes = (count, length) if along == "batch" else (1, count * length)
        tried[count] = {"peak_mib": None}
        try:
            batch = bench.batch(*sizes)
            bench.step(fn, batch)  # compiles, the first time
            found = measure.peak(lambda: bench.step(fn, batch), bench.cuda)
        except torch.OutOfMemoryError:
            return False
        finally:
            batch = None
            bench.optimizer.zero_grad()
            measure.tidy(bench.cuda)
        tried[count] = found
        return memory is None or found["peak_mib"] <= memory

    most, above = 0, 2  # one is a graph of its own
    while fits(above):
        most, above = above, 2 * above
    while above - most > max(1, most // 16):
        middle = (most + above) // 2
        most, above = (middle, above) if fits(middle) else (most, middle)
    sizes = {"batch": most, "length": length} if along == "batch" else {"batch": 1, "length": most * length}
    sizes |= {"tokens": most * length, "tried": len(tried), "fits_mib": memory}
    return sizes | {key: tried[most][key] for key in ("peak_mib",) if most}


def timeline(work: Callable[[], None], cuda: bool, points: int = 2000) -> list[list[float]]:
    """[ms, MiB in use] while work runs."""
    measure.tidy(cuda)
    found = []
    if cuda:
        at = measure.in_use(cuda)
        torch.cuda.memory._record_memory_history(enabled="all", context=None)
        work()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        for event in events:
            at += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
            found.append((event["time_us"] / 1e3, at))
    else:
        done = threading.Event()

        def sample() -> None:
            while not done.is_set():
                found.append((time.perf_counter() * 1e3, measure.in_use(cuda)))
                time.sleep(1e-3)

        sampler = threading.Thread(target=sample)
        sampler.start()
        work()
        done.set()
        sampler.join()
    group = -(-len(found) // points)  # of each, the one with the most in use
    kept = [max(found[i : i + group], key=lambda point: point[1]) for i in range(0, len(found), group)]
    return [[round(ms - found[0][0], 3), round(used / measure.MIB, 1)] for ms, used in kept]


def lines(bench: Bench, args, sizes: dict) -> Iterator[dict]:
    """The lines of one sequence length."""
    contenders = {}
    for spec in args.providers.split(","):
        try:
            name, fn = bench.contender(spec, True if args.largest else None)
            contenders[name] = fn
        except peers.Missing as why:
            yield {"provider": spec, "missing": str(why), **sizes}
    sequences, length = sizes["batch"], sizes["length"]
    if not args.largest and not args.timeline:
        found = compared(bench, (sequences, length), contenders, args.repeats)
        yield from ({**line, **sizes} for line in found)
        return
    torch._dynamo.reset()
    for name, fn in contenders.items():
        if args.largest:
            yield {"provider": name, **sizes, **largest(bench, length, args.largest, fn, args.memory)}
            continue
        batch = bench.batch(sequences, length)
        for _ in range(2):
            bench.step(fn, batch)
        points = timeline(functools.partial(bench.step, fn, batch), bench.cuda)
        yield {"provider": name, **sizes, "timeline": points}


def main(argv: list[str] | None = None) -> int:
    """Measure; exit status 1 when a provider fails the gate."""
    parser = measure.parser(__doc__, repeats=5)
    parser.add_argument("--preset", choices=PRESETS, default="1B-like")
    parser.add_argument("--layers", type=int, help="other than the preset's")
    parser.add_argument("--lengths", default="2048,8192,32768", help="of a sequence, separated by commas")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--providers", default="compile,liger,ours")
    parser.add_argument("--autocast", action="store_true", help="float32 parameters")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each layer in the backward")
    parser.add_argument("--largest", choices=["batch", "length"])
    parser.add_argument("--memory", type=float, help="MiB that --largest may use; needed on a CPU")
    parser.add_argument("--timeline", action="store_true")
    args = parser.parse_args(argv)
    if args.largest and args.device == "cpu" and not args.memory:
        parser.error("--largest on a CPU needs --memory")
    preset = PRESETS[args.preset]
    preset = preset._replace(layers=args.layers or preset.layers)
    bench = Bench(preset, args.device, getattr(torch, args.dtype), args.autocast, args.checkpoint)
    origin = {
        "preset": args.preset,
        "layers": preset.layers,
        "parameters": sum(p.numel() for p in bench.model.parameters()),
        "autocast": args.autocast,
        "checkpoint": args.checkpoint,
        **measure.about(args.device, args.dtype),
    }
    failed = False
    for length in map(int, args.lengths.split(",")):
        failed |= measure.emit(lines(bench, args, {"batch": args.batch, "length": length}), origin)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
