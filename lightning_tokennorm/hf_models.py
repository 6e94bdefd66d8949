"""Whether the loss of a Hugging Face model shifts its labels, read off the model without importing transformers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from torch import nn

NOTHING_FOUND = "no Hugging Face model with a loss of its own was found"

_TASK = re.compile(r"For[A-Z]")
"""What the name of a loss or of a model with a head has in it: ``BertForMaskedLM``."""

_UNSHIFTED_TASK = re.compile(
    r"For\w*(Masked|Classification|QuestionAnswering|MultipleChoice|SentencePrediction|PreTraining|CTC|RNNT|TDT|XVector"
    r"|Segmentation|Detection|Retrieval|Reasoning|Alignment)"
)
"""Tasks whose labels line up with the logits. All others predict the next token, decoder-only vision-language models
called ``...ForConditionalGeneration`` among them: an encoder-decoder is known by its config."""

_LOSS_IS_NOT_WHAT_THE_NAME_SAYS = {
    # The decoders of encoder-decoder models, and older language models: labels are compared as they are.
    **dict.fromkeys(
        (
            "BartForCausalLM",
            "BigBirdPegasusForCausalLM",
            "BlenderbotForCausalLM",
            "BlenderbotSmallForCausalLM",
            "CpmAntForCausalLM",
            "FlaubertWithLMHeadModel",
            "MBartForCausalLM",
            "MarianForCausalLM",
            "MusicgenForCausalLM",
            "MusicgenMelodyForCausalLM",
            "MvpForCausalLM",
            "PLBartForCausalLM",
            "PegasusForCausalLM",
            "ProphetNetForCausalLM",
            "TrOCRForCausalLM",
            "WhisperForCausalLM",
            "XLMWithLMHeadModel",
            "XLNetLMHeadModel",
        ),
        0,
    ),
    "BlipForQuestionAnswering": 1,  # writes its answer
}

_PREPENDS_VIRTUAL_TOKENS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING")
"""Kinds of PEFT that put ignored labels before the batch's, so that the shift drops one of those."""


def label_shift(module: nn.Module) -> tuple[int, str]:
    """How many leading positions of its labels a module never predicts, as its Hugging Face model has it.

    The outermost model with a loss decides, wherever it is: in an attribute, compiled, wrapped by PEFT. Where there are
    several, the trainable ones do.

    Args:
        module: Any module; a `LightningModule` that holds such a model, the model itself.

    Returns:
        0 for encoder-decoder, masked-LM and classification models, whose labels line up with the logits, else 1; and
        in a few words why: the models that decided.

    Raises:
        ValueError: The trainable models do not agree.
    """
    found = list(_models(module, prepended=False, seen=set()))
    found = [one for one in found if any(p.requires_grad for p in one[0].parameters())] or found
    if not found:
        return 1, NOTHING_FOUND
    by_name = {f"{type(model).__name__}{why}": shift for model, shift, why in found}
    if len(set(by_name.values())) > 1:
        listed = ", ".join(f"{name} means shift={shift}" for name, shift in by_name.items())
        raise ValueError(
            f"`SupervisedTokens(shift='auto')` found models that do not agree: {listed}. Say which labels enter the"
            " loss: `count_tokens=SupervisedTokens(shift=1)` where they are shifted against the logits, `shift=0`"
            " where they line up. A model that is not trained has no say once its parameters do not require gradients."
        )
    return found[0][1], ", ".join(by_name)


def _models(module: nn.Module, prepended: bool, seen: set[nn.Module]) -> Iterator[tuple[nn.Module, int, str]]:
    """The outermost models with a loss, each with its shift and what more there is to say of it."""
    if module in seen:
        return
    seen.add(module)
    decided = _shift_of(module) if _is_hugging_face(module) else None
    if decided is not None:
        shift, why = decided
        yield (module, 0, " with virtual tokens before its labels") if shift and prepended else (module, shift, why)
        return
    prepended |= _prepends_virtual_tokens(module)
    for child in module.children():
        yield from _models(child, prepended, seen)


def _is_hugging_face(module: nn.Module) -> bool:
    # By what the module itself has: wrappers pass on what they wrap, and layers and users' modules keep a config, too.
    own = vars(module)
    is_model = "loss_type" in own or any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)
    return is_model and isinstance(getattr(own.get("config"), "is_encoder_decoder", None), bool)


def _shift_of(model: nn.Module) -> tuple[int, str] | None:
    """The shift of one Hugging Face model, ``None`` for a bare one without a loss."""
    names = [cls.__name__ for cls in type(model).__mro__]  # a user's subclass has a name of its own
    for name in names:
        if name in _LOSS_IS_NOT_WHAT_THE_NAME_SAYS:
            return _LOSS_IS_NOT_WHAT_THE_NAME_SAYS[name], ""
    if vars(model)["config"].is_encoder_decoder:
        return 0, " (encoder-decoder)"
    loss_type = getattr(model, "loss_type", None)  # derived from the class name, or set by the model
    for name in [loss_type, *names] if isinstance(loss_type, str) else names:
        if _TASK.search(name):
            return (0 if _UNSHIFTED_TASK.search(name) else 1), ""
    return (1, "") if _takes_labels(model) else None


def _takes_labels(model: nn.Module) -> bool:
    try:
        return "labels" in inspect.signature(type(model).forward).parameters
    except (TypeError, ValueError):  # a forward that is not written in Python
        return False


def _prepends_virtual_tokens(module: nn.Module) -> bool:
    config = getattr(module, "active_peft_config", None) if hasattr(type(module), "active_peft_config") else None
    return getattr(config, "peft_type", None) in _PREPENDS_VIRTUAL_TOKENS
