"""What is proved of a step, as a record that prints as a theorem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That a tensor of the new state is that of the one-rank step: shown, or not.

    tensor: its path, "state.params.flats". leaf: the parameter it belongs to, or "". why: it is not
    shown, or "". line: of the graph of a rank, where this begins.
    """

    tensor: str
    leaf: str
    why: str = ""
    line: str = ""

    @property
    def shown(self) -> bool:
        """Whether it is shown."""
        return not self.why


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A proof about a step on `world` ranks, or what is missing for one.

    claims: one for each leaf in each buffer of the new state, and for each number in it. ranks:
    those whose programs were recorded. ops: of the programs of one rank alone, and of a rank.
    local: the transforms that change a rank's gradients before they cross ranks. beside: what is
    shown of each tensor that is returned beside the state, which is no part of the theorem.
    """

    step: str
    world: int
    ranks: tuple[int, ...]
    ops: tuple[int, int]
    claims: tuple[Claim, ...]
    local: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def proved(self) -> bool:
        """Whether there are claims, and all are shown."""
        return bool(self.claims) and not self.unshown

    @property
    def unshown(self) -> tuple[Claim, ...]:
        """The claims that are not shown."""
        return tuple(claim for claim in self.claims if not claim.shown)

    def __bool__(self) -> bool:
        return self.proved

    def __str__(self) -> str:
        return "\n".join(_theorem(self) if self.proved else _missing(self))

    __repr__ = __str__


ASSUMED = (
    "numbers are real: nothing is rounded, NaN or infinite, nothing divides by 0, int64 does not "
    "overflow, and a constant is the simplest quotient that rounds to it; a cast to a dtype that "
    "does not hold the values is some function of each element, the same in both programs",
    "an op of ATen gives the same for the same operands, and all_gather, all_reduce and "
    "reduce_scatter join, sum, and sum and cut what ranks hand in",
    "a rule of fzero.optim makes each element of that element of its operands",
    "the gradient of a rank is what autograd makes of the loss that grad_and_reduce is given, with "
    "the hooks and autograd.Functions in it",
    "each rank draws random numbers of its own, and the n-th draw is the same in both programs",
    "the batches of all ranks have these shapes; the state is between two updates, and what is "
    "whole in it is the same on all ranks",
    "the step is this program in every call: it reads no clock, no file, and no counter of any "
    "make (in an object that it does not reach, an extension, a thread) that calls change",
    "the step reads and writes no raw address, and no memory of a tensor but by ops",
    "the step is this program on every rank, in every process and under every launcher: what it "
    "has from elsewhere (variables of the environment, modules, closures) is the same there",
    "the step is this program when it is not recorded: it does not ask whether it is",
)
"""What a proof takes for granted, a line each."""
_OTHERS = "the ranks that were not read are assumed to do the same, with their own numbers"
_MOST = 5


def _theorem(proof: Proof) -> Iterator[str]:
    of = f", of the gradients that `local` of {', '.join(proof.local)} returns" * bool(proof.local)
    yield f"Theorem, over the reals{of}. {_named(proof)}, from every state and all such batches:"
    what = "these gradients" if proof.local else "gradients"
    yield f"new state = update(state, mean over ranks of {what}), as of one rank alone."
    counts = Counter(claim.tensor if claim.leaf else "numbers" for claim in proof.claims)
    yield f"Shown of: {', '.join(f'{name} ({count})' for name, count in counts.items())}."
    if proof.beside:
        yield f"Returned beside it: {', '.join(proof.beside)}."
    yield _programs(proof)
    yield "Assumed:"
    rest = () if len(proof.ranks) == proof.world else (_OTHERS,)
    yield from (f"  {number}. {text}." for number, text in enumerate((*ASSUMED, *rest), 1))
    yield "What rounding does is not in it: fzero.certify looks at the bits."


def _missing(proof: Proof) -> Iterator[str]:
    missing = proof.unshown
    yield f"Not proved: {_named(proof)}. {len(missing)} of {len(proof.claims)} claims are open:"
    for claim in missing[:_MOST]:
        yield f"  {claim.tensor} {claim.leaf}: {claim.why}"
    if len(missing) > _MOST:
        yield f"  and {len(missing) - _MOST} more"
    lines = dict.fromkeys(x.line for x in missing if x.line)
    yield from (f"It begins at {line}" for line in lines)
    if proof.ranks:
        yield _programs(proof)


def _named(proof: Proof) -> str:
    return f"{proof.step} on {proof.world} rank{'s' if proof.world > 1 else ''}"


def _programs(proof: Proof) -> str:
    count = len(proof.ranks)
    every = f"each of the {count} ranks, all read" if count > 1 else "the rank"
    some = f"ranks {', '.join(map(str, proof.ranks))}, which were read; others were not"
    of = every if count == proof.world else some
    return f"Programs: {proof.ops[0]} ops of one rank alone; {proof.ops[1]} of {of}."


def line_of(node: fx.Node) -> str:
    """Return a node as a line of its graph: "line 7: add = aten.add.Tensor(x, 1)"."""
    number = list(node.graph.nodes).index(node) + 1
    named = [f"{key}={_shown(x)}" for key, x in node.kwargs.items()]
    target = (
        node.target
        if hasattr(node.target, "overloadpacket")
        else getattr(node.target, "__name__", node.op)
    )
    return f"line {number}: {node.name} = {target}({', '.join([*map(_shown, node.args), *named])})"


def _shown(x: object) -> str:
    text = f"[{', '.join(map(_shown, x))}]" if isinstance(x, list | tuple) else str(x)
    return text if len(text) <= 120 else f"{text[:117]}..."
