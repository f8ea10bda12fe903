"""The choice of rows per chunk: numbers worked out by hand from the rule."""

import pytest
import torch

from flce_inductor import chunking
from flce_inductor.chunking import Card, candidates, default_rows, delay, rows_per_chunk, share, statistics_first

GIB = 1 << 30
H200 = Card(790e12, 53e12, 4.3e12, 141 * GIB)
H100 = Card(790e12, 53e12, 3.0e12, 80 * GIB)
B300 = Card(1800e12, 60e12, 7.0e12, 288 * GIB)
A100 = Card(260e12, 18e12, 1.7e12, 80 * GIB)
RTX_3050 = Card(18e12, 8e12, 0.2e12, 4 * GIB)
CPU = Card(1e11, 1e11, 2e10, 24 * GIB, least=256)


def test_share_is_as_measured():
    """12 % at 1024 rows on an H200 (10 % measured); half as much at twice the rows."""
    assert share(1024, torch.bfloat16, H200) == pytest.approx(0.1196, rel=1e-3)
    assert share(2048, torch.bfloat16, H200) == pytest.approx(0.0598, rel=1e-3)


@pytest.mark.parametrize(
    ("facts", "V", "dtype", "rows"),
    [
        (H200, 128256, torch.bfloat16, 2048),  # 2 * 790 / (3 * 4.3) / 0.06 = 2041
        (H200, 32000, torch.bfloat16, 2048),
        (H200, 262144, torch.bfloat16, 2048),  # 1.1 GiB / (2 V) = 2255
        (H200, 262144, torch.float32, 1024),  # 1.1 GiB / (4 V) = 1128
        (H200, 32000, torch.float32, 2048),  # 4 * 53 / (3 * 4.3) / 0.06 = 274, but GEMMs need more rows
        (H100, 128256, torch.bfloat16, 2048),  # 2926 -> 4096, but 640 MiB / (2 V) = 2616
        (H100, 32000, torch.bfloat16, 4096),
        (H100, 262144, torch.bfloat16, 1024),  # 640 MiB / (2 V) = 1280
        (B300, 262144, torch.bfloat16, 2048),  # 2 * 1800 / 21 / 0.06 = 2857
        (A100, 128256, torch.bfloat16, 2048),  # 2 * 260 / 5.1 / 0.06 = 1699
        (A100, 262144, torch.bfloat16, 1024),
        (RTX_3050, 128256, torch.bfloat16, 128),  # 32 MiB / (2 V) = 130
        (RTX_3050, 262144, torch.float32, 32),  # 32 MiB / (4 V)
        (RTX_3050, 50257, torch.bfloat16, 256),  # 333
        (CPU, 50257, torch.float32, 256),  # 4 * 1e11 / (3 * 2e10) / 0.06 = 111; 192 MiB / (4 V) = 1001
        (CPU, 262144, torch.float32, 128),  # 192
    ],
)
def test_default(facts, V, dtype, rows):
    assert default_rows(V, dtype, facts) == rows
    assert default_rows(V, dtype, facts) * V * dtype.itemsize <= facts.memory // 128


def test_max_slab_bytes_caps():
    assert default_rows(128256, torch.bfloat16, H200, max_slab_bytes=64 << 20) == 256
    assert default_rows(128256, torch.bfloat16, H200, max_slab_bytes=1) == 1


@pytest.mark.parametrize(
    ("head", "before", "chunks", "seconds"),
    [
        (79e12, 0, 8, 5e-4),  # 0.1 s of work, 12.5 ms a chunk: only the first launch is late
        (79e12, 0.395e12, 8, 0),  # which 0.5 ms of work before it hide
        (79e12, 0.158e12, 8, 3e-4),
        (0.79e12, 0, 5, 5e-4 + 4 * 3e-4),  # 1 ms of work, 0.2 ms a chunk: each launch is 0.3 ms later still
        (0.79e12, 0.79e12, 5, 7e-4),
        (0.79e12, 79e12, 5, 0),
        (0.79e12, 0, 1, 5e-4),
    ],
)
def test_delay_of_a_host_that_waits(head, before, chunks, seconds):
    N = 1000 * chunks - 1  # the last chunk may be smaller
    assert delay(head, before, 1000, N, torch.bfloat16, H200) == pytest.approx(seconds / (head / 790e12))


@pytest.mark.parametrize(
    ("N", "V", "max_slab_bytes", "sizes"),
    [
        (8192, 128256, None, [256, 512, 1024, 2048, 4096]),  # 8192 rows are more than the cap allows
        (8192, 32000, None, [256, 512, 1024, 2048, 4096, 8192]),
        (1000, 32000, None, [256, 512, 1024]),  # one chunk is enough
        (8192, 128256, 64 << 20, [32, 64, 128, 256]),
        (8192, 128256, 1 << 19, [1, 2]),
        (64, 262144, None, [2048]),  # there is nothing to choose from
    ],
)
def test_candidates(N, V, max_slab_bytes, sizes):
    found = candidates(N, V, torch.bfloat16, H200, max_slab_bytes=max_slab_bytes)
    assert found == sizes and all(type(c) is int for c in found)
    assert candidates(N, V, torch.bfloat16, H200, chunk_size=77) == [77]


def test_a_users_chunk_size_is_exact():
    assert rows_per_chunk(1000, torch.float32, torch.device("cpu"), chunk_size=1234567) == 1234567


def test_statistics_first_below_a_third(monkeypatch):
    """The loop over rows costs 6 (1 + share), two passes 8: equal where the share is a third, at 367 rows."""
    monkeypatch.setattr("flce_inductor.chunking.card", lambda device: H200)
    assert statistics_first(366, torch.bfloat16, torch.device("cuda"))
    assert not statistics_first(368, torch.bfloat16, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_unknown_card_is_measured(monkeypatch):
    """Once, in the middle of a compilation too, and near what the table says of this card."""
    device = torch.device("cuda", 0)
    known = chunking._card(device)
    monkeypatch.setattr(chunking, "_CARDS", {})
    chunking._card.cache_clear()
    try:
        with torch._subclasses.fake_tensor.FakeTensorMode():
            measured = chunking.card(device)
        assert chunking.card(device) is measured
    finally:
        chunking._card.cache_clear()
    for name in ("flops16", "flops32", "bandwidth"):
        assert 0.5 < getattr(measured, name) / getattr(known, name) < 2, name
    assert default_rows(128256, torch.bfloat16, measured) in (1024, 2048, 4096)
