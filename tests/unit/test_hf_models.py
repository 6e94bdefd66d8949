"""Whether labels are shifted, read off real models, however they are wrapped."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_tokennorm import SupervisedTokens
from lightning_tokennorm.counting import counter_for, describe_counter
from lightning_tokennorm.hf_models import NOTHING_FOUND, label_shift
from tests.helpers import hf_models
from tests.helpers.hf_models import make


class Holder(pl.LightningModule):
    """What users write: the models are attributes, and a config may be one, too."""

    def __init__(self, *models: nn.Module, config: Any = None) -> None:
        super().__init__()
        self.models = nn.ModuleDict({str(index): model for index, model in enumerate(models)})
        self.config = config

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        """Takes labels, as a model with a loss does."""


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("LlamaForCausalLM", 1),
        ("GPT2LMHeadModel", 1),  # has no loss type
        ("BertLMHeadModel", 1),
        ("T5ForConditionalGeneration", 0),
        ("BartForConditionalGeneration", 0),
        ("BartForCausalLM", 0),  # a decoder cut out of an encoder-decoder compares labels as they are
        ("XLNetLMHeadModel", 0),
        ("BertForMaskedLM", 0),
        ("BertForPreTraining", 0),
        ("BertForTokenClassification", 0),
        ("LlamaForTokenClassification", 0),
    ],
)
def test_the_shift_is_the_one_of_the_models_own_loss(name: str, shift: int) -> None:
    model = make(name)
    if name != "BertForPreTraining":  # whose loss needs labels of its second head, too
        assert hf_models.predicts_first_label(model) == (shift == 0)
    assert label_shift(Holder(model))[0] == shift
    assert name in label_shift(Holder(model))[1]


@pytest.mark.parametrize(
    ("build", "shift"), [(hf_models.make_encoder_decoder, 0), (hf_models.make_vision_language_model, 1)]
)
def test_composites_are_one_model(build: Callable[[], nn.Module], shift: int) -> None:
    model = build()
    assert hf_models.predicts_first_label(model) == (shift == 0)
    assert label_shift(Holder(model))[0] == shift


@pytest.mark.parametrize(
    "name",
    [
        "BertForSequenceClassification",
        "BertForQuestionAnswering",
        "BertForMultipleChoice",
        "BertForNextSentencePrediction",
        "ElectraForPreTraining",
        "T5ForTokenClassification",
    ],
)
def test_classification_lines_up(name: str) -> None:
    assert label_shift(Holder(make(name)))[0] == 0


def test_one_label_per_sample_is_counted_per_sample() -> None:
    counter = SupervisedTokens().for_module(Holder(make("BertForSequenceClassification")))
    assert counter({"labels": torch.tensor([0, 1, -100])}) == 2


@pytest.mark.parametrize(("name", "shift"), [("BertForTokenClassification", 0), ("LlamaForCausalLM", 1)])
def test_a_class_of_the_users_own_is_what_it_inherits(name: str, shift: int) -> None:
    model = make(name)
    model.__class__ = type("Mine", (type(model),), {})
    model.loss_type = None  # as transformers finds none in the name
    assert label_shift(model)[0] == shift


# ---- wrappers


class Tuner(nn.Module):
    """As PEFT's: the base model is under ``model``, and unknown attributes are its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class PeftModelForSeq2SeqLM(nn.Module):
    """As PEFT's, with the kind of the adapter."""

    def __init__(self, model: nn.Module, peft_type: str = "LORA") -> None:
        super().__init__()
        self.base_model = Tuner(model) if peft_type == "LORA" else model
        self.peft_config = {"default": SimpleNamespace(peft_type=peft_type)}

    @property
    def active_peft_config(self) -> Any:
        return self.peft_config["default"]

    def get_base_model(self) -> nn.Module:
        return self.base_model.model if isinstance(self.base_model, Tuner) else self.base_model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


class DistributedLike(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    "wrap",
    [torch.compile, PeftModelForSeq2SeqLM, DistributedLike, lambda m: torch.compile(DistributedLike(Tuner(m)))],
    ids=["compiled", "peft", "ddp", "all"],
)
@pytest.mark.parametrize(("name", "shift"), [("T5ForConditionalGeneration", 0), ("LlamaForCausalLM", 1)])
def test_wrappers_are_seen_through(wrap: Callable[[nn.Module], nn.Module], name: str, shift: int) -> None:
    decided, why = label_shift(Holder(nn.Sequential(wrap(make(name)))))
    assert (decided, why.split()[0]) == (shift, name)


def test_virtual_tokens_take_the_shift_upon_them() -> None:
    # Prompt tuning puts ignored labels before the batch's, so that the model predicts the batch's first one, too.
    shift, why = label_shift(PeftModelForSeq2SeqLM(make("LlamaForCausalLM"), "P_TUNING"))
    assert (shift, why) == (0, "LlamaForCausalLM with virtual tokens before its labels")
    assert label_shift(PeftModelForSeq2SeqLM(make("LlamaForCausalLM"), "PREFIX_TUNING"))[0] == 1


# ---- none, several, and what only looks like one


@pytest.mark.parametrize(
    "config", [None, {"model_type": "custom"}, SimpleNamespace(is_encoder_decoder=True), object(), nn.Linear(1, 1)]
)
def test_a_config_alone_makes_no_model(config: Any) -> None:
    assert label_shift(Holder(nn.Linear(2, 2), config=config)) == (1, NOTHING_FOUND)


def test_a_users_module_with_a_models_config_has_no_say() -> None:
    model = make("BertForTokenClassification")
    assert label_shift(Holder(model, config=model.config))[0] == 0
    assert label_shift(Holder(make("BertModel"), config=model.config)) == (1, NOTHING_FOUND)


def test_a_bare_encoder_decoder_lines_up() -> None:
    assert label_shift(Holder(make("T5Model"))) == (0, "T5Model (encoder-decoder)")


def test_the_trainable_models_decide() -> None:
    reward = make("BertForSequenceClassification").requires_grad_(False)
    assert label_shift(Holder(reward, make("LlamaForCausalLM"))) == (1, "LlamaForCausalLM")
    student, teacher = make("T5ForConditionalGeneration"), make("T5ForConditionalGeneration").requires_grad_(False)
    assert label_shift(Holder(teacher, student))[0] == 0
    assert label_shift(Holder(teacher))[0] == 0  # frozen, with a head of the user's own on top


def test_trainable_models_that_disagree_are_refused() -> None:
    module = Holder(make("BertForTokenClassification"), make("LlamaForCausalLM"))
    with pytest.raises(ValueError, match="do not agree") as raised:
        SupervisedTokens().for_module(module)
    assert "BertForTokenClassification means shift=0, LlamaForCausalLM means shift=1" in str(raised.value)
    assert SupervisedTokens(shift=1).for_module(module).shift == 1  # who says it is not asked


# ---- the counter


def test_the_counter_says_what_it_counts_and_why() -> None:
    module = Holder(make("LlamaForCausalLM"))
    auto = counter_for(SupervisedTokens(), module)
    assert auto == SupervisedTokens(shift=1)
    assert describe_counter(auto) == "labels after a shift of 1: LlamaForCausalLM"
    assert describe_counter(counter_for(SupervisedTokens("y"), nn.Linear(1, 1))) == (
        f"labels at 'y' after a shift of 1: {NOTHING_FOUND}"
    )
    assert describe_counter(counter_for(SupervisedTokens(), make("T5ForConditionalGeneration"))) == (
        "labels without a shift: T5ForConditionalGeneration (encoder-decoder)"
    )
    assert describe_counter(SupervisedTokens(shift=0)) == "labels without a shift: as given"
    assert describe_counter(SupervisedTokens()) == "labels, shifted as the module means it"


def test_other_counters_stay_as_they_are() -> None:
    given, mine = SupervisedTokens(shift=2), {"labels": 3}.__getitem__
    module = make("T5ForConditionalGeneration")
    assert counter_for(given, module) is given
    assert counter_for(mine, module) is mine
    assert counter_for(len, module) is len
    auto = SupervisedTokens()
    assert counter_for(auto, None) is auto


def test_one_dimensional_labels_are_refused_with_what_auto_decided() -> None:
    batch = {"labels": torch.tensor([1, 2])}
    with pytest.raises(ValueError, match=r"`shift='auto'` means 1 here: called without a module"):
        SupervisedTokens()(batch)
    with pytest.raises(ValueError, match=r"`shift='auto'` means 1 here: LlamaForCausalLM"):
        SupervisedTokens().for_module(make("LlamaForCausalLM"))(batch)
    with pytest.raises(ValueError, match="at least two dimensions") as raised:
        SupervisedTokens(shift=1)(batch)
    assert "auto" not in str(raised.value)
