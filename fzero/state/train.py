"""The train state: one record of small records."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Self

import torch
from torch import Tensor
from typing_extensions import TypeVar

from fzero.errors import CallError, explain
from fzero.ranks.mesh import Axis
from fzero.state import scale, view
from fzero.state._record import record, static
from fzero.state.alive import require_not_donated
from fzero.state.buffers import Buffers
from fzero.state.form import Slot, undone
from fzero.state.outer import Outer, outer_in
from fzero.state.progress import Phase, Progress
from fzero.state.scale import LossScale
from fzero.state.schedule import Schedule
from fzero.state.setup import Setup
from fzero.state.window import Window, forget

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
        return view.as_text(self)

    def _repr_html_(self) -> str:
        return view.as_html(self)
