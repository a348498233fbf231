"""Started collectives: what they give, when, how they are counted, and how they fail."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fzero
from fzero import collectives as c
from fzero.collectives import InFlight, lowering
from fzero.ranks import mesh, process_groups
from tests.collectives.maps import gathered, reduced, scattered
from tests.covering import covered
from tests.ranks import run_ranks
from tests.strategies import integers, same, seeds, worlds

on_gloo = pytest.mark.xdist_group("gloo")


class Call(NamedTuple):
    """One collective on buffers of [size, 2] (times W rows, where it takes the full ones)."""

    kind: str
    sizes: Sequence[int]
    dtype: torch.dtype = torch.float32
    ordered: bool = False
    strided: bool = False
    seed: int = 0


def sync(call: Call, xs: Sequence[Tensor], axis: Any) -> list[Tensor]:
    if call.kind == "gather_in_place":
        return start(call, xs, axis).wait()
    return getattr(c, f"{call.kind}_many")(xs, axis, **options(call))


def start(call: Call, xs: Sequence[Tensor], axis: Any) -> InFlight:
    return getattr(c, f"start_{call.kind}")(xs, axis, **options(call))


def options(call: Call) -> dict[str, Any]:
    return {"ordered": call.ordered} if call.kind in ("scatter", "reduce") else {}


FORMULA = {"gather": gathered, "scatter": scattered, "reduce": reduced}
FORMULA["gather_in_place"] = gathered


def inputs_of(call: Call, ranks: int) -> list[Tensor]:
    """For each buffer what every rank has of it, stacked: [W, n, 2]."""
    rows = ranks if call.kind == "scatter" else 1
    sizes = enumerate(call.sizes, call.seed)
    return [integers((ranks, size * rows, 2), seed, call.dtype) for seed, size in sizes]


def own(call: Call, axis: Any) -> list[Tensor]:
    """This rank's inputs, fresh; in place: full buffers that are right in its rows only."""
    mine = [stacked[axis.rank].clone() for stacked in inputs_of(call, axis.size)]
    if call.kind == "gather_in_place":
        fulls = [x.new_full((axis.size, *x.shape), 99) for x in mine]
        for full, x in zip(fulls, mine, strict=True):
            full[axis.rank] = x
        return [full.flatten(0, 1) for full in fulls]
    return [x.repeat_interleave(2, -1)[..., ::2] for x in mine] if call.strided else mine


def check(rank: int, world_size: int, calls: Sequence[Call], window: int) -> None:
    """On this rank: `window` calls at most are in flight; the numbers and events are right."""
    axis = fzero.world()
    with fzero.count_collectives() as sync_log:
        want = [sync(call, own(call, axis), axis) for call in calls]
    flights: list[InFlight] = []
    got: list[list[Tensor]] = []
    with fzero.count_collectives() as log:
        for call in calls:
            if len(flights) - len(got) == window:
                got.append(flights[len(got)].wait())
            xs = [x.requires_grad_(x.is_floating_point()) for x in own(call, axis)]
            flights.append(start(call, xs, axis))
            assert all(x.grad_fn is None for x in xs)
        assert log.of(axis.rank) == sync_log.of(axis.rank)  # counted when they start
        got += [flight.wait() for flight in flights[len(got) :]]
    assert log.of(axis.rank) == sync_log.of(axis.rank)
    for call, flight, outs, expected in zip(calls, flights, got, want, strict=True):
        formula = FORMULA[call.kind]
        same(outs, [formula(xs)[axis.rank].to(call.dtype) for xs in inputs_of(call, axis.size)])
        same(outs, expected)
        assert not any(out.requires_grad for out in outs)
        assert flight.wait() is outs


SIZES = (5, 0, 1, 7)
PROGRAM = [
    Call(kind, sizes, dtype, ordered, strided, seed=100 * i)
    for i, (sizes, dtype, ordered, strided) in enumerate(
        [
            (SIZES, torch.float32, False, True),
            (SIZES, torch.bfloat16, False, False),
            ((3,), torch.float64, True, False),
            ((0, 0), torch.float32, False, False),
            ((2, 1), torch.float32, True, True),
            ((), torch.float32, False, False),
        ]
    )
    for kind in FORMULA
]


@on_gloo
@covered(window=[1, 3, 100], ranks=[1, 2, 3, 4])
def test_what_is_started_gives_what_the_sync_call_gives_on_gloo(ranks: int, window: int) -> None:
    run_ranks(check, ranks, PROGRAM, window)


calls = st.builds(
    Call,
    kind=st.sampled_from(sorted(FORMULA)),
    sizes=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64]),
    ordered=st.booleans(),
    strided=st.booleans(),
    seed=seeds,
)


@given(ranks=worlds, program=st.lists(calls, max_size=5), window=st.integers(1, 5))
def test_any_program_of_starts_and_waits(ranks: int, program: list[Call], window: int) -> None:
    fzero.simulate(lambda: check(0, ranks, program, window), world_size=ranks)()


@pytest.mark.parametrize("kind", FORMULA)
def test_on_one_local_rank_nothing_is_copied(kind: str) -> None:
    axis = fzero.Axis(size=1)
    xs = own(Call(kind, (3, 0)), axis)
    assert start(Call(kind, (3, 0)), xs, axis).wait()[0].data_ptr() == xs[0].data_ptr()


def eventually(is_so: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_so()


def started_and_held(rank: int, world_size: int, kind: str, dtype: torch.dtype) -> None:
    """Rank 1 starts only when rank 0 has started; buffers live until `wait` has returned."""
    axis = fzero.world()
    # The store outlives this call, so the key has a name of its own.
    key = c.gather_objects(str(time.monotonic_ns()), axis)[0]
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait([key])
    xs = own(Call(kind, (1000,), dtype), axis)
    inputs = StorageWeakRef(xs[0].untyped_storage())
    flight = start(Call(kind, (1000,), dtype), xs, axis)
    del xs
    if rank == 0:
        store.set(key, "started")
    assert not inputs.expired() or kind == "reduce"  # by exchange that holds a padded copy
    outs = flight.wait()
    if kind in ("gather", "scatter"):
        assert eventually(inputs.expired)  # a thread of gloo may be a moment late to let go
    outputs = StorageWeakRef(outs[0].untyped_storage())
    del outs
    assert not outputs.expired()
    del flight
    assert eventually(outputs.expired)


@on_gloo
@covered(dtype=[torch.float32, torch.bfloat16], kind=[*FORMULA])
def test_a_start_does_not_block_and_buffers_are_held_until_the_wait(
    kind: str, dtype: torch.dtype
) -> None:
    run_ranks(started_and_held, 2, kind, dtype)


def start_alone(rank: int, world_size: int, timeout_s: float) -> list[tuple[str, str]]:
    """Rank 0 starts and waits in a group where rank 1 does nothing: (call, message)."""
    timeout = datetime.timedelta(seconds=timeout_s)
    group: Any = dist.new_group([0, 1], timeout=timeout)
    axis = mesh.axis_of(dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pair",)))
    found = []
    for kind in FORMULA if rank == 0 else ():
        for dtype in (torch.float32, torch.bfloat16):
            call = Call(kind, (4,), dtype)
            for _ in range(2):  # the second one may raise where it starts
                found.append((kind, _raised(lambda c=call: start(c, own(c, axis), axis).wait())))
            found.append((kind, _raised(lambda c=call: sync(c, own(c, axis), axis))))
    if rank == 0:
        found.append(("codes", _raised(lowering.begin_exchange([1], axis, list, width=1).wait)))
        found.append(("objects", _raised(lambda: lowering.gather_objects("x", axis))))
        found.append(("first", _raised(lambda: c.broadcast([torch.ones(2)], axis, 0))))
    lowering.gather_objects(0, fzero.world())  # rank 1 stays until rank 0 has seen it all
    dist.destroy_process_group(group)
    return found


def _raised(do: Callable[[], Any]) -> str:
    with pytest.raises(fzero.AxisError) as caught:
        do()
    return str(caught.value)


NAMES = {
    "gather": "all_gather",
    "scatter": "reduce_scatter",
    "reduce": "all_reduce",
    "gather_in_place": "all_gather",
    "codes": "agree",
    "objects": "gather_objects",
    "first": "broadcast",
}


@on_gloo
def test_a_peer_that_does_not_come_is_named_as_the_cause() -> None:
    found, _ = run_ranks(start_alone, 2, 2.0)
    for kind, message in found:
        assert message.startswith("rank 1 is alive and did not come: it has begun "), message
        assert f"So {NAMES[kind]} on rank 0 of axis 'pair'" in message, (kind, message)
        for part in ("another rank ended or raised", "Fix: ", "FZERO_TIMEOUT_S"):
            assert part in message, message
    assert len(found) == 4 * 2 * 3 + 3


def test_the_device_of_a_tensor_decides_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda config: config)
    for config, wanted in {
        "cuda:nccl,cpu:gloo": ["gloo", "nccl"],
        "cpu:gloo,cuda:gloo": ["gloo", "gloo"],
        "cuda:nccl": ["", "nccl"],
    }.items():
        group: Any = config
        found = [lowering.backend_of(group, torch.device(kind)) for kind in ("cpu", "cuda")]
        assert found == wanted, config
    assert process_groups.backends(None) == "gloo"
    assert process_groups.backends("cuda") == "cpu:gloo,cuda:nccl"
    assert process_groups.backends("mps") == "gloo"  # by the host: gloo takes no tensors of it
    assert process_groups.backends("privateuseone") == "gloo"  # for which there may be none
