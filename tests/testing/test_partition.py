"""The proof for users: right modules pass, wrong ones are caught with the right cause named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_tokennorm import SupervisedTokens, TokenNormDDP
from lightning_tokennorm.testing import RankError, assert_partition_invariant
from lightning_tokennorm.testing.compare import compare
from lightning_tokennorm.testing.watch import Seen
from tests.helpers import tiny_lm
from tests.helpers.ddp_hooks import sum_hook
from tests.helpers.tiny_lm import TinyModule

SAMPLES = tiny_lm.make_samples(12)
for sample in SAMPLES:
    sample["labels"][0] = sample["input_ids"][0]  # live and never predicted: here a shift makes a difference
QUICK = {"collate_fn": tiny_lm.collate, "world_sizes": (2,), "accumulate": (2,)}


def check(make_module: Any, **options: Any) -> Any:
    return assert_partition_invariant(make_module, SAMPLES, **{**QUICK, **options})


def test_a_right_module_on_all_splits() -> None:
    report = check(TinyModule, world_sizes=(1, 2), accumulate=(1, 2, 3))
    assert len(report.results) == 6
    assert all(result.ok and result.max_abs_error < 1e-12 and result.rel_l2_error < 1e-10 for result in report.results)
    text = str(report)
    assert "W=2 K=3, micro-batches of 1-2, short last window, a rank without tokens" in text
    assert "W=1 K=3, micro-batches of 1-2, short last window, a micro-batch without tokens" in text
    assert "note: plain SGD takes the place of the module's optimizer" in text


def test_a_module_that_returns_sums() -> None:
    check(lambda: TinyModule("sum"), strategy=lambda: TokenNormDDP(loss_reduction="sum"), accumulate=(1, 2))


class AllPositions(TinyModule):
    """The mean over all positions, ignored ones too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model.loss_sum(batch) / batch["labels"].numel()


class ChangesInPlace(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["labels"][:, ::2] = -100
        return super().training_step(batch, batch_idx)


class ChangesCopy(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch["labels"].clone()
        labels[:, ::2] = -100
        return super().training_step({**batch, "labels": labels}, batch_idx)


class ReturnsItsCount(ChangesCopy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "num_tokens": torch.tensor(len(batch["labels"]))}


class RowMeans(TinyModule):
    """The mean over rows of each row's sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model.loss_sum(batch) / len(batch["labels"])


class MixesSamples(TinyModule):
    """A loss that depends on more than its own tokens: the square of a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) ** 2


def half_mean_hook(state, bucket):  # type: ignore[no-untyped-def]
    world_size = dist.get_world_size()
    return sum_hook(None, bucket).then(lambda future: future.value() / world_size**2)


def odd_hook(state, bucket):  # type: ignore[no-untyped-def]
    return sum_hook(None, bucket).then(lambda future: future.value() * 0.7)


class Scaled(TokenNormDDP):
    """A strategy that scales once too often."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(closure_loss * self.factor, optimizer, *args, **kwargs)


@pytest.mark.parametrize(
    ("make_module", "options", "cause"),
    [
        (
            AllPositions,
            {},
            "the loss is a mean over all positions, ignored ones too",
        ),
        (
            TinyModule,
            {"strategy": lambda: TokenNormDDP(count_tokens=SupervisedTokens(shift=0))},
            "a mean over the live labels after a shift of 1, but `count_tokens` counts the live labels without a shift",
        ),
        (ChangesInPlace, {}, "`training_step` changes the labels after they were counted"),
        (ChangesCopy, {}, "labels changed in `training_step` or in a transfer hook"),
        (RowMeans, {}, "; or the rows of the batch"),
        (MixesSamples, {}, "a loss term of another kind"),
        (
            TinyModule,
            {"strategy": lambda: TokenNormDDP(ddp_comm_hook=odd_hook, ddp_hook_reduces="mean")},
            "none of the known ones",
        ),
        (TinyModule, {"strategy": DDPStrategy}, "the mean of the micro-batches' means"),
        (
            TinyModule,
            {"strategy": lambda: TokenNormDDP(ddp_comm_hook=sum_hook, ddp_hook_reduces="mean")},
            "the gradient is W = 2 times the right one",
        ),
        (
            TinyModule,
            {
                "strategy": lambda: TokenNormDDP(ddp_comm_hook=half_mean_hook, ddp_hook_reduces="mean"),
                "accumulate": (3,),
            },
            "the gradient is 1/W = 0.5 times the right one",
        ),
        (
            TinyModule,
            {"strategy": lambda: Scaled(3.0), "accumulate": (3,)},
            "the gradient is K = 3 times the right one",
        ),
        (
            TinyModule,
            {"strategy": lambda: Scaled(1 / 3), "accumulate": (3,)},
            "the gradient is 1/K = 0.333333 times the right one",
        ),
        (
            TinyModule,
            {"strategy": lambda: TokenNormDDP(count_tokens=lambda batch: batch["labels"].shape[1] ** 2)},
            "`count_tokens` depends on how samples are batched",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_module_is_caught_with_its_cause(make_module: Any, options: dict[str, Any], cause: str) -> None:
    with pytest.raises(AssertionError) as raised:
        check(make_module, **options)
    text = str(raised.value)
    assert cause in text.split("Likely cause: ")[1]
    assert "W=2 K=" in text
    assert "WRONG" in text
    assert "worst in 'model." in text


class WithDropout(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.block.dropout.p = 0.5
        self.model.block.self_attn.dropout = 0.5


def test_dropout_is_switched_off_and_said() -> None:
    report = check(WithDropout)
    assert "dropout is switched off in 2 layers for the run" in str(report)


class WithBatchNorm(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.head = nn.Sequential(nn.BatchNorm1d(tiny_lm.LENGTH), self.model.head).double()  # type: ignore[assignment]


class Noisy(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + torch.rand(()))


class NewWeights(TinyModule):
    drawn = 0

    def __init__(self) -> None:
        super().__init__()
        NewWeights.drawn += 1
        with torch.no_grad():
            self.model.head.bias += NewWeights.drawn


def test_preconditions_are_looked_at() -> None:
    with pytest.raises(ValueError, match=r"model\.head\.0 \(BatchNorm1d\)"):
        check(WithBatchNorm)
    with pytest.raises(ValueError, match="is not deterministic"):
        check(Noisy)
    with pytest.raises(ValueError, match=r"same weights each time: 'model\.head\.bias' differ"):
        check(NewWeights)
    with pytest.raises(ValueError, match="got no sample"):
        assert_partition_invariant(TinyModule, [])


def test_batch_dependent_layers_can_be_allowed() -> None:
    with pytest.raises(AssertionError, match="layers that mix the samples of a batch are allowed"):
        check(WithBatchNorm, allow_batch_dependent=True)


class Raises(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise KeyError("no such column")


def test_an_error_of_the_module_is_shown() -> None:
    with pytest.raises(RankError, match="no such column"):
        check(Raises)


def test_the_examples_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    for name in ("causal_lm", "chat_data", "options"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from causal_lm import CausalLM, collate  # type: ignore[import-not-found]
    from chat_data import Conversation, Sample  # type: ignore[import-not-found]

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
    )
    samples = [
        Sample(ids, [-100] * prompt + ids[prompt:], Conversation([], "", (1,)))
        for ids, prompt in ((list(range(2, 2 + 5 + i % 4)), 1 + i % 3) for i in range(12))
    ]
    report = assert_partition_invariant(
        lambda: CausalLM(transformers.LlamaForCausalLM(config), 1e-3),
        samples,
        collate_fn=lambda chosen: collate(chosen, 0),
        accumulate=(1, 3),
    )
    print(report)
    assert "dropout is switched off in 2 layers" in capsys.readouterr().out
    assert all(result.ok for result in report.results)


def test_an_error_in_the_imaginary_part_counts() -> None:
    def seen(gradient: complex) -> Seen:
        tensors = {"turn": torch.tensor([gradient], dtype=torch.complex128)}
        return Seen(gradients=[tensors], parameters=[{"turn": torch.zeros(1, dtype=torch.complex128)}], digests=[""])

    assert compare([seen(3 + 4j)], seen(3 + 4j), 1e-9, 1e-12).wrong is None
    found = compare([seen(3 + 5j)], seen(3 + 4j), 1e-9, 1e-12)
    assert found.wrong is not None
    assert found.rel_l2 == pytest.approx(1 / 5)  # |1j| / |3 + 4j|


def test_f_cross_entropy_over_no_token_is_the_case_at_hand() -> None:
    # what the split with a rank without tokens feeds to the module: NaN, whose gradient must not be seen
    assert F.cross_entropy(torch.zeros(2, 3), torch.tensor([-100, -100])).isnan()
