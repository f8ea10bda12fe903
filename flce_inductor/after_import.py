"""A call at the moment that a module is imported, by whomever, without importing it for that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call `call` once: now if the module is imported already, else before the import that loads it returns."""
    finder = _Finder(name, call)
    sys.meta_path.insert(0, finder)
    if name in sys.modules:
        importlib.import_module(name)  # waits for another thread that may be importing it
        finder.run()


class _Finder:
    """Finds the module by the other finders, and has its loader make the call."""

    def __init__(self, name: str, call: Callable[[], None]):
        self.name, self.call = name, call

    def run(self) -> None:
        try:
            sys.meta_path.remove(self)
        except ValueError:  # another thread has made the call
            return
        self.call()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # those in front have been asked
            find = getattr(finder, "find_spec", None)
            if find is not None and (spec := find(name, path, target)) is not None:
                spec.loader = _Loader(spec.loader, self.run)
                return spec
        return None


class _Loader:
    """A loader that makes a call once it has executed its module."""

    def __init__(self, loader: Any, call: Callable[[], None]):
        self.loader, self.call = loader, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self.loader  # the module shows no trace of this
        self.loader.exec_module(module)
        self.call()
