"""Programs that are false by numbers on 2 to 64 virtual ranks: none of them is proved."""

from __future__ import annotations

import warnings

import pytest

import fzero
from tests.tools.prove.adversary.every import (
    FALSE,
    NOT_OF_THE_PROGRAM,
    assert_false_and_not_proved,
    some,
)
from tests.tools.prove.adversary.outside import KIND as OUTSIDE
from tests.tools.prove.adversary.programs import (
    Program,
    of_loss,
    proof_of,
    usual_loss,
)
from tests.tools.prove.adversary.truth import error_of

EVERY = [program for programs in FALSE.values() for program in programs]


def test_there_are_many_of_different_names() -> None:
    assert len({str(one) for one in EVERY}) == len(EVERY) >= 700


@pytest.mark.parametrize("stage", range(4))
def test_a_sound_step_is_true_by_numbers_and_proved(stage: int) -> None:
    program = of_loss("sound", "the usual", usual_loss, world=3, options={"stage": stage})
    assert error_of(program) < 1e-6 and proof_of(program).proved


@pytest.mark.parametrize("kind", FALSE)
def test_some_false_programs_of_each_kind_are_not_proved(kind: str) -> None:
    for program in some(FALSE[kind], 2):
        assert_false_and_not_proved(program)


@pytest.mark.slow
@pytest.mark.parametrize("program", EVERY, ids=str)
def test_no_false_program_is_proved(program: Program) -> None:
    assert_false_and_not_proved(program)


def assert_refused_or_assumed(program: Program) -> None:
    """Other numbers elsewhere are an assumption; a tensor that a call writes to is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proof = proof_of(program)
    if isinstance(proof, fzero.tools.Proof) and proof.proved:
        assert program.kind == OUTSIDE, f"{program} is proved"
        assert "in every process and under every launcher" in str(proof)
        assert "in every call" in str(proof)
    else:
        assert isinstance(proof, fzero.tools.Proof | fzero.FzeroError), f"{program}: {proof!r}"


def test_what_is_not_of_the_program_is_refused_or_assumed() -> None:
    for program in some(NOT_OF_THE_PROGRAM, 4):
        assert_refused_or_assumed(program)


@pytest.mark.slow
@pytest.mark.parametrize("program", NOT_OF_THE_PROGRAM, ids=str)
def test_all_that_is_not_of_the_program(program: Program) -> None:
    assert_refused_or_assumed(program)
