"""Load a Hugging Face causal language model and its tokenizer, or say in one line why that is not possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from options import InputError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

T = TypeVar("T")


def load_tokenizer(name: str) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer of a model, and the model's context.

    Args:
        name: Folder or hub name of the model.

    Returns:
        The tokenizer, and the most tokens that the model can take (None if its configuration does not say).

    Raises:
        InputError: There is no such model, or its tokenizer has no chat template.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = Path(name)
    if folder.exists() and not (folder / "config.json").is_file():
        raise InputError(f"--model {name}: no config.json there, expected a folder written by save_pretrained")
    if not folder.exists() and (folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise InputError(f"--model {name}: no such folder, expected one written by save_pretrained, or a hub name")
    config = _load(AutoConfig.from_pretrained, name)
    tokenizer = _load(AutoTokenizer.from_pretrained, name)
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"--model {name}: its tokenizer has no chat template, expected an instruction-tuned model")
    return tokenizer, getattr(config.get_text_config(), "max_position_embeddings", None)


def load_model(name: str) -> PreTrainedModel:
    """The model, ready to train: in full precision, which mixed precision keeps for the weights.

    Raises:
        InputError: The weights cannot be loaded, or are not those of a causal language model.
    """
    model: PreTrainedModel = _load(AutoModelForCausalLM.from_pretrained, name, dtype=torch.float32)
    model.train()
    return model


def _load(from_pretrained: Callable[..., T], name: str, **arguments: Any) -> T:
    try:
        return from_pretrained(name, **arguments)
    except Exception as error:  # from a missing file to a broken one or one of another kind: no common class
        reason = " ".join(str(error).split())
        raise InputError(f"--model {name}: cannot be loaded, expected a folder or hub name: {reason}") from error
