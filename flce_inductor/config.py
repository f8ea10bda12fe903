"""The keys, grafted onto torch._inductor.config as torch._inductor.config.flce_inductor.*

| key | default | meaning |
|---|---|---|
| enable | False | rewrite (the backend "flce_inductor" sets it for the graphs it compiles) |
| chunk_size | None | rows per chunk, exactly; None: chosen from the device and the shape (chunking.py) |
| max_slab_bytes | None | cap on the slab, the one buffer of chunk_size x V logits; None: device memory / 128 |
| accum_dtype | "auto" | dtype the weight gradient accumulates in: "param", "float32", or "auto" (see ops.py) |
| autotune | None | time the ways to run the loop and take the fastest (lowering.py); None: where max_autotune is on |
| tolerance | 0.02 | of those as fast as the fastest up to this share of its time, the one with the smallest slab |
| min_logits_bytes | 64 MiB | a head whose logits are smaller than this is left alone |
| min_vocab_size | 128 | a head with fewer classes is left alone: its logits are no wider than a GEMM's tile |
| skip_ignored | "auto" | rows whose label is ignored cost nothing: where their number is known early; True, False |
| unused_logits | "keep" | "nan": logits that a training step returns beside its loss become NaN without memory |

A wrong value raises ValueError that names the key, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Optional, Union

from . import _compat

PREFIX = "flce_inductor"
ACCUM_DTYPES = ("auto", "param", "float32")
UNUSED_LOGITS = ("keep", "nan")
SKIP_IGNORED = ("auto", True, False)


def check_accum_dtype(value: object, name: str = f"{PREFIX}.accum_dtype") -> None:
    """Raise ValueError unless value is one of ACCUM_DTYPES."""
    _check_choice(value, name, ACCUM_DTYPES)


def _check_choice(value: object, name: str, allowed: tuple[str | bool, ...]) -> None:
    if not any(isinstance(value, type(choice)) and value == choice for choice in allowed):  # 1 is not True
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")


def check_count(value: object, name: str, *, least: int = 1, optional: bool = True) -> None:
    """Raise ValueError unless value is an int >= least (not a bool), or None where optional."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        allowed = f"an int of at least {least}" + (" or None" if optional else "")
        raise ValueError(f"{name}={value!r}: allowed is {allowed}")


def _check_least(value: object, key: str) -> None:
    check_count(value, f"{PREFIX}.{key}", least=0, optional=False)


def _check_bool(value: object, key: str, optional: bool = False) -> None:
    if not isinstance(value, bool) and not (optional and value is None):
        raise ValueError(f"{PREFIX}.{key}={value!r}: allowed are True and False" + (" and None" if optional else ""))


def _check_tolerance(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{PREFIX}.tolerance={value!r}: allowed is a number from 0 to below 1")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The keys' values at one moment."""

    enable: bool = False
    chunk_size: int | None = None
    max_slab_bytes: int | None = None
    accum_dtype: str = "auto"
    autotune: bool | None = None
    tolerance: float = 0.02
    min_logits_bytes: int = 64 << 20
    min_vocab_size: int = 128
    unused_logits: str = "keep"
    skip_ignored: str | bool = "auto"


@_compat.constant
def current() -> Settings:
    """The values in force in this thread (from torch 2.12 on Inductor's keys are per thread)."""
    # where Inductor was never imported, or has no such keys (backend.py), nobody has set one
    keys = getattr(sys.modules.get("torch._inductor.config"), PREFIX, Settings())
    return Settings(**{field.name: getattr(keys, field.name) for field in dataclasses.fields(Settings)})


@dataclasses.dataclass(frozen=True)
class _Package:
    """The value of a key that nobody sets. A process that reads a copy of Inductor's configuration, as the worker of
    fx_compile_mode SUBPROCESS does, imports this package with it, without which it would refuse the other keys.
    """


def install() -> None:
    """Graft the keys; done once, when both the package and torch._inductor.config are imported."""
    defaults = Settings()
    # typing.Optional and not `int | None`: torch.compile(options=) reads the type's __args__ on every version
    optional_int = Optional[int]  # noqa: UP045
    _compat.install_config(
        PREFIX,
        {
            "_package": (_Package, _Package(), lambda v: None),
            "enable": (bool, defaults.enable, lambda v: _check_bool(v, "enable")),
            "autotune": (Optional[bool], None, lambda v: _check_bool(v, "autotune", optional=True)),  # noqa: UP045
            "tolerance": (float, defaults.tolerance, _check_tolerance),
            "chunk_size": (optional_int, None, lambda v: check_count(v, f"{PREFIX}.chunk_size")),
            "max_slab_bytes": (optional_int, None, lambda v: check_count(v, f"{PREFIX}.max_slab_bytes")),
            "accum_dtype": (str, defaults.accum_dtype, check_accum_dtype),
            "unused_logits": (
                str,
                defaults.unused_logits,
                lambda v: _check_choice(v, f"{PREFIX}.unused_logits", UNUSED_LOGITS),
            ),
            "skip_ignored": (
                Union[str, bool],  # noqa: UP007
                defaults.skip_ignored,
                lambda v: _check_choice(v, f"{PREFIX}.skip_ignored", SKIP_IGNORED),
            ),
            **{
                key: (int, getattr(defaults, key), functools.partial(_check_least, key=key))
                for key in ("min_logits_bytes", "min_vocab_size")
            },
        },
    )
