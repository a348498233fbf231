"""`save_universal`: a train state, or an engine, as DeepSpeed's universal checkpoint."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint._allocate import warn_of_left_out
from fzero.checkpoint._process_states import Held, held_by, require_idle, whole_leaves
from fzero.checkpoint._save import wait_for_earlier
from fzero.checkpoint._universal import (
    FP32,
    LATEST,
    OPTIMIZER,
    STATES,
    STEP,
    ZERO,
    is_name,
    require_places,
    write_pickle,
)
from fzero.checkpoint.collective import written_by_first
from fzero.checkpoint.engine_state import Buffers, Driven, group_names, plain_options
from fzero.checkpoint.folders import PathLike, is_there, path_everywhere, put_text, sync, sync_files
from fzero.collectives import assert_same_everywhere
from fzero.errors import LayoutError
from fzero.machine.named_shards import leaf_paths, tied_names
from fzero.optim.counters import COUNT, counters_of
from fzero.optim.entries import slots_across
from fzero.state import TrainState
from fzero.state.scale import as_numbers
from fzero.state.setup import MASTERS

_LAYOUT = "0.19.8"  # the DeepSpeed whose layout this is: its loader asks for a version
_VERSION = 0.4  # of the universal layout


def save_universal(folder: PathLike, state: TrainState | Driven, *, tag: str | None = None) -> None:
    """Write a state or an engine to folder/tag as DeepSpeed's universal checkpoint. A collective.

    For each parameter a folder: fp32.pt (its master, where it has one), what the optimizer keeps
    for it under torch.optim's names (exp_avg.pt, exp_avg_sq.pt, momentum_buffer.pt, ...), and
    step.pt, each as {"param": [shape]} in fp32; param groups with their options; of an engine the
    persistent buffers of its module, those of rank 0. `load_universal` reads it, and so does
    DeepSpeed at its stages 1 to 3, on any number of ranks, configured with
    {"checkpoint": {"load_universal": true}}.

    Parameters are gathered unit by unit, and rank 0 writes each at once: no rank holds more than
    its part and one unit. All is written into a hidden folder, which then gets its name in one
    move, and then latest_universal names it. A checkpoint of another tag stays as it is.

    Args:
        folder: where to; it is made if it is not there.
        state: one state or engine, idle: no gradient is held; with virtual ranks a stacked state.
        tag: the name of the checkpoint in `folder`, which must be new; by default
            global_step<step>_universal, numbered from the second one on.

    Raises:
        LayoutError: for an empty path, a tag that is no name or is there already, a parameter that
            cannot name a folder, or an optimizer state that the layout has no place for.
        PhaseError: for a state between gradient and update.
        DonatedError: for a used-up one.
        AxisError: when the ranks save at different steps, paths or tags.
        CheckpointError: on every rank, when the disk does not take it.

    Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py; Lian et al., "Universal Checkpointing",
    arXiv 2406.18820.

    Example:
        >>> import tempfile, torch, fzero
        >>> from fzero.checkpoint import load_universal, save_universal
        >>> opt, folder = fzero.optim.adam(1e-3), tempfile.TemporaryDirectory()
        >>> save_universal(folder.name, fzero.init({"w": torch.ones(3)}, opt, stage=3))
        >>> state = load_universal(folder.name, fzero.init({"w": torch.zeros(3)}, opt, stage=1))
        >>> fzero.full_params(state)
        {'w': tensor([1., 1., 1.])}
        >>> folder.cleanup()
    """
    wait_for_earlier(raises=False)
    held = held_by("save_universal", state)
    ranks, names = held.processes, leaf_paths(held.setup.layout)
    where = path_everywhere(ranks, "save_universal", folder)
    first, step = held.states[0], int(held.states[0].step)
    warn_of_left_out(first, held.ranks[0])
    facts = [f"path {where}", f"tag {tag}", f"step {step}"]
    assert_same_everywhere(facts, ranks.axis, what="the checkpoint")

    def begin(partial: Path) -> None:
        for one in held.states:
            require_idle(one)
        require_places("save_universal", first)
        good = tag is None or (isinstance(tag, str) and is_name(tag))
        if not good or (tag is not None and (where / tag).exists()):
            seen = f"is in {where} already" if good else "is no name of a folder"
            raise LayoutError(
                f"save_universal: the tag {tag!r:.80} {seen}.",
                cause="a tag that was used before, or a path.",
                fix="give a new name, or no tag: then one is made of the step.",
            )
        is_there(where / LATEST)
        if ranks.axis.rank == 0:
            _write_shared(partial, first, held.buffers)

    def put(partial: Path, one: tuple[str, int, Tensor]) -> None:
        key, number, values = one
        dtype = values.dtype
        if dtype.is_floating_point:
            dtype = torch.promote_types(dtype, torch.float32)
        own = torch.empty(values.shape, dtype=dtype, device="cpu")  # and nothing else of its memory
        file = partial / ZERO / names[number] / f"{key}.pt"
        write_pickle(file, {"param": own.copy_(values), "cat_dim": 0})

    def put_in_place(partial: Path) -> None:
        """Give the folder its name, and then say that it counts: a move each."""
        sync_files((*partial.rglob("*"), partial))
        name, number = tag or f"global_step{step}_universal", 1
        while tag is None and (where / name).exists():
            number += 1
            name = f"global_step{step}_universal_{number}"
        os.rename(partial, where / name)
        sync(where)
        put_text(where / LATEST, name, through=where / f"{partial.name}-{LATEST}")
        sync(where)

    written_by_first(
        ranks, where, begin=begin, values=_whole_values(held), write=put, finish=put_in_place
    )


def _whole_values(held: Held) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (fp32 or slot, number of the leaf, whole values), one flat at a time. A collective."""
    setup = held.setup
    kept: dict[int, dict[str, list[Tensor]]] = {}
    for name, group, flats in slots_across(held.states):
        kept.setdefault(group, {})[FP32 if name == MASTERS else name] = flats
    for index in range(len(setup.layout.groups)):
        own = kept.get(index, {})
        parts = [(key, flats, setup.optimizer_state) for key, flats in own.items()]
        if FP32 not in own:
            parts.append((FP32, [one.params.flats[index] for one in held.states], setup.params))
        for key, flats, placement in parts:
            for number, values in whole_leaves(held, index, flats, placement):
                yield key, number, values


def _write_shared(partial: Path, state: TrainState, buffers: Buffers) -> None:
    """Write what belongs to no single parameter: the step, param groups, counters, buffers."""
    setup, layout = state.setup, state.setup.layout
    leaves, updates = layout.leaves, int(state.step)
    groups = setup.optimizer.param_groups(leaves, updates)
    counted = counters_of(state)
    steps: Any = counted.get(STEP, counted.get(COUNT, updates))
    numbers = range(len(groups.options))
    of_group = dict.fromkeys(numbers, 0.0)  # the most that one of its parameters took
    for name, number in zip(leaf_paths(layout), groups.of_leaf, strict=True):
        if number >= 0:
            own = float(steps[name] if isinstance(steps, dict) else steps)
            of_group[number] = max(of_group[number], own)
            count = torch.tensor(own, dtype=torch.float32, device="cpu")
            write_pickle(partial / ZERO / name / f"{STEP}.pt", count)
    options = [
        {
            **plain_options(one),
            "params": [i for i, k in enumerate(groups.of_leaf) if k == number],
            "param_names": names,
        }
        for number, one, names in zip(numbers, groups.options, group_names(state), strict=True)
    ]
    shared: dict[str, Any] = {
        "ds_version": _LAYOUT,
        "zero_stage": state.stage,
        "partition_count": layout.ranks,
        "param_groups": options,
        # Where stage 3 of DeepSpeed looks for the step and the options.
        "optimizer_state_dict": {
            "state": {k: {"step": torch.tensor(n, device="cpu")} for k, n in of_group.items()},
            "param_groups": options,
        },
    }
    scale = as_numbers(state.scale).get("scale")
    if scale is not None:
        shared["loss_scale"] = scale
    write_pickle(partial / ZERO / OPTIMIZER, shared)
    pairs = zip(leaf_paths(layout), leaves, strict=True)
    shapes = OrderedDict((name, torch.Size(leaf.shape)) for name, leaf in pairs if leaf.trainable)
    states = {  # what DeepSpeed keeps beside the optimizer: here, buffers and counters
        "module": OrderedDict((name, x.cpu().clone()) for name, x in buffers.items()),
        "buffer_names": list(buffers),
        "param_shapes": [shapes],
        "shared_params": tied_names(layout),
        **dict.fromkeys(("optimizer", "lr_scheduler", "data_sampler", "random_ltd")),
        "skipped_steps": 0,
        "global_steps": updates,
        "dp_world_size": layout.ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _LAYOUT,
        "universal_checkpoint_info": {"universal_checkpoint_version": _VERSION},
    }
    for file in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):  # for stages 1 and 2, and for 3
        write_pickle(partial / f"{file}{STATES}", states)
