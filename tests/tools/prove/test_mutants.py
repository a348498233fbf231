"""Faults in the programs of ranks are rejected, all of them, and most lines are named.

Whether a mutant is a fault is known by numbers: it runs, and gives another state.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.tools.prove import numbers
from tests.tools.prove.mutants import _shape, copied, mutant
from tests.tools.prove.programs import recorded

SUBJECTS = [
    ("adamw, clipped by norm", 1, 2),
    ("adamw, clipped by norm", 3, 2),
    ("sgd", 2, 3),
    ("lion, in a window", 0, 2),
    ("fp16 with a loss scale", 2, 2),
    ("a loss scale", 3, 2),
    ("small buckets, donated", 2, 2),
    ("clipped by value", 1, 3),
]


def named_of(name: str, stage: int, world: int, count: int) -> int:
    """Plant so many faults; return how many lines are named. Each must be rejected."""
    subject = recorded(name, stage, world)
    assert subject.proof(), subject.proof()
    truth = [numbers.outputs(subject.ranks, seed) for seed in (0, 1)]
    named, planted, seed = 0, 0, 100 * stage + world
    while planted < count:
        seed += 1
        what, ranks, names = mutant(subject.ranks, seed)
        try:
            found = [numbers.outputs(ranks, number) for number in (0, 1)]
        except RuntimeError:
            continue  # shapes that do not fit: torch rejects it
        if all(numbers.same(*pair) for pair in zip(found, truth, strict=True)):
            continue  # the same step in another way
        planted += 1
        proof = subject.proof(ranks)
        assert not proof, f"accepted: {what} (seed {seed})"
        named += bool(names & set(re.findall(r"\w+", proof.unshown[0].line)))
    return named


def test_mutants_are_rejected() -> None:
    assert sum(named_of(*subject, 8) for subject in SUBJECTS[:3]) >= 18


def test_a_value_that_one_rank_alone_returns_otherwise_is_rejected() -> None:
    """Also of a number: the old count, that of another counter, one that is two more."""
    subject = recorded("adamw, clipped by norm", 1, 2)
    for i, path in enumerate(subject.ranks[0].outputs):
        for change in (*subject.ranks[0].inputs, "plus 2") if path.startswith("state") else ():
            ranks = [subject.ranks[0], copied(subject.ranks[1])]
            nodes = list(ranks[1].graph.graph.nodes)
            outs = list(nodes[-1].args[0])
            before: Any = outs[i]
            with ranks[1].graph.graph.inserting_before(nodes[-1]):
                if change == "plus 2":
                    outs[i] = nodes[-1].graph.call_function(torch.ops.aten.add.Tensor, (before, 2))
                    outs[i].meta.update(before.meta)
                else:
                    outs[i] = nodes[ranks[1].inputs.index(change)]
            val = before.meta["val"]
            if outs[i] is not before and val.numel() and _shape(outs[i]) == _shape(before):
                nodes[-1].args = (outs,)
                assert not subject.proof(ranks), f"accepted: {path} is {change} on rank 1"


@pytest.mark.slow
def test_two_hundred_mutants_are_rejected_and_their_lines_named() -> None:
    assert sum(named_of(*subject, 25) for subject in SUBJECTS) >= 150
