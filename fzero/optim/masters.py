"""fp32 masters of 16-bit flats: which flats have one, what is stepped, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.optim._rules import Scaled
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.setup import MASTERS
from fzero.state.stateful_update import Place as Place
from fzero.state.train import TrainState


def stay(x: Tensor) -> Tensor:
    """Return `x`: it lives where it was made."""
    return x


def make_masters(
    flats: Sequence[Tensor], wanted: Sequence[bool], place: Place = stay
) -> tuple[Tensor, ...]:
    """Return an fp32 copy of each 16-bit flat where it is wanted; of the others, empty."""
    return tuple(
        place(p.detach().float()) if want and p.dtype in SIXTEEN_BIT else p.new_empty(0)
        for p, want in zip(flats, wanted, strict=True)
    )


def masters_of(state: TrainState) -> Sequence[Tensor]:
    """Return the masters that a state holds, parallel to the groups that learn; () without any."""
    return state.setup.optimizer.slots(state.optimizer).get(MASTERS, ())


def work_tensors(flats: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """Return what the rule steps: the master of each flat that has one, else the flat itself."""
    return [m if m.numel() else p for p, m in zip(flats, masters, strict=True)]


def as_stepped(
    grads: Sequence[Tensor], work: Sequence[Tensor], scaled: Scaled, *, owned: bool
) -> tuple[list[Tensor], Scaled]:
    """Return gradients in the dtypes of what is stepped, and what the kernel has still to do.

    A kernel that divides by `grad_scale` writes to the gradients, so that those which are not
    `owned` are copied. Gradients that are stepped in 16 bits are divided here: those that fit into
    their own dtype with the scale on them may not fit into the narrower one.
    """
    scale = scaled.grad_scale
    if scale is not None and any(w.dtype in SIXTEEN_BIT for w in work):
        return [unscaled(g, scale).to(w.dtype) for g, w in zip(grads, work, strict=True)], Scaled(
            found_inf=scaled.found_inf
        )
    copies = scale is not None and not owned
    return [g.to(w.dtype, copy=copies) for g, w in zip(grads, work, strict=True)], scaled


def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Return gradient / scale, in fp32 or wider: 16 bits may not hold it."""
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide * scale.double().reciprocal().to(wide.dtype)
