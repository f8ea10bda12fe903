"""How many rows C a chunk has.

A chunk of C rows needs a slab of C x V logits and, because the weight gradient [V, H] is read and written once per
chunk, costs time that does not shrink with C. Per chunk the accumulation moves 2*V*H*itemsize bytes beside 6*C*V*H
flops, so on a device with F flop/s and B byte/s its share of the time is

    share = itemsize * F / (3 * B * C)

The default is the power of two next to the C that makes the share SHARE, as batches are multiples of powers of two and
so are cut into equal chunks; no fewer rows than the device's GEMMs need for their speed, and so few that the slab stays
under a fraction of the device's memory. None of it depends on N, so memory doesn't grow with the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import _compat

SHARE = 0.06  # of the time may go to reading and writing dweight
SLAB_FRACTION = 128  # the slab takes at most memory / this
HOST = 5e-4  # s that the host takes to launch a chunk's work, on slow hosts


@dataclasses.dataclass(frozen=True)
class Card:
    """What the choice depends on.

    flops16, flops32: achievable flop/s of 16-bit and 32-bit GEMMs; bandwidth: byte/s; memory: bytes; least: rows below
    which the three GEMMs of a chunk lose speed whatever the accumulation costs.
    """

    flops16: float
    flops32: float
    bandwidth: float
    memory: int
    least: int = 2048  # float32 on an H200: 10 % slower at 512 rows, 4 % at 1024, 2.5 % at 2048 than without chunks


# Achievable rather than peak. H200 measured (790 TFLOP/s bf16, 53 TFLOP/s fp32, 4.3 TB/s); the others are the
# vendors' figures scaled by the same ratio. A card that isn't here is measured.
_CARDS = {
    "H200": (790e12, 53e12, 4.3e12),
    "H100": (790e12, 53e12, 3.0e12),
    "B300": (1800e12, 60e12, 7.0e12),
    "B200": (1800e12, 60e12, 7.0e12),
    "A100": (260e12, 18e12, 1.7e12),
    "RTX 3050": (18e12, 8e12, 0.2e12),
}
_CPU = (1e11, 1e11, 2e10)  # per a few cores; the ratio is what counts, and it varies little
_CPU_LEAST = 256


@torch.compiler.assume_constant_result  # Dynamo needn't see how it's found out
def card(device: torch.device) -> Card:
    """The facts of a device."""
    return _card(device)


@functools.cache
def _card(device: torch.device) -> Card:
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        rates = next((v for k, v in _CARDS.items() if k in props.name), None)
        return Card(*(rates or _measured(device)), memory=props.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 << 30
    return Card(*_CPU, memory=memory, least=_CPU_LEAST)


def _measured(device: torch.device, size: int = 4096) -> tuple[float, float, float]:
    """(flops16, flops32, bandwidth) of a card."""

    def seconds(work) -> float:
        times = []
        for _ in range(4):  # the first warms up
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return min(times[1:])

    with unset_fake_temporarily(), torch.no_grad(), torch.cuda.device(device):
        wide = torch.ones(size, size, device=device)
        half = wide.to(torch.float16)
        out_half, out_wide = torch.empty_like(half), torch.empty_like(wide)
        products = [seconds(lambda x=x, y=y: torch.mm(x, x, out=y)) for x, y in ((half, out_half), (wide, out_wide))]
        copy = seconds(lambda: out_wide.copy_(wide))
    return 2 * size**3 / products[0], 2 * size**3 / products[1], 2 * wide.nbytes / copy


def default_rows(V: int, dtype: torch.dtype, facts: Card, max_slab_bytes: int | None = None) -> int:
    """C for a head of V classes whose logits have the given dtype: the roofline's, capped by the slab's bytes."""
    rows = max(facts.least, 2 ** round(math.log2(share(1, dtype, facts) / SHARE)))
    cap = max_slab_bytes if max_slab_bytes is not None else facts.memory // SLAB_FRACTION
    most = max(1, cap // (V * dtype.itemsize))
    return min(rows, 2 ** int(math.log2(most)))


def share(rows: int, dtype: torch.dtype, facts: Card) -> float:
    """Time that reading and writing dweight takes in the loop, relative to its products' at `rows` rows a chunk."""
    flops = facts.flops16 if dtype.itemsize == 2 else facts.flops32
    return dtype.itemsize * flops / (3 * facts.bandwidth * rows)


def statistics_first(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether chunks are so small that computing the logits twice is faster than accumulating dweight in them.

    A statistics pass and then the vocabulary-major order cost 8 NVH, the loop over rows 6 NVH and its share.
    """
    return 6 * (1 + share(rows, dtype, card(device))) > 8


def delay(head: float, before: float, rows: int, N: int, dtype: torch.dtype, facts: Card) -> float:
    """How much longer a head takes, relative to its time, if the host waits for the graph's start before it goes on.

    head, before: flops of the head's products and of those that the graph computes before it. While the device works on
    the latter the host catches up; what it launches after that comes HOST later, and each further chunk, too, if the
    device does a chunk faster.
    """
    flops = facts.flops16 if dtype.itemsize == 2 else facts.flops32
    chunks = max(1, math.ceil(N / rows))
    late = HOST + (chunks - 1) * max(0.0, HOST - head / flops / chunks) - before / flops
    return max(0.0, late) / max(head / flops, 1e-9)


def candidates(
    N: int, V: int, dtype: torch.dtype, facts: Card, chunk_size: int | None = None, max_slab_bytes: int | None = None
) -> list[int]:
    """Rows per chunk to try when tuning: the user's, or powers of two around the default that the cap allows."""
    if chunk_size is not None:
        return [chunk_size]
    default = default_rows(V, dtype, facts, max_slab_bytes)
    cap = max_slab_bytes if max_slab_bytes is not None else facts.memory // SLAB_FRACTION
    sizes = [*(default >> i for i in (3, 2, 1)), default, 2 * default, 4 * default]
    return [c for c in sizes if 1 <= c < 2 * N and (c <= default or c * V * dtype.itemsize <= cap)] or [default]


def _bound(V: int | torch.SymInt) -> int:
    """V, or a power of two that a dynamic V stays under, or else the graph is compiled again."""
    if isinstance(V, int):
        return V
    bound = 1 << (_compat.size_hint(V) - 1).bit_length()
    return bound if bound >= V else _compat.size_hint(V)  # the comparison is a guard


def rows_per_chunk(
    V: int | torch.SymInt,
    dtype: torch.dtype,
    device: torch.device,
    *,
    chunk_size: int | None = None,
    max_slab_bytes: int | None = None,
) -> int:
    """The user's chunk_size exactly (runtime clamps it to N), else the device's default."""
    if chunk_size is not None:
        return chunk_size
    return default_rows(_bound(V), dtype, card(device), max_slab_bytes)
