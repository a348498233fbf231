"""The device "sim" in this process: `load()` builds it at first use and registers it with torch.

A process that has loaded it has an accelerator until it ends, so tests do it in processes of their
own (conftest.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "fzero_sim"
DEVICES = 2  # kCount of sim.cpp
PRIVATE_USE_1 = 20  # c10::DeviceType
SOURCE = Path(__file__).with_name("sim.cpp")
FLAGS = ["-O0", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D"]


def missing() -> str:
    """Return why the device cannot be built here, or ""."""
    if torch.__version__ < "2.13":  # it is built there too, and 5 of 116 tests fail
        return f"the simulated device is for torch 2.13 and newer, and this is {torch.__version__}"
    if shutil.which("g++") is None and shutil.which("c++") is None:
        return "the simulated device needs a C++ compiler, and there is none"
    if shutil.which("ninja") is None:
        return "the simulated device needs ninja to be built, and there is none"
    return ""


def built() -> Path:
    """Build the extension unless it is there already, by a key of all that it depends on.

    In a process of its own, as this one may stay without the device.
    """
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "building", "w") as file:  # of several processes one builds
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            (folder / "lock").unlink(missing_ok=True)  # of a build that was killed
            options = {"extra_cflags": FLAGS, "build_directory": str(folder)}
            call = f"load({NAME!r}, [{str(SOURCE)!r}], **{options!r})"
            script = f"from torch.utils.cpp_extension import load; {call}"
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the simulated device was not built:\n{done.stderr[-4000:]}")
            (folder / "done").touch()
    return folder / f"{NAME}.so"


def _folder() -> Path:
    from torch.utils import cpp_extension

    told = f"{torch.__version__} {torch.__file__} {sys.version} {FLAGS}".encode()
    key = hashlib.sha256(told + SOURCE.read_bytes()).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root) / f"{NAME}_{key}"


@functools.cache
def load() -> Any:
    """Register "sim" with torch in this process; return the extension."""
    from tests.device import backend

    spec: Any = importlib.util.spec_from_file_location(NAME, built())
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("simccl", backend.create, devices=["sim"])
    return extension


def _module(extension: Any) -> types.ModuleType:
    """Make `torch.sim`, as `torch.cuda` and `torch.xpu` are."""
    accelerator = torch.accelerator
    generators = tuple(extension.default_generator(i) for i in range(DEVICES))

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return accelerator.current_device_index() if found is None else found

    @contextmanager
    def device(chosen: Any) -> Iterator[None]:
        with accelerator.device_index(index(chosen)):
            yield

    @contextmanager
    def stream(chosen: torch.Stream | None) -> Iterator[None]:
        with contextlib.nullcontext() if chosen is None else chosen:
            yield

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def of(name: str) -> Callable[..., Any]:
        return lambda device=None: getattr(accelerator, name)(index(device))

    module: Any = types.ModuleType("torch.sim")
    vars(module).update(
        Stream=torch.Stream,
        Event=torch.Event,
        device=device,
        stream=stream,
        default_generators=generators,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,  # else torch's checkpoints repeat no random numbers
        is_bf16_supported=lambda: True,
        device_count=lambda: DEVICES,
        current_device=accelerator.current_device_index,
        set_device=lambda device: accelerator.set_device_index(index(device)),
        get_device_name=lambda device=None: f"simulated device {index(device)}",
        current_stream=of("current_stream"),
        default_stream=lambda device=None: torch.Stream(
            stream_id=0, device_index=index(device), device_type=PRIVATE_USE_1
        ),
        set_stream=accelerator.set_stream,
        synchronize=of("synchronize"),
        empty_cache=accelerator.empty_cache,
        memory_stats=of("memory_stats"),
        memory_allocated=of("memory_allocated"),
        max_memory_allocated=of("max_memory_allocated"),
        memory_reserved=of("memory_reserved"),
        max_memory_reserved=of("max_memory_reserved"),
        reset_peak_memory_stats=of("reset_peak_memory_stats"),
        mem_get_info=of("get_memory_info"),
        get_rng_state=lambda device=None: generators[index(device)].get_state(),
        set_rng_state=lambda state, device=None: generators[index(device)].set_state(state),
        get_rng_state_all=lambda: [generator.get_state() for generator in generators],
        manual_seed=lambda seed: generators[index()].manual_seed(seed),
        manual_seed_all=manual_seed_all,
        initial_seed=lambda: generators[index()].initial_seed(),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        _is_in_bad_fork=lambda: False,
    )
    return module
