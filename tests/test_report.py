"""README's and the docs' tables are what the committed results say, and the pictures are drawn from them."""

import json

import pytest

from benchmarks import report

WITH_RESULTS = [name for name, (kind, card, _) in report.TABLES.items() if report.newest(kind, card)]


def test_tables_equal_the_results():
    assert report.main(["--check"]) == 0
    texts = "".join((report.ROOT / name).read_text() for name in report.DOCUMENTS)
    for name in ("shapes", "same memory", "low memory"):
        assert f"<!-- table: {name} -->" in texts
        assert name in WITH_RESULTS


def test_another_number_is_noticed():
    text = (report.ROOT / "README.md").read_text()
    (table,) = [part for part in text.split("<!-- end -->") if "<!-- table: shapes -->" in part]
    words = table.split("<!-- table: shapes -->")[1].split()
    number = next(word for word in words if word[0].isdigit() and "." in word)
    at = text.index(number, text.index("<!-- table: shapes -->"))
    wrong = text[:at] + "9999.9" + text[at + len(number) :]
    assert report.written(wrong) == text != wrong


@pytest.mark.parametrize("name", WITH_RESULTS)
def test_measurements_passed_their_gate_or_the_table_says_so(name):
    kind, card, _ = report.TABLES[name]
    assert report.table(name).count("\n") >= 2
    lines = report.read(report.newest(kind, card))
    measured = {"largest": "tokens", "compile time": "seconds"}.get(name, "ms")
    assert any(measured in line for line in lines)
    assert all(line.get("gate", True) for line in lines if line["provider"].startswith(("ours", "compile")))
    assert report.table(name).count("(error ") == sum(not line.get("gate", True) for line in lines)


def test_the_newest_results_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.newest("shapes") is None
    assert report.written("<!-- table: shapes -->\nkept\n<!-- end -->") == "<!-- table: shapes -->\nkept\n<!-- end -->"
    for date in ("2026-11-30", "2027-01-02", "2026-12-31"):
        (tmp_path / f"{date}-h200-shapes.jsonl").touch()
    (tmp_path / "2027-02-01-h200-other-shapes.jsonl").touch()
    (tmp_path / "2027-02-01-cpu-shapes.jsonl").touch()
    assert report.newest("shapes").name == "2027-01-02-h200-shapes.jsonl"


def _write(folder, card: str, kind: str, *lines: dict) -> None:
    (folder / f"2026-12-01-{card}-{kind}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_tables_say_what_failed_and_leave_out_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    shape = {"N": 8, "H": 2, "V": 4, "dtype": "bfloat16"}
    _write(
        tmp_path,
        "h200",
        "peers",
        {"provider": "eager", **shape, "out_of_memory": True},
        {"provider": "quack", **shape, "missing": "no"},
        {"provider": "cce", **shape, "failed": "RuntimeError"},
        {"provider": "ours C=auto", **shape, "ms": 1.25, "peak_plus_mib": 3.0},
    )
    assert report.table("peers").splitlines() == [
        "| N x H x V | eager | cut-cross-entropy | flce_inductor |",
        "| --- | --- | --- | --- |",
        "| 8 x 2 x 4, bfloat16 | out of memory | failed | 1.2 ms, 3 MiB |",
    ]


def test_a_peer_that_fails_the_gate_is_shown_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    line = {"N": 8, "H": 2, "V": 4, "dtype": "float16", "ms": 1.25, "peak_plus_mib": 3.0}
    errors = {"loss_err": 0.001, "dh_err": 0.021, "dweight_err": 0.01}
    _write(tmp_path, "h200", "peers", {"provider": "liger", **line, **errors, "gate": False})
    assert "| 8 x 2 x 4, float16 | 1.2 ms, 3 MiB (error 2.1%) |" in report.table("peers")


def test_nothing_ignored(tmp_path, monkeypatch):
    """Each loss, and each step of a model, beside itself with all rows."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    loss, step = {"pattern": "prefix"}, {"preset": "tiny", "batch": 2, "length": 64}
    _write(
        tmp_path,
        "h200",
        "nothing-ignored",
        {"provider": "ours dense", **loss, "ms": 20.0, "idle_ms": 40.0},
        {"provider": "ours C=auto", **loss, "ms": 20.1, "idle_ms": 39.6},
        {"provider": "ours C=auto", **step, "ms": 9.0, "idle_ms": 9.0},
        {"provider": "ours dense", **step, "ms": 10.0, "idle_ms": 8.0},
    )
    assert report.table("nothing ignored").splitlines()[2:] == [
        "| the loss alone, labels of `prefix` | 20.10 ms | 20.00 ms | 1.005 | 0.990 |",
        "| a step of tiny, 2 x 64 tokens | 9.00 ms | 10.00 ms | 0.900 | 1.125 |",
    ]


def test_chunk_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    line = {"H": 2, "V": 4, "dtype": "bfloat16", "peak_plus_mib": 3.0}
    lines = [
        {"N": N, "provider": provider, **line, "ms": ms}
        for N, provider, ms in (
            (8, "floor", 1.0), (8, "compile", 2.0), (8, "ours C=auto", 3.0), (8, "ours tuned", 4.0),
            (8, "ours C=16", 5.0), (8, "ours C=2", 6.0), (9, "compile", 7.0), (9, "ours C=16", 8.0),
        )
    ]  # fmt: skip
    _write(tmp_path, "h200", "chunk-curve", *lines)
    assert report.table("chunk curve").splitlines() == [
        "| rows per chunk | 8 x 2 x 4 | 9 x 2 x 4 |",
        "| --- | --- | --- |",
        "| (torch.compile) | 2.0 ms, 3 MiB | 7.0 ms, 3 MiB |",
        "| default | 3.0 ms, 3 MiB |  |",
        "| 2 | 6.0 ms, 3 MiB |  |",
        "| 16 | 5.0 ms, 3 MiB | 8.0 ms, 3 MiB |",
    ]


def test_many_gpus(tmp_path, monkeypatch):
    """Worked out by hand: e.g. DDP at 4 ranks moves 1.5 times as much as at 2."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    links = {
        "all-reduce [V, H]": 10.0, "all-gather [V, H]": 5.0, "reduce-scatter [V, H] float32": 15.0,
        "all-reduce [N, H]": 1.0, "all-reduce [2, 2048] float32": 0.5,
    }  # fmt: skip
    steps = [("vocab", "loss_parallel", 60.0), ("vocab", "ours", 65.0), ("vocab", "ours, torch.compile", 62.5)]
    steps += [("ddp", "ours", 125.0), ("fsdp", "ours", 200.0), ("one", "torch.compile", 90.0), ("one", "ours", 100.0)]
    lines = [{"mode": "links", "provider": name, "ms": ms} for name, ms in links.items()]
    lines += [{"mode": mode, "provider": name, "ms": ms, "peak_plus_mib": 7.0} for mode, name, ms in steps]
    _write(tmp_path, "h200", "many-gpus", *({"N": 4096, **line} for line in lines))
    assert "| vocabulary parallel | flce_inductor, torch.compile | 62.5 ms, 7 MiB |" in report.table("many GPUs")
    rows = report.table("many GPUs expected").splitlines()[2:]
    assert [row.split(" | ")[:4] for row in rows] == [
        ["| DDP", "0.80", f"{100 / 110:.2f}", f"{100 / 115:.2f}"],
        ["| FSDP2", "0.50", f"{100 / 120:.2f}", f"{100 / 130:.2f}"],
        ["| vocabulary parallel", "0.80", f"{50 / 53:.2f}", f"{25 / 28.5:.2f}"],
    ]


def test_ignored_rows_beside_what_they_should_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    lines = [
        {"provider": provider, "pattern": "random", "ignored": 0.5, "ms": ms}
        for provider, ms in (("ours dense", 16.0), ("ours C=auto", 10.0))
    ]
    _write(tmp_path, "h200", "ignored", {"provider": "cce", "missing": "no"}, *lines)
    assert report.table("ignored").splitlines() == [
        "| ignored | flce_inductor | all rows |",
        "| --- | --- | --- |",
        "| 50%, random | 10.0 ms (0.62) | 16.0 ms |",
    ]


@pytest.mark.parametrize("name", report.TABLES)
def test_every_table_has_a_place(name, tmp_path, monkeypatch):
    monkeypatch.setitem(report.TABLES, name, ("kind", "h200", lambda lines: "made"))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "2027-01-02-h200-kind.jsonl").touch()
    assert report.written(f"<!-- table: {name} -->\n<!-- end -->") == f"<!-- table: {name} -->\nmade\n<!-- end -->"


@pytest.mark.parametrize("kind", ["shapes", "accuracy"])
def test_pictures_are_drawn_from_committed_results(kind, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    name = {"shapes": "pareto"}.get(kind, kind)
    lines = report.read(report.newest(kind))
    svg, png = plots.draw(name, lines, tmp_path)
    assert png.stat().st_size > 5000
    again, _ = plots.draw(name, lines, tmp_path / "again")
    assert again.read_bytes() == svg.read_bytes()
    for line in lines:
        for key in {"ms", "dweight_ratio"} & line.keys():
            line[key] *= 1.5
    changed, _ = plots.draw(name, lines, tmp_path / "changed")
    assert changed.read_bytes() != svg.read_bytes()


def _curve(**x) -> list[dict]:
    line = {"N": 4096, "H": 64, "V": 1000, "dtype": "bfloat16", "peak_plus_mib": 100.0, "ms": 2.0}
    return [{**line, **x, "provider": provider} for provider in ("floor", "compile", "ours dense", "ours C=auto")]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("over-n", [*_curve(N=1024), *_curve(N=2048, ms=4.0)]),
        ("alignment", [*_curve(V=1000), *_curve(V=1001, ms=7.0)]),
        ("ignored", [*_curve(pattern="random", ignored=0.0), *_curve(pattern="prefix", ignored=0.5)]),
        ("chunk-curve", [*_curve(), *_curve(rows=128, slab_mib=1.0, chosen=["default", "tuner"])]),
        (
            "timeline",
            [
                {
                    "provider": "ours C=auto",
                    "preset": "tiny",
                    "batch": 1,
                    "length": 8,
                    "timeline": [[0.0, 1.0], [2.0, 5.0]],
                }
            ],
        ),
    ],
)
def test_other_pictures_can_be_drawn(name, lines, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    assert all(path.stat().st_size > 3000 for path in plots.draw(name, lines, tmp_path))


def test_a_picture_without_results_is_named_as_missing(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert plots.main(["over-n", "--folder", str(tmp_path)]) == 0
    assert "over-n: missing" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
