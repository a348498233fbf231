"""A DeepSpeed config, a dict or JSON, to checked values, and those to options of `Engine`.

read_config     nested sections -> {dotted key: value}; what is wrong is collected, so that one
                error lists all that is wrong in a config
with_autos      "auto" -> what the model and the other keys say
batch_of        two batch sizes -> the third
engine_options  values -> options of `Engine`, an error for each group of contradicting keys
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fzero.errors import LayoutError
from fzero.integrations.deepspeed._config_keys import (
    KEYS,
    KINDS,
    NAMES,
    RENAMED,
    Key,
    as_bool,
    converted,
    same,
)
from fzero.machine.codecs import cast, int8
from fzero.machine.placeholder import LazyParam
from fzero.ranks.mesh import Axis
from fzero.state import DynamicScale
from fzero.state.codec import Compress
from fzero.state.layout import LeafSpec, class_name
from fzero.state.scale import StaticScale
from fzero.state.setup import Autocast, Offload

Config = Mapping[str, Any] | str | os.PathLike[str]
Problem = str
"""A line of the error: a key, and what to do instead."""

_ZERO = "zero_optimization."
_SWITCHES: Mapping[str, tuple[str, Any]] = NAMES["switches"]
_SECTIONS = {
    ".".join(parts[:depth])
    for parts in (path.split(".") for path, key in KEYS.items() if key.use != "off")
    for depth in range(1, len(parts))
}


@dataclass(slots=True, kw_only=True)
class Reading:
    """A config while it is read.

    given: {key: value} of the keys that fzero uses.
    autos: keys whose value is still "auto".
    instead: the user's {key: value} for keys with "auto".
    harmless: {key: value} of those that have no effect.
    """

    given: dict[str, Any] = field(default_factory=dict)
    autos: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    instead: dict[str, Any] = field(default_factory=dict)
    harmless: dict[str, Any] = field(default_factory=dict)


def read_config(config: Config, auto: Mapping[str, Any] | None = None) -> Reading:
    """Return the values of `config` by dotted key, without those that are null.

    auto: {dotted key: value} for keys that say "auto".

    Raises `LayoutError` if there is nothing to read.

    Example:
        >>> found = read_config({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})
        >>> found.given, found.problems
        ({'zero_optimization.stage': 2, 'zero_optimization.reduce_bucket_size': 500000000}, [])
        >>> read_config({"steps_per_prnt": 1}).problems
        ['steps_per_prnt = 1: unknown (near: steps_per_print).']
    """
    reading = Reading(instead=dict(auto or {}))
    _walk(config if isinstance(config, Mapping) else _load(config), "", reading)
    reading.problems += [f'auto: the config has no {x} that is "auto".' for x in reading.instead]
    return reading


def _load(given: Any) -> Mapping[str, Any]:
    """Return the JSON object in a file, or in a base64 text, as launchers pass it."""
    if not isinstance(given, str | os.PathLike):
        raise LayoutError(
            f"config is a {type(given).__name__}.",
            cause="initialize() without config, or with an object of DeepSpeed.",
            fix="pass a dict, or the path of a JSON file; without either there is "
            "fzero.adapter.Engine(model, optimizer, stage=...).",
        )
    text: str | None = None
    with suppress(TypeError, ValueError):
        text = base64.urlsafe_b64decode(given).decode()  # type: ignore[arg-type]
    try:
        if text is None or not text.lstrip().startswith("{"):
            text = Path(given).read_text()
        loaded = json.loads(text, object_pairs_hook=_without_duplicates)
        if not isinstance(loaded, Mapping):
            raise ValueError(f"it has {loaded!r:.60}")
    except OSError as error:
        raise LayoutError(
            f"config file {str(given)!r:.200}: {error.strerror or error}.",
            cause="a path relative to another folder.",
            fix=f"give a path from here ({Path.cwd()}), or an absolute one.",
        ) from None
    except ValueError as error:  # of json, and of bytes that are not UTF-8
        raise LayoutError(
            f"config file {str(given)!r:.200} is no JSON object: {error}.",
            cause="a comment, a trailing comma, or another file.",
            fix="write plain JSON, { ... }, or pass a dict.",
        ) from None
    return loaded


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is there twice")
    return dict(pairs)


def _walk(section: Mapping[str, Any], at: str, reading: Reading) -> None:
    for name, value in section.items():
        written = f"{at}{name}"
        value = value.value if isinstance(value, Enum) else value  # of DeepSpeed: a word or number
        if "." in str(name):
            reading.problems.append(f"{written}: a name with a dot; write sections in sections.")
            continue
        path = RENAMED.get(written, written)
        if written in NAMES["renamed_switches"] and value is not None:
            with suppress(ValueError):
                value = "cpu" if as_bool(value) else "none"
        if path == "zero_optimization" and isinstance(value, bool):  # of old configs
            path, value = f"{path}.stage", int(value)
        if value == "auto":
            value = reading.instead.pop(path, value)
        said, key = written if written == path else f"{written} ({path})", KEYS.get(path)
        if value is None and (key or path in _SECTIONS):
            continue
        if path in _SECTIONS and isinstance(value, Mapping):
            switch, off = _SWITCHES.get(path, ("", None))
            seen = value.get(switch, off if isinstance(off, str) else None)
            if seen is None or not same(seen, off):  # of a section that is off no key is read
                _walk(value, f"{path}.", reading)
        elif path in _SECTIONS:
            reading.problems.append(f"{said} = {value!r}: give an object {{ ... }}.")
        elif key is None:
            known = ", ".join(_near(path)) or "nothing"
            reading.problems.append(f"{said} = {value!r:.60}: unknown (near: {known}).")
        elif value == "auto" and key.use != "harmless" and value != key.default:
            reading.autos.append(path)
        elif path in reading.given:
            reading.problems.append(f"{said} = {value!r}: it is there twice, by two names.")
        else:
            _take(key, said, value, reading)


def _take(key: Key, said: str, value: Any, reading: Reading) -> None:
    """Convert and store the value of one key, or note a problem."""
    if key.use in ("option", "read"):
        try:
            found = converted(key.kind, value)
        except (ValueError, TypeError, OverflowError):
            reading.problems.append(f"{said} = {value!r}: give {KINDS[key.kind][2]}.")
            return
        opens = key.kind == "mapping"
        reading.given[key.path] = _open(key.path, found, reading) if opens else found
    elif key.use == "harmless":
        reading.harmless[key.path] = value
    elif key.use == "refused" and not same(value, key.default):
        reading.problems.append(f"{said} = {value!r}: {key.says}.")
    elif key.use == "off":
        switch, off = key.default
        if not isinstance(value, Mapping) or (switch is None and value):
            reading.problems.append(f"{said} = {value!r:.60}: {key.says}.")
        elif switch is not None and not same(value.get(switch, off), off):
            reading.problems.append(f"{said}.{switch} = {value[switch]!r}: {key.says}.")


def _open(path: str, params: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """Return `params` without those that are null, or "auto", which are noted."""
    params_given = {}
    for name, value in params.items():
        at = f"{path}.{name}"
        if value == "auto":
            value = reading.instead.pop(at, value)
        if value == "auto":
            reading.autos.append(at)
        elif value is not None:
            params_given[str(name)] = value
    return params_given


def _near(path: str) -> list[str]:
    """Return known keys with a similar name, of any section; those of the same section first."""
    section, _, last = path.rpartition(".")
    if last in NAMES["near"]:
        return [NAMES["near"][last]]
    known = sorted([*KEYS, *_SECTIONS], key=lambda key: (key.rpartition(".")[0] != section, key))
    names = [key.rpartition(".")[2] for key in known]
    close = get_close_matches(last, dict.fromkeys(names), n=3)
    return [key for name in close for key, own in zip(known, names, strict=True) if own == name][:3]


def close_to(word: str, known: Iterable[str]) -> str:
    """Return known words that are close to a misspelt one, as text; "nothing" without any."""
    return NAMES["near"].get(word) or ", ".join(get_close_matches(word, known, n=3)) or "nothing"


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given`, completed with DeepSpeed's defaults."""
    return {key.path: key.default for key in KEYS.values() if key.kind} | dict(given)


def without_switch(given: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key of a section without its switch, such as "enabled"."""
    switches = {section: f"{section}.{switch}" for section, (switch, _) in _SWITCHES.items()}
    return [
        f"{path} without {switches[section]}: set it to true, or leave {section} out."
        for path in given
        if (section := path.rpartition(".")[0]) in switches and switches[section] not in given
    ]


def require_none(problems: Sequence[Problem], errors: Sequence[LayoutError]) -> None:
    """Raise one `LayoutError` that lists all problems and errors, if there are any."""
    if len(errors) == 1 and not problems:
        raise errors[0]
    if problems or errors:
        lines = list(problems)
        for error in errors:
            seen, *_, fix = str(error).removeprefix("config: ").splitlines()
            lines.append(f"{seen.removesuffix('.')}: {fix.removeprefix('Fix: ')}")
        raise LayoutError(
            "\n  ".join(["config: fzero cannot do what these keys say:", *lines]),
            cause="a config for DeepSpeed, or for the Hugging Face Trainer; no key is ignored.",
            fix="change each as said beside it; docs/deepspeed_config.md has every key.",
        )


# "auto", which Hugging Face's Trainer replaces before DeepSpeed reads a config.

_DTYPES = {"fp16.enabled": torch.float16, "bf16.enabled": torch.bfloat16}
_BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda size: size * size,
    "zero_optimization.stage3_prefetch_bucket_size": lambda size: size * size * 9 // 10,
    "zero_optimization.stage3_param_persistence_threshold": lambda size: 10 * size,
}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")


def with_autos(
    reading: Reading, model: nn.Module, *, skipped: tuple[str, ...] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of the config with each "auto" resolved, and a problem for each other one.

    known from the model        fp16.enabled, bf16.enabled: whether its parameters have that dtype;
                                bucket sizes and the persistence threshold: from
                                model.config.hidden_size, as the Trainer has them
    known from other keys       of the batch sizes two give the third; warmup_max_lr is the
                                optimizer's lr, and warmup_min_lr 0
    changes no number           what else is in zero_optimization: as if it was left out
    known to the user only      refused: give initialize(auto={key: value}), or write the value

    skipped: sections whose "auto" values are ignored.

    Example:
        >>> auto = Reading(autos=["bf16.enabled", "gradient_clipping"])
        >>> given, problems = with_autos(auto, nn.Linear(2, 2, dtype=torch.bfloat16))
        >>> given, problems[0].split(":")[0]
        ({'bf16.enabled': True}, 'gradient_clipping = "auto"')
    """
    given, problems = dict(reading.given), []
    config = getattr(model, "config", None)  # of a Hugging Face model, or of its text part
    text = getattr(config, "text_config", None)
    size = getattr(config, "hidden_size", None) or getattr(text, "hidden_size", None)
    learning = {p.dtype for p in model.parameters() if p.requires_grad}
    left_out = {*_BATCH, "scheduler.params.warmup_min_lr"}
    if all(given.get(path) is not None for path in _BATCH):
        left_out.add("gradient_accumulation_steps")
    for key in KEYS.values():  # whose default is what is done
        zero = key.path.startswith(_ZERO) and key.path != _ZERO + "stage"
        left_out |= {key.path} if zero or key.use == "refused" else set()
    for path in reading.autos:
        if path in _DTYPES:
            given[path] = learning == {_DTYPES[path]}
        elif path in _BY_HIDDEN_SIZE and size:
            given[path] = _BY_HIDDEN_SIZE[path](size)
        elif path == "scheduler.params.warmup_max_lr":
            given["scheduler.params"] = {**given["scheduler.params"], "warmup_max_lr": None}
        elif not (path.startswith(skipped) or path in left_out):
            problems.append(
                f'{path} = "auto": only its user knows the value; write it, or pass '
                f'initialize(auto={{"{path}": ...}}).'
            )
    return given, problems


# Batch sizes.


class Batch(NamedTuple):
    """train: samples of an update, on all ranks; micro: of a backward, on one; steps: backwards."""

    train: int | None
    micro: int | None
    steps: int | None  # backwards of an update; None: the config does not say, and it is 1


def batch_of(values: Mapping[str, Any], ranks: int) -> tuple[Batch, list[Problem]]:
    """Return the batch sizes, train = micro x steps x ranks, and a problem for each that is wrong.

    Example:
        >>> batch_of({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, 4)
        (Batch(train=24, micro=2, steps=3), [])
    """
    train, micro = (values.get(path) for path in _BATCH)
    steps = values.get("gradient_accumulation_steps")
    whole = (micro or 1) * (steps or 1) * ranks
    if train is None:
        return Batch(None if micro is None else whole, micro, steps), []
    known = micro is not None and steps is not None
    if (train != whole) if known else (train % whole != 0):
        seen = f"micro-batch size {micro or '?'} x accumulation {steps or '?'} x {ranks} ranks"
        is_not = "is not" if known else "is no multiple of"
        fix = f"make it {whole}" if known else f"make it a multiple of {whole}"
        return Batch(None, None, None), [
            f"train_batch_size = {train}: it {is_not} {seen} = {whole}; {fix}, or leave it out."
        ]
    if micro is None:
        return Batch(train, train // whole, steps), []
    return Batch(train, micro, steps or train // whole), []


def loader_of(
    data: Any,
    batch: Batch,
    axis: Axis,
    *,
    shuffle: bool = True,
    sampler: Any = None,
    **options: Any,
) -> DataLoader[Any]:
    """Return a loader of this rank's share of a dataset, shuffled, in micro-batches.

    sampler: in the place of the one that gives this rank its share. options: of the DataLoader.
    """
    if batch.micro is None:
        raise LayoutError(
            "training_data, and no batch size.",
            cause="a config without train_batch_size and train_micro_batch_size_per_gpu, or with "
            '"auto" for both.',
            fix="write a number for one of both, or make the loader yourself.",
        )
    if sampler is None and not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, num_replicas=axis.size, rank=axis.rank, shuffle=shuffle)
    return DataLoader(data, batch.micro, sampler=sampler, **options)


# Options of the engine.


def engine_options(
    values: Mapping[str, Any], model: nn.Module, batch: Batch
) -> tuple[dict[str, Any], list[LayoutError]]:
    """Return the options of `Engine`, and an error for each group of contradicting keys."""
    keys = [key for key in KEYS.values() if key.use == "option"]
    prescaled = values["prescale_gradients"]
    # DeepSpeed keeps gathered parameters for the backward if its two bounds allow it: the first
    # ones are used again after a forward and a backward of all the others.
    numel = sum(p.numel() for p in model.parameters())
    fits = numel <= values[_ZERO + "stage3_max_live_parameters"]
    fits = fits and 2 * numel <= values[_ZERO + "stage3_max_reuse_distance"]
    managed, steps = values["managed_gradient_accumulation"], batch.steps or 1
    options = {
        **{key.says: values[key.path] for key in keys if values[key.path] is not None},
        "stage": values[_ZERO + "stage"],
        "gradient_predivide_factor": values["gradient_predivide_factor"] if prescaled else 1.0,
        "leaf_modules": _leaf_modules(values, model),
        "reshard_after_forward": not fits,
        "micro_batches": steps,
        "average_micro_batches": steps > 1 or not (managed or batch.steps),
    }
    errors = []
    for part in (
        lambda: _dtypes(values, model),
        lambda: {"loss_scale": loss_scale(values)},
        lambda: {"autocast": autocast_of(values)},
        lambda: {"offload": _offload(values)},
        lambda: {"compress": _compress(values)},
    ):
        try:
            options |= part()
        except LayoutError as error:
            errors.append(error)
    return options, errors


def _leaf_modules(values: Mapping[str, Any], model: nn.Module) -> LeafSpec:
    """Return the leaf modules: named by the config, or marked by set_z3_leaf_modules."""
    marked = [name for name, part in model.named_modules() if getattr(part, "_z3_leaf", False)]
    classes = values[_ZERO + "leaf_module.classes"]
    if classes is None:  # DeepSpeed's default: here those of them that the model has
        here = {class_name(cls) for part in model.modules() for cls in type(part).__mro__}
        classes = tuple(name for name in NAMES["leaf_classes"] if name in here)
    return LeafSpec(
        classes=classes,
        names=(*(values[_ZERO + "leaf_module.names"] or ()), *marked),
        name_suffixes=values[_ZERO + "leaf_module.name_suffixes"] or (),
        granularity_threshold_numel=values[_ZERO + "stage3_module_granularity_threshold"],
    )


def _dtypes(values: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the options of `Engine` about dtypes, and its bucket size in bytes.

    Raises `LayoutError` for keys that contradict each other.
    """
    asked, low = values["data_types.param_dtype"], low_dtype(values)
    if asked is not None and asked is not (low or torch.float32):
        raise LayoutError(
            f"config: data_types.param_dtype = {asked} with fp16.enabled = "
            f"{values['fp16.enabled']}, bf16.enabled = {values['bf16.enabled']}.",
            cause="two keys for one thing.",
            fix="leave data_types.param_dtype out; bf16.enabled makes the parameters bf16.",
        )
    low_states = values["bf16.bf16_optimizer_states"]
    if low_states and not values["bf16.bf16_master_weights_and_grads"]:
        raise LayoutError(
            "config: bf16.bf16_optimizer_states = True with "
            "bf16.bf16_master_weights_and_grads = False.",
            cause="DeepSpeed has bf16 states only of bf16 masters.",
            fix="set both; or, with fp32 masters, leave both out and make the engine yourself: "
            "Engine(..., state_dtype=torch.bfloat16).",
        )
    without_masters = any(
        values[f"{name}.enabled"] and values[f"{name}.{name}_master_weights_and_grads"]
        for name in ("bf16", "fp16")
    )
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    buckets = [values[f"{_ZERO}{x}_bucket_size"] for x in ("reduce", "allgather")]
    return {
        "master_weights": not without_masters,
        "state_dtype": torch.float32 if without_masters and not low_states else None,
        "accumulate_dtype": values["data_types.grad_accum_dtype"] or low or widest,
        # 0: each parameter by itself
        "bucket_bytes": (low or widest).itemsize * max(1, min(buckets)),
    }


def low_dtype(values: Mapping[str, Any]) -> torch.dtype | None:
    """Return the 16-bit dtype to which parameters are converted; None to keep their dtypes.

    Raises `LayoutError` if the config asks for two.
    """
    if values["bf16.enabled"] and values["fp16.enabled"]:
        raise LayoutError(
            "config: bf16.enabled = True with fp16.enabled = True.",
            cause="two keys for one thing.",
            fix="set one of them.",
        )
    if values["fp16.enabled"]:
        return torch.float16
    return torch.bfloat16 if values["bf16.enabled"] else None


def loss_scale(values: Mapping[str, Any]) -> StaticScale | DynamicScale | None:
    """Return the loss scale: of fp16; 1 for bf16 that skips overflows; else None.

    Raises `LayoutError` for numbers out of range.

    Example:
        >>> given = {"fp16.enabled": True, "fp16.initial_scale_power": 4}
        >>> scale = loss_scale(with_defaults(given))
        >>> scale.init_scale, scale.growth_interval, scale.hysteresis, scale.min_scale
        (16.0, 1000, 2, 1.0)
    """
    if not values["fp16.enabled"]:
        skips = values["bf16.enabled"] and values["bf16.check_grad_overflow"]
        return StaticScale(1.0) if skips else None
    if values["fp16.loss_scale"]:
        return StaticScale(values["fp16.loss_scale"])
    return DynamicScale(
        init_scale=2.0 ** values["fp16.initial_scale_power"],
        growth_interval=values["fp16.loss_scale_window"],
        hysteresis=values["fp16.hysteresis"],
        min_scale=values["fp16.min_loss_scale"],
    )


def autocast_of(values: Mapping[str, Any]) -> Autocast | None:
    """Return the autocast of section torch_autocast; its default dtype is bfloat16.

    Raises `LayoutError` beside fp16 or bf16.

    Example:
        >>> autocast_of(with_defaults({"torch_autocast.enabled": True}))
        autocast(torch.bfloat16, default)
    """
    if not values["torch_autocast.enabled"]:
        return None
    if values["fp16.enabled"] or values["bf16.enabled"]:
        raise LayoutError(
            "config: torch_autocast.enabled beside fp16.enabled or bf16.enabled.",
            cause="two ways to compute in 16 bits; autocast wants parameters in fp32.",
            fix="set one of them.",
        )
    return Autocast(
        dtype=values["torch_autocast.dtype"] or torch.bfloat16,
        lower_precision_safe_modules=values["torch_autocast.lower_precision_safe_modules"],
    )


def _offload(values: Mapping[str, Any]) -> Offload:
    """Return what is offloaded: gradients go where the optimizer's states go, as in DeepSpeed."""
    sections = ("offload_optimizer", "offload_param")
    states, params = (values[f"{_ZERO}{name}.device"] for name in sections)
    if params is not None and values[_ZERO + "stage"] != 3:
        raise LayoutError(
            f"config: {_ZERO}offload_param at stage {values[_ZERO + 'stage']}.",
            cause="below stage 3 every rank computes with whole parameters of its own.",
            fix="use stage 3, or leave offload_param out.",
        )
    paths = {
        values[f"{_ZERO}{name}.nvme_path"]
        for name, home in zip(sections, (states, params), strict=True)
        if home == "disk"
    }
    if len(paths) > 1 or None in paths:
        raise LayoutError(
            f"config: nvme_path of {' and '.join(_ZERO + name for name in sections)}: {paths}.",
            cause="device = nvme without a path, or with two.",
            fix="give both sections the same nvme_path: a folder on a disk of each machine.",
        )
    folder = next(iter(paths), None)
    return Offload(optimizer=states, gradients=states, params=params, folder=folder)


def _compress(values: Mapping[str, Any]) -> Compress | None:
    """Return what crosses ranks encoded: in another dtype, or as ZeRO++'s int8 blocks."""
    dtype = values["communication_data_type"]
    weights, blocks = (values[f"{_ZERO}zero_quantized_{name}"] for name in ("weights", "gradients"))
    if dtype is not None and blocks:
        raise LayoutError(
            f"config: communication_data_type = {dtype} and {_ZERO}zero_quantized_gradients.",
            cause="two keys for what is on the wire.",
            fix="leave one of them out.",
        )
    gradients = int8() if blocks else None if dtype is None else cast(dtype)
    parameters = int8() if weights else None
    either = gradients is not None or parameters is not None
    return Compress(gradients=gradients, parameters=parameters) if either else None


@torch.no_grad()
def convert(model: nn.Module, values: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Convert parameters and buffers to the dtypes of the config; shared memory stays shared.

    Returns (converted tensor, its data before) pairs. Raises `LayoutError` before anything is
    converted, if parameters must be, and are sharded already.
    """
    low = low_dtype(values)
    for path, p in model.named_parameters() if low is not None else ():
        if isinstance(p, LazyParam) and p.is_floating_point() and p.dtype is not low:
            name = "fp16.enabled" if low is torch.float16 else "bf16.enabled"
            raise LayoutError(
                f"config: {name}, and {path} is {p.dtype}, made under sharded_init.",
                cause="its parameters are sharded already, in the dtype that they were made in.",
                fix=f"make the model under sharded_init(dtype={low}).",
            )
    originals = []
    for tensors, dtype in (
        (list(model.parameters()), low),
        (list(model.buffers()), values["data_types.buffer_dtype"]),
    ):
        made: dict[Any, Tensor] = {}
        for x in tensors if dtype is not None else ():
            if x.is_floating_point() and x.dtype is not dtype:
                originals.append((x, x.data))
                x.grad = None
                key = (x.data_ptr(), x.shape, x.stride())
                x.data = made.setdefault(key, x.data.to(dtype))
    return originals
