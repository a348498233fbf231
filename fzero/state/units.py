"""What the coordinator moves: units with sizes, the modules that use them, and the limits."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from fzero.errors import LayoutError, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may be gathered, in elements. The defaults are DeepSpeed's.

    A unit persists (stays gathered from step to step, and from the first step on) if it, or each
    of its parameters, has at most `persistence_threshold_numel` elements, and if it fits, with
    those before it that persist, into `model_persistence_threshold_numel`.
    """

    prefetch_bucket_numel: int = 50_000_000  # gathered before the module that uses it is reached
    max_live_parameters_numel: int = 1_000_000_000  # see the bound in fzero.state.coordinator
    max_reuse_distance_numel: int = 1_000_000_000  # kept if used again within so many elements
    persistence_threshold_numel: int = 100_000
    model_persistence_threshold_numel: int = sys.maxsize

    def __post_init__(self) -> None:
        """Refuse what is not a number of elements."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise LayoutError(
                    explain(
                        f"{field.name}={value!r} is not a number of elements.",
                        cause="a float such as 5e7, or -1 for 'no limit'.",
                        fix="pass an int of 0 or more; sys.maxsize means no limit.",
                    )
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What is gathered in one piece, by id: unit `i` is `names[i]`, of `numels[i]` elements.

    A unit is one parameter, or several that the shell keeps in one flat buffer.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    persistent: frozenset[int] = frozenset()

    def numel_of(self, ids: Iterable[int]) -> int:
        """Elements of the units `ids` together."""
        return sum(self.numels[unit] for unit in ids)

    def moving(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Those of `ids` that do not persist."""
        return tuple(unit for unit in ids if unit not in self.persistent)

    def text(self, ids: Iterable[int]) -> str:
        """The names of `ids`, for a message: with the ids, and a count when there are many."""
        known = [f"{unit} ({self.names[unit]!r})" for unit in ids]
        more = f" and {len(known) - 6} more" if len(known) > 6 else ""
        return ", ".join(known[:6]) + more if known else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """Who uses what, by id: module `m` is `names[m]` and needs the units `needs[m]`, each once.

    A leaf module needs the units of its whole subtree; a module without parameters needs none.
    """

    names: tuple[str, ...]
    needs: tuple[tuple[int, ...], ...]


def plan_units(
    numels: Mapping[str, int], limits: Limits, small: Collection[str] | None = None
) -> Units:
    """Give each name its id (its position) and choose what persists, in that order.

    `small` are the units of which every parameter is below the threshold; by default those that
    are below it as a whole.

    Example:
        >>> limits = Limits(persistence_threshold_numel=10, model_persistence_threshold_numel=12)
        >>> sorted(plan_units({"a": 8, "b": 11, "c": 6, "d": 4}, limits).persistent)
        [0, 3]
    """
    persistent: set[int] = set()
    total_numel = 0
    for unit, (name, numel) in enumerate(numels.items()):
        if numel < 0:
            raise LayoutError(
                explain(
                    f"unit {name!r} has {numel} elements.",
                    cause="a size of -1 that stands for 'unknown'.",
                    fix="count the elements of the full tensor, not of this rank's shard.",
                )
            )
        fits = total_numel + numel <= limits.model_persistence_threshold_numel
        is_small = numel <= limits.persistence_threshold_numel if small is None else name in small
        if is_small and fits:
            persistent.add(unit)
            total_numel += numel
    return Units(
        names=tuple(numels), numels=tuple(numels.values()), persistent=frozenset(persistent)
    )


def plan_modules(units: Units, needs: Mapping[str, Sequence[str]]) -> Modules:
    """Give each module its id (its position), and turn the names of its units into ids.

    Raises `LayoutError` for a name that is no unit.

    Example:
        >>> units = plan_units({"w": 8, "b": 2}, Limits())
        >>> plan_modules(units, {"net": [], "net.linear": ["w", "b"]}).needs
        ((), (0, 1))
    """
    ids = {name: unit for unit, name in enumerate(units.names)}
    for module, names in needs.items():
        if unknown := [name for name in names if name not in ids]:
            raise LayoutError(
                explain(
                    f"module {module!r} needs {unknown}, and there is no such unit.",
                    cause="the parameter was added after the units were planned.",
                    fix=f"plan the units again; there are {len(ids)}: {list(ids)[:6]} ...",
                )
            )
    # dict.fromkeys: a weight that is tied within one module is one need.
    listed = tuple(tuple(dict.fromkeys(ids[name] for name in names)) for names in needs.values())
    return Modules(names=tuple(needs), needs=listed)


def with_need(modules: Modules, module: int, extra: Iterable[int]) -> Modules:
    """Let `module` need the units `extra` as well."""
    needs = (*modules.needs[module], *extra)
    return replace(modules, needs=(*modules.needs[:module], needs, *modules.needs[module + 1 :]))
