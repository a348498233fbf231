"""W ranks as W protocol records, without processes and threads: what law 14 of the design is about.

Rounds: every rank posts, every rank reads; a read waits until all have posted. Collectives: the
k-th on a group of ranks is over when every member has started its k-th; two that differ are a
fault. Who moves next is chosen by the test.

Gradients are sets of names: what is reduced of a unit is the union of what the ranks hand in, so
that a gradient which is lost, or comes twice, is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fzero.state.protocol import Units

MOST_MOVES = 20_000  # of all ranks; no case here needs a tenth of them
AXES = ("all", "seq", "data")
"""The axes of a collective of the user's: all ranks, those of one replica, those of one shard."""

Steps = Generator["Callable[[], bool]", None, Any]
"""What a rank does: it yields where it waits, and for what."""


class Fault(AssertionError):
    """A law that does not hold. `law` names it."""

    def __init__(self, law: str, seen: str) -> None:
        super().__init__(f"{law}: {seen}")
        self.law = law


class PeersFailed(Exception):
    """What a rank raises where others raised, or make other calls (`ranks` is empty)."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(f"ranks {ranks}")
        self.ranks = ranks


class OwnError(Exception):
    """What a rank raises in its own loss. `crosses`: the others hear of it, by its pass."""

    crosses = False


class AllAstray(Exception):
    """An error of the communication that every rank raises at one place."""

    ranks = ()


class Dead(Exception):
    """A rank that this one waits for has ended: what the communication library raises."""


@dataclass(frozen=True)
class Sync:
    """A collective of the user's over one axis, in a forward or a backward.

    differentiated: whether a backward of it follows one in a forward. on: the ranks on which what
    it gives has a graph; the backward comes on all ranks, by the ties of their losses.
    """

    axis: str
    differentiated: bool = True
    on: tuple[int, ...] = ()


@dataclass
class Group:
    """Collectives of some ranks: what each of them has started, in its order."""

    name: str
    ranks: tuple[int, ...]
    started: dict[int, list[tuple[Any, frozenset[str]]]] = field(default_factory=dict)

    def start(self, rank: int, what: Any, brings: frozenset[str] = frozenset()) -> int:
        mine = self.started.setdefault(rank, [])
        mine.append((what, brings))
        k = len(mine) - 1
        for other in self.ranks:
            theirs = self.started.get(other, [])
            if len(theirs) > k and theirs[k][0] != what:
                raise Fault(
                    "one order",
                    f"collective {k} of {self.name}: rank {rank} starts {what}, rank {other} "
                    f"{theirs[k][0]}",
                )
        return k

    def is_over(self, k: int) -> bool:
        return all(len(self.started.get(rank, [])) > k for rank in self.ranks)

    def sum(self, k: int) -> Counter[str]:
        return Counter(x for rank in self.ranks for x in self.started[rank][k][1])


@dataclass
class World:
    """The ranks, their groups, and what of gradients all of them have brought."""

    size: int
    units: Sequence[Units]  # of each model
    make: Callable[[World, int], Any]  # a rank
    served: bool = True
    replicas: int = 1
    functional: Sequence[bool] = ()  # of each model: a record for each pass, or one of an engine
    stays: bool = False  # whether a window keeps what it has gathered

    def __post_init__(self) -> None:
        everyone = tuple(range(self.size))
        self.channel = Group("the channel", everyone)
        shards = self.size // self.replicas
        self.shards, self.across = {}, {}
        for first in range(0, self.size, shards):
            group = Group(f"shards {first}", everyone[first : first + shards])
            self.shards |= dict.fromkeys(group.ranks, group)
        for one in range(shards):
            group = Group(f"replicas {one}", everyone[one::shards])
            self.across |= dict.fromkeys(group.ranks, group)
        # As in a Channel: gathers and reductions have groups of their own.
        self.sums = {
            rank: Group(f"sums of {group.name}", group.ranks) for rank, group in self.shards.items()
        }
        for rank, group in list(self.sums.items()):
            self.sums[rank] = self.sums[group.ranks[0]]
        # And collectives of the user's, which are in flight beside them.
        users = Group("the user's over all", everyone)
        self.users = {"all": dict.fromkeys(everyone, users), "seq": {}, "data": {}}
        for axis, groups in (("seq", self.shards), ("data", self.across)):
            made = {
                group.name: Group(f"the user's over {group.name}", group.ranks)
                for group in groups.values()
            }
            self.users[axis] = {rank: made[group.name] for rank, group in groups.items()}
        self.ranks = [self.make(self, number) for number in everyone]
        self.ended: set[int] = set()
        self.rows: dict[tuple[int, int], Any] = {}  # what a rank has said, by (rank, number)

    def run(self, scripts: Sequence[Steps], order: int) -> list[BaseException | None]:
        """Let the ranks run, one move at a time; return what each has raised."""
        waits: list[Callable[[], bool]] = [lambda: True] * self.size
        raised: list[BaseException | None] = [None] * self.size
        chance = Random(order)
        for _ in range(MOST_MOVES):
            if len(self.ended) == self.size:
                return raised
            here = [r for r in range(self.size) if r not in self.ended]
            able = [r for r in here if waits[r]()]
            if not able:
                rank = self._with_a_dead_peer(here)
            else:
                rank = chance.choice(able) if order else able[0]
            try:
                waits[rank] = next(scripts[rank]) if able else scripts[rank].throw(Dead())
            except StopIteration:
                self.ended.add(rank)
            except Fault:
                raise
            except Exception as error:
                raised[rank] = error
                self.ended.add(rank)
        raise Fault("nobody waits for ever", f"{MOST_MOVES} moves, and no end")

    def _with_a_dead_peer(self, here: Sequence[int]) -> int:
        if not self.ended:
            raise Fault("nobody waits for ever", f"ranks {here} all wait")
        return here[0]
