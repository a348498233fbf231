"""DeepSpeed's learning-rate schedules, as `torch.optim.lr_scheduler.LambdaLR`.

Each is a function of the optimizer and of the params of a config. `t` is the number of updates so
far minus one: -1 before the first one. What a formula says of t is what the next update uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fzero.integrations.deepspeed._config_keys import as_bool, as_int, as_number

Rate = Callable[[int], float]


class ConfiguredLR(LambdaLR):
    """A LambdaLR whose functions give the rates themselves, with the names of DeepSpeed's.

    Args:
        optimizer: its param groups are written to.
        rates: t -> the learning rate, of each param group.
        betas: t -> the betas of all of them; None: they stay as they are.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rates: list[Rate],
        betas: Callable[[int], tuple[float, float]] | None = None,
    ) -> None:
        self._betas = betas
        super().__init__(optimizer, rates)

    @property
    def last_batch_iteration(self) -> int:
        """The t of what the param groups have now."""
        return self.last_epoch - 1

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each param group, which the next update uses."""
        return [rate(self.last_batch_iteration) for rate in self.lr_lambdas]

    def get_mom(self) -> list[Any]:
        """The momentum of each param group now, or its betas; 0 without both."""
        return momenta_of(self.optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Advance by one update, and set what the next one uses."""
        super().step(epoch)
        if self._betas is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = self._betas(self.last_batch_iteration)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates so far, as DeepSpeed's schedulers do."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of `state_dict()`."""
        self.last_epoch = state_dict["last_batch_iteration"]
        self._step_count = 2  # torch takes the first step of a new one for a mistake
        self.step()


def lrs_of(optimizer: Optimizer | None) -> list[float]:
    """Return the learning rate of each param group; none without an optimizer."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [float(group["lr"]) for group in groups]


def momenta_of(optimizer: Optimizer | None) -> list[Any]:
    """Return the momentum of each param group, or its betas; 0 without both."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [group.get("momentum", group.get("betas", 0.0)) for group in groups]


def warmup(
    optimizer: Optimizer,
    warmup_min_lr: Any = 0.0,
    warmup_max_lr: Any = None,
    warmup_num_steps: Any = 1000,
    warmup_type: Any = "log",
) -> ConfiguredLR:
    """From the floor to the peak, which is by default the optimizer's rate."""
    return warmup_decay(
        optimizer, None, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type
    )


def warmup_decay(
    optimizer: Optimizer,
    total_num_steps: Any,
    warmup_min_lr: Any = 0.0,
    warmup_max_lr: Any = 0.001,
    warmup_num_steps: Any = 1000,
    warmup_type: Any = "log",
) -> ConfiguredLR:
    """The same, and then linear to the floor, if there is an end: (total - t) / (total - steps)."""
    peak = lrs_of(optimizer)[0] if warmup_max_lr is None else warmup_max_lr
    steps, share = _warm_up(warmup_num_steps, warmup_type)
    total = None if total_num_steps is None else as_int(total_num_steps)

    def at(t: int) -> float:
        if total is None or t < steps:
            return share(t)
        return max(0.0, (total - t) / max(1, total - steps))

    ends = zip(_each(warmup_min_lr, optimizer), _each(peak, optimizer), strict=True)
    return ConfiguredLR(
        optimizer, [lambda t, low=low, high=high: low + (high - low) * at(t) for low, high in ends]
    )


def warmup_cosine(
    optimizer: Optimizer,
    total_num_steps: Any,
    warmup_min_ratio: Any = 0.0,
    warmup_num_steps: Any = 1000,
    cos_min_ratio: Any = 0.0001,
    warmup_type: Any = "log",
) -> ConfiguredLR:
    """0 before the first update, start + (1 - start) share, and then half a cosine to the floor.

    floor + (1 - floor) (1 + cos(pi s)) / 2 with s = (t - steps + 1) / (total - steps), at most 1.
    """
    total, (steps, share) = as_int(total_num_steps), _warm_up(warmup_num_steps, warmup_type)
    start, floor = as_number(warmup_min_ratio), as_number(cos_min_ratio)

    def ratio(t: int) -> float:
        if t < steps:
            return 0.0 if t < 0 else start + (1 - start) * share(t)
        s = min(1.0, (t - steps + 1) / max(1, total - steps))
        return floor + (1 - floor) * (1 + math.cos(math.pi * s)) / 2

    return ConfiguredLR(optimizer, [lambda t, lr=lr: lr * ratio(t) for lr in lrs_of(optimizer)])


def _warm_up(num_steps: Any, kind: Any) -> tuple[int, Rate]:
    """Return the number of warm-up steps, and the function t -> fraction of the peak.

    log(t + 1) / log(steps), or t / steps; 0 before the first update, 1 from `steps` on.
    """
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type is {kind!r}, not log or linear")
    steps = max(2, as_int(num_steps))

    def share(t: int) -> float:
        if not 0 <= t < steps:
            return float(t >= steps)
        return math.log(t + 1) / math.log(steps) if kind == "log" else t / steps

    return steps, share


def range_test(
    optimizer: Optimizer,
    lr_range_test_min_lr: Any = 0.001,
    lr_range_test_step_size: Any = 2000,
    lr_range_test_step_rate: Any = 1.0,
    lr_range_test_staircase: Any = False,
) -> ConfiguredLR:
    """From the least rate up without an end: min (1 + rate (t + 1) / size)."""
    size = _positive(lr_range_test_step_size)
    rate, stairs = as_number(lr_range_test_step_rate), as_bool(lr_range_test_staircase)

    def times(t: int) -> float:
        return 1 + rate * ((t + 1) // size if stairs else (t + 1) / size)

    lows = _each(lr_range_test_min_lr, optimizer)
    return ConfiguredLR(optimizer, [lambda t, low=low: low * times(t) for low in lows])


def one_cycle(
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
) -> ConfiguredLR:
    """Up and down once, with the first beta the other way; then a decay of both.

    As in DeepSpeed, the first update has the least of both.
    """
    first = _positive(cycle_first_step_size)
    second = first if cycle_second_step_size is None else _positive(cycle_second_step_size)
    up = as_int(cycle_first_stair_count)
    down = up if cycle_second_stair_count is None else as_int(cycle_second_stair_count)
    low, high = as_number(cycle_min_lr), as_number(cycle_max_lr)
    least, most = as_number(cycle_min_mom), as_number(cycle_max_mom)
    every, lr_rate = as_int(decay_step_size), as_number(decay_lr_rate)
    mom_rate = as_number(decay_mom_rate)

    def share(t: int) -> float:
        done, whole, count = t + 1, first, up
        if done > first:
            done, whole, count = (first + second - done) % (first + second), second, down
        return done * count // whole / count if count else done / whole

    def decay(t: int) -> float:
        return (t - first - second + 1) / every if every else 0.0

    def rate(t: int) -> float:
        if t < first + second:
            return low if t < 0 else low + (high - low) * share(t)
        return low / (1 + lr_rate * decay(t))

    def betas(t: int) -> tuple[float, float]:
        if t < first + second:
            return (least if t < 0 else most - (most - least) * share(t)), 0.99
        return most * (1 + mom_rate * decay(t)), 0.99

    moves = as_bool(cycle_momentum) and "betas" in optimizer.defaults
    groups = optimizer.param_groups
    return ConfiguredLR(optimizer, [rate] * len(groups), betas if moves else None)


def _each(value: Any, optimizer: Optimizer) -> list[float]:
    """Return a number for each param group, from a list of them or from one for all."""
    count = len(optimizer.param_groups)
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise ValueError(f"{values} has {len(values)} values for {count} param groups")
    return [as_number(x) for x in values]


def _positive(value: Any) -> int:
    number = as_int(value)
    if number < 1:
        raise ValueError(f"a step size of {number}")
    return number


SCHEDULES: Mapping[str, Callable[..., ConfiguredLR]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
    "LRRangeTest": range_test,
    "OneCycle": one_cycle,
}
"""DeepSpeed's schedules by name."""
