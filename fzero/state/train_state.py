"""The train state: one record of small records."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, NoReturn, Self, cast

import optree
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from typing_extensions import TypeVar

from fzero.context.current_rank import has_no_values
from fzero.errors import CallError, DonatedError, LayoutError, MismatchError, explain
from fzero.ranks.mesh import Axis
from fzero.state import scale
from fzero.state.buffers import NAMESPACE, Buffers, record, static
from fzero.state.outer import Outer, outer_in
from fzero.state.progress import Phase, Progress, Window, forget
from fzero.state.scale import LossScale
from fzero.state.schedule import Schedule
from fzero.state.setup import Setup, is_on_disk
from fzero.state.slots import Slot, undone

# A state that a donating step has used up holds empty tensors: no read of it may go unnoticed.


def require_not_donated(state: Any) -> None:
    """Raise `DonatedError` if `state`, or its gradients, was used up by a donating step.

    Args:
        state: of one rank, or stacked: [W, *t] for each tensor [*t].
    """
    if (gone := donated(state)) is not None:
        what, group = gone
        raise DonatedError(
            f"this state was donated: a newer state has the {what} of {group} now.",
            cause="a state was used again after a step made with shard(..., donate=True), or "
            "engine.step(), took it.",
            fix="go on with the state that the step returned, or keep a copy before it: "
            "copy.deepcopy(state).",
        )


def donated(state: Any) -> tuple[str, str] | None:
    """Return what of a state, and of which group, a donating step has taken; None for nothing."""
    layout = state.setup.layout
    count = getattr(state.optimizer, "count", None)
    if isinstance(count, Tensor) and not count.numel():  # parameters may all be empty ones
        return "optimizer state", layout.groups[0].name
    every = tuple(range(len(layout.groups)))
    held = (
        ("parameters", state.params, every),
        ("gradients", state.gradients, layout.trainable),
        ("gradients", state.window.pending, layout.trainable),
    )
    for what, buffers, groups in held:
        for flat, index in zip(buffers.flats, groups if buffers.flats else (), strict=True):
            if layout.full_numel(index) and not flat.numel():
                return what, layout.groups[index].name
    return None


ParamsT_co = TypeVar("ParamsT_co", covariant=True, default=Any)
"""The pytree of full parameters that a state was made of."""

_INSTEAD = {
    "fzero.full_params(state) gives the parameters, fzero.checkpoint.save(path, state) saves all, "
    "and fzero.checkpoint.load(path, state) returns what was saved": "state_dict parameters model "
    "load_state_dict named_parameters module keys items values",
    "make the state of parameters that are there: step.init(params, optimizer)": "to cuda cpu half "
    "float double bfloat16",
    "state, loss = fzero.grad_and_reduce(loss_fn, state)(batch)": "backward loss",
    "state = fzero.apply_gradients(state), which clears the gradients, too": "apply_gradients "
    "zero_grad update",
    "fzero.gradients(state) gives the gradients": "grads grad",
    "state.optimizer has what the rule keeps; its options, and schedules as lr, are those of "
    "fzero.optim.adamw(lr=...)": "opt_state tx param_groups lr",
    "apply, params = fzero.functionalize(module), and apply(params, x) in the loss": "apply_fn "
    "apply forward train eval",
}
"""{what to do: what others have for it}."""


@record
class TrainState(Generic[ParamsT_co]):
    """Everything that training carries from step to step, as this rank holds it.

    Immutable: every function of fzero returns a new state. A pytree, for optree (namespace
    "fzero") and for torch.func; `setup` and `progress` are static.

    To a type checker it is generic in the pytree of its parameters: `fzero.init` makes a
    `TrainState[P]` of parameters of type P, whose `full_params` and `gradients` are P, and so is
    what `grad_and_reduce` gives the loss. `TrainState` alone is `TrainState[Any]`.
    """

    params: Buffers
    gradients: Buffers
    optimizer: Any  # the optimizer's own record
    window: Window
    step: Tensor  # [] int64: updates made; on the CPU, or with a loss scale on its device
    # {"<transform>/<slot>": ...}
    slots: dict[str, Slot] = dataclasses.field(default_factory=dict[str, Slot])
    progress: Progress = static()
    schedule: Schedule = static(default=Schedule())  # stage 3: in which order units are gathered
    setup: Setup = static()

    @property
    def scale(self) -> LossScale | None:
        """The loss scale; None if losses are not scaled."""
        return scale.in_slots(self.slots)

    @property
    def outer(self) -> Outer | None:
        """What the next outer update starts from; None without local updates."""
        return outer_in(self.slots)

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.setup.stage

    @property
    def mesh(self) -> Axis:
        """All ranks: those of `setup.axis`; of local updates the ranks of all replicas."""
        outer = self.outer if self.slots else None
        return self.setup.axis if outer is None else outer.mesh

    @property
    def device(self) -> torch.device:
        """Where it computes: where its parameters are, unless they are offloaded."""
        own = next((flat.device for flat in self.params.flats), torch.device("cpu"))
        return self.setup.offload.device or own

    @property
    def phase(self) -> Phase:
        """Where the state stands between two updates."""
        if self.window.pending.held:
            return Phase.LOCAL
        return Phase.READY if self.gradients.held else Phase.IDLE

    def replace(self, **changes: Any) -> Self:
        """Return a state with some fields changed; this one stays as it is."""
        return dataclasses.replace(self, **changes)

    def replace_policy(self, **changes: Any) -> Self:
        """Return a state with some fields of `setup.policy` changed: what a transform asks for."""
        policy = dataclasses.replace(self.setup.policy, **changes)
        return self.replace(setup=self.setup.changed(policy=policy))

    def without_gradients(self) -> Self:
        """Return the state without any gradient, reduced or waiting; an open window stays open.

        Slots that live until the update go, too, but for those that a transform has made.
        """
        makers = {one.name for one in self.setup.transforms}
        kept = {
            name: slot
            for name, slot in self.slots.items()
            if slot.form.lifetime != "update" or name.partition("/")[0] in makers
        }
        return self.replace(
            slots=undone(kept),
            gradients=Buffers(),
            window=forget(self.window),
            progress=Progress(),
            setup=self.setup.idle,
        )

    __iter__: ClassVar[None] = None  # else Python would ask __getitem__

    def __getitem__(self, key: Any) -> NoReturn:
        """Raise `CallError`: the parameters of a state are in flat buffers, a part on each rank."""
        raise CallError(
            f"state[{key!r}]: a TrainState has no items.",
            cause="a state in the place of the parameters; of those it has flat buffers.",
            fix=f"use fzero.full_params(state)[{key!r}], at stage 3 a collective; a loss is given "
            "the parameters: grad_and_reduce(lambda params, x: ..., state)(x).",
        )

    if not TYPE_CHECKING:  # a type checker would take any name for one of the record

        def __getattr__(self, name: str) -> NoReturn:
            """Raise `AttributeError`, which says what does that: hasattr() asks, too."""
            seen = f"a TrainState has no attribute {name!r}."
            for fix, names in _INSTEAD.items():
                if name in names.split():
                    cause = "a module, an optimizer or a state of another library was expected."
                    seen = explain(seen, cause=cause, fix=f"{fix}.")
            raise AttributeError(seen, name=name, obj=self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy, or pickle: into a state of its own, which is not donated as that of an engine is.

        Raises `DonatedError`.
        """
        require_not_donated(self)
        kept = self.replace_policy(donate=False)
        return object.__reduce_ex__(kept, protocol)  # the class with slots is another one

    def __repr__(self) -> str:
        """A few lines: stage, phase, groups, bytes by kind. No numbers of tensors."""
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)


# How a train state shows itself: as text, as HTML, and as bytes by kind.


def state_bytes(state: Any) -> dict[str, int]:
    """Bytes that this rank holds, by kind: parameters, gradients, optimizer, window, total.

    The window has what is not reduced yet, the residual of encoded gradients, and full parameters
    that it keeps; the optimizer also the anchors and the outer momentum of local updates. What
    transforms keep is under the kind that its form says, by default "slots", which a state without
    any has not. Of a state that is offloaded also by place: on device, in host memory, on disk.

    Raises `LayoutError` for what is no state.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.zeros(3, 4)}, fzero.optim.adam(1e-3), stage=0)
        >>> state_bytes(state)["parameters"], state_bytes(state)["optimizer"]
        (48, 104)
    """
    require_state("state_bytes", state)
    kinds = _kinds(state)
    found = {kind: _tree_bytes(tree) for kind, tree in kinds.items()}
    total = sum(found.values())
    if state.setup.offload.neutral:
        return {**found, "total": total}
    return {**found, "total": total, **_by_home(state, kinds, total)}


def _kinds(state: Any) -> dict[str, Any]:
    """Return {kind: all tensors of that kind}, of which none is in two kinds."""
    found: dict[str, list[Any]] = {
        "parameters": [state.params],
        "gradients": [state.gradients],
        "optimizer": [state.optimizer],
        "window": [state.window],
    }
    for slot in state.slots.values():
        if slot.form.kind != "numbers":
            found.setdefault(slot.form.kind, []).append(slot)
    return found


def require_state(name: str, given: Any) -> None:
    """Raise `LayoutError` for what is no state, where one is wanted."""
    if not isinstance(getattr(given, "setup", None), Setup):
        raise LayoutError(
            f"{name}: expected one TrainState, got a {type(given).__name__}.",
            cause="parameters, a pytree of states, (state, loss), or an engine.",
            fix="pass one TrainState: one call for each state; an engine's is engine.state.",
        )


def _by_home(state: Any, kinds: dict[str, Any], total: int) -> dict[str, int]:
    homes = state.setup.offload.homes
    of = {"parameters": homes["params"]}
    of |= dict.fromkeys(("optimizer", "slots"), homes["optimizer"])
    disk = host = 0
    for kind, tree in kinds.items():
        home = of.get(kind, homes["gradients"])
        for x in optree.tree_leaves(tree, namespace=NAMESPACE):
            if isinstance(x, Tensor) and x.ndim:
                numel_bytes = x.numel() * x.element_size()
                disk += numel_bytes * (is_on_disk(x) or (has_no_values(x) and home == "disk"))
                host += numel_bytes * (home == "cpu")
    return {"on device": total - disk - host, "in host memory": host, "on disk": disk}


def as_text(state: Any) -> str:
    """The lines of `repr(state)`."""
    setup, layout = state.setup, state.setup.layout
    frozen = sum(not leaf.trainable for leaf in layout.leaves)
    numel = sum(prod(leaf.shape) for leaf in layout.leaves)
    head = (
        f"TrainState(stage={setup.stage}, {setup.axis}, step={_step(state)}, "
        f"phase={state.phase.value!r}{', donated' if donated(state) else ''})"
    )
    leaves = f"  {len(layout.leaves)} leaves ({frozen} frozen), {numel:,} elements"
    rows = [f"  {kind:<11}{text}" for kind, text in _rows(state)]
    return "\n".join([head, f"{leaves} in {len(layout.groups)} groups", *rows])


def as_html(state: Any) -> str:
    """A table of the same facts, and one row for each group."""
    lines = as_text(state).splitlines()
    kinds = "".join(
        f"<tr><td>{html.escape(kind)}</td><td>{html.escape(text)}</td></tr>"
        for kind, text in _rows(state)
    )
    layout = state.setup.layout
    groups = "".join(
        f"<tr><td>{html.escape(group.name)}</td><td>{len(group.leaves)}</td>"
        f"<td>{group.shard_numel:,} x {layout.ranks}</td>"
        f"<td>{html.escape(str(group.dtype).removeprefix('torch.'))}</td>"
        f"<td>{'' if group.trainable else 'frozen'}</td></tr>"
        for group in layout.groups
    )
    header = "<tr><th>group</th><th>leaves</th><th>shard x ranks</th><th>dtype</th><th></th></tr>"
    return (
        f"<b>{html.escape(lines[0])}</b><br>{html.escape(lines[1])}"
        f"<table>{kinds}</table><table>{header}{groups}</table>"
    )


def _rows(state: Any) -> list[tuple[str, str]]:
    setup, found = state.setup, state_bytes(state)
    places = {
        "parameters": setup.params.value,
        "gradients": state.gradients.placement.value if state.gradients.held else "none",
        "optimizer": setup.optimizer_state.value,
        "window": f"open, {state.progress.backwards} backwards"
        if state.window.is_open
        else "closed",
    }
    places["window"] += ", with a residual" if "residual" in state.slots else ""
    if (outer := state.outer) is not None:
        places["optimizer"] += f", with anchors, {outer.updates} of {outer.local.every} updates"
    shown = [name for name, slot in state.slots.items() if slot.form.kind == "slots"]
    if shown:
        places["slots"] = ", ".join(dict.fromkeys(name.partition("/")[0] for name in shown))
    return [(kind, f"{place}, {found[kind]:,} bytes") for kind, place in places.items()]


def _tree_bytes(tree: Any) -> int:
    leaves = optree.tree_leaves(tree, namespace=NAMESPACE)
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))


def _step(state: Any) -> str:
    # Under a torch.func transform, or with a leading rank dim, it is not one number.
    step = state.step
    plain = type(step) is Tensor and not is_functorch_wrapped_tensor(step)
    return str(cast(Any, step).tolist()) if plain else "?"


# The values of all virtual ranks as one tensor.


def stack_ranks(column: Sequence[Tensor]) -> Tensor:
    """Return [W, *t] of what each rank has of one place of a state.

    What one rank keeps for all of them, and the others have empty, is shown on each rank: a view,
    which takes no more memory than its owner does. (Of several replicas, each has its own.)

    Example:
        >>> stack_ranks([torch.empty(0), torch.ones(2)])
        tensor([[1., 1.],
                [1., 1.]])
    """
    if len({x.shape for x in column}) == 1:
        return torch.stack(list(column))
    kept = [x for x in column if x.numel()]
    if any(x.shape != kept[0].shape for x in kept):
        raise ValueError(f"ranks have {sorted({tuple(x.shape) for x in column})}")
    if len(kept) == 1:
        return kept[0].expand(len(column), *kept[0].shape)
    # Each replica writes to what its own owner has.
    return torch.stack([x if x.numel() else kept[0] for x in column])


# What a user says of one call of a loss, beside its arguments.

Weight = float | Tensor
"""The weight of one call on one rank: a number of 0 or more, or a scalar tensor."""


class Weighed(NamedTuple):
    """The weight of a backward, and whether its loss was multiplied by it already.

    Else each gradient is that it brings.
    """

    weight: Weight
    in_loss: bool = False


ADVANTAGE = (
    "A weight counts examples or tokens, and is 0 or more. What may be negative multiplies the "
    "loss: `loss = advantage * negative_log_likelihood` with weight=1, or the number of tokens"
)


def weighted_by_some(have: int | str, lack: int | str) -> MismatchError:
    """Return the error of weights that some ranks have given, by their numbers or names."""
    first, second = (f"rank {one}" if isinstance(one, int) else one for one in (have, lack))
    return MismatchError(
        f"{first} holds gradients with weights, and {second} holds gradients without.",
        cause="weight= on some ranks only.",
        fix="give weight= to every call of an update, on every rank, or to none (0 is one).",
    )


@dataclass(frozen=True, slots=True, eq=False)
class GivenCall:
    """A call that brings gradients, and what a user says of it.

    Attributes:
        name: of the call, for errors.
        weight: of these gradients; None: they have none.

    Raises:
        LayoutError: for what is no weight. The values of a tensor are not read.

    Example:
        >>> GivenCall("grad_and_reduce", weight=3.0).weight
        3.0
    """

    name: str
    weight: Weight | None = None

    def __post_init__(self) -> None:
        """Check the weight."""
        weight = self.weight
        if weight is None:
            return
        if isinstance(weight, Tensor):
            good = weight.dim() == 0 and not weight.is_complex() and weight.dtype != torch.bool
            seen = f"a tensor of {weight.dtype}, shape {[*weight.shape]}"
        else:
            number: Any = weight  # what users give
            is_one = isinstance(number, int | float) and not isinstance(number, bool)
            good = is_one and math.isfinite(weight) and weight >= 0
            seen = repr(weight)
        if not good:
            raise LayoutError(
                f"{self.name}: weight={seen}.",
                cause="weights of single examples or tokens, a mask, or a count that is negative.",
                fix="give the sum of the weights of this call: a finite number of 0 or more, or a "
                f"tensor without dims, e.g. weight=mask.sum(). {ADVANTAGE}.",
            )


def weighed(loss: Tensor, weight: Weight | None, *, connected: bool) -> Weighed | None:
    """Return how the gradients of a loss get its weight.

    connected: whether it has called a collective. Then it is multiplied, by the weight in its
        dtype; NaN for 0, which the update refuses, where it is not finite: 0 times it is not 0.
    """
    if weight is None or not connected:
        return None if weight is None else Weighed(weight)
    by = torch.as_tensor(weight, device=loss.device).to(loss.dtype)
    lost = (by == 0) & ~torch.isfinite(loss.detach()).all()
    return Weighed(torch.where(lost, torch.nan, by), in_loss=True)


def with_weight(by: Tensor | None, how: Weighed | None) -> Tensor | None:
    """Return what a loss is multiplied by: `by`, and its weight if that is in it; None for 1."""
    if how is None or not how.in_loss:
        return by
    return torch.as_tensor(how.weight) if by is None else by * how.weight
