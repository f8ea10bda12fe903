"""How many rows C a chunk has.

A chunk of C rows needs a slab of C x V logits and, because the weight gradient [V, H] is read and written once per
chunk, costs time that does not shrink with C. Per chunk the accumulation moves 2*V*H*itemsize bytes beside 6*C*V*H
flops, so on a device with F flop/s and B byte/s its share of the time is

    share = itemsize * F / (3 * B * C)

The default is the smallest C that keeps the share under SHARE, capped so that the slab stays under a fraction of the
device's memory. Neither depends on N, so memory doesn't grow with the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import torch

SHARE = 0.05  # of the time may go to reading and writing dweight
SLAB_FRACTION = 128  # the slab takes at most memory / this
ROUND = 128  # rows: a GEMM tile's height


@dataclasses.dataclass(frozen=True)
class Card:
    """What the choice depends on: achievable flop/s of 16-bit and 32-bit GEMMs, byte/s, bytes of memory."""

    flops16: float
    flops32: float
    bandwidth: float
    memory: int


_GIB = 1 << 30
# Achievable rather than peak. H200 measured (790 TFLOP/s bf16, 53 TFLOP/s fp32, 4.3 TB/s); the others are the
# vendors' figures scaled by the same ratio.
_CARDS = {
    "H200": (790e12, 53e12, 4.3e12),
    "H100": (790e12, 53e12, 3.0e12),
    "B300": (1800e12, 60e12, 7.0e12),
    "B200": (1800e12, 60e12, 7.0e12),
    "A100": (260e12, 18e12, 1.7e12),
    "RTX 3050": (18e12, 8e12, 0.2e12),
}
_UNKNOWN = _CARDS["H100"]  # a middling ratio of flop/s to byte/s
_CPU = (1e11, 1e11, 2e10)  # per a few cores; the ratio is what counts, and it varies little


@torch.compiler.assume_constant_result  # Dynamo needn't see how it's found out
def card(device: torch.device) -> Card:
    """The facts of a device."""
    return _card(device)


@functools.cache
def _card(device: torch.device) -> Card:
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        rates = next((v for k, v in _CARDS.items() if k in props.name), _UNKNOWN)
        return Card(*rates, memory=props.total_memory)
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return Card(*_CPU, memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Card(*_CPU, memory=16 * _GIB)


def default_rows(V: int, dtype: torch.dtype, facts: Card, max_slab_bytes: int | None = None) -> int:
    """C for a head of V classes whose logits have the given dtype: the roofline's, capped by the slab's bytes."""
    rows = share(1, dtype, facts) / SHARE
    rows = -(-int(rows) // ROUND) * ROUND
    cap = max_slab_bytes if max_slab_bytes is not None else facts.memory // SLAB_FRACTION
    most = cap // (V * dtype.itemsize)
    return max(1, min(rows, most // ROUND * ROUND if most >= ROUND else most))


def share(rows: int, dtype: torch.dtype, facts: Card) -> float:
    """Time that reading and writing dweight takes in the loop, relative to its products' at `rows` rows a chunk."""
    flops = facts.flops16 if dtype.itemsize == 2 else facts.flops32
    return dtype.itemsize * flops / (3 * facts.bandwidth * rows)


def statistics_first(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether chunks are so small that computing the logits twice is faster than accumulating dweight in them.

    A statistics pass and then the vocabulary-major order cost 8 NVH, the loop over rows 6 NVH and its share.
    """
    return 6 * (1 + share(rows, dtype, card(device))) > 8


def rows_per_chunk(
    V: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    chunk_size: int | None = None,
    max_slab_bytes: int | None = None,
) -> int:
    """The user's chunk_size exactly (runtime clamps it to N), else the device's default."""
    if chunk_size is not None:
        return chunk_size
    return default_rows(V, dtype, card(device), max_slab_bytes)
