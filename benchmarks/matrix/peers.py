"""DDP and FSDP2 with the calls that `fzero.certify` makes of an engine.

Each is used as its documentation says: `no_sync`, `set_requires_gradient_sync`,
`torch.nn.utils.clip_grad_norm_`, `MixedPrecisionPolicy`. What a peer does not have raises
NotImplementedError, which makes the cell "not supported".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class Peer:
    """What both have in common: the count of backwards, autocast, clipping, the update."""

    def __init__(self, module: Any, optimizer: Any, *, backwards: int, **options: Any) -> None:
        """Take the module as its framework made it."""
        if options.get("gradient_accumulation_steps", 1) > 1:
            raise NotImplementedError("no accumulation of its own: the loop divides by N")
        self.module, self.backwards, self.count = module, backwards, 0
        self.learning = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.learning)
        self.max_norm, self.autocast = options.get("max_norm"), options.get("autocast")
        self.once, self.norm = False, None

    def __call__(self, *args: Any) -> Any:
        """Run the forward, in autocast if there is one."""
        self.count += 1
        self.synchronize(not self.once or self.count == self.backwards)
        low = self.autocast
        with torch.autocast("cpu", dtype=low) if low else nullcontext():
            return self.module(*args)

    def synchronize(self, now: bool) -> None:
        """Say whether the coming backward is to reduce gradients."""
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        """Run the usual backward."""
        loss.backward()

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Reduce in the last backward alone."""
        self.once = True
        yield
        self.once = False

    @property
    def global_grad_norm(self) -> Tensor | None:
        """Of what is held now; of the last update if that clipped."""
        if self.max_norm is not None:
            return self.norm
        grads = [p.grad for p in self.learning if p.grad is not None]
        return _whole(torch.nn.utils.get_total_norm(grads))

    def step(self) -> None:
        """Clip, update, clear."""
        if self.max_norm is not None:
            self.norm = _whole(torch.nn.utils.clip_grad_norm_(self.learning, self.max_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count = 0

    def full_parameters(self) -> dict[str, Tensor]:
        """Whole values by path."""
        named = self.module.named_parameters()
        return {path.removeprefix("module."): _whole(p.detach()) for path, p in named}


class Ddp(Peer):
    """DistributedDataParallel; `find_unused_parameters`, as the model has some."""

    def __init__(self, module: nn.Module, optimizer: Any, *, stage: int, **options: Any) -> None:
        """Wrap the module."""
        if stage:
            raise NotImplementedError("stage 0 only")
        if next(module.parameters()).dtype in SIXTEEN_BIT:
            raise NotImplementedError("no fp32 masters of 16-bit parameters")
        wrapped = DistributedDataParallel(module, find_unused_parameters=True)
        super().__init__(wrapped, optimizer, **options)
        self.silent: Any = nullcontext()

    def synchronize(self, now: bool) -> None:
        """Forward and backward of all but the last are inside of `no_sync`."""
        self.silent = nullcontext() if now else self.module.no_sync()
        self.silent.__enter__()

    def backward(self, loss: Tensor) -> None:
        """Run the backward, and leave `no_sync`."""
        loss.backward()
        self.silent.__exit__(None, None, None)


class Fsdp2(Peer):
    """`fully_shard` on the layer that has parameters of its own, and on the root."""

    def __init__(self, module: nn.Module, optimizer: Any, *, stage: int, **options: Any) -> None:
        """Shard the module."""
        if stage < 2:
            raise NotImplementedError("stages 2 and 3 only")
        policy = MixedPrecisionPolicy()
        if next(module.parameters()).dtype in SIXTEEN_BIT:  # its masters are the parameters
            low = torch.bfloat16
            module, policy = module.float(), MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
        for part in (module.get_submodule("mix"), module):  # the tied embedding is the root's
            fully_shard(part, mp_policy=policy, reshard_after_forward=stage == 3)
        super().__init__(module, optimizer, **options)

    def synchronize(self, now: bool) -> None:
        """`set_requires_gradient_sync`, the no_sync of FSDP2."""
        self.module.set_requires_gradient_sync(now)


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x.clone()
