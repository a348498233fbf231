"""Ranks that meet: who does not come is named to all who wait, and so is a store that is gone."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fzero.errors import AxisError, LostRankError
from fzero.ranks.rendezvous import (
    MeetingPlace,
    call_roll,
    leave,
    not_started,
    open_store,
    place_in,
    roll_of,
)
from tests.rank_process import LOOPBACK

ROOT = Path(__file__).parent.parent.parent
SOON = datetime.timedelta(seconds=1)  # a thread may begin late on a busy machine


def place(rank: int, size: int, port: int = 29500, **more: Any) -> MeetingPlace:
    return MeetingPlace(
        rank=rank, size=size, host="127.0.0.1", port=port, **{"of_launcher": False, **more}
    )


def roll(store: Any, some: list[MeetingPlace]) -> list[Any]:
    """Call the roll of some ranks at once; return what each of them raised, or None."""
    found: list[Any] = [None] * len(some)

    def one(number: int) -> None:
        try:
            call_roll(store, some[number], SOON)
        except AxisError as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(some))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("of_launcher", [False, True])
def test_who_does_not_come_is_named_to_all(of_launcher: bool) -> None:
    store: Any = dist.HashStore()
    came = [place(rank, 4, of_launcher=of_launcher) for rank in (0, 3)]
    for error in roll(store, came):
        assert isinstance(error, LostRankError) and error.ranks == (1, 2)
        text = str(error)
        assert "ranks 1, 2 of 4 have not come to 127.0.0.1:29500, where the ranks meet" in text
        assert "within 1 s; ranks 0, 3 have." in text and "FZERO_TIMEOUT_S" in text
    (late,) = roll(store, [place(1, 4, of_launcher=of_launcher)])
    assert "rank 1 of 4 came to 127.0.0.1:29500 when the others had given it up" in str(late)


def test_all_who_come_go_on_and_one_too_many_is_told() -> None:
    store: Any = dist.HashStore()
    assert roll(store, [place(rank, 3) for rank in range(3)]) == [None] * 3
    for size in (3, 5):
        other = [place(rank, size) for rank in range(1, size)]
        for error in roll(store, other):
            assert "ranks there have met without it" in str(error)
            assert "two jobs with one MASTER_ADDR and MASTER_PORT" in str(error)


def test_a_rank_that_comes_twice_is_told_to_all_at_once() -> None:
    store: Any = dist.HashStore()
    for error in roll(store, [place(rank, 4) for rank in (0, 2, 2)]):
        assert type(error) is AxisError  # none was lost
        assert str(error).startswith("two processes came as rank 2 of 4: process ")
    (late,) = roll(store, [place(1, 4)])
    assert str(late).startswith("two processes came as rank 2 of 4: process ")


def test_a_rank_of_another_job_is_told_and_the_others_go_on() -> None:
    for ids in ((("SLURM_JOB_ID", "1"),), (("TORCHELASTIC_RUN_ID", "1"),)):
        store: Any = dist.HashStore()
        ours = [place(0, 3, job=ids), place(1, 3), place(2, 3, job=ids)]  # where there is one
        other = place(1, 3, job=((ids[0][0], "2"),))
        store.set("0", json.dumps({"name": "process 5", "WORLD_SIZE": "3", **dict(ids)}))
        (error,) = roll(store, [other])
        assert f"rank 0, process 5, has {ids[0][0]}=1; rank 1, process " in str(error)
        assert f"has {ids[0][0]}=2." in str(error)
        store.delete_key("0")
        (late, _) = roll(store, [ours[0], ours[2]])
        assert late.ranks == (1,) and "ranks 0, 2 have. process" in str(late)
        assert "came there, of another job." in str(late)
        assert roll(dist.HashStore(), ours) == [None] * 3


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 3, 3)])
def test_ranks_of_other_sizes_are_told_at_once(sizes: tuple[int, ...]) -> None:
    store: Any = dist.HashStore()
    for error in roll(store, [place(rank, size) for rank, size in enumerate(sizes)]):
        assert "WORLD_SIZE=2; rank" in str(error) or "WORLD_SIZE=3; rank" in str(error)
        assert type(error) is AxisError


def test_the_job_is_what_its_launcher_says() -> None:
    at = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    slurm = {"SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none"}
    assert place_in({**at, **slurm}).job == (("SLURM_HET_JOB_ID", "7"),)
    assert place_in(at).job == ()


def test_a_second_rank_0_is_told_to_both(port: int) -> None:
    raised: list[Any] = [None]
    ours, limit = place(0, 2, port), datetime.timedelta(seconds=60)
    meeting = roll_of(open_store(ours, limit), 0)

    def wait() -> None:
        with pytest.raises(AxisError) as caught:
            call_roll(meeting, ours, limit)
        raised[0] = str(caught.value)

    waits = threading.Thread(target=wait)
    waits.start()
    # Another process: in this one torch would share the store.
    script = (
        "import datetime; from fzero.ranks.rendezvous import MeetingPlace, open_store; "
        f"at = MeetingPlace(0, 2, '127.0.0.1', {port}, False); "
        "open_store(at, datetime.timedelta(seconds=60))"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    waits.join()
    assert raised[0].startswith("two processes came as rank 0 of 2: process ")
    assert raised[0].splitlines()[0] in other.stderr


def test_a_group_that_did_not_start_names_who_is_gone() -> None:
    store: Any = dist.HashStore()
    for rank in (0, 1):
        store.set(f"failed {rank}", "")
    store.set("started 3", "")
    error = not_started(store, place(0, 4), RuntimeError("no peer\nmore"))
    assert error.ranks == (2,)
    assert str(error).startswith("rank 2 came and is gone. So the process group of 4 ranks did not")


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number = int(found.getsockname()[1])
    yield number


def test_a_port_that_is_taken_is_said_at_once(port: int) -> None:
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(AxisError) as caught:
            open_store(place(0, 2, port), SOON)
    text = str(caught.value)
    assert f"rank 0 of 2 cannot open port {port} for the ranks to meet: another program" in text
    assert "export another MASTER_PORT" in text and "torchrun --standalone" in text


def test_a_store_that_goes_while_ranks_meet_there_is_named(port: int) -> None:
    held: list[Any] = [open_store(place(0, 2, port), datetime.timedelta(seconds=5))]
    client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    threading.Timer(0.2, held.clear).start()
    with pytest.raises(LostRankError, match=r"rank 0, which holds the store at .*, has gone") as e:
        call_roll(client, place(1, 2, port), datetime.timedelta(seconds=20))
    assert e.value.ranks == (0,)
    leave(client, place(1, 2, port))  # and says nothing of it


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_processes_name_the_rank_that_was_not_started(port: int) -> None:
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    world |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1", "FZERO_TIMEOUT_S": "20"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", "import fzero; fzero.world()"],
            cwd=ROOT,
            env={**os.environ, **world, "RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 2)
    ]
    texts = [process.communicate(timeout=100)[1] for process in ranks]
    assert any("LostRankError: rank 1 of 3 has not come" in text for text in texts), texts
    assert all("LostRankError" in text for text in texts), texts
