"""Records: frozen, slotted, keyword-only, pytrees for optree and for torch.func."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import fzero
from fzero.optim import OptimizerState
from fzero.state import (
    NAMESPACE,
    Buffers,
    Group,
    Layout,
    Leaf,
    Placement,
    Policy,
    Progress,
    Setup,
    TrainState,
    Window,
)
from tests.strategies import Block, same, stages, trees

RECORDS = (Buffers, Window, TrainState, OptimizerState)
FACTS = (Leaf, Group, Layout, Progress, Policy, Setup, fzero.Axis)


def a_state(stage: int = 2, params: Any = None) -> Any:
    params = {"w": torch.ones(3, 2), "b": torch.zeros(3)} if params is None else params
    return fzero.init(params, fzero.optim.adam(0.1), stage=stage)


@pytest.mark.parametrize("cls", [*RECORDS, *FACTS])
def test_records_are_frozen_slotted_and_keyword_only(cls: Any) -> None:
    fields = dataclasses.fields(cls)
    assert all(field.kw_only for field in fields)
    assert cls.__dataclass_params__.frozen
    if cls is not Setup:  # which keeps what follows from it, by cached properties
        assert "__dict__" not in dir(cls)
        assert set(cls.__slots__) == {field.name for field in fields}


def test_a_record_is_changed_by_replace_only() -> None:
    state = a_state()
    with pytest.raises(AttributeError):
        state.step = torch.ones(())
    with pytest.raises(dataclasses.FrozenInstanceError, match="steps"):
        state.steps = torch.ones(())  # a name that it does not have
    new = state.replace(step=state.step + 1)
    assert (int(new.step), int(state.step)) == (1, 0)
    assert new.params is state.params
    with pytest.raises(TypeError):
        state.replace(stpe=1)


def test_a_record_of_tensors_is_itself_only_facts_compare_by_value() -> None:
    assert a_state() != a_state()
    assert a_state().setup.layout == a_state().setup.layout
    assert Progress(backwards=1) == Progress(backwards=1) != Progress()


@given(tree=trees(), stage=stages)
def test_a_state_is_a_pytree_for_both_libraries(tree: Any, stage: int) -> None:
    state = a_state(stage, tree)
    leaves, treespec = optree.tree_flatten(state, namespace=NAMESPACE)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    also, spec = torch_pytree.tree_flatten(state)
    assert [id(x) for x in also] == [id(x) for x in leaves]
    for back in (optree.tree_unflatten(treespec, leaves), torch_pytree.tree_unflatten(also, spec)):
        assert isinstance(back, TrainState)
        assert (back.setup, back.progress) == (state.setup, state.progress)
        same(back, state)
    assert optree.tree_leaves(state) == [state]  # without the namespace it is a leaf


def test_static_facts_live_in_the_treespec() -> None:
    def spec(state: Any) -> optree.PyTreeSpec:
        return optree.tree_structure(state, namespace=NAMESPACE)

    state = a_state()
    other = state.replace(progress=Progress(backwards=1))
    assert spec(state) == spec(a_state())
    assert spec(state) != spec(other)
    assert spec(state) != spec(a_state(stage=1))
    assert hash(spec(state)) == hash(spec(state.replace(step=state.step + 1)))
    with pytest.raises(ValueError, match="Mismatch custom node data"):
        optree.tree_map(torch.add, state, other, namespace=NAMESPACE)


def test_torch_func_goes_through_records() -> None:
    def energy(block: Block, scale: Tensor) -> Tensor:
        assert block.name == "named"
        return (scale * block.weight**2).sum() + block.bias.sum()

    block = Block(weight=torch.tensor([1.0, 2.0]), bias=torch.ones(2), name="named")
    two = torch.tensor(2.0)
    grad: Any = torch.func.grad(energy)(block, two)
    same(grad, Block(weight=4 * block.weight, bias=torch.ones(2), name="named"))
    pushed = torch.func.jvp(lambda b: energy(b, two), (block,), (grad,))
    same(pushed[1], torch.tensor(4.0 * 4 + 8 * 8 + 2))
    twice: Any = torch_pytree.tree_map(lambda x: torch.stack([x, 2 * x]), block)
    mapped = torch.func.vmap(energy, in_dims=(0, None))(twice, two)
    same(mapped, torch.tensor([2.0 * 5 + 2, 2.0 * 20 + 4]))


def test_records_can_be_copied_and_pickled() -> None:
    buffers = Buffers(flats=(torch.ones(2),), placement=Placement.PARTIAL)
    for clone in (copy.deepcopy(buffers), pickle.loads(pickle.dumps(buffers))):
        assert clone.placement is Placement.PARTIAL
        same(clone, buffers)
