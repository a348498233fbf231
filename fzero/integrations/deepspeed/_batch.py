"""The batch sizes of a config, and the loader of `training_data`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fzero.errors import LayoutError
from fzero.integrations.deepspeed._read import Problem
from fzero.ranks.mesh import Axis


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
    train = values.get("train_batch_size")
    micro = values.get("train_micro_batch_size_per_gpu")
    steps = values.get("gradient_accumulation_steps")
    if train is None:
        return Batch(None if micro is None else micro * (steps or 1) * ranks, micro, steps), []
    whole = (micro or 1) * (steps or 1) * ranks
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
    drop_last: bool,
    collate_fn: Callable[..., Any] | None,
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
    return DataLoader(
        data, batch.micro, sampler=sampler, drop_last=drop_last, collate_fn=collate_fn, **options
    )
