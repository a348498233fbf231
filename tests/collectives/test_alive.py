"""Who is to blame for a collective that failed, by the signs of life of the ranks at two times."""

from __future__ import annotations

import pytest

from fzero.collectives._alive import Sign, lost_ranks

OURS, WAITS = (Sign(), Sign(9, 7)), (Sign(4, 7), Sign(9, 7))  # the reader, a rank that waits, too
KILLED = (Sign(4, 7), Sign(4, 7))
ENDED = (Sign(4, 7), Sign(4, 7, "has ended its program", False))
SURVIVED = (Sign(4, 7), Sign(4, 7, "lost [2]", True))
LATE = (Sign(4, 6), Sign(9, 6))
NEVER = (Sign(), Sign())


@pytest.mark.parametrize(
    ("ranks", "blamed"),
    [
        ([OURS, WAITS, KILLED], {2: "is dead"}),
        ([OURS, KILLED, KILLED], {1: "is dead", 2: "is dead"}),
        ([OURS, SURVIVED, KILLED], {2: "is dead"}),
        ([OURS, WAITS, ENDED], {2: "has ended"}),
        ([OURS, SURVIVED, ENDED], {2: "has ended"}),
        ([OURS, WAITS, LATE], {2: "is alive and did not come"}),
        ([OURS, LATE, ENDED], {2: "has ended"}),
        ([OURS, WAITS, NEVER], {2: "is dead"}),
        ([OURS, WAITS, WAITS], {}),
        ([OURS, SURVIVED], {}),
    ],
)
def test_blame(ranks: list[tuple[Sign, Sign]], blamed: dict[int, str]) -> None:
    before, after = ({r: pair[i] for r, pair in enumerate(ranks)} for i in (0, 1))
    found = lost_ranks(before, after)
    assert found.keys() == blamed.keys()
    assert all(found[rank].startswith(start) for rank, start in blamed.items())
