"""Law 19: a slot of any form, which nobody knows, keeps its logical value wherever it goes.

Saved on W ranks at a stage and loaded on W' at another; resharded, and restored from a mirror, with
the same bits. What is its own to a rank, or made anew, begins where it cannot go on.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero.checkpoint import Mirror, load, save
from fzero.errors import LayoutError
from fzero.state import NAMESPACE, Form, Placement, Slot
from fzero.state.train_state import stack_ranks
from tests.checkpoint.slots import (
    FORMS,
    NAME,
    WHY,
    dtypes,
    forms,
    is_kept,
    meaning,
    of_rank,
    with_slot,
)
from tests.checkpoint.states import blank, make, mixed, snapshot
from tests.checkpoint.test_reshard import Place, equal, mesh_of, places
from tests.ranks import run_ranks
from tests.strategies import same

reshard: Any = fzero.reshard
PARAMS = mixed()
SENT = [form for form in FORMS if form.elsewhere in ("cut", "sum")]


def changes(source: Place, target: Place) -> tuple[bool, bool]:
    """Whether it is another place; whether it has another number of ranks."""
    ranks = source["ranks"] != target["ranks"]
    return ranks or source["stage"] != target["stage"], ranks


def quietly(fn: Any, *args: Any, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fn(*args, **options)
    return found, [str(one.message) for one in caught]


@given(forms, places, places, dtypes)
@example(
    Form(),
    {"ranks": 4, "stage": 2, "replicas": 2, "over": "all"},
    {"ranks": 3, "stage": 0, "replicas": 1, "over": "all"},
    torch.float32,
)
@settings(max_examples=12)
def test_any_slot_keeps_its_meaning(
    form: Form, source: Place, target: Place, dtype: torch.dtype
) -> None:
    target = {**target, "over": source["over"]}
    state = with_slot(make(PARAMS, **source), form, seed=1, dtype=dtype)
    like = with_slot(make(blank(PARAMS), **target), form, seed=0, dtype=dtype)
    before, wanted = snapshot(state), meaning(state)
    moved, ranks_change = changes(source, target)
    kept = is_kept(form, moved=moved, ranks_change=ranks_change)
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/a", state)
        loaded, said = quietly(load, f"{folder}/a", like)
        Mirror(f"{folder}/b", every=1).update(state)
        (mirrored, _), told = quietly(Mirror(f"{folder}/b", every=1).restore, like)
    resharded, heard = quietly(reshard, state, stage=target["stage"], mesh=mesh_of(target))
    same(meaning(loaded), wanted if kept else meaning(like))
    equal(mirrored, loaded)
    equal(resharded, loaded)
    equal(state, before)
    warned = form.elsewhere == "anew" and not kept
    for texts in (said, told, heard):
        assert len(texts) == warned and all(WHY in text for text in texts)


@pytest.mark.parametrize("form", [f for f in FORMS if f.placement is Placement.PARTIAL])
def test_summands_on_as_many_ranks_have_the_same_bits(form: Form, tmp_path: Path) -> None:
    state = with_slot(make(PARAMS, stage=1, ranks=3), form, seed=1)
    like = with_slot(make(blank(PARAMS), stage=1, ranks=3), form, seed=0)
    save(tmp_path, state)
    equal(load(tmp_path, like), state)


def test_what_is_added_or_left_out_is_said(tmp_path: Path) -> None:
    plain, form = make(PARAMS, stage=1, ranks=2), Form()
    save(tmp_path / "without", plain)
    save(tmp_path / "with", with_slot(plain, form, seed=1))
    with pytest.warns(UserWarning, match=f"it has no {NAME}, which the state keeps"):
        found = load(tmp_path / "without", with_slot(plain, form, seed=2))
    same(meaning(found), meaning(with_slot(plain, form, seed=2)))
    with pytest.warns(UserWarning, match=f"it has {NAME}, which the state does not keep"):
        assert not load(tmp_path / "with", plain).slots
    optional = Form(optional=True)
    save(tmp_path / "optional", with_slot(plain, optional, seed=1))
    assert not load(tmp_path / "optional", plain).slots
    load(tmp_path / "without", with_slot(plain, optional, seed=2))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Form(leaves="number"), f"{NAME}: learning in the checkpoint, number here"),
        (
            Form(placement=Placement.PARTIAL, elsewhere="sum"),
            f"{NAME}: learning in the checkpoint, learning, partial here",
        ),
        (None, f"{NAME} double: torch.float32 in the checkpoint, torch.float64 in the state"),
    ],
)
def test_a_misfit_is_an_error_that_names_it(other: Form | None, text: str, tmp_path: Path) -> None:
    plain = make(PARAMS, stage=1, ranks=2)
    save(tmp_path, with_slot(plain, Form(), seed=1))
    dtype = torch.float64 if other is None else torch.float32
    with pytest.raises(LayoutError, match=text):
        load(tmp_path, with_slot(plain, other or Form(), seed=2, dtype=dtype))


def test_two_slots_of_one_name_in_a_file_are_refused(tmp_path: Path) -> None:
    state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1), stage=0)
    number = Slot(value=torch.ones(1), form=Form(leaves="number"))
    named = Slot(value={"b": torch.ones(1)}, form=Form(leaves="named"))
    with pytest.raises(LayoutError, match="two values are called t/a/b"):
        save(tmp_path, state.replace(slots={"t/a/b": number, "t/a": named}))


def test_what_lives_until_the_update_is_carried_live_and_not_saved(tmp_path: Path) -> None:
    form = Form(lifetime="update")
    state = with_slot(make(PARAMS, stage=1, ranks=2), form, seed=1)
    moved = reshard(state, stage=3, mesh=(1, 3))
    same(meaning(moved), meaning(state))
    save(tmp_path, state)
    like = with_slot(make(PARAMS, stage=3, ranks=3), form, seed=2)
    assert NAME not in load(tmp_path, like).slots  # as in every state without gradients


@given(st.sampled_from(["learning", "number", "named"]), st.booleans(), st.integers(0, 3))
@settings(max_examples=6)
def test_of_replicas_that_train_apart_each_has_its_own(leaves: Any, again: bool, to: int) -> None:
    form = Form(leaves=leaves)

    def init(stage: int, mesh: tuple[int, int]) -> Any:
        made = lambda: fzero.init(  # noqa: E731
            {"a": torch.ones(7), "b": torch.ones(3, 2)},
            fzero.optim.sgd(0.5),
            stage=stage,
            mesh=mesh,
            local=fzero.Local(every=2),
        )
        return fzero.simulate(made, world_size=mesh[0] * mesh[1])()

    ones = init(2, (2, 2))
    both = [with_slot(ones, form, seed=seed).slots[NAME] for seed in (1, 2)]
    slot: Any = optree.tree_map(lambda x, y: torch.cat([x[:2], y[2:]]), *both, namespace=NAMESPACE)
    state = ones.replace(slots={**ones.slots, NAME: slot})
    like = with_slot(init(to, (2, 3) if again else (3, 1)), form, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        save(folder, state)
        found, said = quietly(load, folder, like)
    assert bool(said) != again and all("has 2 replicas" in text for text in said)
    sizes = found.setup.axis.size
    for replica in range(found.mesh.size // sizes):
        rows = slice(replica * sizes, (replica + 1) * sizes)
        seed = 1 + replica if again else 1
        wanted = with_slot(like, form, seed=seed).slots[NAME]
        pairs = (optree.tree_leaves(x, namespace=NAMESPACE) for x in (found.slots[NAME], wanted))
        for mine, theirs in zip(*pairs, strict=True):
            assert torch.equal(mine[rows], theirs[rows])


def _on_processes(rank: int, size: int, folder: Path) -> list[Any]:
    found: list[Any] = []
    two, rule = DeviceMesh("cpu", [0, 1]), fzero.optim.sgd(0.5)
    for number, form in enumerate(SENT):
        state = of_rank(fzero.init(PARAMS, rule, stage=1), form, rank, seed=1)
        like = of_rank(fzero.init(blank(PARAMS), rule, stage=3), form, rank, seed=0)
        save(folder / f"{number}", state)
        loaded = load(folder / f"{number}", like, rng=False)
        moved: Any = fzero.reshard(state, stage=3)
        if form.placement is not Placement.OWNER:  # of which each of the two has its own choice
            equal(moved.slots[NAME].value, loaded.slots[NAME].value)
        away: Any = fzero.reshard(moved, stage=2, mesh=two)
        assert (away is None) == (rank == 2)
        back: Any = fzero.reshard(away, stage=3, mesh=fzero.world())
        found.append((loaded.slots[NAME], back.slots[NAME]))
    return found


@pytest.mark.xdist_group("gloo")
def test_on_processes(tmp_path: Path) -> None:
    found = run_ranks(_on_processes, 3, tmp_path)
    for form, *pairs in zip(SENT, *found, strict=True):
        like = with_slot(make(PARAMS, stage=3, ranks=3), form, seed=1)
        for slots in zip(*pairs, strict=True):
            whole: Any = optree.tree_map(lambda *xs: stack_ranks(xs), *slots, namespace=NAMESPACE)
            same(meaning(like.replace(slots={NAME: whole})), meaning(like))
