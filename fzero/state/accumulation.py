"""What has been accumulated since the last update, and in which window: for the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fzero.errors import PhaseError, explain

_DROPPED = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """Host integers, all but `updates` reset by an update or a clear."""

    backwards: int = 0  # outermost backwards since the last update
    micro_steps: int = 0  # step() calls since the last update
    updates: int = 0  # never reset
    window: str = ""  # "coalesce" or "no_sync" while one is open
    waiting: bool = False  # gradients of this rank that have not crossed ranks
    reduced: bool = False  # gradients that have
    dropped: int = 0  # backwards since the last update that raised here, below stage 3

    @property
    def code(self) -> int:
        """What is held, from how many backwards, as a number for the other ranks."""
        held = int(self.waiting) + 2 * int(self.reduced) + 4 * self.backwards
        return held + _DROPPED * self.dropped

    @property
    def keeps(self) -> bool:
        """Whether gradients stay on their rank while a backward runs."""
        return bool(self.window) or self.waiting

    @property
    def held(self) -> bool:
        """Whether there is any gradient to update from."""
        return self.waiting or self.reduced


def open_window(s: Accumulation, kind: str) -> Accumulation:
    """Gradients stay on their rank from here on. Raises `PhaseError` inside another window.

    Example:
        >>> open_window(Accumulation(), "coalesce").window
        'coalesce'
    """
    if s.window:
        raise PhaseError(
            explain(
                f"{kind}() inside {s.window}().",
                cause="two functions that each open a window were nested.",
                fix="keep the outer window: it already makes one reduction of all backwards.",
            )
        )
    return replace(s, window=kind)


def close_window(s: Accumulation) -> Accumulation:
    """Gradients cross ranks again."""
    return replace(s, window="")


def saw_backward(s: Accumulation) -> Accumulation:
    """An outermost backward is over; inside a window its gradients wait."""
    if s.window:
        return replace(s, backwards=s.backwards + 1, waiting=True)
    return replace(s, backwards=s.backwards + 1, reduced=True)


def saw_error(s: Accumulation) -> Accumulation:
    """A backward raised, and its gradients are gone."""
    return replace(s, dropped=s.dropped + 1)


def saw_local(s: Accumulation) -> Accumulation:
    """A gradient stays here for now: it came late, or outside of every backward."""
    return s if s.waiting else replace(s, waiting=True)


def saw_reduction(s: Accumulation) -> Accumulation:
    """All that waited has crossed ranks."""
    return replace(s, waiting=False, reduced=True)


def call_step(s: Accumulation, every: int) -> tuple[Accumulation, bool]:
    """`step()` was called: is the update due? It is at every `every`-th call.

    Raises `PhaseError` inside a window.

    Example:
        >>> s, due = call_step(Accumulation(), 2)
        >>> due, call_step(s, 2)[1]
        (False, True)
    """
    if s.window:
        raise PhaseError(
            explain(
                f"step() inside {s.window}().",
                cause="the window was left open around the whole step.",
                fix=f"leave the `with engine.{s.window}():` block first; its end reduces what it "
                "collected.",
            )
        )
    s = replace(s, micro_steps=s.micro_steps + 1)
    return s, s.micro_steps >= every


def agree(s: Accumulation, others: Sequence[int]) -> Accumulation:
    """What is held is what any rank holds, from as many backwards as the rank with the most.

    `others` are the `code` of every rank. Raises `PhaseError` if a backward raised on some ranks
    only: they have dropped what the others hold.

    Example:
        >>> agree(Accumulation(), [0, saw_local(Accumulation()).code]).waiting
        True
    """
    codes, dropped = [c % _DROPPED for c in others], [c // _DROPPED for c in others]
    if len(set(dropped)) > 1:
        raise PhaseError(
            explain(
                f"backwards that raised, by rank: {dropped}; the gradients of the ranks differ.",
                cause="an error in the backward of some ranks only, which caught it and went on.",
                fix="call zero_grad() on every rank, and run these backwards again.",
            )
        )
    return replace(
        s,
        waiting=any(code & 1 for code in codes),
        reduced=any(code & 2 for code in codes),
        backwards=max(code >> 2 for code in codes),
    )


def require_gradients(s: Accumulation, name: str) -> Accumulation:
    """Return `s`; raise `PhaseError` when there is no gradient."""
    if s.held:
        return s
    raise PhaseError(
        explain(
            f"{name}: there are no gradients; {s.updates} updates so far.",
            cause="no backward ran since the last step() or zero_grad(), or it ran on another "
            "model, or none of this model's parameters took part in the loss.",
            fix="run loss.backward() or engine.backward(loss) before it.",
        )
    )


def updated(s: Accumulation) -> Accumulation:
    """The update was made."""
    return Accumulation(updates=s.updates + 1)


def cleared(s: Accumulation) -> Accumulation:
    """All gradients were thrown away; a window stays open."""
    return Accumulation(updates=s.updates, window=s.window)


def thrown_away(s: Accumulation, every: int) -> str:
    """What to warn of before `cleared`: a managed accumulation starts again; "" if nothing."""
    if not s.micro_steps:
        return ""
    return explain(
        f"zero_grad() throws away the gradients of {s.micro_steps} of {every} micro-batches; the "
        "accumulation starts again.",
        cause="a training loop that clears before every micro-batch.",
        fix="leave zero_grad() out: step() clears after each update.",
    )
