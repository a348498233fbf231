"""Pytrees of train states: one state, or several models under one loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree

from fzero.errors import AxisError, LayoutError
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, TrainState
from fzero.transforms.donation import HERE, took
from fzero.transforms.pipeline import ParamsT as ParamsT
from fzero.transforms.pipeline import S as S
from fzero.transforms.pipeline import returned_pair


def flatten_states(name: str, tree: Any) -> tuple[list[TrainState], optree.PyTreeSpec]:
    """Return the states in `tree` and its structure; raise `LayoutError` for other leaves."""
    leaves, treespec = optree.tree_flatten(tree, is_leaf=is_state, namespace=NAMESPACE)
    if HERE.made:
        took(filter(is_state, leaves))
    for leaf in leaves:
        if not is_state(leaf):
            raise LayoutError(
                f"{name}: expected a TrainState or a pytree of them, got a {type(leaf).__name__}.",
                cause="parameters, or an engine, were passed in the place of a state.",
                fix="make one with train_step.init(params, optimizer) or fzero.init(...); "
                "an engine's is engine.state.",
            )
    if not leaves:
        raise LayoutError(
            f"{name}: there is no TrainState in {type(tree).__name__}.",
            cause="an empty container or None was passed as the state.",
            fix="pass the state that init or the last step returned.",
        )
    return leaves, treespec


def call_of_states(name: str, treespec: optree.PyTreeSpec, learns: Sequence[bool] = ()) -> str:
    """Return what the other ranks are told of a call: its name, and where in a tree its states are.

    Two states of a tree may look alike, as adapters do: ranks that give other ones must raise.

    learns: of each state; by default all of them do.

    Example:
        >>> call_of_states("evaluate", optree.tree_structure({"base": 0, "x": [0, 0]}))
        'evaluate of base, x.0, x.1'
    """
    if treespec.num_nodes == 1:
        return name
    paths = [".".join(map(str, path)) for path in treespec.paths()]
    learns = learns or [True] * len(paths)
    pairs = zip(paths, learns, strict=True)
    return f"{name} of {', '.join(path if by else f'{path} (read)' for path, by in pairs)}"


def map_states(name: str, fn: Callable[[TrainState], TrainState], tree: S) -> S:
    """Return the pytree `tree` with fn(state) in the place of each state."""
    states, treespec = flatten_states(name, tree)
    mapped: Any = optree.tree_unflatten(treespec, [fn(state) for state in states])
    return mapped


def under_policy(
    name: str, inner: Callable[..., Any], state: Any, arguments: Any, **changes: Any
) -> tuple[Any, Any]:
    """Return inner(state, *args, **kwargs), called with `changes` to the states' policies.

    arguments: (args, kwargs). The policies of the returned states are what they were before.
    """
    args, kwargs = arguments
    policy = flatten_states(name, state)[0][0].setup.policy
    before = {key: getattr(policy, key) for key in changes}
    changed = map_states(name, lambda one: one.replace_policy(**changes), state)
    state, aux = returned_pair(name, inner, inner(changed, *args, **kwargs))
    return map_states(name, lambda one: one.replace_policy(**before), state), aux


def is_state(node: Any) -> bool:
    """Whether a node of a pytree is a `TrainState`: `is_leaf` of maps over states."""
    return isinstance(node, TrainState)


def axes_of_loss(states: Sequence[TrainState], otherwise: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return the mesh that a loss of some states is a mean over, where one is on a part of it.

    otherwise: the axes of the states, of which each is returned once.

    Raises `AxisError` for a state on a part of a mesh beside one that is not on that mesh.
    """
    mesh = next((one.mesh.mesh for one in states if one.mesh.mesh is not None), None)
    if mesh is None:
        return tuple(dict.fromkeys(otherwise))
    for one in states:
        if not _is_of(one.mesh, mesh):
            raise AxisError(
                f"a state on {one.mesh} under one loss with one on a part of {mesh}.",
                cause="states of two meshes: a loss is a mean over the ranks of one.",
                fix="make both on one mesh: mesh = fzero.Mesh(...), the dense state on mesh, that "
                'of the experts on mesh["data"].',
            )
    return (mesh,)


def _is_of(axis: Axis, mesh: Axis) -> bool:
    """Whether ranks are all of a mesh, also by another name, or a part of it."""
    if axis.mesh is not None:
        return axis.mesh == mesh
    return axis.size == mesh.size and axis.named in ((), mesh.named)
