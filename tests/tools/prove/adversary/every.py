"""All false programs, and some of each kind."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import fzero
from tests.tools.prove.adversary import (
    arguments,
    casts,
    collectives,
    custom,
    gradients,
    kept,
    memory,
    options,
    outside,
    ranks,
    schedules,
    sly,
    states,
)
from tests.tools.prove.adversary.programs import Program, proof_of
from tests.tools.prove.adversary.truth import error_of

SUBJECTS = (
    *(arguments, casts, collectives, custom, gradients, kept, memory, options, ranks),
    *(schedules, sly, states),
)
FALSE: dict[str, list[Program]] = {}
for _module in SUBJECTS:
    for _one in _module.programs():
        FALSE.setdefault(_one.kind, []).append(_one)
NOT_OF_THE_PROGRAM = list(outside.programs())


def some(programs: Sequence[Program], count: int) -> list[Program]:
    """So many of the programs that are small, from the first to the last of them."""
    small = [one for one in programs if one.world <= 4]
    step = max(len(small) // count, 1)
    return small[step // 2 :: step][:count]


def assert_false_and_not_proved(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps as nobody should write them
        error, proof = error_of(program), proof_of(program)
    assert error > 1e-3, f"{program} is true: {error}"
    if isinstance(proof, fzero.tools.Proof):
        assert not proof.proved, f"{program} is false by {error:.3g}, and proved"
    else:
        assert isinstance(proof, fzero.FzeroError), f"{program}: {proof!r}"
