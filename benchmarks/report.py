"""Write the tables of README.md and docs from the committed results, so that no number is typed.

    python -m benchmarks.report            # rewrite what is between the markers
    python -m benchmarks.report --check    # exit status 1 if that would change anything

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is one of TABLES.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]


def read(name: str) -> list[dict]:
    """The lines of a file of results."""
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()]


def _cell(line: dict | None) -> str:
    return f"{line['ms']:.1f} ms, {line['peak_plus_mib']:.0f} MiB" if line else ""


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _by_shape(lines: list[dict]) -> dict[str, dict[str, dict]]:
    """"N x H x V" (and the dtype, where it isn't bfloat16) to the lines of its providers."""
    shapes: dict[str, dict[str, dict]] = {}
    for line in lines:
        dtype = "" if line["dtype"] == "bfloat16" else f", {line['dtype']}"
        shapes.setdefault("{N} x {H} x {V}".format(**line) + dtype, {})[line["provider"].split(" 0.")[0]] = line
    return dict(sorted(shapes.items(), key=lambda item: (item[0].count(","), -item[1]["compile"]["peak_plus_mib"])))


def shapes(name: str) -> str:
    """The default beside torch.compile and liger-kernel."""
    rows = []
    for shape, of in _by_shape(read(name)).items():
        ours, compiled = of["ours C=auto"], of["compile"]
        ratios = [ours[key] / compiled[key] for key in ("ms", "idle_ms", "peak_plus_mib")]
        rows.append([shape, _cell(compiled), _cell(of.get("liger")), _cell(ours), *(f"{r:.2f}" for r in ratios)])
    header = ["N x H x V", "torch.compile", "liger-kernel", "flce_inductor"]
    return _table([*header, "time / torch.compile's", "from an idle device", "memory / torch.compile's"], rows)


def same_memory(name: str) -> str:
    """The fastest setting that takes at most 1.3 times liger-kernel's memory."""
    rows = []
    for shape, of in _by_shape(read(name)).items():
        if "liger" not in of:
            continue
        fits = [x for x in of.values() if x["provider"].startswith("ours")]
        fits = [x for x in fits if x["peak_plus_mib"] <= 1.3 * of["liger"]["peak_plus_mib"]]
        best = min(fits, key=lambda x: x["ms"])
        setting = best["provider"].replace("ours C=auto", "default").replace("ours C=", "chunk_size=")
        setting = re.sub(r" (param|float32)$", r', accum_dtype="\1"', setting)
        times = f"{of['liger']['ms'] / best['ms']:.2f}"
        rows.append([shape, _cell(of["liger"]), _cell(best), f"`{setting}`" if "=" in setting else setting, times])
    return _table(["N x H x V", "liger-kernel", "flce_inductor", "setting", "times faster"], rows)


def low_memory(name: str) -> str:
    """max_slab_bytes beside torch.compile."""
    rows, compiled = [], None
    for line in read(name):
        if line["provider"] == "compile":
            compiled = line
            continue
        slab = line["provider"].removeprefix("ours slab")
        ratio = f"{line['ms'] / compiled['ms']:.2f}"
        rows.append(["{N} x {H} x {V}".format(**line), f"{slab} MiB", _cell(compiled), _cell(line), ratio])
    return _table(["N x H x V", "max_slab_bytes", "torch.compile", "flce_inductor", "time / torch.compile's"], rows)


TABLES = {
    "shapes": lambda: shapes("2026-11-30-h200-shapes.jsonl"),
    "same memory": lambda: same_memory("2026-11-30-h200-shapes.jsonl"),
    "low memory": lambda: low_memory("2026-11-30-h200-low-memory.jsonl"),
}
_PLACE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The text with its tables as the results say."""
    return _PLACE.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text)


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
    print("changed: " + ", ".join(stale) if stale else "up to date")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
