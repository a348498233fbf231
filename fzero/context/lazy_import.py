"""Names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from fzero.errors import explain


def importer(
    package: str, modules: Iterable[str], names: Mapping[str, Iterable[str]] | None = None
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports some of its names at their first use.

    Args:
        package: the package's `__name__`.
        modules: those that the package has under the last part of their own names.
        names: {module: names in it that the package has, too}.

    Raises:
        AttributeError: by the function that is returned, for any other name.

    Example:
        >>> get = importer("fzero.tools", ["fzero.tools.plot"], {"fzero.tools.plan": ["Plan"]})
        >>> get("plot").__name__, get("Plan").__name__
        ('fzero.tools.plot', 'Plan')
    """
    paths = {path.rpartition(".")[2]: path for path in modules}
    homes = {name: path for path, inside in (names or {}).items() for name in inside}

    def get(name: str) -> Any:
        this = sys.modules[package]
        if name in homes:
            value = getattr(import_module(homes[name]), name)
        elif name in paths:
            value = import_module(paths[name])
        else:
            raise unknown_name(this, name)
        setattr(this, name, value)  # so that the next access does not come here
        return value

    return get


def unknown_name(
    module: ModuleType, name: str, instead: Mapping[str, str] | None = None
) -> AttributeError:
    """Return the error for a name that a module has not: with what to use, or the nearest names.

    instead: {what to use: names of other libraries for it, with spaces between them}.

    Example:
        >>> str(unknown_name(sys.modules["fzero.context.lazy_import"], "gon")).splitlines()[-1]
        'Fix: write fzero.context.lazy_import.gone.'
    """
    message = f"module {module.__name__!r} has no attribute {name!r}"
    fixes = [fix for fix, names in (instead or {}).items() if name in names.split()]
    if not fixes and not name.startswith("_"):
        known = {x.lower(): x for x in getattr(module, "__all__", dir(module)) if x[0] != "_"}
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
        fixes = [f"write {module.__name__}.{known[one]}" for one in near]
    if fixes:
        cause = "a name of another library, of another module, or a misspelt one."
        message = explain(f"{message}.", cause=cause, fix=f"{fixes[0]}.")
    return AttributeError(message, name=name, obj=module)


def gone(package: str, instead: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that says what to use for names that it had.

    Args:
        package: the package's `__name__`.
        instead: {what to use: the names that it takes the place of}.

    Example:
        >>> gone("fzero.tools.plot", {"trace.diff(other)": ["op_diff"]})("op_diff")
        Traceback (most recent call last):
        AttributeError: fzero.tools.plot.op_diff is gone.
        Usual cause: a name of an older fzero.
        Fix: trace.diff(other).
    """
    fixes = {name: fix for fix, names in instead.items() for name in names}

    def get(name: str) -> Any:
        message = f"module {package!r} has no attribute {name!r}"
        if name in fixes:
            seen, cause = f"{package}.{name} is gone.", "a name of an older fzero."
            message = explain(seen, cause=cause, fix=f"{fixes[name]}.")
        raise AttributeError(message, name=name, obj=sys.modules[package])

    return get


class SecondName(ModuleType):
    """A module under a second name, imported when something is read from it.

    It is an entry of `sys.modules` and no attribute of its package, which may have a function of
    that name: `fzero.plan` is a function, and `from fzero.plan import Plan` works.

    Example:
        >>> sys.modules["fzero.pictures"] = SecondName("fzero.pictures", "fzero.tools.plot")
        >>> from fzero.pictures import partition_map
        >>> sys.modules.pop("fzero.pictures").__name__
        'fzero.tools.plot'
    """

    def __init__(self, name: str, module: str) -> None:
        """Stand for `module` under `name`."""
        super().__init__(name)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        """Import the module, which takes this one's place, and read a name of it."""
        if name.startswith("__") and name != "__all__":  # inspect asks all modules for __file__
            raise AttributeError(name)
        module = sys.modules[self.__name__] = import_module(self._module)
        vars(self).update(vars(module))  # `import *` reads them, and so does who imported this one
        return getattr(module, name)
