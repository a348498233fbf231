"""DeepSpeed with the calls that `fzero.certify` makes of an engine."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def is_installed() -> bool:
    """Whether `import deepspeed` can work; it is in the `bench` extra."""
    return importlib.util.find_spec("deepspeed") is not None


class DeepSpeed:
    """`deepspeed.initialize` with a client optimizer; what its config has is in the config."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        *,
        stage: int,
        backwards: int,
        window: str,
        **options: Any,
    ) -> None:
        """Make the engine."""
        dtype, low = next(module.parameters()).dtype, options.get("autocast")
        if dtype is torch.float64:  # and stage 0 refuses to reduce such gradients
            raise NotImplementedError("ZeRO keeps masters in fp32; no gradients in fp64")
        if window == "coalesce" and not stage:
            raise NotImplementedError("coalesce_grad_reduction is of stages 1 to 3")
        deepspeed = _imported()
        self.window, self.backwards, self.count, self.stage = window, backwards, 0, stage
        self.clips, self.stepped, self.low = options.get("max_norm") is not None, False, low
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1 if window == "coalesce" else backwards,
            "gradient_clipping": options.get("max_norm") or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000},
            "bf16": {"enabled": dtype is torch.bfloat16},
        }
        learning = [p for p in module.parameters() if p.requires_grad]
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer(learning), config=config
        )
        self.utils = deepspeed.utils
        self.gathered = deepspeed.zero.GatheredParameters

    def __call__(self, *args: Any) -> Any:
        """Run the forward, in autocast if there is one."""
        with torch.autocast("cpu", dtype=self.low) if self.low else nullcontext():
            return self.engine(*args)

    def backward(self, loss: Tensor) -> None:
        """Run its backward. Its step counts to gradient_accumulation_steps."""
        self.engine.backward(loss, scale_wrt_gas=self.window == "accumulate")
        self.count += 1
        if self.window == "each" and self.count < self.backwards:
            self.engine.step()

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """Reduce once."""
        with self.engine.coalesce_grad_reduction():
            yield

    @property
    def global_grad_norm(self) -> Any:
        """Of the last update; before one it tells none."""
        return self.engine.get_global_grad_norm() if self.clips else None

    def step(self) -> None:
        """Update."""
        self.engine.step()
        if self.window != "accumulate":
            self.count = 0

    def full_parameters(self) -> dict[str, Tensor]:
        """Whole values by path; of what learns, the fp32 masters where there are."""
        found = {}
        for path, p in self.engine.module.named_parameters():
            master = self.utils.safe_get_full_fp32_param(p) if p.requires_grad else None
            if master is None:
                with self.gathered([p], enabled=self.stage == 3):
                    master = p.detach()
                    found[path] = master.clone()
            else:
                found[path] = master.detach().clone()
        return found

    def close(self) -> None:
        """Take off its hooks."""
        self.engine.destroy()


def _imported() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # A shared-memory kernel that only inference uses, compiled for a minute at first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    return deepspeed
