"""Bad input on real ranks: every rank gets a clear error in short time, none waits for ever.

And the old state is still good: the next step gives what it gives without the error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from tests.behaviours.networks import PLACES, STAGES
from tests.failing import fails_in_backward
from tests.rank_process import LOOPBACK, ROOT
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

PARAMS = {"layers": [{"w": torch.ones(5)}, {"w": torch.ones(2, 3)}]}


def loss(params: Any, x: Tensor) -> Tensor:
    return sum((layer["w"] ** 2).sum() for layer in params["layers"]) * x


def init_differently(rank: int, world_size: int, what: str, stage: int) -> Any:
    """Build the state from something that is other on the last rank."""
    odd = rank == world_size - 1
    layers: list[dict[str, Any]] = [{"w": torch.ones(5)}, {"w": torch.ones(2, 3)}]
    options: dict[str, Any] = {"stage": stage}
    if what == "shape" and odd:
        layers[1] = {"w": torch.ones(2, 4)}
    if what == "dtype" and odd:
        layers[1] = {"w": torch.ones(2, 3, dtype=torch.float64)}
    if what == "one layer more" and odd:
        layers.append({"w": torch.ones(1)})
    if what == "frozen":
        options["trainable"] = lambda path: not (odd and path == "layers.1.w")
    if what == "stage" and odd:
        options["stage"] = (stage + 1) % 4
    return fzero.init({"layers": layers}, fzero.optim.sgd(0.5), **options)


LAYOUTS = {
    "shape": ("rank 0 has layers.1.w (2, 3)", "has layers.1.w (2, 4)"),
    "dtype": ("rank 0 has layers.1.w (2, 3) torch.float32", "torch.float64"),
    "one layer more": ("rank 0 has ", "has layers.2.w (1,)"),
    "frozen": ("torch.float32 trainable", "torch.float32 frozen"),
    "stage": ("rank 0 has stage", "has stage"),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", LAYOUTS)
def test_22_ranks_that_disagree_about_the_layout(what: str, ranks: int) -> None:
    """On every rank, the same words: the first rank and leaf that differ. And none hangs."""
    for stage in STAGES if what == "shape" else (2,):
        errors = run_ranks(init_differently, ranks, what, stage, raises=True, timeout_s=20)
        for kind, message in errors:
            assert kind == "AxisError"
            for part in (*LAYOUTS[what], f"rank {ranks - 1} has", "Usual cause: ", "Fix: "):
                assert part in message, message


def raise_on_one(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    """At stage 3 an error in the loss of one rank ends the others; then all go on."""
    state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=3)
    mine = torch.tensor(float(rank + 1))
    want = fzero.full_params(_step(state, mine))
    found = []
    for raiser in range(world_size):
        for where in ("before a parameter", "after one", "after all", "in backward"):
            start = time.monotonic()
            run = fzero.coalesce(_one_pass) if raiser else _one_pass
            try:
                run(state, mine, rank == raiser, where)
            except (ArithmeticError, fzero.AxisError) as error:
                seconds = time.monotonic() - start
                found.append((type(error).__name__, str(error), seconds))
            after = fzero.full_params(_step(state, mine))
            pairs = zip(after["layers"], want["layers"], strict=True)
            assert all(torch.equal(a["w"], b["w"]) for a, b in pairs), where
    return found


def _one_pass(state: Any, *batch: Any) -> Any:
    return fzero.grad_and_reduce(_failing_loss, state)(*batch)


def _step(state: Any, x: Tensor) -> Any:
    state, _ = fzero.grad_and_reduce(loss, state)(x)
    return fzero.apply_gradients(state)


def _failing_loss(params: Any, x: Tensor, fails: bool, where: str) -> Tensor:
    if fails and where == "before a parameter":
        raise ArithmeticError(where)
    total = (params["layers"][0]["w"] ** 2).sum()
    if fails and where == "after one":
        raise ArithmeticError(where)
    total = total + (params["layers"][1]["w"] ** 2).sum() * x
    if fails and where == "after all":
        raise ArithmeticError(where)
    if fails and where == "in backward":
        return fails_in_backward(total, ArithmeticError(where))
    return total


@pytest.mark.parametrize("ranks", [2, 3])
def test_8_an_error_on_one_rank_ends_the_others_at_stage_3(ranks: int) -> None:
    for rank, found in enumerate(run_ranks(raise_on_one, ranks)):
        assert len(found) == 4 * ranks
        for i, (kind, message, seconds) in enumerate(found):
            raiser = i // 4
            assert seconds < 5
            assert kind == ("ArithmeticError" if rank == raiser else "PeerFailedError")
            if rank != raiser:
                for part in (f"raised on rank [{raiser}]", f"rank {rank}", "Fix: "):
                    assert part in message, message


def raise_on_all(rank: int, world_size: int) -> None:
    """Errors on every rank, caught by each, at every place; nothing is left over."""
    for stage, reshard in PLACES:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage, reshard_after_forward=reshard)
        want = fzero.full_params(_step(state, torch.ones(())))
        for where in ("before a parameter", "after one", "after all", "in backward"):
            with pytest.raises((ArithmeticError, fzero.AxisError)):
                fzero.grad_and_reduce(_failing_loss, state)(torch.ones(()), True, where)
            wrong: tuple[Any, ...] = (torch.ones(2), "text")
            for bad in wrong:
                with pytest.raises((fzero.FzeroError, TypeError)):
                    fzero.grad_and_reduce(loss, state)(bad)
            with pytest.raises(fzero.PhaseError, match="holds no gradients"):
                fzero.apply_gradients(state)
        after = fzero.full_params(_step(state, torch.ones(())))
        pairs = zip(after["layers"], want["layers"], strict=True)
        assert all(torch.equal(a["w"], b["w"]) for a, b in pairs), (stage, reshard)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_8_after_errors_on_every_rank_the_state_is_good(ranks: int) -> None:
    run_ranks(raise_on_all, ranks)


def use_up(rank: int, world_size: int) -> None:
    """A donated state, a state of another world: refused on every rank, before any collective."""
    for stage in STAGES:
        step = fzero.shard(lambda s, x: (_step(s, x), None), stage=stage, donate=True)
        used = step.init(PARAMS, fzero.optim.adam(0.5))
        new, _ = step(used, torch.ones(()))
        with fzero.count_collectives() as log:
            with pytest.raises(fzero.DonatedError, match="Fix: "):
                step(used, torch.ones(()))
            with pytest.raises(fzero.DonatedError, match="Fix: "):
                fzero.full_params(used)
            local = fzero.init(PARAMS, fzero.optim.adam(0.5), stage=stage, mesh=fzero.Axis(size=1))
            with pytest.raises(fzero.AxisError, match="1 ranks"):
                step(local, torch.ones(()))
            with pytest.raises(fzero.LayoutError, match="a state of stage"):
                fzero.shard(lambda s: (s, None), stage=(stage + 1) % 4)(new)
        assert not log.events
        assert step(new, torch.ones(()))[0].step.item() == 2


def test_10_a_state_that_cannot_be_used_is_refused_before_anything_hangs() -> None:
    run_ranks(use_up, 2)


def part_of_the_world(rank: int, world_size: int) -> list[str]:
    """A state of a group that is gone, and of a mesh that is no mesh."""
    group: Any = dist.new_group([0, 1])
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pair",))
    states = [fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=s, mesh=mesh) for s in (1, 3)]
    before = [fzero.full_params(state)["layers"][0]["w"] for state in states]
    assert all(torch.equal(w, torch.ones(5)) for w in before)
    dist.destroy_process_group(group)
    messages = []
    for state in states:
        with pytest.raises(fzero.AxisError) as caught:
            _step(state, torch.ones(()))
        messages.append(str(caught.value))
    with pytest.raises(fzero.AxisError, match=r"mesh is a[\s\S]*DeviceMesh") as caught:
        fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=1, mesh=group)
    return messages


def test_a_process_group_that_is_gone() -> None:
    for messages in run_ranks(part_of_the_world, 2):
        for message in messages:
            for part in ("does not exist", "Usual cause: ", "Fix: ", "torchrun"):
                assert part in message


LONELY = """
import sys, time, datetime
import torch, torch.distributed as dist, fzero
rank, world, store, stage, dies, timeout_s = sys.argv[1:]
rank, world, stage = int(rank), int(world), int(stage)
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
    timeout=datetime.timedelta(seconds=float(timeout_s)),
)
params = {"layers": [{"w": torch.ones(5)}, {"w": torch.ones(6)}]}
state = fzero.init(params, fzero.optim.sgd(0.5), stage=stage)

def loss(p, x):
    first = (p["layers"][0]["w"] ** 2).sum()
    if dies == "dies" and rank == 1:
        import os
        os._exit(3)
    if dies == "sleeps" and rank == 1:
        time.sleep(30)
    return first + (p["layers"][1]["w"] ** 2).sum()

start = time.monotonic()
try:
    fzero.grad_and_reduce(loss, state)(1.0)
except Exception as error:
    rows = [flat.tolist() for flat in state.params.flats]
    good = all(x in (0.0, 1.0) for row in rows for x in row)
    print(f"raised {type(error).__name__} seconds {time.monotonic() - start:.1f} good {good}")
    import os
    os._exit(0)
print("returned")
"""


@pytest.mark.parametrize(("stage", "dies"), [(0, "dies"), (2, "dies"), (3, "dies"), (3, "sleeps")])
def test_a_rank_that_is_killed_or_hangs_ends_the_others_within_the_timeout(
    stage: int, dies: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LONELY)
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "PYTHONPATH": str(ROOT),
    }
    timeout_s = 7  # the ranks must find each other within it, on a busy machine too
    commands = [
        [
            sys.executable,
            script,
            str(rank),
            "2",
            tmp_path / "store",
            str(stage),
            dies,
            str(timeout_s),
        ]
        for rank in range(2)
    ]
    processes = [
        subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for c in commands
    ]
    try:
        out, err = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert out.startswith("raised "), (out, err)
    assert out.rstrip().endswith("good True")
    assert float(out.split("seconds ")[1].split()[0]) < timeout_s + 3
    if dies == "dies":
        assert processes[1].returncode == 3
