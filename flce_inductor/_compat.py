"""Every use of a private torch API whose shape differs between torch 2.11 and 2.15, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

TESTED = ("2.11", "2.15")  # the oldest and the newest torch that the tests ran on


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def is_tested() -> bool:
    """Whether this torch is no newer than those that the tests ran on."""
    return _numbers(torch.__version__) <= _numbers(TESTED[1])


def constant(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result, which imports Dynamo: seconds."""
    function._dynamo_marked_constant = True
    return function


def is_exporting() -> bool:
    """torch.compiler.is_exporting, which torch 2.11's Dynamo takes to be true under torch.compile, too."""
    return torch.compiler._is_exporting_flag


# ---------------------------------------------------------------- Inductor's configuration


class _CheckedVar:
    """Stands in for the ContextVar that holds a key's value from torch 2.12 on, and checks what is set."""

    def __init__(self, var: Any, check: Callable[[object], None]):
        self._var, self._check = var, check

    def __getattr__(self, name: str) -> Any:  # get, and reset
        return getattr(self._var, name)

    def set(self, value: object) -> Any:
        self._check(value)
        return self._var.set(value)


def _checked_entry(default: object, value_type: Any, name: str, check: Callable[[object], None]) -> Any:
    """A key of torch._inductor.config that refuses a wrong value at the moment it is set or patched."""
    from torch.utils._config_module import _UNSET_SENTINEL, _Config, _ConfigEntry

    def check_value(value: object) -> None:
        if value is not _UNSET_SENTINEL:
            check(value)

    class CheckedEntry(_ConfigEntry):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "user_override":
                check_value(value)
            super().__setattr__(name, value)

    config = _Config(default=default, value_type=value_type)
    if "name" not in inspect.signature(_ConfigEntry.__init__).parameters:  # torch 2.11 stores the value in the entry
        return CheckedEntry(config)
    entry = _ConfigEntry(config, name)
    entry.user_override = _CheckedVar(entry.user_override, check_value)
    return entry


def install_config(prefix: str, entries: dict[str, tuple[Any, object, Callable[[object], None]]]) -> None:
    """Graft keys `prefix.name` onto torch._inductor.config.

    entries: name -> (type, default, check), where check raises ValueError for a value that is not allowed.
    Grafted keys behave as Inductor's own: attribute access, patch, torch.compile(options=), cache keys.
    """
    import torch._inductor.config as inductor_config
    from torch.utils._config_module import SubConfigProxy

    named = {f"{prefix}.{key}": entry for key, entry in entries.items()}
    missing = named.keys() - inductor_config._config.keys()  # after a reload none are, and what is set stays
    grafted = {name: _checked_entry(d, t, name, c) for name, (t, d, c) in named.items() if name in missing}
    proxy = SubConfigProxy(inductor_config, f"{prefix}.")
    inductor_config._config.update(grafted)
    inductor_config.__dict__[prefix] = proxy
    if hasattr(inductor_config, "_hash_dirty_var"):  # 2.13 and later
        inductor_config._hash_dirty_var.set(True)
        inductor_config._get_dict_dirty_keys_var.set(None)
    else:
        inductor_config._is_dirty = True


def install_pass(key: str, ours: Any) -> None:
    """Put ours behind the passes in torch._inductor.config's *_custom_pass key: in all threads, those too that have
    passes of their own already, which from torch 2.12 on only the present thread may have.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    if missing := [name for name in dir(CustomGraphPass) if not name.startswith("_") and not hasattr(ours, name)]:
        raise NotImplementedError(f"CustomGraphPass has {', '.join(missing)}, which our passes have not")
    for kind in (type(ours), _Chain):
        CustomGraphPass.register(kind)  # and not a subclass: that would import Inductor, which takes seconds
    entry = inductor_config._config[key]
    entry.default = chain_passes(entry.default, ours)
    setattr(inductor_config, key, chain_passes(getattr(inductor_config, key), ours))


class _Chain:
    """Two custom passes one after the other, for torch 2.11, whose hooks take a single pass."""

    def __init__(self, first: Callable[[torch.fx.Graph], None], second: Any):
        self.passes = (first, second)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for custom_pass in self.passes:
            custom_pass(graph)

    def uuid(self) -> Any:
        from torch._inductor.custom_graph_pass import CustomGraphPass

        # a pass without an identifier of its own keeps the graph out of the cache, as it does alone
        ids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes)
        return None if None in ids else ids


def iter_passes(current: Any) -> tuple[Any, ...]:
    """The passes in the value of a *_custom_pass key: None, one pass, a list of them, or a _Chain."""
    if current is None:
        return ()
    if isinstance(current, _Chain):
        return current.passes
    if isinstance(current, (list, tuple)):
        return tuple(current)
    return (current,)


def chain_passes(current: Any, ours: Any) -> Any:
    """The value for a *_custom_pass key that runs what is there, then ours (once)."""
    theirs = [p for p in iter_passes(current) if type(p) is not type(ours)]
    if not theirs:
        return ours
    if hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes"):  # 2.13 and later take lists
        return [*theirs, ours]
    chained: Any = theirs[0]
    for custom_pass in [*theirs[1:], ours]:
        chained = _Chain(chained, custom_pass)
    return chained


def inductor_patches(mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    """The config patches that torch.compile(mode=, options=) gives stock Inductor, with its checks."""
    return dict(torch._TorchCompileInductorWrapper(mode, options, dynamic).config)


def is_whole(graph: torch.fx.Graph) -> bool:
    """Whether a graph is all that Dynamo captured at once, and not the body of an operator or a piece of a split.

    Only then are its outputs what the user's function returns, or what is alive at a graph break.
    """
    # Dynamo says of what it captured why it ended there; DDP's optimizer says so of its pieces, in its own name
    reason = getattr(graph.owning_module, "compile_subgraph_reason", None)
    return reason is not None and not any(frame.name == "DDPOptimizer" for frame in reason.user_stack)


def donation() -> tuple[Any, ...]:
    """What the code of a backward depends on that Inductor's graph cache leaves out of its keys: the saved tensors that
    it may overwrite. Without it, a backward for retain_graph=True could be one from the cache that scales in place.
    """
    context = torch._guards.TracingContext.try_get()
    indices = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    return torch._functorch.config.donated_buffer, tuple(indices or ())


def partitioner_takes_tuples() -> bool:
    """Whether a node that returns a tuple may be marked as never to be computed again.

    Before torch 2.14 the partitioner would, under an activation memory budget, save the tuple itself, and fail.
    """
    return _numbers(torch.__version__) >= (2, 14) or torch._functorch.config.activation_memory_budget == 1


def set_arguments(node: torch.fx.Node, *args: Any) -> None:
    """Give a node of a joint graph other arguments, more of them maybe.

    Where the op has been a fallback of Inductor's in this process, its layout constraint holds the node's arguments
    against those that it was traced with.
    """
    node.args = args
    node.meta.pop("eager_input_vals", None)


def size_hint(size: int | torch.SymInt) -> int | None:
    """A size as a number where the graph knows one for now; None for one that only the data decides."""
    hint = size if isinstance(size, int) else size.node.hint
    return None if hint is None else int(hint)  # torch 2.11 has sympy's integers here


# ---------------------------------------------------------------- many processes


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group of a name that `group.group_name` gave."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def all_reduced(x: torch.Tensor, how: str, group: str) -> torch.Tensor:
    """x reduced ("sum", "max") over the process group of that name, as a new tensor; a graph may hold it."""
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x.contiguous(), how, group))


def dtensor_method(target: Any) -> tuple[str, list[Any]] | None:
    """The method of DTensor that a function in Dynamo's graph calls, and its arguments, which are bound to it.

    Before torch 2.13 there is such a function for to_local and redistribute; later they are methods in the graph.
    """
    called = getattr(target, "__name__", "")
    if getattr(target, "__module__", "") != "torch._dynamo.variables.tensor" or not called.startswith("prim_"):
        return None
    bound = inspect.getclosurevars(target).nonlocals
    given = [*bound.get("args_as_value", [None]), *bound.get("kwargs_as_value", {}).values()]
    return called.removeprefix("prim_"), given
