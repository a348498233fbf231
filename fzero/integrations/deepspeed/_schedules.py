"""DeepSpeed's learning-rate schedules: formulas, and a scheduler that applies them.

`t` is the number of updates so far minus one: -1 before the first. `after(t)` is what the next
update uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fzero.integrations.deepspeed._kinds import as_bool, as_int, as_number

Options = list[dict[str, Any]]
"""For each param group, the options to set: lr, momentum, betas."""


class ConfiguredSchedule:
    """A schedule of DeepSpeed with the methods of a torch scheduler; the engine steps it.

    Args:
        optimizer: its param groups are written to.
        after: t -> the options of each param group.
    """

    def __init__(self, optimizer: Optimizer, after: Callable[[int], Options]) -> None:
        self.optimizer, self._after = optimizer, after
        self.last_batch_iteration = -1
        self._write()

    def step(self) -> None:
        """Advance by one update, and set the options for the next one."""
        self.last_batch_iteration += 1
        self._write()

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each param group, which the next update uses."""
        return lrs_of(self.optimizer)

    def get_lr(self) -> list[float]:
        """Return `get_last_lr()`."""
        return self.get_last_lr()

    def get_mom(self) -> list[Any]:
        """The momentum of each param group now, or its betas; 0 without both."""
        return momenta_of(self.optimizer)

    def state_dict(self) -> dict[str, int]:
        """Return the number of updates so far, as DeepSpeed's schedulers do."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of `state_dict()`."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._write()

    def _write(self) -> None:
        after = self._after(self.last_batch_iteration)
        for group, options in zip(self.optimizer.param_groups, after, strict=True):
            for name, value in options.items():
                old = group.get(name)
                if isinstance(old, Tensor):  # as torch has it for captured CUDA graphs
                    old.fill_(value)
                else:
                    group[name] = value


def lrs_of(optimizer: Optimizer | None) -> list[float]:
    """Return the learning rate of each param group; none without an optimizer."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [float(group["lr"]) for group in groups]


def momenta_of(optimizer: Optimizer | None) -> list[Any]:
    """Return the momentum of each param group, or its betas; 0 without both."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [group.get("momentum", group.get("betas", 0.0)) for group in groups]


def in_cycle(t: int, first: int, second: int, stairs: tuple[int, int]) -> float:
    """Rise from 0 to 1 in `first` updates, then fall to 0 in `second`; in steps if `stairs`.

    Example:
        >>> [in_cycle(t, 2, 4, (0, 0)) for t in (0, 1, 2, 3)], in_cycle(2, 2, 4, (0, 2))
        ([0.5, 1.0, 0.75, 0.5], 0.5)
    """
    done, whole, count = (t + 1) % (first + second), first, stairs[0]
    if done > first:
        done, whole, count = first + second - done, second, stairs[1]
    return done * count // whole / count if count else done / whole


# From the params of a config to the options of param groups: `(optimizer, **params) -> after`.


def _each(value: Any, optimizer: Optimizer) -> list[float]:
    """Return a number for each param group, from a list of them or from one for all."""
    count = len(optimizer.param_groups)
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise ValueError(f"{values} has {len(values)} values for {count} param groups")
    return [as_number(x) for x in values]


def _warm_up(num_steps: Any, kind: Any) -> tuple[int, Callable[[int], float]]:
    """Return the number of warm-up steps, and the function t -> fraction of the peak.

    log(t + 1) / log(steps), or t / steps; 0 before the first update, 1 from `steps` on.
    """
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type is {kind!r}, not log or linear")
    steps = max(2, as_int(num_steps))

    def share(t: int) -> float:
        if t < 0:
            return 0.0
        if t >= steps:
            return 1.0
        return math.log(t + 1) / math.log(steps) if kind == "log" else t / steps

    return steps, share


def _warmup(
    optimizer: Optimizer,
    warmup_min_lr: Any = 0.0,
    warmup_max_lr: Any = None,
    warmup_num_steps: Any = 1000,
    warmup_type: Any = "log",
) -> Callable[[int], Options]:
    return _warmup_decay(
        optimizer, None, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type
    )


def _warmup_decay(
    optimizer: Optimizer,
    total_num_steps: Any,
    warmup_min_lr: Any = 0.0,
    warmup_max_lr: Any = 0.001,
    warmup_num_steps: Any = 1000,
    warmup_type: Any = "log",
) -> Callable[[int], Options]:
    """The peak is by default the optimizer's lr; after it linear to the floor, if there is an end.

    (total - t) / (total - steps) from `steps` on.
    """
    peak = lrs_of(optimizer)[0] if warmup_max_lr is None else warmup_max_lr
    ends = list(zip(_each(warmup_min_lr, optimizer), _each(peak, optimizer), strict=True))
    steps, share = _warm_up(warmup_num_steps, warmup_type)
    total = None if total_num_steps is None else as_int(total_num_steps)

    def after(t: int) -> Options:
        at = share(t)
        if total is not None and t >= steps:
            at = max(0.0, (total - t) / max(1, total - steps))
        return [{"lr": low + (high - low) * at} for low, high in ends]

    return after


def _warmup_cosine(
    optimizer: Optimizer,
    total_num_steps: Any,
    warmup_min_ratio: Any = 0.0,
    warmup_num_steps: Any = 1000,
    cos_min_ratio: Any = 0.0001,
    warmup_type: Any = "log",
) -> Callable[[int], Options]:
    """0 before the first update, start + (1 - start) share, and then half a cosine to the floor.

    floor + (1 - floor) (1 + cos(pi s)) / 2 with s = (t - steps + 1) / (total - steps), at most 1.
    """
    lrs, total = lrs_of(optimizer), as_int(total_num_steps)
    steps, share = _warm_up(warmup_num_steps, warmup_type)
    start, floor = as_number(warmup_min_ratio), as_number(cos_min_ratio)

    def after(t: int) -> Options:
        ratio = 0.0 if t < 0 else start + (1 - start) * share(t)
        if t >= steps:
            s = min(1.0, (t - steps + 1) / max(1, total - steps))
            ratio = floor + (1 - floor) * (1 + math.cos(math.pi * s)) / 2
        return [{"lr": lr * ratio} for lr in lrs]

    return after


def _range_test(
    optimizer: Optimizer,
    lr_range_test_min_lr: Any = 0.001,
    lr_range_test_step_size: Any = 2000,
    lr_range_test_step_rate: Any = 1.0,
    lr_range_test_staircase: Any = False,
) -> Callable[[int], Options]:
    low, size = _each(lr_range_test_min_lr, optimizer), _positive(lr_range_test_step_size)
    rate, stairs = as_number(lr_range_test_step_rate), as_bool(lr_range_test_staircase)

    def after(t: int) -> Options:
        interval = (t + 1) // size if stairs else (t + 1) / size
        return [{"lr": lr * (1 + rate * interval)} for lr in low]

    return after


def _one_cycle(
    optimizer: Optimizer,
    cycle_min_lr: Any,
    cycle_max_lr: Any,
    decay_lr_rate: Any = 0.0,
    cycle_first_step_size: Any = 2000,
    cycle_second_step_size: Any = None,
    cycle_first_stair_count: Any = 0,
    cycle_second_stair_count: Any = None,
    decay_step_size: Any = 0,
    cycle_momentum: Any = True,
    cycle_min_mom: Any = 0.8,
    cycle_max_mom: Any = 0.9,
    decay_mom_rate: Any = 0.0,
) -> Callable[[int], Options]:
    first = _positive(cycle_first_step_size)
    second = first if cycle_second_step_size is None else _positive(cycle_second_step_size)
    up = as_int(cycle_first_stair_count)
    stairs = (up, up if cycle_second_stair_count is None else as_int(cycle_second_stair_count))
    low, high = as_number(cycle_min_lr), as_number(cycle_max_lr)
    least, most = as_number(cycle_min_mom), as_number(cycle_max_mom)
    every, lr_rate = as_int(decay_step_size), as_number(decay_lr_rate)
    mom_rate = as_number(decay_mom_rate)
    momentum = as_bool(cycle_momentum) and "betas" in optimizer.defaults

    def after(t: int) -> Options:
        if t < 0:
            lr, beta = low, least
        elif t < first + second:
            share = in_cycle(t, first, second, stairs)
            lr, beta = low + (high - low) * share, most - (most - least) * share
        else:
            decay = (t - first - second + 1) / every if every else 0.0
            lr, beta = low / (1 + lr_rate * decay), most * (1 + mom_rate * decay)
        options = {"lr": lr, "betas": (beta, 0.99)} if momentum else {"lr": lr}
        return [dict(options) for _ in optimizer.param_groups]

    return after


def _positive(value: Any) -> int:
    number = as_int(value)
    if number < 1:
        raise ValueError(f"a step size of {number}")
    return number


SCHEDULES: Mapping[str, Callable[..., Callable[[int], Options]]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "LRRangeTest": _range_test,
    "OneCycle": _one_cycle,
}
"""By name: (optimizer, **params of the config) -> after."""
