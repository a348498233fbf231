"""The model of a Hugging Face config, without values, and a batch of tokens for it."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from fzero.errors import LayoutError


def from_config(config: Any) -> nn.Module:
    """Return the model that a Hugging Face config names, on the meta device.

    That is the first of its "architectures"; of a config without them the language model: causal,
    or else from sequence to sequence, or else masked.

    `config`: the path of a config.json, or of the folder with it; a dict; a `PretrainedConfig`.
    """
    try:
        import transformers
    except ImportError as error:
        raise LayoutError(
            "a Hugging Face config was given, and transformers is not installed.",
            cause="transformers is no dependency of fzero.",
            fix="pip install transformers; or give the nn.Module itself.",
        ) from error
    if isinstance(config, str | os.PathLike):
        config = _read(os.fspath(config))
    kind: Any = config.get("model_type") if isinstance(config, dict) else config.model_type
    if kind not in transformers.CONFIG_MAPPING:
        raise LayoutError(
            f"the config has model_type {kind!r}.",
            cause="no config of transformers, or a model that needs its own code.",
            fix=_ANOTHER,
        )
    try:
        if isinstance(config, dict):
            others = {name: value for name, value in config.items() if name != "model_type"}
            config = transformers.AutoConfig.for_model(kind, **others)
        config.use_cache = False  # a step of training has no use for it
        with torch.device("meta"):
            model = _class_of(config)(config)
    except LayoutError:
        raise
    except Exception as error:  # of any kind, as the many models check their configs
        raise LayoutError(
            f"no model could be made of the config of {kind!r}: {error}",
            cause="sizes that do not fit each other, or a key of another type.",
            fix="correct the config; or give the nn.Module itself.",
        ) from error
    return model.to(getattr(config, "dtype", None) or torch.float32)


def _class_of(config: Any) -> Any:
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    language_models = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_MASKED_LM_MAPPING,
    )
    for known in language_models:
        if type(config) in known:
            found = known[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise LayoutError(
        f"the config of {config.model_type!r} says no architectures, and is of no language model.",
        cause="a config of another kind of model, or a part of one.",
        fix=_ANOTHER,
    )


_ANOTHER = (
    "give the config.json of a model that this transformers has, or the nn.Module itself: "
    "fzero.plan(module, batch, stage=..., world=...)."
)


def _read(path: str) -> dict[str, Any]:
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    try:
        with open(file, encoding="utf-8") as opened:
            found = json.load(opened)
        if not isinstance(found, dict):
            raise ValueError(f"it has a {type(found).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise LayoutError(
            f"{file!r} could not be read as a config: {error}.",
            cause="another path, or a file that is no JSON.",
            fix="give the path of a model's config.json, or of the folder that has it.",
        ) from error
    return found


def tokens(model: nn.Module, batch_size: int, length: int | None) -> dict[str, Tensor]:
    """Return a batch of a language model of Hugging Face: [b, t] tokens, which are its labels.

    t is `length`; if None, 4096, or as many as the model has positions for, if those are fewer.
    """
    config: Any = model.config
    name, first = type(model).__name__, getattr(model, "main_input_name", "input_ids")
    if first != "input_ids":
        raise LayoutError(
            f"{name} is given {first}, not tokens.",
            cause="a config of a model of images or sound.",
            fix="fzero.plan(config, batch, stage=..., world=...) with a batch of its own.",
        )
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    given = (min(4096, most) if most > 0 else 4096) if length is None else length
    if 0 < most < given:
        raise LayoutError(
            f"--length {given}, and {name} has {most} positions.",
            cause="longer sequences than the model is for.",
            fix=f"give at most --length {most}; or change max_position_embeddings.",
        )
    ids = torch.empty(batch_size, given, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}
