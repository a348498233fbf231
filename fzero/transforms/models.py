"""Pytrees of train states: one state, or several models under one loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import optree
import torch

from fzero.errors import AxisError, CallError, LayoutError
from fzero.optim import NoOptimizer, Optimizer, TorchOptimizer
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


# Several models in one tree: which parameters, optimizer and stage belong together.

Model = tuple[Any, Any, Any, Any]  # params, optimizer, stage, mesh


def models_of(
    params: Any, optimizer: Any, stage: Any, mesh: Any
) -> tuple[list[Model], optree.PyTreeSpec]:
    """Return (params, optimizer, stage, mesh) of each model, and the structure that they are in.

    A number as `stage`, one optimizer or one mesh is that of all models; a tree of them has one for
    each. If none is a tree there is one model, whatever the structure of `params`.

    Raises `LayoutError`, naming the keys, if the trees do not fit each other.
    """
    given = {"stages": stage, "optimizers": optimizer, "meshes": mesh}
    specs = {of: _structure(x, _LEAVES[of]) for of, x in given.items()}
    trees = {of: spec for of, spec in specs.items() if not _is_one(spec)}
    if not trees:
        return [(params, optimizer, stage, mesh)], specs["stages"]
    of, treespec = next(iter(trees.items()))
    parts = _aligned(treespec, params, "init: the parameters", of)
    by: dict[str, list[Any]] = {
        what: _aligned(treespec, x, f"init: the {what}", of) if what in trees else [x] * len(parts)
        for what, x in given.items()
    }
    return [*zip(parts, by["optimizers"], by["stages"], by["meshes"], strict=True)], treespec


def meshes_of(mesh: Any, tree: Any, states: Sequence[Any]) -> list[Any]:
    """Return the mesh of each state of `tree`.

    Raises `LayoutError`, naming the keys, if `mesh` is a tree of other models.
    """
    treespec = _structure(mesh, is_mesh)
    if _is_one(treespec):
        return [mesh] * len(states)
    _aligned(treespec, tree, "shard: the states", "meshes")
    return leaves_of_meshes(mesh)


def leaves_of_meshes(mesh: Any) -> list[Any]:
    """Return the meshes of a tree of them; one mesh is its own."""
    found: list[Any] = optree.tree_leaves(
        mesh, is_leaf=is_mesh, none_is_leaf=True, namespace=NAMESPACE
    )
    return found or [mesh]


def is_mesh(node: Any) -> bool:
    """Whether a node of a tree of meshes is one: also {"data": 2, "seq": 4} is, and (2, 4).

    A list of numbers is a mistake for one, and is refused as a whole.
    """
    sizes: Any = node.values() if isinstance(node, Mapping) else node
    if isinstance(node, Mapping | list):
        return any(isinstance(size, int) for size in sizes)
    return isinstance(node, tuple)


def require_params(params: Any) -> None:
    """Raise `CallError` if an optimizer stands in the place of the parameters."""
    kinds = (Optimizer, TorchOptimizer, NoOptimizer, torch.optim.Optimizer, type)
    if isinstance(params, kinds) or _is_pair(params):
        if isinstance(params, tuple) and not all(map(callable, cast("tuple[Any, ...]", params))):
            raise CallError(
                "init got a tuple that begins with a function in the place of the parameters.",
                cause="what fzero.functionalize returns, as it is.",
                fix="apply, params = fzero.functionalize(module), then init(params, optimizer).",
            )
        name = params.__name__ if isinstance(params, type) else type(params).__name__
        raise CallError(
            f"init got an optimizer ({name}) in the place of the parameters.",
            cause="its arguments in another order.",
            fix="call it as init(params, optimizer, stage=2), or step.init(params, optimizer).",
        )


def stages_of(stage: Any, tree: Any, states: Sequence[Any]) -> list[tuple[Any, int, str]]:
    """Return (state, its stage, its path in the tree) for each state of `tree`.

    Raises `LayoutError`, naming the keys, if `stage` is a tree of other models.
    """
    treespec = _structure(stage)
    if _is_one(treespec):
        return [(state, stage, "") for state in states]
    found = _aligned(treespec, tree, "shard: the states", "stages")
    wheres = ["".join(f"[{key!r}]" for key in path) for path in treespec.paths()]
    for state, where in zip(found, wheres, strict=True):
        if not is_state(state):
            raise _misfit(f"shard: there is a {type(state).__name__} of states at {where}")
    stages = optree.tree_leaves(stage, namespace=NAMESPACE)
    return list(zip(found, stages, wheres, strict=True))


def _structure(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> optree.PyTreeSpec:
    """The structure of a tree of stages, optimizers or meshes."""
    return optree.tree_structure(
        tree, is_leaf=is_leaf or _is_pair, none_is_leaf=True, namespace=NAMESPACE
    )


def _is_pair(node: Any) -> bool:
    """Whether it is an (init, update) pair, which is one optimizer."""
    return isinstance(node, tuple) and any(map(callable, node))  # also a wrong one, to be refused


_LEAVES: dict[str, Callable[[Any], bool]] = {
    "stages": _is_pair,
    "optimizers": _is_pair,
    "meshes": is_mesh,
}


def _is_one(treespec: optree.PyTreeSpec) -> bool:
    return treespec.num_nodes == 1  # an empty container, too: it will be refused as what it is


def _aligned(treespec: optree.PyTreeSpec, tree: Any, what: str, of: str) -> list[Any]:
    """The parts of `tree` (that is `what`) at the leaves of `treespec`, the structure `of`."""
    try:
        return treespec.flatten_up_to(tree)
    except ValueError as error:  # it names the keys, and then shows all values
        raise _misfit(f"{what} do not fit the {of}: {error!s:.200}") from None


def _misfit(seen: str) -> LayoutError:
    return LayoutError(
        f"{seen}.",
        cause="a model without a stage or an optimizer, or under another name.",
        fix="give each model one of everything under the same key, as in "
        'shard(step, stage={"g": 2, "d": 3}).init({"g": ..., "d": ...}, {"g": ..., "d": ...}).',
    )
