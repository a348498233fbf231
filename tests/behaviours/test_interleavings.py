"""Any interleaving, at every stage, equals unsharded training on a list of gradients.

And a state from before a step is as it was, or refuses to be used.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.behaviours.draws import programs, settings_of
from tests.behaviours.models import RICH, Tree, Uses, trees, uses_of
from tests.behaviours.networks import PLACES
from tests.behaviours.programs import Case, Program, Setting, check, expected, play
from tests.strategies import tensors

MANY = settings(max_examples=3 * settings().max_examples)
ALL = 2 ** len(tensors(RICH)) - 1
EVERYTHING: Uses = ((ALL,) * 4, (0b0_0010_0011,) * 4, (1, 0, 0b1_0000_1000, 2))
EVERYWHERE = [
    Setting(ranks, stage, reshard, donate=donate, bucket_bytes=100)
    for ranks, donate in ((2, True), (3, False))
    for stage, reshard in PLACES
]
EVERYWHERE += [
    Setting(4, 1, donate=True, bucket_bytes=100, replicas=2, over="all"),
    Setting(4, 3, "window", bucket_bytes=100, replicas=2),
]


def run(setting: Setting, tree: Tree, uses: Uses, program: Program) -> None:
    case = Case(tree, uses, program)
    check(play(setting, case), expected(setting, case))


@MANY
@given(data=st.data(), setting=settings_of())
def test_any_program_equals_the_list_of_gradients(data: st.DataObject, setting: Setting) -> None:
    tree = data.draw(trees())
    run(setting, tree, data.draw(uses_of(tree)), data.draw(programs()))


GRAD, OTHER, RARE = ("grad", 0), ("grad", 1), ("grad", 2)
UPDATE, READ = ("update",), ("read",)
NAMED: dict[str, Program] = {
    "4: several windows before an update add": (
        (("window", (GRAD,)), ("window", (OTHER, RARE)), READ, UPDATE),
    ),
    "4: windows of several steps before an update add": (
        (("window", (GRAD,)),),
        (("window", (OTHER,)),),
        (UPDATE,),
    ),
    "4: an empty window is the identity": ((GRAD, ("window", ()), UPDATE), (("window", ()),)),
    "4: a window may hold several updates": ((("window", (GRAD, OTHER, UPDATE, RARE, UPDATE)),),),
    "4: a window closed by an error restores the state": (
        (GRAD,),
        (("window", (OTHER, GRAD, ("raise",))),),
        (("window", (RARE, ("raise in loss", 0))),),
        (UPDATE,),
    ),
    "5: a leaf without a gradient adds zero, not an earlier value": (
        (GRAD, UPDATE),
        (OTHER, UPDATE),
        (RARE, UPDATE),
        (("window", (OTHER, UPDATE)),),
    ),
    "6: each rank may use other leaves, or none": (
        (RARE, RARE, READ, ("window", (RARE, OTHER, RARE)), UPDATE),
        (RARE, UPDATE),
    ),
    "8: an error in the loss changes nothing": (
        (GRAD,),
        (OTHER, ("raise in loss", 0)),
        (("raise in loss", 1),),
        (GRAD, UPDATE),
        (GRAD, UPDATE),
    ),
    "8: after an error behind an update no state lies": (
        (GRAD,),
        (OTHER, UPDATE, ("raise",)),
        (UPDATE,),
    ),
    "33: gradients of a step that is dropped are gone": (
        (GRAD, UPDATE),
        (GRAD, OTHER, ("raise",)),
        (OTHER, UPDATE),
    ),
    "33: reading, clipping and empty steps drop nothing": (
        (GRAD, READ),
        (READ, ("clip", (READ,))),
        (),
        (UPDATE,),
    ),
    "34: an update without gradients is refused, also twice, and the state is good": (
        (UPDATE, UPDATE, READ),
        (GRAD, UPDATE, UPDATE, READ),
        (("window", (UPDATE, GRAD)), UPDATE, UPDATE),
    ),
    "10: what was read is not what an update behind it makes": (
        (("params",), GRAD, READ, ("params",), UPDATE, ("params",)),
        (("window", (GRAD, ("params",), READ, UPDATE, ("params",))),),
    ),
    "35: a window inside a window is refused, and the outer one goes on": (
        (("window", (GRAD, ("window", (OTHER,)), OTHER)), UPDATE),
    ),
    "36: the number of backward passes may vary from step to step": (
        (GRAD, UPDATE),
        (GRAD, OTHER, RARE, UPDATE),
        (("window", (GRAD, GRAD, GRAD, OTHER, UPDATE)),),
        (("window", (OTHER, UPDATE)),),
    ),
    "36: counted parts equal a caller's own": (
        (("accumulate", 4, (GRAD, UPDATE)),),
        (("window", (("accumulate", 2, (OTHER, GRAD)), UPDATE)),),
        (("accumulate", 2, (("window", (GRAD,)),)), GRAD, UPDATE),
    ),
}


@pytest.mark.parametrize("setting", EVERYWHERE, ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_the_programs_that_other_implementations_get_wrong(name: str, setting: Setting) -> None:
    run(setting, RICH, EVERYTHING, NAMED[name])
