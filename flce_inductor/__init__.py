"""A torch.compile extension that rewrites linear + cross_entropy into a chunked fused loss.

step = torch.compile(train_step, backend="flce_inductor")            # no import needed
import flce_inductor                                                 # or stock Inductor and a flag:
step = torch.compile(train_step, options={"flce_inductor.enable": True})
"""

from typing import TYPE_CHECKING, Any

from . import backend, ops, parallel  # noqa: F401  they register the operators, for graphs saved with them
from .backend import with_passes
from .explain import Reason, explain

if TYPE_CHECKING:
    from .functional import cross_entropy, linear_cross_entropy

__all__ = ["Reason", "cross_entropy", "explain", "linear_cross_entropy", "with_passes"]
__version__ = "0.1.0"

backend.install()


def __getattr__(name: str) -> Any:
    if name not in ("cross_entropy", "linear_cross_entropy"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import functional  # imports Dynamo, which takes seconds

    return globals().setdefault(name, getattr(functional, name))
