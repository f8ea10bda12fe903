"""Where the rewrite enters torch.compile: the backend "flce_inductor", and two Inductor passes for its flag.

The passes are part of Inductor's configuration from the moment that both it and the package are imported, and do
nothing while torch._inductor.config.flce_inductor.enable is False; the backend sets the flag for the graphs that it
compiles. Importing Inductor takes seconds, so the package doesn't.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from . import _compat, config
from .after_import import after_import
from .explain import compilation


@functools.cache
def _warn_displaced(key: str, consequence: str) -> None:
    warnings.warn(
        f"flce_inductor: torch._inductor.config.{key} was set to another pass after flce_inductor was imported, which "
        f"took ours away, so {consequence}. Set it before importing flce_inductor, or keep ours in it: "
        f"torch._inductor.config.{key} = flce_inductor.with_passes({key!r}, your_pass).",
        stacklevel=2,
    )


def _present(key: str, kind: type) -> bool:
    return any(isinstance(p, kind) for p in _compat.iter_passes(getattr(torch._inductor.config, key)))


class _Pass:
    """A pass of ours, known to Inductor's caches by the package's sources."""

    def __deepcopy__(self, memo: dict) -> _Pass:
        return self  # Inductor copies what is a key's default

    def uuid(self) -> Any:
        from .kernels import source_digest

        return source_digest(), _compat.donation()


class _PreGradPass(_Pass):
    """Finds heads with their losses and emits row_stats."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        if not config.current().enable or not _ready():
            return
        from .match import rewrite

        if not _present(_JOINT, _JointPass):
            _warn_displaced(_JOINT, "the backward computes the logits a second time (8 NVH instead of 6)")
        rewrite(graph)


class _JointPass(_Pass):
    """Turns row_stats and its backward into one row_stats_with_grads where that is legal."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        if not config.current().enable or not _ready():
            return
        from . import lowering
        from .hoist import hoist

        if not _present(_PRE_GRAD, _PreGradPass):
            _warn_displaced(_PRE_GRAD, "nothing is rewritten")
        hoist(graph)
        lowering.tune(graph)


_PRE_GRAD, _JOINT = "pre_grad_custom_pass", "joint_custom_pre_pass"
_PASSES = {_PRE_GRAD: _PreGradPass(), _JOINT: _JointPass()}


def with_passes(key: str, current: Any) -> Any:
    """The value for torch._inductor.config's pre_grad_custom_pass or joint_custom_pre_pass (key) that runs `current`
    (a pass, a list of passes or None) and then flce_inductor's own.
    """
    return _compat.chain_passes(current, _PASSES[key])


_usable = True  # False: this torch lacks something that we need


def install() -> None:
    """Add the keys, and our passes after those that are there, to Inductor's configuration once it is imported."""
    after_import("torch._inductor.config", _attach)


def _attach() -> None:
    try:
        for key, ours in _PASSES.items():
            _compat.install_pass(key, ours)
        config.install()
    except Exception as error:
        _step_aside(error)
    else:
        if not _compat.is_tested():
            warnings.warn(
                f"flce_inductor: not tested with torch {torch.__version__}; tested {' to '.join(_compat.TESTED)}. It "
                "does here what it does there, but may fail where Inductor has changed: compare a loss with it and "
                "without it, and if something is wrong, use one of those versions or a newer flce_inductor.",
                stacklevel=2,
            )


def _step_aside(error: Exception) -> None:
    global _usable
    _usable = False
    warnings.warn(
        f"flce_inductor: nothing is rewritten, and Inductor works as without flce_inductor, because torch "
        f"{torch.__version__} lacks something that it needs ({type(error).__name__}: {error}). Use torch "
        f"{' to '.join(_compat.TESTED)}, with which it is tested, or a newer flce_inductor.",
        stacklevel=2,
    )


def _ready() -> bool:
    """Whether the rewrite can be done with this torch; False after a warning."""
    if _usable:
        try:
            from . import hoist, lowering, match  # noqa: F401  what they need of Inductor shows here

            lowering.register()
        except Exception as error:
            _step_aside(error)
    return _usable


def _enabled(patches: dict[str, Any]) -> dict[str, Any]:
    return {**patches, f"{config.PREFIX}.enable": True} if _ready() else patches


def _patches(mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    if not _ready():
        theirs = {key: value for key, value in (options or {}).items() if not key.startswith(f"{config.PREFIX}.")}
        return {**torch._inductor.list_mode_options(mode or "default", dynamic), **theirs}
    patches = _compat.inductor_patches(mode, options, dynamic)
    for key in _PASSES:
        patches[key] = with_passes(key, patches.get(key, getattr(torch._inductor.config, key)))
    return _enabled(patches)


def flce_inductor(gm, example_inputs, *, mode=None, options=None, dynamic=None, **_):
    """torch.compile(fn, backend="flce_inductor"): Inductor with the rewrite enabled; mode=, options= and dynamic= mean
    what they mean for backend="inductor".
    """
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, config_patches=_patches(mode, options, dynamic))


def _run_eagerly(graph, *args, **kwargs):
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(graph.forward)


def tracing_backend(gm, example_inputs):
    """Runs the passes as flce_inductor does, then the graph in eager mode."""
    from torch._inductor.compile_fx import compile_fx

    patches = {**_patches(None, None, None), "force_disable_caches": True}
    return compile_fx(gm, example_inputs, inner_compile=_run_eagerly, config_patches=patches)


class Traced(NamedTuple):
    """A graph that Dynamo made."""

    attempt: int  # how often Dynamo had started it anew
    enabled: bool  # whether the rewrite is, for this graph by itself
    fused: int  # its calls of linear_cross_entropy, which need no rewrite


def _fused(gm: torch.fx.GraphModule) -> int:
    targets = (str(node.target) for m in gm.modules() if isinstance(m, torch.fx.GraphModule) for node in m.graph.nodes)
    return sum(bool(re.match(r"flce_inductor\.(sharded_)?row_stats(_with_grads)?(\.|$)", t)) for t in targets)


@contextlib.contextmanager
def tracing() -> Iterator[dict[Any, Traced]]:
    """While open, Inductor runs the passes, with the rewrite enabled, then the graphs in eager mode.

    Yields the graphs by Dynamo's identifiers.
    """
    from torch._inductor import compile_fx as module

    original, graphs = module.compile_fx, {}

    def traced(gm, example_inputs, inner_compile=None, config_patches=None, **rest):
        if config_patches is None:  # called by itself
            return original(gm, example_inputs, _run_eagerly, **rest)
        enabled = config_patches.get(f"{config.PREFIX}.enable", config.current().enable)
        graph, attempt = compilation()
        before = graphs.get(graph)  # of this attempt another piece, as DDP cuts graphs
        if before is None or before.attempt != attempt:
            before = Traced(attempt, True, 0)
        graphs[graph] = Traced(attempt, before.enabled and enabled, before.fused + _fused(gm))
        patches = {**_enabled(config_patches), "force_disable_caches": True}
        return original(gm, example_inputs, _run_eagerly, config_patches=patches, **rest)

    module.compile_fx = traced
    try:
        yield graphs
    finally:
        module.compile_fx = original
