"""`init`: full parameters and an optimizer -> a train state, each rank keeping only its part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

import optree
import torch
from torch import Tensor

from fzero.collectives import assert_same_everywhere, broadcast, told_everywhere
from fzero.context.modes import in_transform, require_autograd
from fzero.errors import LayoutError
from fzero.machine.compress import remembering
from fzero.machine.offload import offloaded
from fzero.machine.owners import owners_of
from fzero.machine.packing import cut, pack
from fzero.machine.partition import leaves_of
from fzero.optim import (
    NoOptimizer,
    Optimizer,
    TorchOptimizer,
)
from fzero.options import Initializer, InitOptions, SharedOptions, Stages, grouped, takes
from fzero.ranks.mesh import MeshLike, refuse_part
from fzero.state import (
    Buffers,
    Layout,
    Leaf,
    Local,
    Placement,
    Progress,
    Setup,
    TrainState,
)
from fzero.state.progress import CLOSED
from fzero.transforms._closed_over import watch
from fzero.transforms._models import leaves_of_meshes, models_of, require_params
from fzero.transforms._taken import taken_over
from fzero.transforms.donation import returned
from fzero.transforms.outer import begun, mesh_for, on_replica, require_local
from fzero.transforms.pieces import pieces_of
from fzero.transforms.points import begun_slots
from fzero.transforms.setup import COMPARED, plan_setup
from fzero.transforms.state_options import check_shared, check_stages
from fzero.transforms.states import ParamsT

OneOptimizer = (
    Optimizer | TorchOptimizer | NoOptimizer | tuple[Callable[..., Any], Callable[..., Any]]
)


@overload
def init(
    params: ParamsT,
    optimizer: OneOptimizer,
    *,
    stage: int,
    **options: Unpack[InitOptions],
) -> TrainState[ParamsT]: ...
@overload
def init(
    params: Any,
    optimizer: Any,
    *,
    stage: Stages,
    **options: Unpack[InitOptions],
) -> Any: ...
@takes("init", "init(params, optimizer, stage=2)")
def init(  # noqa: D417 {options}
    params: Any,
    optimizer: Any,
    *,
    stage: Stages,
    **options: Unpack[InitOptions],
) -> Any:
    """Return a train state for `params`, partitioned as `stage` says.

    (Stage 1 is stage 2: a gradient that is reduce-scattered costs less on the wire than one that is
    kept whole, and less memory.) Elements that a rank holds, for P parameters and K optimizer
    slots, over W ranks:

        stage   parameters   gradients   optimizer
        0       P            P           K P
        1       P            P / W       K P / W
        2       P            P / W       K P / W
        3       P / W        P / W       K P / W

    On a mesh of two dims, R replicas of S ranks, the S ranks of each replica share all that is
    sharded, and W is S in the table; with `optimizer_over="all"`, W is R S but for the parameters.
    A gradient is reduce-scattered over the shards, and the result reduced over the replicas.

    The values are rank 0's on every rank, as when DDP is built; `params` is copied, not kept.
    (Inside a torch.func transform they stay each rank's own, and differentiable by `params`.)

    Several models: let `stage`, `optimizer` or `mesh`, or several of them, be a pytree, {"g": 2,
    "d": 3}. There is one state for each of its leaves, made of what `params` has under that key;
    the states come back in the same structure. All other options hold for each model, and paths
    begin inside of it. With meshes {"dense": mesh, "experts": mesh["data"]} each place along the
    other axes has experts of its own: the values are those of its first rank.

    Args:
        params: a pytree of tensors, of any shapes, the same on every rank.
        optimizer: from `fzero.optim`, or any (init, update) pair; `fzero.optim.no_optimizer()` for
            a model that is only read; or a pytree of them.
        {options}

    Returns:
        A `TrainState`, or a pytree of them. A collective: every rank must call it.

    Raises:
        LayoutError: for bad options, for parameters that are no tensors or have elements in common
            without being the same view (by path), and for trees of stages, optimizers and
            parameters that do not fit each other (by key).
        AxisError: when the ranks disagree about the layout (the first rank and line that differ).

    Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.

    Example:
        >>> import torch, fzero
        >>> state = init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), stage=2)
        >>> state.stage, fzero.full_params(state)["w"]
        (2, tensor([1., 1., 1., 1.]))
        >>> params = {"g": torch.ones(2), "d": torch.zeros(3)}
        >>> states = init(params, fzero.optim.sgd(0.1), stage={"g": 0, "d": 3})
        >>> {name: state.stage for name, state in states.items()}
        {'g': 0, 'd': 3}
    """
    local = options.get("local")
    mesh = options.get("mesh")
    meshes = leaves_of_meshes(mesh)
    axes = {id(one): mesh_for(one, local) for one in meshes}
    first = axes[id(meshes[0])]
    with told_everywhere(first.mesh or first, what=COMPARED):  # the next that all ranks compare
        require_autograd("init")
        require_params(params)
        chosen = check_shared(grouped(SharedOptions, options))
        require_local(chosen.local)
        models, treespec = models_of(params, optimizer, check_stages("init", stage), mesh)

    def one(params: Any, optimizer: Any, stage: int, mesh: MeshLike) -> TrainState:
        axis = axes[id(mesh)]
        if axis.mesh is not None:  # before the ranks of a part, by itself, wait for each other
            assert_same_everywhere([f"a state on {axis}"], axis.mesh, what="the mesh of a state")
        if chosen.logical_ranks is not None:
            refuse_part(axis, "logical_ranks=")
        frozen = isinstance(optimizer, NoOptimizer)
        asked = replace(chosen, trainable=lambda _: False) if frozen else chosen
        setup = plan_setup(params, optimizer, stage=stage, axis=axis, options=asked)
        return _filled(setup, params, options.get("initializer"), local)

    made = [one(*model) for model in models]
    returned(made)
    return optree.tree_unflatten(treespec, made)


def _filled(
    setup: Setup, params: Any, initializer: Initializer | None, local: Local | None
) -> TrainState:
    layout, tensors = setup.layout, leaves_of(setup.layout, params)
    _require_some(layout)
    for leaf, tensor in zip(layout.leaves, tensors, strict=True):
        if leaf.trainable and not in_transform():
            watch(leaf.title, tensor)

    def make(index: int) -> Iterator[Tensor]:
        ids = layout.groups[index].leaves
        return (made_by(layout.leaves[i], tensors[i], initializer) for i in ids)

    return filled_state(setup, make, local=local)


def made_by(leaf: Leaf, given: Tensor, initializer: Initializer | None) -> Tensor:
    """The full values of one leaf: from `params`, or from the initializer."""
    if initializer is None:
        if given.is_meta:
            raise LayoutError(
                f"{leaf.title} is on the meta device: it has a shape and no values.",
                cause="a model that was built under torch.device('meta').",
                fix="give initializer=(path, leaf) -> values, which makes one leaf at a time.",
            )
        return given
    made = initializer(leaf.path, given)
    if not isinstance(made, Tensor) or tuple(made.shape) != leaf.shape or made.dtype != leaf.dtype:
        seen = f"{tuple(made.shape)} {made.dtype}" if isinstance(made, Tensor) else f"{made!r:.80}"
        raise LayoutError(
            f"the initializer made {seen} for {leaf.title}, which is {leaf.shape} {leaf.dtype}.",
            cause="an initializer that writes in place and returns nothing, or another dtype.",
            fix="return a tensor of the leaf's shape and dtype.",
        )
    return made.detach()


def _require_some(layout: Layout) -> None:
    """Raise, on every rank alike, for a state of nothing."""
    if not layout.leaves:
        raise LayoutError(
            "there is no parameter.",
            cause="None or an empty container was passed as the parameters, or a module "
            "without any.",
            fix="pass the params that functionalize returned, or any pytree of tensors.",
        )


def _how(setup: Setup) -> dict[str, Any]:
    """How an optimizer's new state is moved to its home, and who owns which parameter, if any."""
    home, owners = setup.offload.optimizer, owners_of(setup)
    given: dict[str, Any] = {} if owners is None else {"owners": owners}
    return (
        given if home is None else {"place": lambda x: offloaded(home, x, setup.offload), **given}
    )


def _shards(setup: Setup, held: Sequence[Tensor]) -> list[Tensor]:
    """What this rank steps of the flats that learn."""
    fulls = [held[i] for i in setup.layout.trainable]
    return [cut(setup, full, setup.params, setup.optimizer_state) for full in fulls]


def begun_anew(state: TrainState) -> TrainState:
    """Return the state with a fresh optimizer state; masters stay."""
    setup = state.setup
    shards = _shards(setup, state.params.flats)
    fresh: Any = setup.optimizer.init(shards, pieces_of(setup), **_how(setup))
    return state.replace(optimizer=setup.optimizer.anew(state.optimizer, fresh))


Make = Callable[[int], Iterable[Tensor]]
"""Group -> its full leaves; called once for each group, in order."""


def filled_state(
    setup: Setup,
    make: Make,
    done: Callable[[int, Tensor], None] | None = None,
    *,
    local: Local | None = None,
) -> TrainState:
    """Return the state of which `make` gives the values, group by group: rank 0's on every rank.

    No rank holds more than one group beyond its part; of a group that is encoded, one leaf.
    `done(group, flat)` is called as soon as the group's part is there. With `local` updates it is
    the state of a replica.
    """
    layout, mesh = setup.layout, setup.axis
    held = []
    for index in range(len(layout.groups)):
        flat = pack(layout, index, make(index))
        if not in_transform():  # inside one, the state goes on depending on `params`
            flat = broadcast([flat.detach()], mesh, 0)[0]
        flat = cut(setup, flat, Placement.REPLICATED, setup.params).clone()
        home = setup.offload.params
        held.append(flat if home is None else offloaded(home, flat, setup.offload))
        if done is not None:
            done(index, held[-1])
    setup = on_replica(setup, local)
    return begun_slots(begun(taken_over(_state_of(setup, held), mesh), local, mesh))


def blank_state(setup: Setup, device: torch.device, *, local: Local | None = None) -> TrainState:
    """Return a state of zeros of this rank's parts, to be filled; what the optimizer keeps, too.

    A collective at first, with `local` updates alone.
    """
    held = []
    mesh, setup = setup.axis, on_replica(setup, local)
    for index, group in enumerate(setup.layout.groups):
        numel = setup.numel(index, setup.params)
        flat = torch.zeros(numel, dtype=group.dtype, device=device)
        home = setup.offload.params
        held.append(flat if home is None else offloaded(home, flat, setup.offload))
    return begun_slots(begun(_state_of(setup, held), local, mesh))


def _state_of(setup: Setup, held: Sequence[Tensor]) -> TrainState:
    """Return the state before the first update of which a rank has these flats."""
    state = TrainState(
        params=Buffers(flats=tuple(held), placement=setup.params),
        gradients=Buffers(),
        optimizer=setup.optimizer.init(_shards(setup, held), pieces_of(setup), **_how(setup)),
        window=CLOSED,
        step=torch.zeros((), dtype=torch.int64),
        progress=Progress(),
        setup=setup,
    )
    return remembering(state)
