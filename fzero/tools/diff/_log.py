"""`Log`, what a training loop tells `diff`: it is run as it stands, and says what it has made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.errors import LayoutError
from fzero.tools.compare import perturbed, signs_like
from fzero.tools.diff._difference import GRADIENT, LOSS, START, UPDATE


class LogEntry(NamedTuple):
    """What a loop has told once: of a parameter's path, or of "", its values."""

    kind: str
    values: dict[str, Tensor]


class Log:
    """What a training loop tells `fzero.diff`, in its order: copies, and nothing is changed.

    log.start(model)        the nn.Module, before an engine or an optimizer is made of it
    log.loss(loss)          of this rank
    log.gradients(model)    complete, before the update; of an engine: the engine
    log.parameters(model)   after the update; of an engine: the engine
    """

    def __init__(self, disturbance: float = 0.0) -> None:
        self.entries: list[LogEntry] = []
        self.order: dict[str, None] = {}  # of the gradients, as a backward has made them
        self._disturbance = disturbance

    def start(self, model: nn.Module) -> None:
        """Tell the parameters that the loop begins with.

        Call it once, first of all. One of the runs is made again from parameters that are changed
        by a few roundings, here and in place: so what rounding explains is measured.
        """
        if not isinstance(model, nn.Module):
            raise LayoutError(
                f"log.start got a {type(model).__name__}.",
                cause="an engine, whose parameters are sharded.",
                fix="give the nn.Module, before the engine is made of it.",
            )
        self._tell(START, dict(model.named_parameters()))
        source = torch.Generator().manual_seed(0)
        for path, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._made(path))
            if self._disturbance and p.is_floating_point():
                with torch.no_grad():
                    p.copy_(perturbed(p, self._disturbance, signs_like(p, source)))

    def loss(self, loss: Tensor) -> None:
        """Tell the loss of a backward, on this rank; compared is the mean over ranks."""
        self._tell(LOSS, {"": torch.as_tensor(loss)})

    def gradients(self, model: Any) -> None:
        """Tell all gradients: p.grad of a module, the full gradients of an engine (a collective).

        Where ranks have parts of a batch these are means over ranks, as an engine has them.
        """
        if hasattr(model, "full_gradients"):
            self._tell(GRADIENT, model.full_gradients())
        else:
            found = {path: p.grad for path, p in model.named_parameters()}
            self._tell(GRADIENT, {path: x for path, x in found.items() if x is not None})

    def parameters(self, model: Any) -> None:
        """Tell all parameters after an update: of an engine masters, if there are (a collective).

        It ends a step.
        """
        if hasattr(model, "full_parameters"):
            self._tell(UPDATE, model.full_parameters())
        else:
            self._tell(UPDATE, dict(model.named_parameters()))

    def _tell(self, kind: str, values: Mapping[str, Tensor]) -> None:
        if (kind == START) != (not self.entries):
            raise LayoutError(
                f"the loop tells {kind!r} of number {len(self.entries) + 1}.",
                cause="log.start(model) is missing, or was called twice.",
                fix="call log.start(model) once, before all else.",
            )
        copies = {path: x.detach().cpu().clone() for path, x in values.items()}
        self.entries.append(LogEntry(kind, copies))

    def _made(self, path: str) -> Any:
        return lambda _: self.order.setdefault(path)


def moments(entries: list[LogEntry]) -> Iterator[tuple[LogEntry, int, int]]:
    """Yield each entry with its step and its backward, from 1: a loss begins a backward."""
    step, backward = 1, 0
    for entry in entries:
        backward += entry.kind == LOSS
        yield entry, step, backward
        if entry.kind == UPDATE:
            step, backward = step + 1, 0
