"""Takes names out of vLLM's modules: with this directory on its path, Python runs this in every process.

SLOTSTREAM_TEST_MISSING holds them, as `module:Class.name`, with a comma between two. vLLM itself goes on without them: what was
a method of a class, each instance has as an attribute.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence

_missing: dict[str, list[str]] = {}
for _one in filter(None, os.environ.get("SLOTSTREAM_TEST_MISSING", "").split(",")):
    _missing.setdefault(_one.partition(":")[0], []).append(_one.partition(":")[2])


def _give_instances(owner: type, name: str, method: Callable[..., object]) -> None:
    init = owner.__init__  # type: ignore[misc]

    def initialize(self: object, *args: object, **kwargs: object) -> None:
        vars(self)[name] = types.MethodType(method, self)
        init(self, *args, **kwargs)

    setattr(owner, "__init__", initialize)  # noqa: B010  (mypy: a method is no variable)


class _Without(importlib.abc.MetaPathFinder):
    """Finds the modules that lack something, and takes it out when they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _missing:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader = spec.loader
        assert isinstance(loader, importlib.machinery.SourceFileLoader)
        inner = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            inner(module)
            for path in _missing[name]:
                *owners, last = path.split(".")
                owner: object = module
                for part in owners:
                    owner = getattr(owner, part)
                found = getattr(owner, last)
                delattr(owner, last)
                if isinstance(owner, type) and callable(found):
                    _give_instances(owner, last, found)

        setattr(loader, "exec_module", exec_module)  # noqa: B010  (mypy: a method is no variable)
        return spec


sys.meta_path.insert(0, _Without())
