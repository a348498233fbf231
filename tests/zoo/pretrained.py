"""Small random models of the architectures that people fine-tune."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.family import Family

VOCABULARY, TOKENS = 37, 6
_SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0}
_LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def _made(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        given = getattr(transformers, config)(**options)
        given.use_cache = False
        return getattr(transformers, name)(given)

    return make


def _labelled(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def _ids(source: torch.Generator, count: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (count, TOKENS), generator=source)


def _of_ids(name: str, config: str, **options: Any) -> Family:
    return Family(make=_made(name, config, **_SMALL, **options), loss=_labelled, batch=_ids)


def _of_layers(name: str, config: str, **options: Any) -> Family:
    return _of_ids(name, config, **{**_LAYERS, **_HEADS, **options})


def _seen(model: Any, batch: Any) -> Tensor:
    return model(pixel_values=batch[0], labels=batch[1]).loss


def _images(source: torch.Generator, count: int) -> Any:
    x = torch.randn(count, 3, 8, 8, generator=source)
    return x, torch.randint(2, (count,), generator=source)


def _of_images(name: str, config: str, **options: Any) -> Family:
    return Family(make=_made(name, config, **options), loss=_seen, batch=_images)


_GROUPED = {"num_key_value_heads": 2}
_VIT = {**_LAYERS, **_HEADS, "image_size": 8, "patch_size": 4}

PRETRAINED = {
    "llama": _of_layers("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "mistral": _of_layers("MistralForCausalLM", "MistralConfig", **_GROUPED),
    "qwen": _of_layers("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED, **_ENDS),
    "gemma": _of_layers("GemmaForCausalLM", "GemmaConfig", head_dim=4, **_GROUPED),
    "phi": _of_layers("PhiForCausalLM", "PhiConfig"),
    "neox": _of_layers("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "bert": _of_layers("BertForMaskedLM", "BertConfig"),
    "roberta": _of_layers("RobertaForMaskedLM", "RobertaConfig", max_position_embeddings=16),
    "electra": _of_layers("ElectraForMaskedLM", "ElectraConfig", embedding_size=8),
    "albert": _of_layers("AlbertForMaskedLM", "AlbertConfig", embedding_size=8),
    "distilbert": _of_ids(
        "DistilBertForMaskedLM", "DistilBertConfig", dim=16, hidden_dim=24, n_layers=2, n_heads=4
    ),
    "gpt2": _of_ids(
        "GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=4, n_positions=16, **_ENDS
    ),
    "opt": _of_layers(
        "OPTForCausalLM", "OPTConfig", ffn_dim=24, word_embed_proj_dim=16, **_ENDS
    ),
    "bloom": _of_ids(
        "BloomForCausalLM", "BloomConfig", hidden_size=16, n_layer=2, n_head=4, **_ENDS
    ),
    "t5": _of_ids(
        "T5ForConditionalGeneration", "T5Config", d_model=16, d_kv=4, d_ff=24, num_layers=2,
        num_heads=4, decoder_start_token_id=0,
    ),
    "bart": _of_ids(
        "BartForConditionalGeneration", "BartConfig", d_model=16, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=16,
    ),
    "mamba": _of_ids(
        "MambaForCausalLM", "MambaConfig", hidden_size=16, state_size=4, num_hidden_layers=2,
        **_ENDS,
    ),
    "vit": _of_images("ViTForImageClassification", "ViTConfig", **_VIT),
    "deit": _of_images("DeiTForImageClassification", "DeiTConfig", **_VIT),
    "convnext": _of_images(
        "ConvNextForImageClassification", "ConvNextConfig", patch_size=2, hidden_sizes=[8, 12],
        depths=[1, 1], num_stages=2,
    ),
}  # fmt: skip
