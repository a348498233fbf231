"""int8 blocks on the wire, by both drivers: their bytes, their values, and the residual."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from fzero.adapter import Engine
from fzero.errors import PhaseError
from fzero.machine.compress import memory_flats
from fzero.state import Layout, TrainState
from tests.covering import covered
from tests.ranks import run_ranks
from tests.transforms.wired import (
    CASES,
    INT8,
    LR,
    USED,
    Batch,
    Odd,
    by_engine,
    by_function,
    each_rank,
    fine,
    moved,
    noise,
    residual,
    signs,
    total,
    twelves,
)

ROOT = Path(__file__).parents[2]
BOTH = [by_engine, by_function]
STEPS = 3


def wire_of(layout: Layout, indices: Any) -> int:
    """The bytes of the full buffers of some groups: elements, and a scale for each block."""
    return sum(layout.ranks * INT8.wire_bytes(layout.groups[i].shard_numel) for i in indices)


def on_the_wire(driver: Any, world_size: int, stage: int, options: dict[str, Any]) -> Any:
    """{(op, dtype): elements} and bytes that rank 0 sends in one step; the layout."""
    layouts: list[Layout] = []

    def body(rank: int, steps: int) -> None:
        layouts.append(driver(rank, noise, stage, steps, **options).setup.layout)

    found: Counter[tuple[str, torch.dtype]] = Counter()
    sent: Counter[str] = Counter()
    for steps, sign in ((1, 1), (0, -1)):
        with fzero.count_collectives() as log:
            each_rank(functools.partial(body, steps=steps), world_size)
        for event in log.of(0):
            found[event.op, event.dtype] += sign * event.numel
            sent[event.op] += sign * event.wire_bytes
    return found, sent, layouts[0]


@covered(driver=BOTH, case=CASES, world_size=[2, 3])
def test_the_wire_has_int8_and_the_bytes_of_the_theory(
    driver: Any, case: Any, world_size: int
) -> None:
    stage, options = case
    found, sent, layout = on_the_wire(driver, world_size, stage, options)
    used = [i for i, g in enumerate(layout.groups) if {*paths(layout, i)} & {*USED}]
    reduced = [i for i in (used if stage == 3 else layout.trainable)]
    assert found["all_to_all", torch.int8] == wire_of(layout, reduced)
    assert sent["all_to_all"] == sum(
        wire_of(layout, [i]) * (world_size - 1) // world_size for i in reduced
    )
    assert not sent["reduce_scatter"] and not sent["all_reduce"]
    if stage == 3:  # no value is read in a backward: their products are differentiated by x
        frozen = [i for i in range(len(layout.groups)) if "frozen" in paths(layout, i)]
        read = {layout.groups[i].name for i in [*used, *frozen]}
        gathered = [i for i, g in enumerate(layout.groups) if g.name in read]
        encoded = [i for i in gathered if i in layout.trainable]
        assert found["all_gather", torch.int8] >= wire_of(layout, encoded)
        assert found["all_gather", torch.int8] % wire_of(layout, encoded) == 0
        as_they_are = sum(layout.full_numel(i) for i in gathered if i not in encoded)  # frozen
        assert found["all_gather", torch.float32] % as_they_are == 0
        assert found["all_gather", torch.float32] > 0


def paths(layout: Layout, index: int) -> list[str]:
    return [layout.leaves[i].path for i in layout.groups[index].leaves]


@covered(driver=BOTH, case=CASES, world_size=[1, 2, 3, 4])
def test_gradients_of_three_levels_are_exact(driver: Any, case: Any, world_size: int) -> None:
    stage, options = case
    wanted = total(twelves, world_size, STEPS)

    def body(rank: int) -> None:
        found = moved(driver(rank, twelves, stage, STEPS, **options))
        for path in USED:
            assert torch.equal(found[path], wanted[path]), path

    each_rank(body, world_size)


@covered(driver=BOTH, case=CASES, world_size=[2, 3])
def test_all_updates_together_lack_the_last_residual_and_nothing_else(
    driver: Any, case: Any, world_size: int
) -> None:
    (stage, options), steps = case, 4
    wanted = total(fine, world_size, steps)
    largest = max(batch.abs().max() for r in range(world_size) for batch in fine(r, 0).values())

    def body(rank: int) -> None:
        state = driver(rank, fine, stage, steps, torch.float64, **options)
        found, lost = moved(state), residual(state)
        for path in USED:
            torch.testing.assert_close(found[path] + lost[path], wanted[path], rtol=0, atol=1e-12)
            assert lost[path].abs().max() <= 1.5 * largest / 254
            if USED[path].numel() > 1:
                assert (found[path] - wanted[path]).abs().max() > 1e-6

    each_rank(body, world_size)


def test_without_feedback_the_error_would_grow_with_it_it_does_not() -> None:
    steps = 40
    x = {path: value.abs() + 0.1 for path, value in fine(0, 0).items()}

    def body(rank: int) -> Tensor:
        found = moved(by_function(rank, lambda *_: x, 2, steps, torch.float64, **CASES[0][1]))
        return torch.stack([(found[path] - steps * x[path]).abs().max() for path in USED]).max()

    bound = max(value.max() for value in x.values()) / 254
    alone = x["wide"].flatten()
    received = INT8.decode(INT8.encode(alone), alone.numel(), alone.dtype)
    drift = steps * (received - alone).abs().max()
    assert each_rank(body, 2).max() <= 1.01 * bound
    assert drift > 10 * bound


@pytest.mark.parametrize(
    ("case", "more"), [*zip(CASES, ({}, {"loss_scale": 1024.0}, {"reduce_op": "sum"}), strict=True)]
)
def test_both_drivers_hold_the_same_bits(case: Any, more: dict[str, Any]) -> None:
    stage, options = case

    def body(rank: int) -> None:
        mine = by_engine(rank, noise, stage, **options, **more)
        theirs = by_function(rank, noise, stage, **options, **more)
        flats = [[*s.params.flats, *memory_flats(s)] for s in (mine, theirs)]
        for x, y in zip(*flats, strict=True):
            assert torch.equal(x, y)

    each_rank(body, 3)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("world_size", [3])
def test_gloo_ranks_have_the_bits_and_the_bytes_of_virtual_ones(world_size: int) -> None:
    with fzero.count_collectives() as log:
        wanted = each_rank(all_cases, world_size)
    events = Counter((e.op, e.dtype, e.numel) for e in log.of(0) if e.op != "agree")
    for rank, (found, counted) in enumerate(run_ranks(on_gloo, world_size)):
        assert torch.equal(found, wanted[rank])
        assert counted == events


def all_cases(rank: int) -> Tensor:
    states = [
        driver(rank, noise, stage, **options)
        for driver in (by_engine, by_function)
        for stage, options in CASES
    ]
    flats = [x for s in states for x in (*values_of(s), *memory_flats(s))]
    return torch.cat([flat.flatten() for flat in flats])


def values_of(state: TrainState) -> list[Tensor]:
    return [value for _, value in sorted(fzero.full_params(state).items())]


def on_gloo(rank: int, world_size: int) -> Any:
    send, exchange, sent = dist.isend, dist.all_to_all_single, list[int]()

    def sending(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(x.numel() * x.element_size())
        return send(x, *args, **kwargs)

    def exchanging(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype != torch.int64:  # what ranks say to each other, which is no all_to_all of theirs
            sent.append(x.numel() * x.element_size() * (world_size - 1) // world_size)
        return exchange(out, x, *args, **kwargs)

    with fzero.count_collectives() as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", sending)
        patch.setattr(dist, "all_to_all_single", exchanging)
        found = all_cases(rank)
    assert sum(sent) == log.wire_bytes(ops=("all_to_all",))  # what torch was given to send
    return found, Counter((e.op, e.dtype, e.numel) for e in log.of() if e.op != "agree")


# What is gathered.


@covered(driver=BOTH, autocast=[None, torch.bfloat16], reshard=[True, False, "window"])
def test_every_rank_reads_the_same_rounded_values_and_between_steps_exact_ones(
    driver: Any, autocast: Any, reshard: Any
) -> None:
    thirds = {path: p.detach() / 3 for path, p in Odd().named_parameters()}

    class Reading(Odd):
        def __init__(self) -> None:
            super().__init__()
            for path, p in self.named_parameters():
                p.data.copy_(thirds[path])

        def forward(self, x: Batch) -> Tensor:
            for path, p in self.named_parameters():
                seen[path] = p.detach().clone() + 0.0
            return super().forward(x)

    def body(rank: int) -> Any:
        rounded = fzero.Compress(parameters=INT8)
        options: Any = {"reshard_after_forward": reshard, "compress": rounded}
        if driver is by_engine:
            engine = Engine(Reading(), None, stage=3, autocast=autocast, **options)
            with engine.no_sync():
                engine(signs(1.0)).backward()
                exact = engine.full_state_dict()
            return [seen["wide"], *(exact[path] for path in thirds)]
        _, params = fzero.functionalize(Reading())
        state = fzero.init(params, fzero.optim.sgd(LR), stage=3, autocast=autocast, **options)
        state, _ = fzero.grad_and_reduce(lambda p: (p["wide"] + 0.0).sum(), state)()
        _, wide = fzero.grad_and_reduce(
            lambda p: ((p["wide"] + 0.0).sum(), p["wide"].detach().clone()), state, has_aux=True
        )()
        exact = fzero.full_params(state)
        return [wide[1], *(exact[path] for path in thirds)]

    seen: dict[str, Tensor] = {}
    found, *exact = each_rank(body, 3)
    wanted = thirds["wide"]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not torch.equal(found[0], wanted)
    assert (found[0] - wanted).abs().max() <= wanted.max() / 254 * 1.01
    for path, value in zip(thirds, exact, strict=True):
        assert torch.equal(value[0], thirds[path]), path


def test_what_cannot_be_differentiated_is_refused_by_name() -> None:
    params = {"w": torch.ones(300)}

    def body(rank: int) -> None:
        for stage, name in ((2, "gradients"), (3, "parameters")):
            kinds: Any = {name: INT8}
            compress = fzero.Compress(**kinds)
            state = fzero.init(params, fzero.optim.sgd(1.0), stage=stage, compress=compress)
            grad = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)
            with pytest.raises(PhaseError, match=f"{name}=int8"):
                grad(torch.ones((), requires_grad=True))
            inside = fzero.grad_and_reduce(
                lambda p: torch.func.grad(lambda w: (w**2).sum())(p["w"]).sum(), state
            )
            assert torch.equal(fzero.gradients(inside()[0])["w"], torch.full((300,), 2.0))
        state = fzero.init(params, fzero.optim.sgd(1.0), stage=2, **CASES[0][1])
        with pytest.raises(PhaseError, match="add_gradients"):
            fzero.add_gradients(state, params, reduced=False)
        added, _ = fzero.coalesce(lambda s: (fzero.add_gradients(s, params, reduced=False), None))(
            state
        )
        assert torch.equal(fzero.gradients(added)["w"], torch.ones(300))

    each_rank(body, 2)


def test_the_example_of_the_docs_prints_what_stands_below_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "communication.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    names: dict[str, Any] = {}
    for code in blocks:
        exec(code, names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) >= 4 and all(f"    {line}\n" in text for line in printed)
