"""Draw the pictures in docs/img from the committed results.

    python -m benchmarks.plots                   # all whose results exist
    python -m benchmarks.plots accuracy pareto

Each becomes NAME.svg and NAME.png, transparent and in colours that are legible on light and on dark. Of each kind of
results the newest file is read; a picture whose results aren't there is named as missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import report

IMAGES = report.ROOT / "docs" / "img"
GREY, OURS, GRAPHS = "#888888", "#3b7dd8", "#2a9d9d"
COLOURS = {
    "eager": "#b07aa1",
    "compile": "#e07b39",
    "auto_chunker": "#c9a227",
    "native": "#8c6d46",
    "liger": "#3fa34d",
    "cce": "#d1495b",
    "quack": "#2a9d9d",
}
LABELS = {
    "floor": "three products",
    "compile": "torch.compile",
    "liger": "liger-kernel",
    "cce": "cut-cross-entropy",
    "native": "F.linear_cross_entropy",
    "ours dense": "flce_inductor, all rows",
    "ours graphs": "flce_inductor, CUDA graphs",
    "ours dense-graphs": "all rows, CUDA graphs",
}


def colour(provider: str) -> str:
    if provider.endswith("graphs"):
        return GRAPHS
    return OURS if provider.startswith("ours") else COLOURS.get(provider.split()[0], GREY)


def label(provider: str) -> str:
    kind = provider.split(" 0.")[0]
    return LABELS.get(kind, kind.replace("ours C=auto", "flce_inductor").replace("ours", "flce_inductor"))


def panels(count: int, columns: int = 3, width: float = 4.2, height: float = 3.6, **shared: bool) -> list[Axes]:
    """Empty axes in rows."""
    columns = min(count, columns)
    rows = -(-count // columns)
    size = (width * columns, height * rows)
    _, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **shared)
    for ax in grid.flat[count:]:
        ax.remove()
    return list(grid.flat[:count])


def finish(ax: Axes, title: str, x: str, y: str, legend: bool = True) -> Figure:
    """Grey, on whatever is behind."""
    ax.set_title(title, color=GREY, size=10)
    ax.set_xlabel(x, color=GREY)
    ax.set_ylabel(y, color=GREY)
    ax.tick_params(which="both", colors=GREY)
    ax.grid(color=GREY, alpha=0.2, linewidth=0.6)
    for spine in ax.spines.values():
        spine.set_color(GREY)
    if legend:
        ax.legend(frameon=False, labelcolor=GREY, fontsize=8)
    return ax.figure


def plain(axis) -> None:
    """A logarithmic axis labelled with numbers, not powers."""
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def grouped(lines: list[dict], *keys: str) -> dict[tuple, list[dict]]:
    """Lines with a time by the values of keys, in their order."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        if "ms" in line:
            groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    return groups


def curves(ax: Axes, lines: list[dict], x: str, y: Callable[[dict], float], style: str = "o-") -> None:
    """A curve per provider."""
    for (provider,), of in grouped(lines, "provider").items():
        of = sorted(of, key=lambda line: line[x])
        dashed = provider == "floor" or "dense" in provider
        ax.plot(
            [line[x] for line in of],
            [y(line) for line in of],
            "--" if dashed else style,
            color=colour(provider),
            label=label(provider),
            markersize=4,
        )


def beaten(line: dict, lines: list[dict]) -> bool:
    """Whether a setting of ours takes more time and more memory than another."""
    return line["provider"].startswith("ours C=") and any(
        x["provider"].startswith("ours") and x["ms"] < line["ms"] and x["peak_plus_mib"] < line["peak_plus_mib"]
        for x in lines
    )


def pareto(lines: list[dict]) -> Figure:
    """Time against memory, a panel per shape (the first six); settings of ours that none of ours beats are joined."""
    lines = [line for line in lines if line["dtype"] == "bfloat16"]
    shapes = list(grouped(lines, "N", "H", "V").items())[:6]
    for ax, (shape, of) in zip(panels(len(shapes)), shapes, strict=True):
        measured = [line for line in of if line["provider"] != "floor" and not beaten(line, of)]
        ours = sorted((x["peak_plus_mib"], x["ms"]) for x in measured if x["provider"].startswith("ours"))
        ax.plot(*zip(*ours, strict=True), "-", color=OURS, alpha=0.6)
        middle = (max(x["peak_plus_mib"] for x in measured) * min(x["peak_plus_mib"] for x in measured)) ** 0.5
        for line in measured:
            provider, at, shade = line["provider"], (line["peak_plus_mib"], line["ms"]), colour(line["provider"])
            setting = provider.startswith("ours") and provider != "ours C=auto"
            ax.plot(*at, "o", color=shade, markersize=4 if setting else 8)
            place = {"xytext": (-5, 4 if at[0] == ours[0][0] else -12) if setting else (0, 8)}
            place["ha"] = "right" if setting or at[0] > middle else "left"
            name = label(provider).removeprefix("flce_inductor ").removesuffix(" param")
            ax.annotate(name, at, textcoords="offset points", color=shade, size=8, **place)
        floor = [line["ms"] for line in of if line["provider"] == "floor"]
        for ms in floor:
            ax.axhline(ms, color=GREY, linestyle="--", label="the three products alone")
        ax.set_xscale("log")
        ax.margins(0.15)
        ax.set_ylim(0, 1.2 * max(line["ms"] for line in of))
        ax.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        plain(ax.xaxis)
        figure = finish(ax, "N={} H={} V={}".format(*shape), "MiB above the inputs", "ms", legend=bool(floor))
    return figure


def over_n(lines: list[dict]) -> Figure:
    """Memory above inputs and gradients, and time, against N."""
    memory, clock = panels(2)
    curves(memory, [x for x in lines if x["provider"] != "floor"], "N", lambda x: x["peak_plus_mib"])
    curves(clock, lines, "N", lambda x: x["ms"])
    for ax in (memory, clock):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        plain(ax.yaxis)
    head = "H={H} V={V}".format(**lines[0])
    finish(memory, head, "rows N", "MiB above the inputs")
    return finish(clock, head, "rows N", "ms")


def timeline(lines: list[dict]) -> Figure:
    """Memory in use during one training step."""
    lines = [line for line in lines if line.get("timeline")]
    axes = panels(len(lines), sharey=True)
    for ax, line in zip(axes, lines, strict=True):
        ms, used = zip(*line["timeline"], strict=True)
        gib = [x / 1024 for x in used]
        ax.fill_between(ms, gib, color=colour(line["provider"]), alpha=0.6, step="post")
        ax.axhline(max(gib), color=GREY, linestyle="--", label=f"{max(gib):.1f} GiB")
        ax.set_ylim(0, 1.1 / 1024 * max(used for line in lines for _, used in line["timeline"]))
        title = "{}: {preset}, {batch} x {length} tokens".format(label(line["provider"]), **line)
        figure = finish(ax, title, "ms of the host", "GiB in use")
    return figure


def accuracy(lines: list[dict]) -> Figure:
    """The error of dweight against the number of chunks."""
    dtypes = [d for d in ("bfloat16", "float16", "float32") if any(line["dtype"] == d for line in lines)]
    names = {
        ("ours", "param"): ('accum_dtype="param"', "o--", "#7aa6e6"),
        ("ours", "auto"): ("default", "o-", OURS),
        ("ours", "float32"): ('accum_dtype="float32"', "o-", "#2a9d9d"),
    }
    for ax, dtype in zip(panels(len(dtypes), sharey=True), dtypes, strict=True):
        of = [line for line in lines if line["dtype"] == dtype and "dweight_ratio" in line]
        for (provider, accum), (name, style, shade) in names.items():
            points = [(x["chunks"], x["dweight_ratio"]) for x in of if (x["provider"], x["accum"]) == (provider, accum)]
            ax.plot(*zip(*sorted(points), strict=True), style, color=shade, label=name, markersize=4)
        for line in of:
            if line["chunks"] is None and line["provider"] != "eager":
                name, shade = label(line["provider"]), colour(line["provider"])
                ax.axhline(line["dweight_ratio"], color=shade, linestyle=":", label=name)
        ax.set_xscale("log", base=2)
        plain(ax.xaxis)
        ax.set_yscale("log", base=2)
        plain(ax.yaxis)
        figure = finish(ax, dtype, "chunks", "error of dW / eager's", legend=ax is ax.figure.axes[0])
    return figure


def alignment(lines: list[dict]) -> Figure:
    """Time per row and class against the vocabulary, in equal steps."""
    sizes = sorted({line["V"] for line in lines})
    (ax,) = panels(1, width=7)
    placed = [{**line, "at": sizes.index(line["V"])} for line in lines if "ms" in line]
    curves(ax, placed, "at", lambda x: x["ms"] * 1e9 / (x["N"] * x["V"]))
    ax.set_xticks(range(len(sizes)), [f"{V}\n({V % 8})" for V in sizes])
    ax.set_yscale("log")
    plain(ax.yaxis)
    ax.yaxis.set_minor_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    return finish(ax, "N={N} H={H}".format(**lines[0]), "V (and V modulo 8)", "picoseconds / (N V)")


def ignored(lines: list[dict]) -> Figure:
    """Time against the share of labels that are ignored."""
    patterns = grouped(lines, "pattern")
    for ax, (_, of) in zip(panels(len(patterns), sharey=True), patterns.items(), strict=True):
        curves(ax, of, "ignored", lambda x: x["ms"])
        ax.set_ylim(0, 1.1 * max(line["ms"] for line in lines if "ms" in line))
        title = "N={N} H={H} V={V}, {pattern}".format(**of[0])
        figure = finish(ax, title, "share of the labels that is ignored", "ms", legend=ax is ax.figure.axes[0])
    return figure


def chunk_curve(lines: list[dict]) -> Figure:
    """Time relative to torch.compile's, and the slab, over the rows of a chunk."""
    shapes, highest = grouped(lines, "N", "H", "V"), 0.0
    for ax, (shape, of) in zip(panels(len(shapes), sharey=True), shapes.items(), strict=True):
        base = next(line["ms"] for line in of if line["provider"] == "compile")
        points = sorted((line for line in of if "slab_mib" in line), key=lambda line: line["rows"])
        ax.plot([p["rows"] for p in points], [p["ms"] / base for p in points], "o-", color=OURS, label="flce_inductor")
        ax.axhline(1, color=COLOURS["compile"], linestyle="--", label="torch.compile")
        for name, marker, dy in (("default", "D", 14), ("tuner", "*", 28)):
            for p in points:
                if name in p["chosen"]:
                    at = p["rows"], p["ms"] / base
                    ax.plot(*at, marker, color=GREY, markersize=11)
                    ax.annotate(name, at, (0, dy), textcoords="offset points", ha="center", color=GREY)
        for i, p in enumerate(points):
            at, place = (p["rows"], p["ms"] / base), {"xytext": (0, -26 if i % 2 else -15), "ha": "center"}
            ax.annotate(f"{p['slab_mib']:.0f} MiB", at, textcoords="offset points", color=GREY, size=7, **place)
        ax.set_xscale("log", base=2)
        ax.margins(x=0.1)
        highest = max(highest, *(p["ms"] / base for p in points))
        ax.set_ylim(0, 1.1 * highest)
        title = "N={} H={} V={}".format(*shape)
        figure = finish(ax, title, "rows in a chunk (slab)", "time / torch.compile's", ax is ax.figure.axes[0])
    return figure


PLOTS: dict[str, tuple[tuple[str, ...], Callable[[list[dict]], Figure]]] = {  # kinds of results, the first that exists
    "pareto": (("shapes",), pareto),
    "over-n": (("over-n",), over_n),
    "timeline": (("timeline",), timeline),
    "accuracy": (("accuracy",), accuracy),
    "alignment": (("unaligned",), alignment),
    "ignored": (("ignored",), ignored),
    "chunk-curve": (("chunk-curve",), chunk_curve),
}


def draw(name: str, lines: list[dict], folder: Path) -> list[Path]:
    """Write both files; the same lines give the same bytes."""
    figure = PLOTS[name][1](lines)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.svg", folder / f"{name}.png"]
    with matplotlib.rc_context({"svg.hashsalt": "flce_inductor"}):
        figure.savefig(written[0], transparent=True, metadata={"Date": None})
    figure.savefig(written[1], transparent=True, dpi=150)
    plt.close(figure)
    return written


def main(argv: list[str] | None = None) -> int:
    """Draw; a picture without results isn't an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PLOTS))
    parser.add_argument("--folder", type=Path, default=IMAGES)
    args = parser.parse_args(argv)
    for name in args.names or PLOTS:
        kinds, _ = PLOTS[name]
        source = next((path for kind in kinds if (path := report.newest(kind)) is not None), None)
        if source is None:
            print(f"{name}: missing, there is no benchmarks/results/*-h200-{kinds[0]}.jsonl")
        else:
            draw(name, report.read(source), args.folder)
            print(f"{name}: drawn from {source.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
