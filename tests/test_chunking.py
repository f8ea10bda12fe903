"""The choice of rows per chunk: numbers worked out by hand from the rule."""

import pytest
import torch

from flce_inductor.chunking import Card, default_rows, rows_per_chunk, share, statistics_first

GIB = 1 << 30
H200 = Card(790e12, 53e12, 4.3e12, 141 * GIB)
H100 = Card(790e12, 53e12, 3.0e12, 80 * GIB)
SMALL = Card(18e12, 8e12, 0.2e12, 4 * GIB)


def test_share_is_as_measured():
    """12 % at 1024 rows on an H200 (10 % measured); half as much at twice the rows."""
    assert share(1024, torch.bfloat16, H200) == pytest.approx(0.1196, rel=1e-3)
    assert share(2048, torch.bfloat16, H200) == pytest.approx(0.0598, rel=1e-3)


@pytest.mark.parametrize(
    ("facts", "V", "dtype", "rows"),
    [
        (H200, 128256, torch.bfloat16, 2560),  # 2 * 790 / (3 * 4.3) / 0.05 = 2450, in steps of 128
        (H100, 128256, torch.bfloat16, 2560),  # 3511, but 640 MiB / (2 V) = 2616
        (H100, 32000, torch.bfloat16, 3584),
        (H200, 262144, torch.bfloat16, 2176),  # 1.1 GiB / (2 V) = 2255
        (SMALL, 128256, torch.bfloat16, 128),  # 32 MiB / (2 V) = 130
        (SMALL, 262144, torch.float32, 32),  # fewer than a step
        (H200, 32000, torch.float32, 384),  # 4 * 53 / (3 * 4.3) / 0.05 = 329
    ],
)
def test_default(facts, V, dtype, rows):
    assert default_rows(V, dtype, facts) == rows
    assert default_rows(V, dtype, facts) * V * dtype.itemsize <= facts.memory // 128


def test_max_slab_bytes_caps():
    assert default_rows(128256, torch.bfloat16, H200, max_slab_bytes=64 << 20) == 256
    assert default_rows(128256, torch.bfloat16, H200, max_slab_bytes=1) == 1


def test_a_users_chunk_size_is_exact():
    assert rows_per_chunk(1000, torch.float32, torch.device("cpu"), chunk_size=1234567) == 1234567


def test_statistics_first_below_a_third(monkeypatch):
    """The loop over rows costs 6 (1 + share), two passes 8: equal where the share is a third, at 367 rows."""
    monkeypatch.setattr("flce_inductor.chunking.card", lambda device: H200)
    assert statistics_first(366, torch.bfloat16, torch.device("cuda"))
    assert not statistics_first(368, torch.bfloat16, torch.device("cuda"))
