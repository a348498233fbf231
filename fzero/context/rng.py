"""torch's default generators: set by a seed while a block runs, and put back afterwards.

Those of Python and of NumPy are the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.optim.optimizer as optimizer
from torch._functorch import eager_transforms
from torch.autograd import graph
from torch.nn.modules import module
from torch.nn.utils import parametrize
from torch.utils import _device, _python_dispatch, checkpoint

from fzero.context.device import accelerator, current_device, generators_on


def of_devices(device: torch.device | None = None) -> list[torch.Generator]:
    """Return the default generators of the CPU and of a device; without one, of all devices.

    Before an accelerator is in use its devices may have no generators, as those of CUDA.
    """
    kind = accelerator() if device is None else device.type
    there = () if kind in (None, "cpu", "meta") else generators_on(kind)
    if there and device is not None:
        index = current_device(device.type).index if device.index is None else device.index
        there = (there[index],)
    return [torch.default_generator, *there]


@contextmanager
def kept(generators: Sequence[torch.Generator]) -> Generator[None, None, None]:
    """Put generators back to their states when the block ends."""
    before = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


@contextmanager
def at_states(
    states: Sequence[tuple[torch.Generator, torch.Tensor]],
) -> Generator[None, None, None]:
    """Set generators to states; put them back when the block ends."""
    with kept([generator for generator, _ in states]):
        for generator, state in states:
            generator.set_state(state)
        yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None, None, None]:
    """Set the generators of the CPU and of `device` by a seed; put them back when the block ends.

    That of the CPU looks at the lower 32 bits of a seed, as `torch.manual_seed` has it.
    """
    generators = of_devices(device)
    with kept(generators):
        for generator in generators:
            generator.manual_seed(seed)
        yield


# torch's process-wide state that each virtual rank needs for itself, swapped at each turn.
#
# Ranks take turns: what one of them has set when it waits in a collective is taken away, and put
# back when it goes on. Modes that torch keeps for each thread are in `context/modes`.

_NAMES: tuple[tuple[Any, str], ...] = (
    (eager_transforms, "JVP_NESTING"),
    # parametrize.cached(): keyed by id(module), which a module made later may have again
    (parametrize, "_cache_enabled"),
    (parametrize, "_cache"),
    (checkpoint, "_checkpoint_debug_enabled"),
    (checkpoint, "_enable_checkpoint_early_stop"),
    (graph, "_allow_mutation_on_saved_tensors_enabled"),
    (_device, "CURRENT_DEVICE"),
    (_python_dispatch, "_is_in_torch_dispatch_mode"),
    (_python_dispatch, "_is_in_non_infra_torch_dispatch_mode"),
    (module, "_global_is_full_backward_hook"),
)
"""Module-level names of torch's that are assigned to."""

_TABLES: tuple[dict[Any, Any], ...] = (
    module._global_backward_pre_hooks,
    module._global_backward_hooks,
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
    module._global_forward_hooks_always_called,
    module._global_forward_hooks_with_kwargs,
    optimizer._global_optimizer_pre_hooks,
    optimizer._global_optimizer_post_hooks,
)
"""Tables of hooks, to which handles refer: they stay, and what is in them changes.

Those of registrations are not among them: a rank pauses inside of such a hook, under torch's loop
over the table, which must not change then; `sharded_init` serves all ranks by one.
"""


_C: Any = torch._C
_warns, _checks_nan = _C._get_deterministic_algorithms_warn_only, torch.is_anomaly_check_nan_enabled


def _set_deterministic(on: bool, warns: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=warns)


# What reads a setting is a function of torch's C++ where there is one: each turn of each rank calls
# all of them. For those of attention and CuDNN torch has no other names than those by CUDA.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_C._get_deterministic_algorithms, lambda on: _set_deterministic(on, _warns())),
    (_warns, lambda warns: _set_deterministic(_C._get_deterministic_algorithms(), warns)),
    (torch.is_anomaly_enabled, lambda on: torch.set_anomaly_enabled(on, _checks_nan())),
    (_checks_nan, lambda nan: torch.set_anomaly_enabled(torch.is_anomaly_enabled(), nan)),
    (_C._get_float32_matmul_precision, _C._set_float32_matmul_precision),
    (_C._get_math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (_C._get_flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (_C._get_mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (_C._get_cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._check_sparse_tensor_invariants, _C._set_check_sparse_tensor_invariants),
)
"""Settings of the process: how to read and to set them."""

_READ = tuple(read for read, _ in _SETTINGS)


_latest: list[TorchGlobals] = []
"""What was read last, when a turn ended: until the next one begins nobody changes it."""


class TorchGlobals(NamedTuple):
    """What one rank has, and the random states of the CPU and of the CUDA devices in use."""

    rng: tuple[torch.Tensor, ...]
    names: tuple[Any, ...]
    tables: tuple[dict[Any, Any] | None, ...]  # None: empty
    settings: tuple[Any, ...]

    @staticmethod
    def take() -> TorchGlobals:
        """Capture the current state."""
        taken = TorchGlobals(
            tuple([generator.get_state() for generator in of_devices()]),
            tuple([getattr(where, name) for where, name in _NAMES]),
            tuple([dict(table) if table else None for table in _TABLES]),
            tuple([read() for read in _READ]),
        )
        _latest[:] = [taken]
        return taken

    def put(self) -> None:
        """Let it be so again. What is as it was read last is not set."""
        for generator, state in zip(of_devices(), self.rng, strict=False):
            generator.set_state(state)
        (now,) = _latest
        for place, value, other in zip(_NAMES, self.names, now.names, strict=True):
            if value is not other:
                setattr(*place, value)
        if self.tables != now.tables:
            for table, content in zip(_TABLES, self.tables, strict=True):
                table.clear()
                table.update(content or {})
        if self.settings != now.settings:
            for (read, change), value in zip(_SETTINGS, self.settings, strict=True):
                if read() != value:
                    change(value)
        _latest[:] = [self]

    def of_ranks(self, size: int, nesting: int) -> list[TorchGlobals]:
        """The same for each of some ranks, with a cache of its own."""
        own = (
            tuple(dict(x) if isinstance(x, dict) else x for x in self.names) for _ in range(size)
        )
        return [self._replace(names=names).with_jvp_nesting(nesting) for names in own]

    def with_jvp_nesting(self, nesting: int) -> TorchGlobals:
        """The same at another nesting of torch.func.jvp, which is the first of the names."""
        return self._replace(names=(nesting, *self.names[1:]))
