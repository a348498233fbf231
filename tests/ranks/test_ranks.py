"""tests/ranks.py itself: a harness that cannot fail would make every gloo test worthless."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rank_process import filter_warnings
from tests.ranks import run_ranks, spawn_script

pytestmark = pytest.mark.xdist_group("gloo")


def where(rank: int, world_size: int) -> tuple[int, int, int, int, int]:
    return rank, world_size, dist.get_rank(), dist.get_world_size(), os.getpid()


def summed(rank: int, world_size: int, x: torch.Tensor) -> torch.Tensor:
    x = x + rank
    dist.all_reduce(x)
    return x


def tree(rank: int, world_size: int) -> dict[str, Any]:
    x = torch.arange(6.0).reshape(2, 3) * (rank + 1)
    return {"x": x, "tied": x, "half": x.bfloat16(), "more": [torch.empty(0, 2), (rank, None)]}


def boom(rank: int, world_size: int) -> None:
    raise ValueError(f"boom {rank}")


def boom_on_zero(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("boom 0")
    dist.barrier()


def out_of_step(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError(f"boom {rank}")


def die(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def doze_on_one(rank: int, world_size: int, seconds: float) -> int:
    if rank == 1:
        time.sleep(seconds)
    return rank


def end_group(rank: int, world_size: int) -> None:
    dist.destroy_process_group()


def pids(world_size: int) -> list[int]:
    return [pid for *_, pid in run_ranks(where, world_size)]


def failure_of(*args: Any, **options: Any) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        run_ranks(*args, **options)
    return str(caught.value)


@pytest.mark.smoke
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_runs_once_in_a_process_that_is_kept_and_talks_to_the_others(
    world_size: int,
) -> None:
    results = run_ranks(where, world_size)
    assert [row[:4] for row in results] == [(r, world_size) * 2 for r in range(world_size)]
    assert len({pid for *_, pid in results} | {os.getpid()}) == world_size + 1
    assert pids(world_size) == [pid for *_, pid in results]
    want = 5.0 * world_size + sum(range(world_size))
    for got in run_ranks(summed, world_size, torch.full((3,), 5.0)):
        assert torch.equal(got, torch.full((3,), want))


def test_tensors_come_back_as_ordinary_memory() -> None:
    for rank, got in enumerate(run_ranks(tree, 2)):
        x = torch.arange(6.0).reshape(2, 3) * (rank + 1)
        assert torch.equal(got["x"], x)
        assert torch.equal(got["half"], x.bfloat16())
        assert got["more"][0].shape == (0, 2)
        assert got["more"][1] == (rank, None)
        assert got["tied"] is got["x"]
        assert not got["x"].is_shared()
        got["x"].add_(1)  # writable


def test_a_failure_shows_the_traceback_of_every_rank_and_renews_the_pool() -> None:
    before = pids(2)
    message = failure_of(boom, 2)
    assert "rank 0 raised; rank 1 raised" in message
    for rank in range(2):
        assert re.search(
            rf"--- rank {rank} ---\nTraceback[\s\S]*?in boom\n.*\n.*boom {rank}", message
        )
    assert set(pids(2)).isdisjoint(before)


def test_a_rank_that_waits_for_a_failed_one_is_stopped_and_shows_where() -> None:
    start = time.monotonic()
    message = failure_of(boom_on_zero, 2, timeout_s=60)
    assert time.monotonic() - start < 30
    assert "rank 0 raised; rank 1 did not answer" in message
    assert re.search(r"--- rank 1 ---[\s\S]*in barrier[\s\S]*in boom_on_zero", message)


def test_a_killed_rank_is_named_with_its_exit_code() -> None:
    message = failure_of(die, 2)
    assert "rank 1 died" in message
    assert "--- rank 1 ---\nexit code -9" in message
    os.kill(pids(2)[1], signal.SIGKILL)  # one that dies while it is idle is replaced
    time.sleep(0.2)
    assert run_ranks(doze_on_one, 2, 0.0) == [0, 1]


def test_a_timeout_names_the_ranks_that_did_not_answer_and_kills_them() -> None:
    _, silent = pids(2)
    message = failure_of(doze_on_one, 2, 60.0, timeout_s=1)
    assert "rank 1 did not answer" in message
    assert "rank 0" not in message
    assert "in doze_on_one" in message
    with pytest.raises(ProcessLookupError):
        os.kill(silent, 0)


def test_raises_returns_the_errors_and_keeps_ranks_that_are_in_step() -> None:
    before = pids(2)
    assert run_ranks(boom, 2, raises=True) == [("ValueError", "boom 0"), ("ValueError", "boom 1")]
    assert pids(2) == before
    message = failure_of(doze_on_one, 2, 0.0, raises=True)
    assert "rank 0 returned; rank 1 returned ('raised' was expected)" in message


def test_raises_renews_ranks_that_are_out_of_step() -> None:
    before = pids(2)
    run_ranks(out_of_step, 2, raises=True)
    assert set(pids(2)).isdisjoint(before)
    assert torch.equal(run_ranks(summed, 2, torch.zeros(1))[0], torch.ones(1))


def environment(rank: int, world_size: int) -> tuple[int, float, str]:
    with pytest.raises(FutureWarning):  # warnings are errors, as in the process of the tests
        warnings.warn("mind the gap", FutureWarning, stacklevel=1)
    return torch.get_num_threads(), torch.rand(()).item(), os.environ["GLOO_SOCKET_IFNAME"]


def test_every_call_starts_from_one_seed_with_one_thread_and_warnings_as_errors() -> None:
    first = run_ranks(environment, 2)
    assert first == run_ranks(environment, 2)
    assert first[0] == first[1]
    assert first[0][0] == 1
    assert first[0][2].startswith("lo")


def test_ranks_filter_warnings_as_pytest_does() -> None:
    with warnings.catch_warnings():
        filter_warnings(
            ["error", r"ignore:mind the \w+$:FutureWarning", "default::UserWarning:xyz"]
        )
        warnings.warn("mind the gap", FutureWarning, stacklevel=1)
        for message, kind in [("mind the gap ", FutureWarning), ("mind the gap", UserWarning)]:
            with pytest.raises(kind, match=message):
                warnings.warn(message, kind, stacklevel=1)


def test_a_body_must_leave_the_process_group() -> None:
    assert "leave the group to run_ranks" in failure_of(end_group, 1)


def test_spawn_script_runs_a_module_and_hands_back_the_exit_status() -> None:
    done = spawn_script("-m", 1, ["json.tool", "no-such-file"])
    assert done.returncode != 0
    assert "no-such-file" in done.stderr


@pytest.mark.slow
def test_spawn_script_stops_ranks_that_take_too_long(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(300)")
    with pytest.raises(pytest.fail.Exception, match="was not over within 12 s") as caught:
        spawn_script(script, 1, timeout_s=12)
    pid = re.search(r"pid (\d+)", str(caught.value))
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid[1]), 0)
