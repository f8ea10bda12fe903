"""README's and the docs' tables are what the committed results say."""

import pytest

pytest.importorskip("benchmarks", reason="benchmarks are not installed, they lie in the checkout")
from benchmarks import report  # noqa: E402


def test_tables_equal_the_results():
    assert report.main(["--check"]) == 0
    texts = [(report.ROOT / name).read_text() for name in report.DOCUMENTS]
    assert sum(text.count("<!-- table: ") for text in texts) >= len(report.TABLES)


def test_another_number_is_noticed():
    text = (report.ROOT / "README.md").read_text()
    (table,) = [part for part in text.split("<!-- end -->") if "<!-- table: shapes -->" in part]
    number = next(word for word in table.split("<!-- table: shapes -->")[1].split() if word[0].isdigit() and "." in word)
    at = text.index(number, text.index("<!-- table: shapes -->"))
    wrong = text[:at] + "9999.9" + text[at + len(number) :]
    assert report.written(wrong) == text != wrong


@pytest.mark.parametrize("name", report.TABLES)
def test_every_measurement_passed_its_gate(name):
    table = report.TABLES[name]()
    assert table.count("\n") >= 2
    for file in report.ROOT.glob("benchmarks/results/2026-11-30-h200-*.jsonl"):
        assert all(line["gate"] for line in report.read(file.name))
