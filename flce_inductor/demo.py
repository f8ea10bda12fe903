"""Train the same small language model three times and compare: eager, torch.compile, backend="flce_inductor".

    python -m flce_inductor.demo                  # three to four minutes on two idle CPU cores
    python -m flce_inductor.demo --device cuda --batch 16 --seq 1024 --untied

The model below is ordinary PyTorch and calls nothing of this package. `train_loss` is what gets compiled, and the only
difference between the three runs is how:

    eager           fn
    compile         torch.compile(fn)
    flce_inductor   torch.compile(fn, backend="flce_inductor")

The text is what every Python installation carries (the standard library's sources and pydoc's topics), so nothing is
downloaded. Each run is a process of its own with the same seed and the same batches; it reports JSON lines, which this
process turns into a progress bar, a table and a picture. The exit status is 1 when the loss curves differ by more than
rounding, or when the flce_inductor run rewrote nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RUNS = ("eager", "compile", "flce_inductor")
LABELS = {"eager": "eager", "compile": "torch.compile", "flce_inductor": "flce_inductor"}
MIB = 2**20


# ---------------------------------------------------------------------------------------------------------------- text

# Standard library folders left out: distributions split them off or drop them, and with them in, the vocabulary would
# depend on who packaged this Python.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
SKIPPED_FOLDERS |= {"idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "distutils"}


# Words, numbers and punctuation, each with the one space in front of it; a line break takes its indentation along.
# Every character falls under one alternative, so joining the tokens gives the text back.
TOKEN = re.compile(r"\n+[ \t]*| ?[^\W\d]\w*| ?\d+| ?[^\w\s]+|\s+")


def corpus() -> Iterator[str]:
    """The standard library's own sources in the order of their paths, then pydoc's topics."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            try:
                yield path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return
    yield from (topics[name] for name in sorted(topics))


class Tokenizer:
    """Word-level tokenizer over the `size` most frequent types of a text; id 0 is <unk>."""

    UNK = "<unk>"

    def __init__(self, counts: Counter[str], size: int) -> None:
        # By count, then by spelling: the ids must not depend on the order in which files were read.
        ranked = sorted(counts, key=lambda token: (-counts[token], token))
        self.types = [self.UNK, *ranked[: size - 1]]
        self.ids = {token: i for i, token in enumerate(self.types)}

    @classmethod
    def from_texts(cls, texts: Iterable[str], size: int) -> Tokenizer:
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(TOKEN.findall(text))
        return cls(counts, size)

    def __len__(self) -> int:
        return len(self.types)

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(token, 0) for token in TOKEN.findall(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.types[i] for i in ids)


def batch_at(tokens: Tensor, step: int, batch: int, seq: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-token labels, both [batch, seq], of one step; a function of its arguments alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - seq, (batch, 1), generator=generator)
    window = tokens[starts + torch.arange(seq + 1)]  # [batch, seq + 1]
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


# --------------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, H] -> [B, T, H]
        B, T, H = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, H // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, T, H / heads]
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, H))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Decoder-only transformer, tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, vocab: int, seq: int, hidden: int, layers: int, tied: bool) -> None:
        super().__init__()
        heads = next(n for n in range(max(1, hidden // 64), 0, -1) if hidden % n == 0)
        self.embedding = nn.Embedding(vocab, hidden)
        self.position = nn.Parameter(torch.zeros(seq, hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) + self.position[: tokens.size(1)]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def train_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """What is compiled. It returns the loss alone: logits that the caller asks for would have to exist."""
    logits = model(tokens)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


# -------------------------------------------------------------------------------------------------------------- memory


class StepMemory:
    """Peak memory of one step at a time: call start(), run the step, call stop().

    `resident` and `peak` are bytes: what was in use when the step started, and the most that it used above that.
    `method` says in words what was measured. Without a way to reset the operating system's high-water mark, `resident`
    is None and `peak` is the highest use of the process since it started.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.resident: int | None = None
        self.peak: int | None = None
        if device == "cuda":
            self.method = "torch.cuda.max_memory_allocated of a step, less what was allocated when it started"
        elif self._reset_high_water_mark():
            self.method = (
                "highest resident memory of the process during a step (VmHWM, reset before it), "
                "less what was resident when it started"
            )
        else:
            self.method = (
                "highest resident memory of the process since its start (this system cannot reset it), "
                "compilation and parameters included"
            )
        self.resettable = device == "cuda" or self._reset_high_water_mark()

    @staticmethod
    def _reset_high_water_mark() -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # not Linux, or /proc is read-only here
            return False
        return True

    @staticmethod
    def _status(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise OSError(f"/proc/self/status has no {field}")

    @staticmethod
    def _since_start() -> int | None:
        try:
            import resource
        except ImportError:  # Windows
            return None
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return usage if sys.platform == "darwin" else usage * 1024

    def start(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.resident = torch.cuda.memory_allocated()
        elif self.resettable:
            self._reset_high_water_mark()
            self.resident = self._status("VmRSS")

    def stop(self) -> None:
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated() - self.resident
        elif self.resettable:
            peak = max(0, self._status("VmHWM") - self.resident)
        else:
            peak = self._since_start()
        self.peak = peak if self.peak is None else max(self.peak, peak)


# -------------------------------------------------------------------------------------------------------------- worker


def compiled(name: str, min_logits_bytes: int | None) -> Any:
    """The one line in which the three runs differ."""
    if name == "eager":
        return train_loss
    if name == "compile":
        return torch.compile(train_loss)
    if min_logits_bytes is None:
        return torch.compile(train_loss, backend="flce_inductor")
    options = {"flce_inductor.min_logits_bytes": min_logits_bytes}
    return torch.compile(train_loss, backend="flce_inductor", options=options)


def warmup_steps(steps: int) -> int:
    """Steps kept out of time and memory: the first compiles, the second is the first with optimizer state in place."""
    return min(2, steps - 1)


def work(args: argparse.Namespace) -> None:
    """One run. Writes JSON lines to stdout: one per step, then a summary."""
    # Libraries may print to stdout; the events keep the pipe to themselves, everything else goes to the log.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(**event: Any) -> None:
        print(json.dumps(event), file=events)

    logging.basicConfig()
    logging.getLogger("flce_inductor").setLevel(logging.INFO)  # what was rewritten or refused, into the log

    data = torch.load(args.data)
    torch.manual_seed(args.seed)
    model = LanguageModel(data["vocab"], args.seq, args.hidden, args.layers, args.tied).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    fn = compiled(args.worker, args.min_logits_bytes)

    autocast = torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32")
    memory = StepMemory(args.device)
    times: list[float] = []
    for step in range(args.steps):
        tokens, labels = (t.to(args.device) for t in batch_at(data["tokens"], step, args.batch, args.seq, args.seed))
        measured = step >= warmup_steps(args.steps)
        if measured:
            memory.start()
        start = time.perf_counter()

        with autocast:
            loss = fn(model, tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()  # waits for the loss; the optimizer's kernels may still run
        if args.device == "cuda":
            torch.cuda.synchronize()

        times.append(time.perf_counter() - start)
        if measured:
            memory.stop()
        report(event="step", step=step, loss=value, seconds=times[-1])
        if step == 0 and args.worker == "flce_inductor":
            report(event="rewritten", count=torch._dynamo.utils.counters["inductor"]["flce_rewritten"])

    steady = statistics.median(times[warmup_steps(args.steps) :])
    report(
        event="done",
        step_seconds=steady,
        compile_seconds=max(0.0, times[0] - steady) if args.worker != "eager" else None,
        peak_bytes=memory.peak,
        resident_bytes=memory.resident,
        memory_method=memory.method,
        parameters=sum(p.numel() for p in model.parameters()),
        torch=torch.__version__,
    )


# ---------------------------------------------------------------------------------------------- the three runs, watched


class DemoError(Exception):
    """Ends the demo with exit status 1 and this message."""


class Progress:
    """A bar that rewrites its line on a terminal, and a plain line now and then elsewhere."""

    WIDTH = 24

    def __init__(self, label: str, steps: int) -> None:
        self.label, self.steps, self.tty = label, steps, sys.stdout.isatty()
        self.show(0, "first step: compiles" if label != LABELS["eager"] else "")

    def show(self, done: int, note: str) -> None:
        if self.tty:
            filled = self.WIDTH * done // self.steps
            bar = "#" * filled + "." * (self.WIDTH - filled)
            columns = shutil.get_terminal_size().columns - 1
            line = f"{self.label:>14} [{bar}] {done:>{len(str(self.steps))}}/{self.steps}  {note}"
            print("\r" + line[:columns].ljust(columns), end="\n" if done == self.steps else "", flush=True)
        elif done in (0, 1, self.steps) or done % max(1, self.steps // 4) == 0:
            print(f"{self.label:>14} {done:>{len(str(self.steps))}}/{self.steps}  {note}".rstrip(), flush=True)

    def abort(self) -> None:
        if self.tty:
            print(flush=True)


def worker_environment(cache: Path) -> dict[str, str]:
    environment = dict(os.environ)
    # A warm FX graph cache would skip the passes and flatter the compile time: every worker starts from nothing.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    environment.pop("TRITON_CACHE_DIR", None)  # Inductor then puts it under its own
    # glibc raises its mmap threshold as large blocks are freed, and then keeps freed tensors in its heap, where they
    # count as resident. Fixed thresholds (the same for all runs) hand them back at once.
    environment["MALLOC_MMAP_THRESHOLD_"] = environment["MALLOC_TRIM_THRESHOLD_"] = str(MIB)
    return environment


def run_worker(name: str, args: argparse.Namespace, data: Path, scratch: Path, out: Path) -> dict[str, Any]:
    """Start one worker, show its progress, return its losses and summary. Its stderr goes to <out>/<name>.log."""
    command = [sys.executable, "-m", "flce_inductor.demo", "--worker", name, "--data", str(data)]
    for option in ("steps", "batch", "seq", "hidden", "layers", "lr", "seed", "device", "dtype"):
        command += [f"--{option}", str(getattr(args, option))]
    command.append("--tied" if args.tied else "--untied")
    if args.min_logits_bytes is not None and name == "flce_inductor":
        command += ["--min-logits-bytes", str(args.min_logits_bytes)]

    log = out / f"{name}.log"
    result: dict[str, Any] = {"losses": [], "seconds": [], "rewritten": None}
    summary = None
    progress = Progress(LABELS[name], args.steps)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=worker_environment(scratch / name),
        )
        try:
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "step":
                    result["losses"].append(event["loss"])
                    result["seconds"].append(event["seconds"])
                    progress.show(event["step"] + 1, f"loss {event['loss']:.4f}  {event['seconds']:.2f} s")
                elif event["event"] == "rewritten":
                    result["rewritten"] = event["count"]
                else:
                    summary = event
            process.wait()
        finally:  # Ctrl-C too: leave no worker behind
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
    if process.returncode != 0 or summary is None:
        progress.abort()
        tail = "\n".join(line[:500] for line in log.read_text(errors="replace").rstrip().splitlines()[-15:])
        status = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
        raise DemoError(f"the {LABELS[name]} run ended with {status}; the end of {log}:\n{tail}")
    return result | {key: value for key, value in summary.items() if key != "event"}


# ----------------------------------------------------------------------------------------------------------- agreement


@dataclass(frozen=True)
class Tolerance:
    """Relative differences between two loss curves that rounding explains.

    first: at step 0, before any update, where only the forward's own rounding can show.
    floor: at later steps, always allowed.
    cap:   never exceeded, whatever the yardstick says.
    """

    first: float
    floor: float
    cap: float


# float32, measured at the defaults, stock torch.compile against eager: 1e-7 at the first step (one unit in the last
# place), at most 4e-7 in 20 steps; other sizes and batches have single steps with 6e-6. bfloat16 likewise: 6e-7 at the
# first step, mostly under 1e-4, single steps up to 1e-2.
TOLERANCES = {
    "float32": Tolerance(first=1e-6, floor=1e-5, cap=1e-3),
    "bfloat16": Tolerance(first=2e-5, floor=1e-3, cap=3e-2),
}

# How much further than stock torch.compile a curve may be from eager. The two deviations are draws of the same noise,
# so the one can be small by luck where the other is not: 10 times is rare, 4 times would not be.
YARDSTICK_FACTOR = 10.0


def relative_difference(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def check_agreement(curves: dict[str, list[float]], dtype: str) -> float:
    """The largest relative difference between any two of the curves; DemoError where one is more than rounding.

    The yardstick is measured, not guessed: how far stock torch.compile has moved from eager by that step, in the same
    training. Curves may differ by YARDSTICK_FACTOR times that, at least `floor`, at most `cap`.
    """
    tolerance = TOLERANCES[dtype]
    names = list(curves)
    if len({len(curve) for curve in curves.values()}) > 1:
        lengths = {name: len(curve) for name, curve in curves.items()}
        raise DemoError(f"the loss curves have different lengths: {lengths}")
    largest, yardstick = 0.0, 0.0
    for step in range(len(curves[names[0]])):
        if "eager" in curves and "compile" in curves:
            yardstick = max(yardstick, relative_difference(curves["eager"][step], curves["compile"][step]))
        allowed = min(tolerance.cap, max(tolerance.floor, YARDSTICK_FACTOR * yardstick)) if step else tolerance.first
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                difference = relative_difference(curves[a][step], curves[b][step])
                if not difference <= allowed:
                    hint = ""
                    if {a, b} == {"eager", "compile"}:
                        hint = (
                            "; this is stock PyTorch against itself: the training amplifies rounding, try a lower --lr"
                        )
                    raise DemoError(
                        f"loss curves differ at step {step + 1}: {LABELS[a]} {curves[a][step]:.8g}, "
                        f"{LABELS[b]} {curves[b][step]:.8g}: relative difference {difference:.2e}, "
                        f"allowed {allowed:.2e}{hint}"
                    )
                largest = max(largest, difference)
    return largest


# -------------------------------------------------------------------------------------------------------------- report


def shown_steps(steps: int) -> list[int]:
    return sorted({0, (steps - 1) // 2, steps - 1})


def format_table(results: dict[str, dict[str, Any]], steps: int) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    def mib(value: int | None) -> float | None:
        return None if value is None else value / MIB

    runs = results.values()
    rows = [("", *(LABELS[name] for name in results))]
    for step in shown_steps(steps):
        rows.append((f"loss, step {step + 1}", *(f"{run['losses'][step]:.5f}" for run in runs)))
    rows += [
        ("peak of a step (MiB)", *(number(mib(run["peak_bytes"]), ",.0f") for run in runs)),
        ("resident before it (MiB)", *(number(mib(run["resident_bytes"]), ",.0f") for run in runs)),
        ("time per step (s)", *(number(run["step_seconds"], ".3f") for run in runs)),
        ("compile time (s)", *(number(run["compile_seconds"], ".1f") for run in runs)),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Loss curves and memory bars. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # The curves lie on top of each other, which is the point: a wide line, a narrower one, and dots over both.
    styles = {
        "eager": {"color": "#b8c4d6", "linewidth": 7},
        "compile": {"color": "#3b6ea5", "linewidth": 2.5},
        "flce_inductor": {"color": "#d1495b", "linestyle": "none", "marker": "o", "markersize": 5},
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=(3, 2), layout="constrained")
    for name, run in results.items():
        left.plot(range(1, len(run["losses"]) + 1), run["losses"], label=LABELS[name], **styles[name])
    left.set(xlabel="step", ylabel="training loss", title="the same loss")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False)
    left.grid(alpha=0.25)

    names = [name for name in results if results[name]["peak_bytes"] is not None]
    peaks = [results[name]["peak_bytes"] / MIB for name in names]
    bars = right.bar(
        [LABELS[name] for name in names], peaks, color=[styles[name]["color"] for name in names], width=0.6
    )
    right.bar_label(bars, labels=[f"{peak:,.0f} MiB" for peak in peaks], padding=3)
    right.set(ylabel="MiB", title="peak memory of a step")
    right.margins(y=0.12)
    right.grid(axis="y", alpha=0.25)
    right.set_axisbelow(True)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def demo(args: argparse.Namespace) -> None:
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flce_demo_", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        texts = list(corpus())
        tokenizer = Tokenizer.from_texts(texts, args.vocab)
        tokens = torch.tensor([i for text in texts for i in tokenizer.encode(text)])
        if len(tokens) <= args.seq:
            raise DemoError(
                f"only {len(tokens)} tokens of text in {sysconfig.get_path('stdlib')}: the demo trains on the "
                "standard library's .py sources, which this Python does not carry"
            )
        data = scratch / "tokens.pt"
        torch.save({"tokens": tokens, "vocab": len(tokenizer)}, data)

        N, V = args.batch * args.seq, len(tokenizer)
        unknown = (tokens == 0).float().mean().item()
        print(
            f"text: {len(texts)} files and topics of the standard library, {len(tokens):,} tokens; vocabulary {V:,} "
            f"types, {unknown:.1%} of the text unknown"
        )
        # Under autocast cross_entropy takes fp32, but the head's output, the tensor meant here, has the run's dtype.
        itemsize = torch.empty((), dtype=getattr(torch, args.dtype)).element_size()
        setting = (
            f"N={N:,} tokens a step, V={V:,}, hidden {args.hidden}, {args.layers} layers, "
            f"{'tied' if args.tied else 'untied'}, {args.dtype} on {args.device}"
        )
        print(f"{setting}; the logits alone: {N * V * itemsize / MIB:,.0f} MiB\n", flush=True)

        results = {name: run_worker(name, args, data, scratch, out) for name in args.runs}

    (out / "results.json").write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1))
    print("\n" + format_table(results, args.steps))
    first = next(iter(results.values()))
    print(f"\npeak: {first['memory_method']}; the highest of {args.steps - warmup_steps(args.steps)} steps")
    print("time: median of those steps (forward, backward, optimizer); compile time: what the first step took more")
    if "flce_inductor" in results:
        for name in args.runs:
            peak, ours = results[name]["peak_bytes"], results["flce_inductor"]["peak_bytes"]
            if name != "flce_inductor" and peak and ours:
                print(f"a step of {LABELS[name]} peaks {peak / ours:.1f} times as high as flce_inductor's")
    try:
        plot(results, setting, out / "demo.png")
        print(f"picture: {out / 'demo.png'}")
    except ImportError:
        print("no picture: matplotlib is missing; `pip install flce_inductor[demo]` brings it")

    if "flce_inductor" in results and not results["flce_inductor"]["rewritten"]:
        raise DemoError(
            f"the flce_inductor run rewrote nothing, so it shows nothing; {out / 'flce_inductor.log'} has the reason"
        )
    largest = check_agreement({name: run["losses"] for name, run in results.items()}, args.dtype)
    print(f"loss curves agree (max relative difference {largest:.1e})")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flce_inductor.demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=positive, default=10, help="training steps of each run (at least 2; default 10)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where available")
    parser.add_argument(
        "--dtype",
        choices=("auto", *TOLERANCES),
        default="auto",
        help="bfloat16 trains under autocast; auto: float32 on the CPU, bfloat16 on CUDA",
    )
    parser.add_argument("--batch", type=positive, default=16, help="sequences a step")
    parser.add_argument("--seq", type=positive, default=256, help="tokens a sequence")
    parser.add_argument("--hidden", type=positive, default=256)
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--vocab", type=positive, default=40_960, help="types kept, <unk> included (default 40960)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    tied = parser.add_mutually_exclusive_group()
    tied.add_argument(
        "--tied", action="store_true", default=True, help="the head shares the embedding's weight (default)"
    )
    tied.add_argument("--untied", dest="tied", action="store_false", help="the head has a weight of its own")
    parser.add_argument("--out", default="demo_out", help="folder for the picture, results.json and logs")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="which runs (default: all three)")
    parser.add_argument(
        "--min-logits-bytes",
        type=int,
        help="the backend's option of that name: it leaves smaller logits alone, which matters for tiny sizes",
    )
    parser.add_argument("--worker", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step compiles")
    if args.vocab < 2:
        parser.error("--vocab must be at least 2")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no CUDA device")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if args.device == "cuda" else "float32"
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        work(args) if args.worker else demo(args)
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
