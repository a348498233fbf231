"""What is proved of a step, as a record that prints as a theorem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That a tensor of the new state is that of the one-rank step: shown, or not.

    tensor: where it is in the state, "state.params.flats". leaf: the parameter that it belongs to,
    or "". why: what is not shown. line: of the graph, where this begins; "" if it is shown.
    """

    tensor: str
    leaf: str
    why: str = ""
    line: str = ""

    @property
    def shown(self) -> bool:
        """Whether it is shown."""
        return not self.why

    def __str__(self) -> str:
        name = f"{self.tensor} {self.leaf}".strip()
        return name if self.shown else f"{name}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A proof about a step on `world` ranks, or what is missing for one.

    claims: one for each leaf of each buffer of the new state, and for each number in it. ranks:
    those whose programs were recorded. ops: of the two programs, of one rank alone and of a rank.
    """

    step: str
    world: int
    ranks: tuple[int, ...]
    ops: tuple[int, int]
    claims: tuple[Claim, ...]

    @property
    def proved(self) -> bool:
        """Whether all claims are shown, and there are any."""
        return bool(self.claims) and all(claim.shown for claim in self.claims)

    @property
    def unshown(self) -> tuple[Claim, ...]:
        """The claims that are not shown."""
        return tuple(claim for claim in self.claims if not claim.shown)

    def __bool__(self) -> bool:
        return self.proved

    def __str__(self) -> str:
        return "\n".join(_theorem(self) if self.proved else _open(self))

    __repr__ = __str__


ASSUMED = (
    "numbers are real: nothing is rounded, infinite or NaN unless a test of the program asks, casts "
    "between floating types change nothing, and a constant is the simplest quotient that rounds to it",
    "all_gather, all_reduce and reduce_scatter join, sum, and sum and cut what the ranks hand in",
    "the rule of the optimizer updates each element from that element of its operands",
    "an op gives the same of the same operands; the n-th random draw of a rank is the same in both programs",
    "the batches of all ranks have one shape, and the state is between two updates",
)
"""What a proof takes for granted."""


def _theorem(proof: Proof) -> list[str]:
    lines = [
        f"Theorem. {proof.step} on {_ranks(proof.world)}: from every state and all batches of these "
        "shapes, the new state of all ranks together is that of one rank which updates with the mean "
        f"over the {_ranks(proof.world)} of their gradients.",
        f"Shown of {_counted(proof.claims)}.",
        f"Programs: {proof.ops[0]} ops of one rank alone, {proof.ops[1]} of {_recorded(proof)}.",
        "Assumed:",
        *(f"  {number}. {text}" for number, text in enumerate(ASSUMED, 1)),
    ]
    return [*lines, "A theorem over the reals: what rounding does is for fzero.certify to say."]


def _open(proof: Proof) -> list[str]:
    return [
        f"Not proved: {proof.step} on {_ranks(proof.world)}. Of {len(proof.claims)} claims "
        f"{len(proof.unshown)} are not shown:",
        *(f"  {claim}" for claim in proof.unshown[:_MOST]),
        *([f"  ... and {len(proof.unshown) - _MOST} more"] if len(proof.unshown) > _MOST else []),
        *(f"It begins at {line}" for line in dict.fromkeys(claim.line for claim in proof.unshown)),
        f"Programs: {proof.ops[0]} ops of one rank alone, {proof.ops[1]} of {_recorded(proof)}.",
    ]


_MOST = 5


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _recorded(proof: Proof) -> str:
    if len(proof.ranks) == proof.world:
        return "each of all ranks" if proof.world > 1 else "that rank"
    seen = ", ".join(map(str, proof.ranks))
    return f"ranks {seen}; the others are taken to run the same with their own number"


def _counted(claims: Sequence[Claim]) -> str:
    found = []
    for tensor, some in groupby(claims, key=lambda claim: claim.tensor if claim.leaf else ""):
        number = len(list(some))
        found.append(f"{tensor} ({number} leaves)" if tensor else f"{number} numbers")
    return ", ".join(found)


def line_of(node: fx.Node) -> str:
    """Return a node as a line of its graph: "line 7: add = aten.add.Tensor(x, 1)"."""
    number = list(node.graph.nodes).index(node) + 1
    args = ", ".join([*map(_shown, node.args), *(f"{k}={_shown(x)}" for k, x in node.kwargs.items())])
    target = getattr(node.target, "__name__", node.target) if callable(node.target) else node.target
    name = str(node.target) if hasattr(node.target, "namespace") else target
    return f"line {number}: {node.name} = {name}({args})"


def _shown(x: object) -> str:
    text = ", ".join(map(_shown, x)) if isinstance(x, list | tuple) else str(x)
    text = f"[{text}]" if isinstance(x, list | tuple) else text
    return text if len(text) <= 120 else f"{text[:117]}..."
