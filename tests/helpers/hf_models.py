"""Tiny random models of Hugging Face's classes, built without a download."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

VOCABULARY = 32


def _bert(**options: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {"vocab_size": VOCABULARY, **sizes, "max_position_embeddings": 32, **options}


_BART = {
    **{"vocab_size": VOCABULARY, "d_model": 8, "max_position_embeddings": 32, "dropout": 0.0},
    **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
    **{"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16},
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
_T5 = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
_T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}
_XLNET = {"vocab_size": VOCABULARY, "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 16}

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", _bert(num_key_value_heads=2)),
    "GPT2": ("GPT2Config", _GPT2),
    "T5": ("T5Config", _T5),
    "Bart": ("BartConfig", _BART),
    "Bert": ("BertConfig", _bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
    "XLNet": ("XLNetConfig", _XLNET),
    "Electra": ("ElectraConfig", _bert(embedding_size=8)),
}


def make(name: str, **options: Any) -> nn.Module:
    """A model of the class `name` with random weights, the same each time."""
    transformers = pytest.importorskip("transformers")
    family = next(family for family in sorted(_CONFIGS, key=len, reverse=True) if name.startswith(family))
    config, sizes = _CONFIGS[family]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**{**sizes, **options}))
    return model


def make_encoder_decoder() -> nn.Module:
    """Two BERTs, of which one writes: the composite's own loss, not its decoder's, is what is trained."""
    transformers = pytest.importorskip("transformers")
    bert = transformers.BertConfig(**_bert())
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, bert)
    config.decoder_start_token_id = config.pad_token_id = 0
    model: nn.Module = transformers.EncoderDecoderModel(config)
    return model


def make_vision_language_model() -> nn.Module:
    """A decoder-only model that reads images, too: called "for conditional generation", and shifts its labels."""
    transformers = pytest.importorskip("transformers")
    vision = transformers.CLIPVisionConfig(
        **{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"image_size": 8, "patch_size": 4, "projection_dim": 8},
    )
    text = transformers.LlamaConfig(**_bert(num_key_value_heads=2))
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=VOCABULARY - 1)
    model: nn.Module = transformers.LlavaForConditionalGeneration(config)
    return model


def predicts_first_label(model: nn.Module) -> bool:
    """What the model itself says: a loss over the labels of position 0 alone is a number, or a mean over none."""
    labels = torch.full((2, 4), -100)
    labels[:, 0] = 1
    loss = model(input_ids=torch.full((2, 4), 3), labels=labels).loss
    return bool(loss.isfinite())
