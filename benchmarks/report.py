"""Write the tables of README.md and docs from the committed results, so that no number is typed.

    python -m benchmarks.report            # rewrite what is between the markers
    python -m benchmarks.report --check    # exit status 1 if that would change anything

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is one of TABLES. Of each kind of results the
newest file is read; a table whose results aren't there is named as missing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]


def newest(kind: str, card: str = "h200") -> Path | None:
    """The last of the files `date-card-kind.jsonl`."""
    return max(RESULTS.glob(f"????-??-??-{card}-{kind}.jsonl"), default=None)


def read(path: Path) -> list[dict]:
    """The lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _cell(line: dict | None) -> str:
    if line is None or "ms" in line:
        return f"{line['ms']:.1f} ms, {line['peak_plus_mib']:.0f} MiB{_wrong(line)}" if line else ""
    return "out of memory" if "out_of_memory" in line else "failed" if "failed" in line else ""


def _wrong(line: dict) -> str:
    """What a cell says of a provider that failed the correctness gate."""
    return "" if line.get("gate", True) else f" (error {max(x for k, x in line.items() if k.endswith('_err')):.1%})"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _by_shape(lines: list[dict]) -> dict[str, dict[str, dict]]:
    """ "N x H x V" (and the dtype, where it isn't bfloat16) to the lines of its providers."""
    shapes: dict[str, dict[str, dict]] = {}
    for line in lines:
        if "ms" not in line:
            continue
        dtype = "" if line["dtype"] == "bfloat16" else f", {line['dtype']}"
        shapes.setdefault("{N} x {H} x {V}".format(**line) + dtype, {})[line["provider"].split(" 0.")[0]] = line
    return dict(sorted(shapes.items(), key=lambda item: (item[0].count(","), -item[1]["compile"]["peak_plus_mib"])))


def shapes(lines: list[dict]) -> str:
    """The default beside torch.compile and liger-kernel."""
    rows = []
    for shape, of in _by_shape(lines).items():
        ours, compiled = of["ours C=auto"], of["compile"]
        ratios = [ours[key] / compiled[key] for key in ("ms", "idle_ms", "peak_plus_mib")]
        rows.append([shape, _cell(compiled), _cell(of.get("liger")), _cell(ours), *(f"{r:.2f}" for r in ratios)])
    header = ["N x H x V", "torch.compile", "liger-kernel", "flce_inductor"]
    return _table([*header, "time / torch.compile's", "from an idle device", "memory / torch.compile's"], rows)


def same_memory(lines: list[dict]) -> str:
    """The fastest setting that takes at most 1.3 times liger-kernel's memory."""
    rows = []
    for shape, of in _by_shape(lines).items():
        if "liger" not in of:
            continue
        fits = [x for x in of.values() if x["provider"].startswith("ours")]
        fits = [x for x in fits if x["peak_plus_mib"] <= 1.3 * of["liger"]["peak_plus_mib"]]
        if not fits:
            rows.append([shape, _cell(of["liger"]), "", "none that was measured", ""])
            continue
        best = min(fits, key=lambda x: x["ms"])
        setting = best["provider"].replace("ours C=auto", "default").replace("ours C=", "chunk_size=")
        setting = re.sub(r" (param|float32)$", r', accum_dtype="\1"', setting)
        times = f"{of['liger']['ms'] / best['ms']:.2f}"
        rows.append([shape, _cell(of["liger"]), _cell(best), f"`{setting}`" if "=" in setting else setting, times])
    return _table(["N x H x V", "liger-kernel", "flce_inductor", "setting", "times faster"], rows)


def low_memory(lines: list[dict]) -> str:
    """max_slab_bytes beside torch.compile."""
    rows, compiled = [], None
    for line in lines:
        if line["provider"] == "compile":
            compiled = line
            continue
        slab = line["provider"].removeprefix("ours slab")
        ratio = f"{line['ms'] / compiled['ms']:.2f}"
        rows.append(["{N} x {H} x {V}".format(**line), f"{slab} MiB", _cell(compiled), _cell(line), ratio])
    return _table(["N x H x V", "max_slab_bytes", "torch.compile", "flce_inductor", "time / torch.compile's"], rows)


def chunk_curve(lines: list[dict]) -> str:
    """Rows in a chunk, a shape a column."""
    curve = [line for line in lines if line["provider"] == "compile" or line["provider"].startswith("ours C=")]
    rows: dict[str, dict[str, str]] = {}
    for line in curve:
        name = line["provider"].removeprefix("ours C=").replace("compile", "(torch.compile)").replace("auto", "default")
        rows.setdefault(name, {})["{N} x {H} x {V}".format(**line)] = _cell(line)
    shapes = list(dict.fromkeys(shape for of in rows.values() for shape in of))
    order = sorted(rows, key=lambda name: int(name) if name.isdigit() else -1)
    return _table(["rows per chunk", *shapes], [[name, *(rows[name].get(s, "") for s in shapes)] for name in order])


_MODES = {"vocab": "vocabulary parallel", "ddp": "DDP", "fsdp": "FSDP2", "one": "one GPU"}


def many_gpus(lines: list[dict]) -> str:
    """Each way to run on several GPUs, beside torch.compile's."""
    rows = [
        [_MODES[x["mode"]], x["provider"].replace("ours", "flce_inductor"), _cell(x)]
        for x in lines
        if x["mode"] in _MODES
    ]
    return _table(["", "", "a step of each rank"], rows)


def expected(lines: list[dict]) -> str:
    """Share of the time that is not the collectives': measured, and for more ranks as rings of equally fast links."""
    measured = {x["mode"]: x["ms"] for x in lines if x["provider"].startswith("ours")}  # of vocab that by torch.compile
    one = measured["one"]
    N = lines[0]["N"]
    link = {x["provider"]: x["ms"] for x in lines if x["mode"] == "links"}
    weight, gather, scatter, states, numbers = (
        link[name]
        for name in (
            "all-reduce [V, H]",
            "all-gather [V, H]",
            "reduce-scatter [V, H] float32",
            "all-reduce [N, H]",
            "all-reduce [2, 2048] float32",
        )
    )
    ways: dict[str, Callable[[int, float], tuple[float, float]]] = {  # milliseconds without and with the collectives
        "ddp": lambda R, ring: (one, one + ring * weight),
        "fsdp": lambda R, ring: (one, one + ring * (gather + scatter)),
        "vocab": lambda R, ring: (one / R, one / R + ring * states + 2 * -(-N // 2048) * numbers),
    }
    ranks = (2, 4, 8, 16, 32, 64)
    rows = []
    for name, way in ways.items():
        times = [way(R, 2 * (R - 1) / R) for R in ranks]
        shares = [times[0][0] / measured[name], *(alone / together for alone, together in times)]
        rows.append([_MODES[name], *(f"{share:.2f}" for share in shares)])
    return _table(["", "2 ranks, measured", *(f"{R} ranks" for R in ranks)], rows)


def _pivot(lines: list[dict], first: str, row: Callable[[dict], str], columns: dict[str, str], cell=_cell) -> str:
    """A row per value of row, a column per provider that has a line."""
    rows: dict[str, dict[str, dict]] = {}
    for line in lines:
        rows.setdefault(row(line), {})[line["provider"]] = line
    present = [name for name in columns if any("missing" not in of.get(name, {"missing": 1}) for of in rows.values())]
    cells = [[at, *(cell(of.get(name)) for name in present)] for at, of in rows.items()]
    return _table([first, *(columns[name] for name in present)], cells)


_COLUMNS = {
    "floor": "three products",
    "eager": "eager",
    "compile": "torch.compile",
    "auto_chunker": "auto_chunker",
    "auto_chunker forced 8": "auto_chunker, 8 chunks",
    "native": "F.linear_cross_entropy",
    "liger": "liger-kernel",
    "cce": "cut-cross-entropy",
    "quack": "quack",
    "ours": "flce_inductor",
    "ours in place": "flce_inductor, in place",
    "ours C=auto": "flce_inductor",
    "ours tuned": "tuned",
    "ours dense": "all rows",
    "ours C=256": "256 rows",
    "ours C=256 param": '256 rows, `accum_dtype="param"`',
    "ours slab64": "cap of 64 MiB",
    "ours slab128": "cap of 128 MiB",
    "ours C=1024": "1024 rows",
}


def providers(lines: list[dict]) -> str:
    """Everything that was measured, a shape a row."""
    return _pivot(lines, "N x H x V", lambda x: "{N} x {H} x {V}, {dtype}".format(**x), _COLUMNS)


def cross_entropy(lines: list[dict]) -> str:
    """Logits that exist; the error is the largest of one row's loss, where the loss has rows."""

    def cell(line: dict | None) -> str:
        if line is None or "ms" not in line:
            return _cell(line)
        error = f", {line['token_err']:.4f}" if "token_err" in line else ""
        return f"{line['ms']:.2f} ms, {line['peak_plus_mib']:.0f} MiB{error}{_wrong(line)}"

    return _pivot(lines, "N x V, loss", lambda x: "{N} x {V}, {form}".format(**x), _COLUMNS, cell)


def ignored(lines: list[dict]) -> str:
    """Time over the share of labels that are ignored, and in brackets as a share of that of all rows."""
    columns = {**_COLUMNS, "ours dense-graphs": "all rows, CUDA graphs", "ours graphs": "flce_inductor, CUDA graphs"}

    def at(line: dict) -> str:
        return "{:.0%}, {}".format(line["ignored"], line["pattern"]) if "ignored" in line else ""

    def cell(line: dict | None) -> str:
        if line is None or "ms" not in line:
            return _cell(line)
        share = f" ({line['ms'] / dense[at(line)]:.2f})" if line["provider"] == "ours C=auto" else ""
        return f"{line['ms']:.1f} ms{share}"

    dense = {at(line): line["ms"] for line in lines if line["provider"] == "ours dense"}
    return _pivot([line for line in lines if "missing" not in line], "ignored", at, columns, cell)


def nothing_ignored(lines: list[dict]) -> str:
    """Losses alone and whole steps: counting the rows beside computing all."""
    dense = {_labels(x): x for x in lines if x["provider"] == "ours dense"}
    rows = []
    for at, auto in ((_labels(x), x) for x in lines if x["provider"] == "ours C=auto"):
        ratios = (f"{auto[key] / dense[at][key]:.3f}" for key in ("ms", "idle_ms"))
        rows.append([at, f"{auto['ms']:.2f} ms", f"{dense[at]['ms']:.2f} ms", *ratios])
    return _table(["", '"auto"', "all rows", "ratio", "from an idle device"], rows)


def _labels(line: dict) -> str:
    if "pattern" in line:
        return "the loss alone, labels of `{pattern}`".format(**line)
    return "a step of {preset}, {batch} x {length} tokens".format(**line)


def train(lines: list[dict]) -> str:
    """Whole steps."""

    def cell(line: dict | None) -> str:
        if line and "tokens_per_s" in line:
            return f"{line['tokens_per_s']:.0f} tokens/s, {line['peak_mib'] / 1024:.1f} GiB"
        return _cell(line)

    return _pivot(lines, "model, tokens", lambda x: "{preset}, {batch} x {length}".format(**x), _COLUMNS, cell)


def largest(lines: list[dict]) -> str:
    """What fits."""

    def cell(line: dict | None) -> str:
        return f"{line['batch']} x {line['length']} tokens" if line else ""

    def at(line: dict) -> str:
        what = "one sequence" if line["batch"] == 1 else "sequences of {length}".format(**line)
        return "{preset}, {layers} layers: ".format(**line) + what

    return _pivot(lines, "model", at, _COLUMNS, cell)


def compile_time(lines: list[dict]) -> str:
    """Seconds to import the package and, from the call of torch.compile, to the first gradient."""
    names = {"compile": "torch.compile", "ours": "flce_inductor", "tuned": "flce_inductor, autotune"}
    stock = {x["state"]: x["seconds"] for x in lines if x["provider"] == "compile"}
    rows = []
    for x in lines:
        name = names.get(x["provider"], x["provider"].replace("C=", "flce_inductor, chunk_size="))
        seconds = x["seconds"] + x["import_seconds"]
        beside = "" if x["provider"] == "compile" else f"{seconds - stock[x['state']]:+.2f} s"
        rows.append([f"{name}, {x['state']}", f"{seconds:.2f} s", beside])
    return _table(["", "median", "beside torch.compile's"], rows)


TABLES = {  # a kind of results, of a card, and what makes the table
    "shapes": ("shapes", "h200", shapes),
    "same memory": ("shapes", "h200", same_memory),
    "low memory": ("low-memory", "h200", low_memory),
    "write-ups": ("writeups", "h200", providers),
    "peers": ("peers", "h200", providers),
    "over N": ("over-n", "h200", providers),
    "unaligned": ("unaligned", "h200", providers),
    "cross entropy": ("cross-entropy", "h200", cross_entropy),
    "chunk curve": ("chunk-curve", "h200", chunk_curve),
    "many GPUs": ("many-gpus", "h200", many_gpus),
    "many GPUs expected": ("many-gpus", "h200", expected),
    "ignored": ("ignored", "h200", ignored),
    "ignored on a CPU": ("ignored", "cpu", ignored),
    "train": ("train", "h200", train),
    "nothing ignored": ("nothing-ignored", "h200", nothing_ignored),
    "largest": ("largest", "h200", largest),
    "compile time": ("compile-time", "h200", compile_time),
    "cpu": ("shapes", "cpu", providers),
}


def table(name: str) -> str | None:
    """None where there are no results yet."""
    kind, card, make = TABLES[name]
    source = newest(kind, card)
    return None if source is None else make(read(source))


_PLACE = re.compile(r"(<!-- table: ([\w -]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The text with its tables as the results say; those without results as they were."""

    def place(match: re.Match) -> str:
        made = table(match[2])
        return match[0] if made is None else f"{match[1]}{made}\n{match[3]}"

    return _PLACE.sub(place, text)


def main(argv: list[str] | None = None) -> int:
    """Write or check; exit status 1 when a document isn't up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        before = path.read_text()
        after = written(before)
        if after != before:
            stale.append(name)
            if not args.check:
                path.write_text(after)
    for name, (kind, card, _) in TABLES.items():
        if newest(kind, card) is None:
            print(f"table {name}: missing, there is no benchmarks/results/*-{card}-{kind}.jsonl")
    print("changed: " + ", ".join(stale) if stale else "up to date")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
