"""PEFT's adapters as states of their own, over one base that all of them read.

    _, base = fzero.functionalize(model)                     one state, gathered once for all
    apply, params = functionalize_adapter(model, config)     a state for each adapter
    apply(base, params, *args)                               model and adapter

The base has the names of the model, whatever adapters there are, and an adapter the names that PEFT
has in its files: so each adapter is saved alone, as PEFT saves it, and read back by PEFT.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
from peft.utils.other import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from peft.utils.save_and_load import get_peft_model_state_dict
from torch import Tensor, nn

from fzero.checkpoint.collective import Ranks, run_on_all_ranks, written_by_first
from fzero.checkpoint.elements import (
    TensorForm,
    begin_file,
    local_states,
    read_file,
    read_values,
    whole_parameters,
    write_values,
)
from fzero.checkpoint.folders import PathLike, path_everywhere, sync_files
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError
from fzero.machine.named_shards import leaf_paths
from fzero.ranks.mesh import axis_of
from fzero.state import TrainState
from fzero.transforms.functionalize import Apply, functionalize

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdaptedApply:
    """`apply(base, params, *args, **kwargs) -> out`: a model with an adapter, as a pure function.

    Attributes:
        config: of PEFT, complete: "all-linear" is a list of names here.
        keys: {name in PEFT's file: name in the params}; two names for weights that are tied.
        forms: shape and dtype of each of the params.
        names: {name in the base or the params: path in PEFT's model}.
        whole: PEFT's model as a function of all its parameters.
    """

    config: peft.PeftConfig
    keys: Mapping[str, str]
    forms: Mapping[str, TensorForm]
    names: Mapping[str, str]
    whole: Apply

    def __call__(self, base: Tensors, params: Tensors, /, *args: Any, **kwargs: Any) -> Any:
        """Run the model with these parameters.

        Raises:
            LayoutError: for other names or shapes than those of the model and the adapter.
        """
        held = {self.names.get(name, name): x for name, x in {**base, **params}.items()}
        return self.whole(held, *args, **kwargs)

    def __repr__(self) -> str:
        return f"apply({self.whole.name}, {_kind(self.config)}, {len(self.forms)} params)"


def functionalize_adapter(
    model: nn.Module, config: peft.PeftConfig
) -> tuple[AdaptedApply, dict[str, Tensor]]:
    """Return (apply, params): the model with a new adapter, and the parameters of that adapter.

    `apply(base, params, *args)` has the values of `peft.get_peft_model(model, config)`, with `base`
    as `fzero.functionalize(model)` gives it. The model stays as it is: it is copied, but for its
    weights. One apply serves all adapters of one config; each call makes new params, drawn by
    torch's generator as PEFT does. Train or eval mode is that which the model has now.

    Args:
        model: the module without an adapter, of transformers or any other.
        config: of LoRA, DoRA, IA3, ...: one whose file has parameters, as they are.

    Raises:
        LayoutError: for a model that has an adapter, a config whose file has something else than
            parameters (prompt tuning, stored projections of VeRA), and one that writes to the base
            (PiSSA, OLoRA).

    Source: Hu et al., "LoRA", arXiv 2106.09685; Hugging Face, PEFT.

    Example:
        >>> import fzero, peft, torch
        >>> from fzero.integrations.peft import functionalize_adapter
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
        >>> config = peft.LoraConfig(r=2, target_modules=["0"])
        >>> apply, params = functionalize_adapter(model, config)
        >>> [*params]
        ['base_model.model.0.lora_A.weight', 'base_model.model.0.lora_B.weight']
        >>> base = fzero.functionalize(model)[1]
        >>> torch.equal(apply(base, params, torch.ones(1, 4)), model(torch.ones(1, 4)))
        True
    """
    _require_plain(model, config)
    values = dict(model.named_parameters())
    own = {name: nn.Parameter(p.detach(), p.requires_grad) for name, p in values.items()}
    memo: dict[int, Any] = {id(p): own[name] for name, p in values.items()}
    twin = copy.deepcopy(model, memo | {id(x): x for x in model.buffers()})
    adapted: Any = peft.get_peft_model(twin, copy.deepcopy(config))
    complete = adapted.peft_config["default"]
    if complete.task_type is None:  # as PEFT's own save does: for AutoPeftModel
        of = type(model)
        complete.auto_mapping = {"base_model_class": of.__name__, "parent_library": of.__module__}
    path_of = {id(p): path for path, p in adapted.named_parameters()}
    for name, p in own.items():
        if id(p) not in path_of or p.data_ptr() != values[name].data_ptr():
            raise _refused(config, f"writes to {name} of the base", "init_lora_weights=True")
    held = adapted.state_dict(keep_vars=True)
    saved = get_peft_model_state_dict(adapted, state_dict=held, save_embedding_layers=False)
    for key, x in saved.items():
        if id(x) not in path_of:
            fix = "another kind of adapter, or for VeRA save_projection=False"
            raise _refused(config, f"saves {key}, which is no parameter", fix)
    first: dict[int, str] = {}
    keys = {key: first.setdefault(id(x), key) for key, x in saved.items()}
    for path, p in adapted.named_parameters():
        if p.requires_grad and id(p) not in first:
            raise _refused(
                config, f"trains {path}, which it does not save", "modules_to_save=[...]"
            )
    whole, every = functionalize(adapted)
    params = {key: every[path_of[number]] for number, key in first.items()}
    apply = AdaptedApply(
        config=complete,
        keys=keys,
        forms={key: TensorForm(tuple(x.shape), x.dtype) for key, x in params.items()},
        names={name: path_of[id(p)] for name, p in own.items()}
        | {key: path_of[number] for number, key in first.items()},
        whole=whole,
    )
    return apply, params


def save_adapter(folder: PathLike, state: TrainState, apply: AdaptedApply) -> None:
    """Write a state as PEFT saves an adapter: adapter_model.safetensors, adapter_config.json.

    A collective; rank 0 writes. `peft.PeftModel.from_pretrained(model, folder)` reads it. What an
    earlier save has written there is replaced when all is written.

    Args:
        folder: where to; it is made if it is not there.
        state: of the params that `functionalize_adapter` or `load_adapter` returned, and no more.
        apply: what the state is an adapter of.

    Raises:
        LayoutError: for a state with other names or shapes than the adapter has (the base, a part).
        DonatedError: for a used-up state.
        CheckpointError: on every rank, when the disk does not take it.

    Example:
        >>> import fzero, peft, tempfile, torch
        >>> from fzero.integrations.peft import functionalize_adapter, load_adapter, save_adapter
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
        >>> apply, params = functionalize_adapter(model, peft.LoraConfig(target_modules=["0"]))
        >>> state = fzero.init(params, fzero.optim.adamw(1e-3), stage=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(folder, state, apply)
        ...     read = peft.PeftModel.from_pretrained(model, folder)
        ...     again = load_adapter(folder, apply)
        >>> all(torch.equal(again[name], x) for name, x in params.items())
        True
    """
    held = local_states("save_adapter", state)
    if held.engine is not None:
        raise LayoutError(
            "save_adapter: an engine.",
            cause="an engine's module is PEFT's own model, which saves itself.",
            fix="on every rank `with fzero.adapter.gathered(model):`, and in the block, on rank 0, "
            "model.save_pretrained(folder).",
        )
    ranks, layout = held.processes, held.setup.layout
    where = path_everywhere(ranks, "save_adapter", folder)
    facts = [f"path {where}", f"step {int(held.states[0].step)}"]
    assert_same_everywhere(facts, ranks.axis, what="the adapter")
    paths = leaf_paths(layout)
    forms = {
        path: TensorForm(leaf.shape, leaf.dtype)
        for path, leaf in zip(paths, layout.leaves, strict=True)
    }
    places: dict[str, Any] = {}

    def begin(partial: Path) -> None:
        _require_alike("save_adapter: the state", apply.forms, forms)
        if ranks.axis.rank == 0:
            partial.mkdir(parents=True)
            in_file = {key: forms[of] for key, of in apply.keys.items()}
            places.update(begin_file(partial / SAFETENSORS_WEIGHTS_NAME, in_file))
            config = copy.deepcopy(apply.config)
            config.inference_mode = True  # as PEFT saves it
            config.save_pretrained(str(partial))

    def write(_: Path, named: tuple[str, Tensor]) -> None:
        for key in (key for key, of in apply.keys.items() if of == named[0]):
            write_values(places[key], named[1])

    def finish(partial: Path) -> None:
        sync_files(partial.iterdir())
        (where / CONFIG_NAME).unlink(missing_ok=True)  # nobody reads files of two saves
        for name in (SAFETENSORS_WEIGHTS_NAME, CONFIG_NAME):
            os.replace(partial / name, where / name)

    values: Iterator[tuple[str, Tensor]] = ((paths[i], x) for i, x in whole_parameters(held))
    written_by_first(ranks, where, begin=begin, values=values, write=write, finish=finish)


def load_adapter(folder: PathLike, apply: AdaptedApply) -> dict[str, Tensor]:
    """Return the params of an adapter that PEFT, or `save_adapter`, has saved. A collective.

    Every rank reads the folder; `fzero.init(params, ...)` makes a state of them. For an adapter of
    another kind than `apply` has, make one of its own config:

        apply, _ = functionalize_adapter(model, peft.PeftConfig.from_pretrained(folder))

    Args:
        folder: with adapter_model.safetensors and adapter_config.json.
        apply: of a model and a config.

    Returns:
        {name: values}, in the dtypes of the params of `functionalize_adapter`.

    Raises:
        LayoutError: for an adapter of another config: other names or shapes, or another number in
            its config (lora_alpha), by which it would have other values.
        CheckpointError: for missing or damaged files. Both on every rank, if on any.

    Example:
        See `save_adapter`.
    """
    ranks = Ranks(axis=axis_of(None))
    where = path_everywhere(ranks, "load_adapter", folder)

    def read() -> dict[str, Tensor]:
        places = read_file(where / SAFETENSORS_WEIGHTS_NAME)
        mine, theirs = _numbers(apply.config), _numbers(peft.PeftConfig.from_pretrained(str(where)))
        for name in mine:
            if theirs.get(name, mine[name]) != mine[name]:
                raise _other(f"{name}={theirs[name]!r} in {where}, {mine[name]!r} in apply")
        of_base = {key for key in places if key in apply.names.values()} - apply.keys.keys()
        if of_base:
            warnings.warn(
                f"{where} has weights of the base, too, {min(of_base)} first: they are left out.",
                stacklevel=4,
            )
        found = {key: place for key, place in places.items() if key not in of_base}
        forms = {key: apply.forms[of] for key, of in apply.keys.items()}
        _require_alike(f"load_adapter: {where}", forms, {k: x.form for k, x in found.items()})
        return {key: read_values(found[key]).to(form.dtype) for key, form in apply.forms.items()}

    return run_on_all_ranks(ranks, read, what=f"read {where}")


def _require_plain(model: nn.Module, config: Any) -> None:
    if not isinstance(config, peft.PeftConfig):
        raise LayoutError(
            f"functionalize_adapter got a {type(config).__name__} in the place of the config.",
            cause="its arguments in another order, or a config of the model.",
            fix="functionalize_adapter(model, peft.LoraConfig(...)).",
        )
    if not isinstance(model, nn.Module) or hasattr(model, "peft_config"):
        raise LayoutError(
            f"functionalize_adapter got a {type(model).__name__} in the place of the model.",
            cause="a model that has an adapter already.",
            fix="pass the model that peft.get_peft_model would be given: it makes the adapter. One "
            "that was saved is read by load_adapter.",
        )


def _numbers(config: peft.PeftConfig) -> dict[str, Any]:
    """What of a config changes the values of a forward, and not the names or shapes of weights."""
    aside = ("dropout", "init", "inference")
    return {
        name: value
        for name, value in config.to_dict().items()
        if isinstance(value, bool | int | float | dict) and not any(x in name for x in aside)
    }


def _require_alike(
    what: str, wanted: Mapping[str, TensorForm], found: Mapping[str, TensorForm]
) -> None:
    for key in [*wanted, *found]:
        mine, theirs = (x[key].shape if key in x else "nothing" for x in (wanted, found))
        if mine != theirs:
            raise _other(f"{what} has {theirs} at {key}, the adapter {mine}")


def _other(seen: str) -> LayoutError:
    return LayoutError(
        f"{seen}.",
        cause="the base, a part of an adapter, or an adapter of another config.",
        fix="apply and params go together: functionalize_adapter(model, config) makes both; of one "
        "that was saved, with config = peft.PeftConfig.from_pretrained(folder).",
    )


def _refused(config: peft.PeftConfig, seen: str, fix: str) -> LayoutError:
    return LayoutError(
        f"functionalize_adapter: {_kind(config)} {seen}.",
        cause="a kind of adapter whose file is more than parameters beside a base that stays.",
        fix=f"{fix}; or train it by an engine: `sharded(Trainer, stage=3)` takes any.",
    )


def _kind(config: peft.PeftConfig) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))
