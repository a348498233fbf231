"""An update and a learning rate as ops of a recorded graph: what runs there is what runs here.

Without them a graph would have the formula of the rule, and no number of the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero.context.current_rank import is_abstract
from fzero.context.modes import in_transform, wants_graph
from fzero.optim.rules import ADAM, LION, SGD, UNSCALED, Rule, has_kernel

Schedule = Callable[[int], float]

_KERNELS = {rule.name: rule.kernel for rule in (SGD, ADAM, LION)}
SCHEDULES: list[Schedule] = []
"""Those that graphs of this process know, by their number: an op takes no function."""


def is_one_op(rule: Rule, tensors: Sequence[Tensor]) -> bool:
    """Whether an update is recorded as one op: nobody differentiates it or maps it."""
    recorded = get_proxy_mode() is not None and is_abstract()
    known = _KERNELS.get(rule.name) is rule.kernel and has_kernel(tensors)
    return recorded and known and not in_transform() and not wants_graph(tensors)


def update_by_op(
    rule: Rule,
    params: list[Tensor],
    grads: list[Tensor],
    moments: Sequence[list[Tensor]],
    count: Tensor,
    options: dict[str, Any],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return (params', moments') of one kernel. count: updates before this one."""
    lr = options["lr"] if isinstance(options["lr"], Tensor) else None
    others = {key: value for key, value in options.items() if lr is None or key != "lr"}
    flat = [x for some in moments for x in some]
    made: Any = updated_copies(rule.name, json.dumps(others), params, grads, flat, count, lr)
    n = len(params)
    return made[:n], [made[k : k + n] for k in range(n, len(made), n)]


def lr_by_op(lr: Schedule, count: Tensor) -> Any:
    """Return lr(count), [] fp64 on the CPU, of a count without a value."""
    if not any(lr is known for known in SCHEDULES):
        SCHEDULES.append(lr)
    return schedule(count, next(i for i, known in enumerate(SCHEDULES) if known is lr))


def lacks_value(count: Any) -> TypeGuard[Tensor]:
    """Whether the number of updates has no value: in a trace."""
    return isinstance(count, FakeTensor)


@torch.library.custom_op("fzero_optim::update", mutates_args=())
def updated_copies(
    rule: str,
    options: str,
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    count: Tensor,
    lr: Tensor | None,
) -> list[Tensor]:
    """[*params', *moments'] of one update: copies, which the kernel of the rule writes to."""
    made = [x.clone() for x in (*params, *moments)]
    update_in_place(rule, options, made, grads, count, lr)
    return made


@updated_copies.register_fake
def _(
    rule: str,
    options: str,
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    count: Tensor,
    lr: Tensor | None,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (*params, *moments)]


def update_in_place(
    rule: str,
    options: str,
    held: list[Tensor],
    grads: list[Tensor],
    count: Tensor,
    lr: Tensor | None,
) -> None:
    """Write one update into `held`, which has the parameters and then each moment of all."""
    given = json.loads(options) | ({} if lr is None else {"lr": float(lr)})
    number = count + 1 if count.device.type != "cpu" else int(count) + 1
    n = len(grads)
    slots = tuple(held[k : k + n] for k in range(n, len(held), n)) if n else ()
    _KERNELS[rule](held[:n], grads, slots, number, given, UNSCALED)


@torch.library.custom_op("fzero_optim::schedule", mutates_args=())
def schedule(count: Tensor, number: int) -> Tensor:
    """lr(count), [] fp64 on the CPU, of one of `SCHEDULES`."""
    return torch.tensor(float(SCHEDULES[number](int(count))), dtype=torch.float64)


@schedule.register_fake
def _(count: Tensor, number: int) -> Tensor:
    return torch.empty((), dtype=torch.float64, device="cpu")
