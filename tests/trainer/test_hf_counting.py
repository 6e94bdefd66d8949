"""Models whose labels are not shifted train right under the default counter, from the loader to the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_tokennorm import SupervisedTokens, TokenMeanMetric, TokenNormDDP
from lightning_tokennorm.testing import assert_partition_invariant
from tests.helpers.hf_models import VOCABULARY, make
from tests.helpers.scalar_rig import make_trainer

X = -100
LR = 0.1

# The lengths of the answers by window, micro-batch and row. In the second window each answer is one token.
ANSWERS = [[[4, 2], [1, 3]], [[1, 1], [1]]]
TOKENS = [10, 3]  # after a shift of 1: 3 + 1 + 0 + 2 = 6, and 0


def sample(length: int, generator: torch.Generator) -> dict[str, Tensor]:
    source = torch.randint(2, VOCABULARY, (5,), generator=generator)
    target = torch.randint(2, VOCABULARY, (length,), generator=generator)
    return {"input_ids": source, "labels": target}


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pads labels to the longest of the batch, as a seq2seq collator does."""
    labels = torch.nn.utils.rnn.pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=X)
    return {"input_ids": torch.stack([s["input_ids"] for s in samples]), "labels": labels}


class HFModule(pl.LightningModule):
    """What a user of these models writes; the weights are the same each time."""

    def __init__(self, name: str, configure_model: bool = False, **options: Any) -> None:
        super().__init__()
        self.build = lambda: make(name, **options).double()
        self.model: Any = None if configure_model else self.build()
        self.gradients: list[Tensor] = []
        self.records: list[Any] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    validation_step = test_step = training_step

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(flat_gradient(self.model))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        record = getattr(self.trainer.strategy, "last_update", None)
        if record is not None and record not in self.records:
            self.records.append(record)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def flat_gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def reference(name: str, merged: Sequence[dict[str, Tensor]], **options: Any) -> list[Tensor]:
    """Plain SGD in one process, one batch per window: the model's own mean over it."""
    model, gradients = make(name, **options).double(), []
    for batch in merged:
        model.zero_grad()
        model(**batch).loss.backward()
        gradients.append(flat_gradient(model))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LR * parameter.grad
    return gradients


def fit(module: HFModule, batches: Sequence[Any], accumulate: int = 2, **options: Any) -> pl.Trainer:
    options.setdefault("strategy", TokenNormDDP())
    trainer = make_trainer(1, accumulate_grad_batches=accumulate, **options)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return trainer


def seq2seq_windows() -> list[list[list[dict[str, Tensor]]]]:
    generator = torch.Generator().manual_seed(1)
    return [[[sample(length, generator) for length in rows] for rows in window] for window in ANSWERS]


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
@pytest.mark.parametrize("configure_model", [False, True])
def test_seq2seq_with_a_padding_collator(name: str, configure_model: bool, capsys: Any, caplog: Any) -> None:
    windows = seq2seq_windows()
    module = HFModule(name, configure_model)
    with caplog.at_level("INFO"):
        trainer = fit(module, [collate(rows) for window in windows for rows in window], callbacks=[TokenMeanMetric()])
    assert [record.num_tokens for record in module.records] == TOKENS
    assert all(record.applied for record in module.records)
    expected = reference(name, [collate([row for rows in window for row in rows]) for window in windows])
    for ours, right in zip(module.gradients, expected, strict=True):
        assert (ours - right).norm() <= 1e-12 * right.norm()
    assert trainer.callback_metrics["train_tokens"] == TOKENS[-1]
    assert f"Counted: labels without a shift: {name} (encoder-decoder)." in caplog.text + capsys.readouterr().err


def test_token_classification() -> None:
    # Words without a first special token: the first label of each row is a word's, and is predicted.
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (6, 5), generator=generator)
    labels = torch.randint(3, (6, 5), generator=generator)
    for row, live in enumerate((5, 1, 2, 4, 3, 1)):
        labels[row, live:] = X
    batches = [{"input_ids": i, "labels": n} for i, n in zip(ids.split(2), labels.split(2), strict=True)]
    module = HFModule("BertForTokenClassification", num_labels=3)
    fit(module, batches, accumulate=3)
    assert [record.num_tokens for record in module.records] == [16]
    merged = {"input_ids": ids, "labels": labels}
    (right,) = reference("BertForTokenClassification", [merged], num_labels=3)
    assert (module.gradients[0] - right).norm() <= 1e-12 * right.norm()


def test_sequence_classification() -> None:
    # one label per sample, of shape [batch]: a mean over samples, 3 + 1 of them
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(VOCABULARY, (4, 5), generator=generator), torch.tensor([0, 2, 1, 1])
    batches = [{"input_ids": ids[rows], "labels": labels[rows]} for rows in (slice(0, 3), slice(3, 4))]
    module = HFModule("BertForSequenceClassification", num_labels=3)
    fit(module, batches)
    assert [record.num_tokens for record in module.records] == [4]
    (right,) = reference("BertForSequenceClassification", [{"input_ids": ids, "labels": labels}], num_labels=3)
    assert (module.gradients[0] - right).norm() <= 1e-12 * right.norm()


@pytest.mark.parametrize("strategy", ["ours", "auto", SingleDeviceStrategy(device="cpu")], ids=["ours", "auto", "one"])
def test_the_metric_counts_the_same_under_every_strategy(strategy: Any) -> None:
    rows = seq2seq_windows()[0]
    batches = [collate(r) for r in rows]
    module = HFModule("T5ForConditionalGeneration", configure_model=True)
    trainer = make_trainer(
        1, strategy=TokenNormDDP() if strategy == "ours" else strategy, callbacks=[TokenMeanMetric()]
    )
    (logged,) = trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)  # type: ignore[arg-type]
    merged = module.model(**collate([row for r in rows for row in r])).loss.item()
    assert logged["val_loss_per_token"] == pytest.approx(merged, rel=1e-12)


def test_the_strategy_shows_the_counter_of_the_module_it_fits() -> None:
    strategy = TokenNormDDP()
    assert strategy.count_tokens == SupervisedTokens(shift="auto")
    batches = [collate(rows) for rows in seq2seq_windows()[0]]
    trainer = fit(HFModule("T5ForConditionalGeneration"), batches, strategy=strategy)
    assert strategy.count_tokens == SupervisedTokens(shift=0)
    trainer.fit_loop.max_epochs = 2
    module = HFModule("LlamaForCausalLM")
    ids = torch.ones(1, 4, dtype=torch.long)
    trainer.fit(module, DataLoader([{"input_ids": ids, "labels": ids}] * 2, batch_size=None))  # type: ignore[arg-type]
    assert strategy.count_tokens == SupervisedTokens(shift=1)
    assert module.records[-1].num_tokens == 6


def test_models_that_disagree_are_refused_when_the_fit_starts() -> None:
    module = HFModule("T5ForConditionalGeneration")
    module.other = make("LlamaForCausalLM")
    with pytest.raises(
        ValueError, match=r"T5ForConditionalGeneration .* means shift=0, LlamaForCausalLM means shift=1"
    ):
        fit(module, [collate(rows) for rows in seq2seq_windows()[0]])
    strategy = TokenNormDDP(count_tokens=SupervisedTokens(shift=0), find_unused_parameters=True)
    fit(module, [collate(rows) for rows in seq2seq_windows()[0]], strategy=strategy)  # who says it is not asked
    assert module.records[-1].num_tokens == TOKENS[0]


# ---- the proof for users


def seq2seq_samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [sample(length, generator) for length in (4, 1, 2, 3, 1, 4, 2, 1)]


def make_t5() -> HFModule:
    return HFModule("T5ForConditionalGeneration")


def test_the_proof_holds_for_seq2seq() -> None:
    check = {"collate_fn": collate, "world_sizes": (2,), "accumulate": (2,)}
    report = assert_partition_invariant(make_t5, seq2seq_samples(), **check)  # type: ignore[arg-type]
    assert report.results[0].ok
    # 18 tokens in all; after a shift of 1 they would be 10
    assert sum(report.results[0].num_tokens) >= 18


def test_a_shift_too_many_is_named_for_seq2seq() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_partition_invariant(
            make_t5,
            seq2seq_samples(),
            collate_fn=collate,
            world_sizes=(2,),
            accumulate=(2,),
            strategy=lambda: TokenNormDDP(count_tokens=SupervisedTokens(shift=1)),
        )
    assert (
        "the loss is a mean over the live labels without a shift, but `count_tokens` counts the live labels after a"
        " shift of 1"
    ) in str(raised.value)
