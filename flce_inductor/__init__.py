"""A torch.compile extension that rewrites linear + cross_entropy into a chunked fused loss.

step = torch.compile(train_step, backend="flce_inductor")            # no import needed
import flce_inductor                                                 # or stock Inductor and a flag:
step = torch.compile(train_step, options={"flce_inductor.enable": True})
"""

from . import backend, config

config.install()
backend.install()

from .backend import with_passes  # noqa: E402
from .explain import Reason, explain  # noqa: E402
from .functional import cross_entropy, linear_cross_entropy  # noqa: E402

__all__ = ["Reason", "cross_entropy", "explain", "linear_cross_entropy", "with_passes"]
__version__ = "0.1.0"
