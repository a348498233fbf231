"""Many adapters on one base: the bits of each alone, one base for all, and they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import MismatchError
from tests.covering import covered
from tests.drivers import each_rank
from tests.ranks import run_ranks

DEPTH, WIDTH, RANKS = 3, 12, {"x": 2, "y": 3, "z": 2}  # of the low-rank factors
torch.manual_seed(0)
BASE = {f"{i}.w": torch.randn(WIDTH, WIDTH) / 3 for i in range(DEPTH)}
ADAPTERS = {
    name: {
        f"{i}.{which}": torch.randn(shape) / 3
        for i in range(DEPTH)
        for which, shape in (("a", (WIDTH, rank)), ("b", (rank, WIDTH)))
    }
    for name, rank in RANKS.items()
}
ROWS = {name: torch.randn(4, 4, 5, WIDTH) for name in RANKS}  # [step, rank, row]
RULE = fzero.optim.adamw(1e-2)


def output(base: Any, adapter: Any, x: Tensor) -> Tensor:
    for i in range(DEPTH):
        x = torch.tanh(x @ base[f"{i}.w"] + x @ adapter[f"{i}.a"] @ adapter[f"{i}.b"])
    return x


def loss(p: Any, x: Tensor, name: str) -> Tensor:
    return (output(p["base"], p[name], x) - 1).square().mean()


def states_of(names: Sequence[str], stages: Any) -> dict[str, Any]:
    """The base, and some adapters, of which each has a rule."""
    params = {"base": BASE, **{name: ADAPTERS[name] for name in names}}
    rules = {**dict.fromkeys(names, RULE), "base": fzero.optim.no_optimizer()}
    return fzero.init(params, rules, stage={name: stages[name] for name in params})


def gathers_of_base(log: fzero.CollectiveLog, rank: int) -> int:
    """How often a rank has gathered a layer of the base."""
    seen = [(e.op, e.rank, e.numel) for e in log.events]
    return seen.count(("all_gather", rank, WIDTH * WIDTH))


def stepped(states: Any, name: str, step: int, rank: int, read: Sequence[str]) -> Any:
    """The states after an update of one adapter, its loss, and the log of its gradient.

    read: the states that the loss is given.
    """
    some = {key: states[key] for key in read}
    with fzero.count_collectives() as log:
        new, value = fzero.grad_and_reduce(lambda p, x: loss(p, x, name), some, wrt=name)(
            ROWS[name][step, rank]
        )
    new = {**states, **new, name: fzero.apply_gradients(new[name])}
    return new, value, log


def alone(name: str, stages: Any, rank: int, steps: Sequence[int]) -> tuple[Any, list[Tensor], Any]:
    states, values, gathers = states_of([name], stages), [], []
    for step in steps:
        states, value, log = stepped(states, name, step, rank, ("base", name))
        values.append(value)
        gathers.append(gathers_of_base(log, rank))
    return fzero.full_params(states[name]), values, gathers


def same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[path], x) for path, x in wanted.items())


@covered(
    base=[0, 3],
    world=[1, 2, 3, 4],
    adapters=[(0, 2), (2, 3), (3, 3), (3, 0)],
    order=["xy", "yx"],
    whole=[True, False],
)
def test_each_has_the_bits_of_its_run_alone_and_the_base_is_gathered_once(
    base: int, world: int, adapters: Any, order: str, whole: bool
) -> None:
    stages = {"base": base, **dict(zip("xy", adapters, strict=True))}

    def body(rank: int) -> Any:
        states, found = states_of("xy", stages), {name: ([], []) for name in "xy"}
        for step in range(3):
            for name in order:
                read = ("base", "x", "y") if whole else ("base", name)
                states, value, log = stepped(states, name, step, rank, read)
                found[name][0].append(value)
                found[name][1].append(gathers_of_base(log, rank))
        for name, (values, gathers) in found.items():
            params, wanted, as_alone = alone(name, stages, rank, range(3))
            same(fzero.full_params(states[name]), params)
            assert all(map(torch.equal, values, wanted)) and gathers == as_alone
            assert gathers == 3 * [2 * DEPTH - 1 if base == 3 and world > 1 else 0]
        same(fzero.full_params(states["base"]), BASE)
        return torch.zeros(())

    each_rank(body, world)


@pytest.mark.parametrize("base", [0, 3])
def test_adapters_come_and_go(base: int) -> None:
    stages = {"base": base, "x": 2, "y": 3, "z": 2}

    def body(rank: int) -> Any:
        states, gathers = states_of("x", stages), {}
        for step in range(4):
            if step == 1:  # the base is not made anew
                states |= {"y": states_of("y", stages)["y"], "z": states_of("z", stages)["z"]}
            if step == 2:
                left = fzero.full_params(states.pop("x"))
            for name in sorted(states.keys() - {"base"}):
                states, _, log = stepped(states, name, step, rank, [*states])
                gathers[name, step] = gathers_of_base(log, rank)
        steps = {"x": range(2), "y": range(1, 4), "z": range(1, 4)}
        for name, some in steps.items():
            params, _, as_alone = alone(name, stages, rank, some)
            same(left if name == "x" else fzero.full_params(states[name]), params)
            assert [gathers[name, step] for step in some] == as_alone
        return torch.zeros(())

    each_rank(body, 2)


def test_a_schedule_is_kept_for_each_set_of_states_that_a_loss_is_given() -> None:
    stages = {"base": 3, "x": 3, "y": 2, "z": 3}

    def body(rank: int) -> Any:
        states, rounds = states_of("xyz", stages), {"xyz": [], "x": [], "zy": []}
        for step in range(4):
            for read, counts in rounds.items():
                states, _, log = stepped(states, read[0], step, rank, ["base", *read])
                counts.append([(e.op, e.rank) for e in log.events].count(("agree", rank)))
        for counts in rounds.values():  # asked for each unit at first, and never again
            assert counts[0] > counts[1] == counts[2] == counts[3]
        return torch.zeros(())

    each_rank(body, 2)


def differ(rank: int, case: str) -> Any:
    """What one rank does otherwise."""
    stages = {"base": 3, "x": 2, "y": 2, "z": 2}
    states = states_of("x" if case == "added" else "xz", stages)
    if case == "added" and rank == 0:
        states |= {"z": states_of("z", stages)["z"]}
    name = "z" if case == "trained" and rank else "x"
    states, _, _ = stepped(states, name, 0, rank, ["base", "z"] if name == "z" else [*states])
    if case == "dropped" and rank:
        del states["z"]
    states, _, _ = stepped(states, "x", 1, rank, [*states])
    if case == "updated":
        for key in "xz":
            some = {"base": states["base"], key: states[key]}
            new, _ = fzero.grad_and_reduce(lambda p, x, key=key: loss(p, x, key), some, wrt=key)(
                ROWS["x"][0, 0]
            )
            states |= new
        fzero.apply_gradients({key: states[key] for key in ("z" if rank else "x")})
    return torch.zeros(())


DIFFERENCES = {
    "added": "rank 0 init",
    "dropped": r"rank 0 grad_and_reduce of base \(read\), x, z \(read\), rank 1 .* x\.",
    "trained": r"rank 0 .*read\), x, z \(read\), rank 1 grad_and_reduce of base \(read\), z\.",
    "updated": "rank 0 apply_gradients of x, rank 1 apply_gradients of z",
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_ranks_that_differ_all_raise_and_name_the_adapter(case: str) -> None:
    with pytest.raises(MismatchError, match=DIFFERENCES[case]):
        each_rank(lambda rank: differ(rank, case), 2)


def differ_on_gloo(rank: int, world_size: int, case: str) -> None:
    with pytest.raises(MismatchError, match=DIFFERENCES[case]):
        differ(rank, case)


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
def test_so_do_processes() -> None:
    run_ranks(differ_on_gloo, 2, "trained")


STACK = {path: torch.stack([x, ADAPTERS["z"][path]]) for path, x in ADAPTERS["x"].items()}
OF_ROW = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1, 0])  # the adapter of each row


def batched(p: Any, rows: Tensor) -> Tensor:
    """The sum of two means, each over half of the rows."""
    each = {path: x[OF_ROW] for path, x in p["stack"].items()}
    made = torch.func.vmap(output, in_dims=(None, 0, 0))(p["base"], each, rows)
    return (made - 1).square().mean() * 2


@covered(base=[0, 3], adapters=[0, 2, 3], world=[1, 2, 3])
def test_one_batched_step_is_that_of_each_alone_within_rounding(
    base: int, adapters: int, world: int
) -> None:
    stages = {"base": base, "x": adapters, "z": adapters, "stack": adapters}

    def body(rank: int) -> Any:
        rule = {"base": fzero.optim.no_optimizer(), "stack": RULE}
        params = {"base": BASE, "stack": STACK}
        states: Any = fzero.init(params, rule, stage={key: stages[key] for key in params})
        for step in range(3):
            rows = torch.empty(10, WIDTH)
            for number, name in enumerate("xz"):
                rows[number == OF_ROW] = ROWS[name][step, rank]
            with fzero.count_collectives() as log:
                states, _ = fzero.grad_and_reduce(batched, states, wrt="stack")(rows)
            states |= {"stack": fzero.apply_gradients(states["stack"])}
        found = fzero.full_params(states["stack"])
        for number, name in enumerate("xz"):
            params, _, as_alone = alone(name, stages, rank, range(3))
            for path, x in params.items():
                torch.testing.assert_close(found[path][number], x, rtol=1e-5, atol=1e-6)
        assert gathers_of_base(log, rank) == as_alone[-1]  # as often as for one of them
        return torch.zeros(())

    each_rank(body, world)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_base_in_4_bits_gives_the_bits_of_the_decoded_one(stage: int) -> None:
    def body(rank: int) -> Any:
        reads, found = fzero.optim.no_optimizer(), []
        encoded = fzero.init(BASE, reads, stage=stage, frozen=fzero.codecs.nf4(block=64))
        decoded = fzero.init(fzero.full_params(encoded), reads, stage=stage)
        assert not torch.equal(fzero.full_params(decoded)["0.w"], BASE["0.w"])
        for base in (encoded, decoded):
            states: Any = {"base": base, "x": fzero.init(ADAPTERS["x"], RULE, stage=2)}
            states, value, _ = stepped(states, "x", 0, rank, ["base", "x"])
            both: Any = {"base": base, "stack": fzero.init(STACK, RULE, stage=2)}
            both, of_both = fzero.grad_and_reduce(batched, both, wrt="stack")(torch.ones(10, WIDTH))
            trained = fzero.full_params(states["x"]), fzero.gradients(both["stack"])
            found.append([value, of_both, *(x for one in trained for x in one.values())])
        assert all(map(torch.equal, *found))
        return torch.zeros(())

    each_rank(body, 2)
