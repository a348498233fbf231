"""Who is to blame for a collective that failed, by the signs of life of the ranks at two times."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from fzero.collectives.liveness import Pulse, Sign, lost_ranks
from tests.ranks import spawn_script

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


def test_where_a_rank_waits_is_looked_up_without_a_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.11 holds a lock there that threads need to start: one that waits has the GIL."""
    collects = list[bool]()
    frames: Any = vars(sys)["_current_frames"]

    def looked_up() -> Any:
        collects.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", looked_up)
    Pulse._waits(Pulse.__new__(Pulse))
    assert collects == [False] and gc.isenabled()


SCRIPT = """
import sys, torch
import torch.distributed as dist
from datetime import timedelta
from fzero.adapter import Engine

dist.init_process_group("gloo", timeout=timedelta(seconds=8))
rank, read = dist.get_rank(), sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
engine.backward(model(torch.ones(1, 3)).sum())
engine.step()
if rank == 0:
    try:
        {
            "read": lambda: model[0].weight.sum().item(),
            "dict": lambda: [x.clone() for x in model.state_dict().values()],
            "full_state_dict": engine.full_state_dict,
            "forward": lambda: torch.no_grad()(model)(torch.ones(1, 3)),
        }[read]()
    except BaseException as error:
        sys.stdout.write(f"seen {type(error).__name__} {error}\\n".replace("\\n", " ") + "\\n")
        raise
if sys.argv[2] == "barrier":
    dist.barrier()
elif sys.argv[2] == "all_reduce":
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("read", "other"),
    [
        ("read", "barrier"),
        ("full_state_dict", "end"),
        pytest.param("dict", "all_reduce", marks=pytest.mark.slow),
        pytest.param("forward", "barrier", marks=pytest.mark.slow),
        pytest.param("read", "end", marks=pytest.mark.slow),
    ],
)
def test_each_rank_says_who_waits_for_whom(read: str, other: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = spawn_script(script, 2, (read, other))
    assert "with accelerator.whole(model):" in done.stderr
    if other == "end":
        assert "seen LostRankError rank 1 has ended its program" in done.stdout, done.stderr
        assert "rank 0 waits for it in a call of fzero" in done.stderr
    else:  # the launcher may end the reader before it raises
        lines = script.read_text().splitlines()
        line = next(k for k, text in enumerate(lines) if text.startswith(f"    dist.{other}("))
        where = f"rank 1 waits in torch.distributed.{other}() at {script}:{line + 1}"
        assert done.stderr.count(where) >= 2, done.stderr  # each rank says it
        assert f"{script}:" in done.stderr.partition("rank 0 waits in ")[2]
