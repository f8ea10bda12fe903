"""Where the rewrite enters torch.compile: the backend "flce_inductor", and two Inductor passes for its flag.

The passes are part of Inductor's configuration from the moment the package is imported and do nothing while
torch._inductor.config.flce_inductor.enable is False; the backend sets the flag for the graphs that it compiles.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.config as inductor_config

from . import _compat, config


@functools.cache
def _warn_displaced(key: str, consequence: str) -> None:
    warnings.warn(
        f"flce_inductor: torch._inductor.config.{key} was set to another pass after flce_inductor was imported, which "
        f"took ours away, so {consequence}. Set it before importing flce_inductor, or keep ours in it: "
        f"torch._inductor.config.{key} = flce_inductor.with_passes({key!r}, your_pass).",
        stacklevel=2,
    )


def _present(key: str, kind: type) -> bool:
    return any(isinstance(p, kind) for p in _compat.iter_passes(getattr(inductor_config, key)))


class _Pass(_compat.CustomGraphPass):
    """A pass of ours, known to Inductor's caches by the package's sources."""

    def uuid(self) -> Any:
        from .kernels import source_digest

        return source_digest(), _compat.donation()


class _PreGradPass(_Pass):
    """Finds heads with their losses and emits row_stats."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        if not config.current().enable:
            return
        from .match import rewrite

        if not _present(_JOINT, _JointPass):
            _warn_displaced(_JOINT, "the backward computes the logits a second time (8 NVH instead of 6)")
        rewrite(graph)


class _JointPass(_Pass):
    """Turns row_stats and its backward into one row_stats_with_grads where that is legal."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        if not config.current().enable:
            return
        from . import lowering
        from .hoist import hoist

        lowering.register()
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


def install() -> None:
    """Add our passes to Inductor's configuration in every thread, after those that are there; done once, at import."""
    for key, ours in _PASSES.items():
        current = getattr(inductor_config, key)
        _compat.install_default(key, ours)
        if current is not None:  # the user's, or ours from an import before
            setattr(inductor_config, key, with_passes(key, current))


def _patches(mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    patches = _compat.inductor_patches(mode, options, dynamic)
    for key in _PASSES:
        patches[key] = with_passes(key, patches.get(key, getattr(inductor_config, key)))
    return {**patches, f"{config.PREFIX}.enable": True}


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


@contextlib.contextmanager
def tracing() -> Iterator[set[Any]]:
    """While open, Inductor runs the passes, with the rewrite enabled, then the graphs in eager mode.

    Yields Dynamo's identifiers of the graphs.
    """
    from torch._inductor import compile_fx as module

    original, graphs = module.compile_fx, set()

    def traced(gm, example_inputs, inner_compile=None, config_patches=None, **rest):
        if config_patches is None:  # called by itself
            return original(gm, example_inputs, _run_eagerly, **rest)
        graphs.add(torch._guards.CompileContext.current_compile_id())
        patches = {**config_patches, f"{config.PREFIX}.enable": True, "force_disable_caches": True}
        return original(gm, example_inputs, _run_eagerly, config_patches=patches, **rest)

    module.compile_fx = traced
    try:
        yield graphs
    finally:
        module.compile_fx = original
