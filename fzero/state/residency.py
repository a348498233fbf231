"""Where every unit is: not available, in flight, or available. One byte a unit."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from fzero.errors import PhaseError, explain
from fzero.state.units import Units


class Status(IntEnum):
    """What this rank holds of a unit."""

    NOT_AVAILABLE = 0  # its shard only
    IN_FLIGHT = 1  # the gather was started
    AVAILABLE = 2  # the full values


_STATUSES = tuple(Status)
_STATUS = 3  # bits of a code that are the status
_AHEAD = 4  # the bit of a unit that was prefetched and that no module has asked for yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """The status of every unit, and sums over it; a change costs a copy of `len(codes)` bytes.

    Live is what is in flight or available. Decisions read liveness and never the difference
    between the two, for that depends on a rank's clock, and all ranks must decide the same.
    """

    codes: bytes
    live_numel: int = 0
    ahead_numel: int = 0

    def status(self, unit: int) -> Status:
        """What is held of `unit`."""
        return _STATUSES[self.codes[unit] & _STATUS]

    def of(self, status: Status) -> tuple[int, ...]:
        """The units in `status`, ascending."""
        return tuple(u for u, code in enumerate(self.codes) if code & _STATUS == status)

    @property
    def live(self) -> tuple[int, ...]:
        """The units in flight or available, ascending."""
        return tuple(unit for unit, code in enumerate(self.codes) if code)


def nothing_of(units: Units) -> Residency:
    """Return the residency in which every unit is sharded."""
    return Residency(codes=bytes(len(units.names)))


def launch(r: Residency, units: Units, ids: Collection[int], *, ahead: bool = False) -> Residency:
    """Not available -> in flight. Raises `PhaseError` for what is live already."""
    _require(r, units, ids, (Status.NOT_AVAILABLE,), "start a gather")
    codes = _write(r.codes, ids, Status.IN_FLIGHT | (_AHEAD if ahead else 0))
    numel = units.numel_of(ids)
    return Residency(
        codes=codes,
        live_numel=r.live_numel + numel,
        ahead_numel=r.ahead_numel + (numel if ahead else 0),
    )


def arrive(r: Residency, units: Units, ids: Collection[int]) -> Residency:
    """In flight -> available. Raises `PhaseError` for what is not in flight, or named twice."""
    _require(r, units, ids, (Status.IN_FLIGHT,), "report as gathered")
    codes = bytearray(r.codes)
    for unit in ids:
        codes[unit] += Status.AVAILABLE - Status.IN_FLIGHT
    return replace(r, codes=bytes(codes))


def claim(r: Residency, units: Units, ids: Iterable[int]) -> Residency:
    """Note that a module has asked for `ids`: what was prefetched of them is no longer ahead."""
    reached = [unit for unit in ids if r.codes[unit] & _AHEAD]
    if not reached:
        return r
    codes = bytearray(r.codes)
    for unit in reached:
        codes[unit] &= _STATUS
    return replace(r, codes=bytes(codes), ahead_numel=r.ahead_numel - units.numel_of(reached))


def drop(r: Residency, units: Units, ids: Collection[int]) -> Residency:
    """In flight or available -> not available. Raises `PhaseError` for what is not live."""
    _require(r, units, ids, (Status.IN_FLIGHT, Status.AVAILABLE), "free")
    ahead = [unit for unit in ids if r.codes[unit] & _AHEAD]
    return Residency(
        codes=_write(r.codes, ids, 0),
        live_numel=r.live_numel - units.numel_of(ids),
        ahead_numel=r.ahead_numel - units.numel_of(ahead),
    )


def _write(codes: bytes, ids: Iterable[int], code: int) -> bytes:
    changed = bytearray(codes)
    for unit in ids:
        changed[unit] = code
    return bytes(changed)


def _require(
    r: Residency, units: Units, ids: Collection[int], allowed: tuple[Status, ...], verb: str
) -> None:
    twice = len(set(ids)) != len(ids)
    wrong = [unit for unit in ids if r.codes[unit] & _STATUS not in allowed]
    if not wrong and not twice:
        return
    states = sorted({r.status(unit).name.lower() for unit in wrong}) or ["named twice"]
    raise PhaseError(
        explain(
            f"cannot {verb} {units.text(wrong or ids)}: {', '.join(states)}.",
            cause="an effect was run or reported twice, or a record older than the last "
            "transition was used.",
            fix="run each effect once, in the order given; report a unit as gathered once, after "
            "its Gather or Prefetch; go on from the state that the last transition returned.",
        )
    )
