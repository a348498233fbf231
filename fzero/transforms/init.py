"""`init`: full parameters and an optimizer -> a train state, each rank keeping only its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

import optree
import torch
from torch import Tensor

from fzero._check import called_as
from fzero._modes import in_transform, require_autograd
from fzero.collectives import broadcast, cut, told_everywhere
from fzero.errors import LayoutError
from fzero.homes import placed
from fzero.mesh import axis_of
from fzero.optim import (
    NoOptimizer,
    Optimizer,
    TorchOptimizer,
)
from fzero.packing import pack
from fzero.partition import leaves_of, unit_of
from fzero.quantize import residual_of
from fzero.state import (
    Buffers,
    Layout,
    Leaf,
    Placement,
    Progress,
    Setup,
    TrainState,
)
from fzero.state.offload import Offload
from fzero.state.precision import Autocast
from fzero.state.window import CLOSED
from fzero.transforms._models import models_of, require_params
from fzero.transforms._options import (
    InitOptions,
    Stages,
    check_options,
    check_stages,
)
from fzero.transforms._pieces import pieces_of
from fzero.transforms._plan import COMPARED, plan
from fzero.transforms._taken import taken_over

Initializer = Callable[[str, Tensor], Tensor]
OneOptimizer = (
    Optimizer | TorchOptimizer | NoOptimizer | tuple[Callable[..., Any], Callable[..., Any]]
)


@overload
def init(
    params: Any,
    optimizer: OneOptimizer,
    *,
    stage: int,
    autocast: Autocast | torch.dtype | None = None,
    initializer: Initializer | None = None,
    offload: Offload | None = None,
    **options: Unpack[InitOptions],
) -> TrainState: ...
@overload
def init(
    params: Any,
    optimizer: Any,
    *,
    stage: Stages,
    autocast: Autocast | torch.dtype | None = None,
    initializer: Initializer | None = None,
    offload: Offload | None = None,
    **options: Unpack[InitOptions],
) -> Any: ...
@called_as("init(params, optimizer, stage=2)")
def init(
    params: Any,
    optimizer: Any,
    *,
    stage: Stages,
    autocast: Autocast | torch.dtype | None = None,
    initializer: Initializer | None = None,
    offload: Offload | None = None,
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

    Several models: let `stage`, or `optimizer`, or both be a pytree, {"g": 2, "d": 3}. There is one
    state for each of its leaves, made of what `params` has under that key; the states come back in
    the same structure. All other options hold for each model, and paths begin inside of it.

    Args:
        params: a pytree of tensors, of any shapes, the same on every rank.
        optimizer: from `fzero.optim`, or any (init, update) pair; `fzero.optim.no_optimizer()` for
            a model that is only read; or a pytree of them.
        stage: 0, 1, 2 or 3; or a pytree of such.
        autocast: what `fzero.autocast` is given: parameters of safe modules then cross ranks in its
            dtype, in groups of their own. `step.init` passes that of its own transform.
        initializer: (path, leaf) -> values of that leaf, for `params` that have shapes and dtypes
            only (tensors on the meta device): so that no rank ever holds the model. Rank 0's count.
        offload: what lives in host memory or on disk. `step.init` passes that of its own transform.
        mesh: default the world (what torchrun started; else one rank); a DeviceMesh of one dim, or
            of two, (replicate, shard); or their sizes (R, S), R S being the world's.
        optimizer_over: which ranks of a mesh of two dims share gradients, masters and optimizer
            states at stages 1 to 3: "shard", those of each replica, or "all".
        reshard_after_forward: stage 3 only. True: the full values of a unit go when another unit
            is used, and are gathered again in backward. False: they stay until the backward is
            over. "window": they stay over a coalescing window.
        units: path -> name of the stage-3 unit it is gathered with.
        trainable: path -> whether it learns; on top of the rule in `fzero.partition.plan_layout`.
        bucket_bytes: stages 0 to 2, the size in bytes up to which leaves share a collective;
            default 8 MiB at stage 0, 4 MiB at stages 1 and 2.
        whole_parameters: stages 1 to 3, for an optimizer that is not elementwise (Muon, LAMB): the
            parameters of such a rule, by its param groups, are each whole on one rank. What ranks
            have of a bucket or unit is padded to the most that one of them has; the default bucket
            grows to W of the largest such parameter.
        ordered: each reduction sums in rank order, on every backend: bits then do not depend on
            the bucketing. (At stage 3 a rank that uses units in another order than all expect
            may bring a part of a gradient by itself, which is added to the sum of the others.)
        accumulate_dtype: in which gradients add up, and are held; default fp32 for 16-bit
            parameters, else their own.
        communication_dtype: in which gradients cross ranks; default the parameters'.
        reduce_op: "mean" or "sum": what is made of the ranks' gradients.
        gradient_predivide_factor: f: each rank sends g / f, and the sum is multiplied by f / W (by
            f for "sum"). With f = W the sum of W gradients overflows no sooner than one of them.
        quantized_weights: stage 3 only. A forward or a backward gathers parameters as int8 blocks:
            each comes back to within 1/254 of the largest of its block of 256.
        quantized_gradients: stages 1 to 3. Gradients cross ranks as int8 blocks, and are summed in
            the accumulation dtype, in fp32 at least. What a rank's rounding has lost is added to
            its next gradient: the residual, one fp32 element for each of P on every rank.

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
    axis = axis_of(options.get("mesh"))
    with told_everywhere(axis, what=COMPARED):  # the next that all ranks compare
        require_autograd("init")
        require_params(params)
        chosen = check_options("init", options, autocast=autocast, offload=offload)
        models, treespec = models_of(params, optimizer, check_stages("init", stage))

    def one(params: Any, optimizer: Any, stage: int) -> TrainState:
        frozen = isinstance(optimizer, NoOptimizer)
        setup = plan(
            params,
            optimizer,
            stage=stage,
            axis=axis,
            options=chosen,
            units=options.get("units", unit_of),
            trainable=(lambda _: False) if frozen else options.get("trainable"),
        )
        return _filled(setup, params, initializer)

    return optree.tree_unflatten(treespec, [one(*model) for model in models])


def _filled(setup: Setup, params: Any, initializer: Initializer | None) -> TrainState:
    layout, tensors = setup.layout, leaves_of(setup.layout, params)
    _require_some(layout)

    def make(index: int) -> list[Tensor]:
        ids = layout.groups[index].leaves
        return [_made(layout.leaves[i], tensors[i], initializer) for i in ids]

    return fill(setup, make)


def _made(leaf: Leaf, given: Tensor, initializer: Initializer | None) -> Tensor:
    """The full values of one leaf: given, or made by the initializer."""
    if initializer is None:
        if given.is_meta:
            raise LayoutError(
                f"{leaf.path} is on the meta device: it has a shape and no values.",
                cause="a model that was built under torch.device('meta').",
                fix="give initializer=(path, leaf) -> values, which makes one leaf at a time.",
            )
        return given
    made = initializer(leaf.path, given)
    if not isinstance(made, Tensor) or tuple(made.shape) != leaf.shape or made.dtype != leaf.dtype:
        seen = f"{tuple(made.shape)} {made.dtype}" if isinstance(made, Tensor) else f"{made!r:.80}"
        raise LayoutError(
            f"the initializer made {seen} for {leaf.path}, which is {leaf.shape} {leaf.dtype}.",
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


def _place(setup: Setup) -> dict[str, Any]:
    """How an optimizer takes what it makes to its home, if that is elsewhere."""
    home = setup.offload.optimizer
    return {} if home is None else {"place": lambda x: placed(home, x, setup.offload)}


def _shards(setup: Setup, held: Sequence[Tensor]) -> list[Tensor]:
    """What this rank steps of the flats that learn."""
    fulls = [held[i] for i in setup.layout.trainable]
    return [cut(setup, full, setup.params, setup.optimizer_state) for full in fulls]


def begun_anew(state: TrainState) -> TrainState:
    """Return the state whose optimizer has made no step; masters stay."""
    setup = state.setup
    shards = _shards(setup, state.params.flats)
    fresh: Any = setup.optimizer.init(shards, pieces_of(setup), **_place(setup))
    return state.replace(optimizer=setup.optimizer.anew(state.optimizer, fresh))


Make = Callable[[int], Sequence[Tensor]]
"""Group -> its full leaves; called once for each group, in order."""


def fill(setup: Setup, make: Make, done: Callable[[int, Tensor], None] | None = None) -> TrainState:
    """Return the state of which `make` gives the values, group by group: rank 0's on every rank.

    No rank holds more than one group beyond its part. `done(group, flat)` is called as soon as
    the group's part is there.
    """
    layout = setup.layout
    held = []
    for index in range(len(layout.groups)):
        flat = pack(layout, index, make(index))
        if not in_transform():  # inside one, the state goes on depending on `params`
            flat = broadcast([flat.detach()], setup.axis, 0)[0]
        flat = cut(setup, flat, Placement.REPLICATED, setup.params).clone()
        home = setup.offload.params
        held.append(flat if home is None else placed(home, flat, setup.offload))
        if done is not None:
            done(index, held[-1])
    state = TrainState(
        params=Buffers(flats=tuple(held), placement=setup.params),
        gradients=Buffers(),
        optimizer=setup.optimizer.init(_shards(setup, held), pieces_of(setup), **_place(setup)),
        window=CLOSED,
        step=torch.zeros((), dtype=torch.int64),
        progress=Progress(),
        setup=setup,
    )
    return taken_over(state.replace(window=replace(CLOSED, residual=residual_of(state))))
