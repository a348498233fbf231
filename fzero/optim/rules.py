"""Update rules: a formula that torch.func can differentiate, and a kernel that is fast.

Both compute the same numbers up to rounding (a test holds them together). The kernel works in
place on lists of flat tensors that the caller owns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from fzero.context.current_rank import has_no_values, is_planned, kind_of
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.codec import mixed
from fzero.state.stateful_update import Piece

Options = dict[str, Any]  # lr, weight_decay, betas, ... of one set of leaves
Slots = tuple[list[Tensor], ...]  # the rule's moments, each a list parallel to the parameters


class Scaled(NamedTuple):
    """What a fused kernel is told of a loss scale: as `torch.amp.GradScaler` tells it."""

    found_inf: Tensor | None = None  # [] fp32: where it is 1 the kernel writes nothing
    grad_scale: Tensor | None = None  # [] fp32: the kernel divides gradients by it, where they are


UNSCALED = Scaled()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One update rule.

    formula(p, g, moments, count, options) -> (p', moments'), elementwise and pure;
    kernel(ps, gs, slots, count, options, scaled) does the same in place on lists.
    `count` is the number of this update, from 1; a tensor if there is a `found_inf`. The kernel
    also takes a list of them, one for each tensor.
    """

    name: str
    moments: tuple[str, ...]
    formula: Callable[
        [Tensor, Tensor, tuple[Tensor, ...], Any, Options], tuple[Tensor, tuple[Tensor, ...]]
    ]
    kernel: Callable[[list[Tensor], list[Tensor], Slots, Any, Options, Scaled], None]
    # Whether the kernel takes `found_inf` for these tensors.
    skips: Callable[[Sequence[Tensor]], bool]


def _sgd_formula(
    p: Tensor, g: Tensor, moments: tuple[Tensor, ...], count: Any, o: Options
) -> tuple[Tensor, tuple[Tensor, ...]]:
    g = g + o["weight_decay"] * p if o["weight_decay"] else g
    if not o["momentum"]:
        return p - o["lr"] * g, moments
    buf = o["momentum"] * moments[0] + g
    step = g + o["momentum"] * buf if o["nesterov"] else buf
    return p - o["lr"] * step, (buf,)


def _sgd_kernel(
    ps: list[Tensor], gs: list[Tensor], slots: Slots, count: Any, o: Options, scaled: Scaled
) -> None:
    torch_sgd(
        ps,
        gs,
        list(slots[0]) if o["momentum"] else [None] * len(ps),
        weight_decay=o["weight_decay"],
        momentum=o["momentum"],
        lr=o["lr"],
        dampening=0.0,
        nesterov=o["nesterov"],
        maximize=False,
        fused=sgd_fuses(ps),
        found_inf=scaled.found_inf,
        grad_scale=scaled.grad_scale,
    )


def _adam_formula(
    p: Tensor, g: Tensor, moments: tuple[Tensor, ...], count: Any, o: Options
) -> tuple[Tensor, tuple[Tensor, ...]]:
    b1, b2 = o["betas"]
    if o["weight_decay"]:
        if o["decoupled"]:
            p = p * (1 - o["lr"] * o["weight_decay"])
        else:
            g = g + o["weight_decay"] * p
    m = b1 * moments[0] + (1 - b1) * g
    v = b2 * moments[1] + (1 - b2) * g * g
    step = m / (1 - b1**count)
    # sqrt has no derivative at 0; where v is 0 so is the step, and its derivative is 0 too.
    safe = torch.where(v > 0, v, torch.ones_like(v))
    root = torch.where(v > 0, (safe / (1 - b2**count)).sqrt(), torch.zeros_like(v))
    return p - o["lr"] * step / (root + o["eps"]), (m, v)


def _adam_kernel(
    ps: list[Tensor], gs: list[Tensor], slots: Slots, count: Any, o: Options, scaled: Scaled
) -> None:
    run = torch_adamw if o["decoupled"] else torch_adam
    run(
        ps,
        gs,
        list(slots[0]),
        list(slots[1]),
        [],
        _steps_before(count, ps),
        amsgrad=False,
        beta1=o["betas"][0],
        beta2=o["betas"][1],
        lr=o["lr"],
        weight_decay=o["weight_decay"],
        eps=o["eps"],
        maximize=False,
        fused=True,
        found_inf=scaled.found_inf,
        grad_scale=scaled.grad_scale,
    )


def _steps_before(count: Any, ps: Sequence[Tensor]) -> list[Tensor]:
    """A counter of its own for each tensor: the kernel counts in place."""
    if isinstance(count, list):
        pairs = zip(count, ps, strict=True)
        return [step for one, p in pairs for step in _steps_before(one, [p])]
    if isinstance(count, Tensor):
        before = (count - 1).to(torch.float32).expand(len(ps)).clone()
        return [x.to(p.device) for x, p in zip(before.unbind(), ps, strict=True)]
    wide = torch.promote_types(torch.get_default_dtype(), torch.float32)  # as torch.optim counts
    # Made on the device: a copy to a GPU would wait.
    return [torch.full((), count - 1.0, dtype=wide, device=p.device) for p in ps]


def _lion_formula(
    p: Tensor, g: Tensor, moments: tuple[Tensor, ...], count: Any, o: Options
) -> tuple[Tensor, tuple[Tensor, ...]]:
    b1, b2 = o["betas"]
    step = torch.sign(b1 * moments[0] + (1 - b1) * g)
    p = p * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * step
    return p, (b2 * moments[0] + (1 - b2) * g,)


def _lion_kernel(
    ps: list[Tensor], gs: list[Tensor], slots: Slots, count: Any, o: Options, _: Scaled
) -> None:
    b1, b2 = o["betas"]
    ms = list(slots[0])
    steps = torch._foreach_mul(ms, b1)
    torch._foreach_add_(steps, gs, alpha=1 - b1)
    torch._foreach_sign_(steps)
    torch._foreach_mul_(ps, 1 - o["lr"] * o["weight_decay"])
    torch._foreach_add_(ps, steps, alpha=-o["lr"])
    torch._foreach_mul_(ms, b2)
    torch._foreach_add_(ms, gs, alpha=1 - b2)


def sgd_fuses(tensors: Sequence[Tensor]) -> bool:
    """Whether torch's fused SGD is right for these tensors.

    On a CPU it is not for 16-bit ones: up to torch 2.13 it leaves most elements as they are, and
    takes the momentum from other memory (pytorch issue 191763). For tensors without values torch
    has no such kernel; a plan brings one.
    """
    if any(map(has_no_values, tensors)) and not is_planned():
        return False
    return not any(t.dtype in SIXTEEN_BIT and kind_of(t.device) == "cpu" for t in tensors)


def _always(tensors: Sequence[Tensor]) -> bool:
    return True


def never(tensors: Sequence[Tensor]) -> bool:
    """Return False: of a rule without such a kernel. It has a name, by which a rule is pickled."""
    return False


def has_kernel(tensors: Sequence[Tensor]) -> bool:
    """Whether torch's fused kernels take these tensors."""
    supported = _get_fused_kernels_supported_devices()
    return all(kind_of(t.device) in supported for t in tensors)


SGD = Rule(name="sgd", moments=(), formula=_sgd_formula, kernel=_sgd_kernel, skips=sgd_fuses)
MOMENTUM = replace(SGD, moments=("momentum_buffer",))
ADAM = Rule(
    name="adam",
    moments=("exp_avg", "exp_avg_sq"),
    formula=_adam_formula,
    kernel=_adam_kernel,
    skips=_always,
)
LION = Rule(  # there is no fused Lion
    name="lion",
    moments=("exp_avg",),
    formula=_lion_formula,
    kernel=_lion_kernel,
    skips=never,
)


def noise_of(pieces: Sequence[Piece], like: Tensor, count: Tensor) -> Tensor:
    """Return [n] int32 for a flat like `like`: a hash of each element's place, and of `count`.

    The place of an element is its leaf's path and its number in it. pieces: those of this flat.
    Padding has any noise: zero is rounded to zero.
    """
    noise = torch.zeros(like.numel(), dtype=torch.int32, device=like.device)
    for _, leaf, start, stop, first in pieces:
        key = zlib.crc32(leaf.path.encode()) & 0x7FFFFFFF
        noise[start:stop] = torch.arange(
            first, first + stop - start, dtype=torch.int32, device=like.device
        )
        noise[start:stop] += key
    step = count.to(like.device, torch.int32)
    return mixed(mixed(noise) ^ (step * 0x2545F491))
