"""The coordinator's record: what is gathered, who uses it, and the order that is expected."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fzero.errors import LayoutError, explain
from fzero.state.residency import Residency, Status, nothing_of
from fzero.state.trace import Complete, Invalid, Recording, Trace
from fzero.state.units import Limits, Modules, Units, plan_modules, plan_units


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CoordinatorState:
    """One rank's full parameters at stage 3. Its transitions are in `fzero.state.coordinator`.

    Host facts only: exact under `==`, and equal on ranks that made the same calls, but for what
    is still in flight. `units` and `limits` never change; `modules` only learns external needs.
    """

    units: Units
    modules: Modules
    limits: Limits
    residency: Residency
    trace: Trace
    active: tuple[int, ...] = ()  # modules in use, oldest first; a module once for each use
    held: tuple[tuple[int, ...], ...] = ()  # units kept by `hold`, one entry for each call
    repeats: bool = False  # a window is open: the step comes again before parameters change

    @property
    def available(self) -> tuple[int, ...]:
        """The units whose full values are here."""
        return self.residency.of(Status.AVAILABLE)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The units whose gather was started, and not reported as done."""
        return self.residency.of(Status.IN_FLIGHT)

    @property
    def in_use(self) -> frozenset[int]:
        """The units that a module in use needs, or that are held."""
        needs = self.modules.needs
        return frozenset().union(*(needs[module] for module in set(self.active)), *self.held)

    def needs_of(self, module: int) -> tuple[int, ...]:
        """The units that `module` needs. Raises `LayoutError` for an unknown id."""
        if not 0 <= module < len(self.modules.names):
            raise _unknown("module", [module], len(self.modules.names))
        return self.modules.needs[module]

    def require_units(self, ids: Iterable[int]) -> None:
        """Raise `LayoutError` for ids that are no units."""
        count = len(self.units.names)
        if unknown := [unit for unit in ids if not 0 <= unit < count]:
            raise _unknown("unit", unknown, count)

    def text(self, modules: Iterable[int]) -> str:
        """The names of `modules`, for a message."""
        named = [f"{self.modules.names[module] or '(root)'!r}" for module in modules]
        more = f" and {len(named) - 6} more" if len(named) > 6 else ""
        return ", ".join(named[:6]) + more if named else "nothing"

    def __repr__(self) -> str:
        """One line: the trace, what is live, what is in use."""
        return (
            f"CoordinatorState({_stand(self.trace)}, "
            f"{self.residency.live_numel:,} of {sum(self.units.numels):,} elements live, "
            f"available: {self.units.text(self.available)}, "
            f"in flight: {self.units.text(self.in_flight)}, in use: {self.text(self.active)})"
        )


def new_coordinator(
    numels: Mapping[str, int],
    needs: Mapping[str, Sequence[str]],
    limits: Limits,
    small: Collection[str] | None = None,
) -> CoordinatorState:
    """Return the state before the first step: nothing is gathered, no order is known.

    Ids are positions: unit i is the i-th name of `numels` (full elements), module m the m-th of
    `needs` (the units it uses itself; a leaf module lists those of its whole subtree). `small`: see
    `plan_units`. Raises `LayoutError` for a need that is no unit.

    Example:
        >>> needs = {"": [], "a": ["a.w", "a.b"]}
        >>> new_coordinator({"a.w": 800, "a.b": 8}, needs, Limits())
        CoordinatorState(no order, 0 of 808 elements live, available: none, in flight: none,
            in use: nothing)
    """
    units = plan_units(numels, limits, small)
    return CoordinatorState(
        units=units,
        modules=plan_modules(units, needs),
        limits=limits,
        residency=nothing_of(units),
        trace=Invalid(),
    )


def _stand(trace: Trace) -> str:
    if isinstance(trace, Complete):
        return f"place {trace.position} of {len(trace.order.modules)}"
    return "recording" if isinstance(trace, Recording) else "no order"


def _unknown(kind: str, ids: Sequence[int], count: int) -> LayoutError:
    return LayoutError(
        explain(
            f"{kind} {', '.join(map(str, ids))}: there are {count} of them, 0 to {count - 1}.",
            cause=f"the id is of another model, or the {kind} was added after the plan.",
            fix="make a new coordinator when modules or parameters are added.",
        )
    )
