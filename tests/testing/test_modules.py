"""The proof on modules as people write them: parameters, batches, optimizers and hooks of all kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from lightning_tokennorm import SupervisedTokens, TokenNormDDP
from lightning_tokennorm.testing import RankError, assert_partition_invariant
from lightning_tokennorm.testing.module import build
from lightning_tokennorm.testing.ranks import run_ranks
from lightning_tokennorm.testing.watch import LEARNING_RATE, fit
from tests.helpers import tiny_lm
from tests.helpers.tiny_lm import IGNORE, VOCABULARY, TinyModule

SAMPLES = tiny_lm.make_samples(8)
QUICK = {"collate_fn": tiny_lm.collate, "world_sizes": (2,), "accumulate": (2,)}


def check(make_module: Any, samples: Any = SAMPLES, **options: Any) -> Any:
    return assert_partition_invariant(make_module, samples, **{**QUICK, **options})


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Bigrams(pl.LightningModule):
    """The next token's logits from this token alone: an embedding and a head. No optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 4, dtype=torch.float64)
        self.head = nn.Linear(4, VOCABULARY, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return token_loss(self.head(self.embed(batch["input_ids"])), batch["labels"])


# ---- parameters


class OddParameters(Bigrams):
    """Transposed, empty, 0-dim and complex ones, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 4, dtype=torch.float64).T)
        self.none = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.head.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.embed(batch["input_ids"]) @ self.mix * self.scale + self.none.sum()
        hidden = hidden + (hidden.to(torch.complex128) @ self.turn).imag
        return token_loss(self.head(hidden), batch["labels"])


class SparseEmbedding(Bigrams):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 4, dtype=torch.float64, sparse=True)


class ChannelsLast(pl.LightningModule):
    """A convolution over positions, in the memory format that vision models use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 4)
        self.convolution = nn.Conv2d(4, VOCABULARY, 3, padding=1)
        self.double().to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image = self.embed(batch["input_ids"]).transpose(1, 2)[:, :, None]
        return token_loss(self.convolution(image)[:, :, 0].transpose(1, 2), batch["labels"])


class Half(Bigrams):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.to(dtype)


@pytest.mark.parametrize(
    "make_module",
    [OddParameters, SparseEmbedding, ChannelsLast, lambda: Half(torch.bfloat16), lambda: Half(torch.float16)],
    ids=["odd", "sparse", "channels_last", "bfloat16", "float16"],
)
def test_all_kinds_of_parameters(make_module: Any) -> None:
    report = check(make_module, world_sizes=(1, 2))
    assert report.rtol == (5e-2 if "lambda" in make_module.__name__ else 1e-9)
    with pytest.raises(AssertionError, match="is the mean of the micro-batches' means"):
        check(make_module, strategy=DDPStrategy)


class Unused(Bigrams):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2, dtype=torch.float64)


def test_a_parameter_that_is_never_used() -> None:
    with pytest.raises(RankError) as raised:
        check(Unused)
    text = str(raised.value)
    assert text.startswith("The fit failed with W=2 K=2, ")
    cause = text.split("Likely cause: ")[1].split("\n")[0]
    assert cause.startswith("'never.weight', 'never.bias' got no gradient in any update")
    assert "find_unused_parameters=True" in cause
    assert check(Unused, strategy=lambda: TokenNormDDP(find_unused_parameters=True)).results[0].ok


# ---- tokens


def test_samples_without_a_supervised_token() -> None:
    without = [{**sample, "labels": torch.full_like(sample["labels"], IGNORE)} for sample in SAMPLES]
    with pytest.raises(ValueError, match=r"None of the 8 samples has a supervised token.* All their labels are -100"):
        check(Bigrams, without)
    # a classifier: one label in a row, which the shift of language models takes away
    one = [{**sample, "labels": sample["labels"][-1:]} for sample in SAMPLES]
    with pytest.raises(ValueError, match=r"They have 8 live labels, but none after the shift.*shift=0"):
        check(Bigrams, one)
    with pytest.raises(ValueError, match=r"no_tokens.*whose `count_tokens` fits them"):
        check(Bigrams, strategy=lambda: TokenNormDDP(count_tokens=no_tokens))


def no_tokens(batch: Any) -> int:
    return 0


def test_few_samples_with_a_supervised_token() -> None:
    without = [{**sample, "labels": torch.full_like(sample["labels"], IGNORE)} for sample in SAMPLES]
    samples = [*without[:2], SAMPLES[2], *without[3:7], SAMPLES[7]]
    # their labels at positions 1 to 6 that are live, by the samples' seed
    live = [int((samples[index]["labels"][1:] != IGNORE).sum()) for index in (2, 7)]
    report = check(lambda: TinyModule("own mean"), samples, world_sizes=(1, 2), accumulate=(1, 2))
    assert all(result.ok for result in report.results)
    # W = K = 1: micro-batches of samples 0, 1 2, 3, 4 5, 6, 7 0: one update per micro-batch, some are none
    assert report.results[0].num_tokens == (0, live[0], 0, 0, 0, live[1])
    with pytest.raises(AssertionError, match="Likely cause: a micro-batch without supervised tokens"):
        check(lambda: TinyModule("own mean"), samples, strategy=DDPStrategy)
    with pytest.raises(AssertionError, match="Likely cause: no sample of this window has a supervised token"):
        check(lambda: TinyModule("own mean"), samples, strategy=DDPStrategy, world_sizes=(1,), accumulate=(1,))


def test_samples_that_cannot_show_a_wrong_shift() -> None:
    assert "no sample has a live first label" in str(check(Bigrams))
    first_live = [{**sample, "labels": sample["input_ids"]} for sample in SAMPLES]
    assert "first label" not in str(check(Bigrams, first_live))


# ---- batches


@dataclass
class Batch:
    ids: Tensor
    labels: Tensor


class Unpacks(Bigrams):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch if isinstance(batch, tuple) else (batch.ids, batch.labels)
        return super().training_step({"input_ids": ids, "labels": labels}, batch_idx)


def as_dataclass(samples: Any) -> Batch:
    batch = tiny_lm.collate(samples)
    return Batch(batch["input_ids"], batch["labels"])


def as_tuple(samples: Any) -> tuple[Tensor, Tensor]:
    batch = tiny_lm.collate(samples)
    return batch["input_ids"], batch["labels"]


def view_of_one(samples: Any) -> dict[str, Tensor]:
    """A batch of one shares its memory with the sample."""
    return tiny_lm.collate(samples) if len(samples) > 1 else {key: value[None] for key, value in samples[0].items()}


def test_all_kinds_of_batches() -> None:
    check(Unpacks, collate_fn=as_dataclass)
    check(Unpacks, collate_fn=as_tuple, strategy=lambda: TokenNormDDP(count_tokens=SupervisedTokens(labels=1)))
    check(Bigrams, collate_fn=view_of_one, micro_batch_size=1, world_sizes=(1, 2))
    transformers = pytest.importorskip("transformers")
    check(Bigrams, collate_fn=lambda samples: transformers.BatchEncoding(tiny_lm.collate(samples)))


def random_masks(samples: Any) -> dict[str, Tensor]:
    batch = tiny_lm.collate(samples)
    return {**batch, "labels": batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, IGNORE)}


def test_a_collate_function_that_draws() -> None:
    with pytest.raises(ValueError, match=r"not deterministic.*that of `collate_fn`"):
        check(Bigrams, collate_fn=random_masks)


# ---- optimizers and schedules


class Configured(Bigrams):
    """A module with one of the things that `configure_optimizers` may return."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_optimizers(self) -> Any:
        head, embed = {"params": self.head.parameters()}, {"params": self.embed.parameters(), "lr": 3.0}
        optimizer: Any = Adam([head, embed], lr=0.1)
        falls = LambdaLR(optimizer, lambda step: 0.5**step)
        return {
            "optimizer": optimizer,
            "list": [optimizer],
            "lists": ([optimizer], [{"scheduler": falls, "interval": "step"}]),
            "dict": {"optimizer": optimizer, "lr_scheduler": falls},
            "plateau": {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
            "closure": torch.optim.LBFGS(self.parameters()),
            "too short": ([optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total_steps=1), "interval": "step"}]),
            "none": None,
        }[self.how]


@pytest.mark.parametrize("how", ["optimizer", "list", "lists", "dict", "plateau", "closure", "none"])
def test_all_that_configure_optimizers_may_return(how: str) -> None:
    report = check(lambda: Configured(how))
    assert report.results[0].ok
    assert "not compared" not in str(report)
    with pytest.raises(AssertionError, match="is the mean of the micro-batches' means"):  # Adam's own step hides scales
        check(lambda: Configured(how), strategy=DDPStrategy)


class Wrapper:
    """An optimizer around another one that never ran `Optimizer.__init__`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict
        self.zero_grad = optimizer.zero_grad

    def step(self, closure: Any = None) -> Any:
        raise AssertionError("plain SGD steps in its place")


class Wrapped(Bigrams):
    def configure_optimizers(self) -> Any:
        return Wrapper(Adam(self.parameters()))


def updates_of(rank: int, world_size: int, make_module: Any, strategy: str = "auto") -> Any:
    batches = [tiny_lm.collate(SAMPLES[index : index + 2]) for index in (0, 2, 4)]
    return fit(build(make_module), batches, strategy=strategy)


@pytest.mark.parametrize("make_module", [lambda: Configured("lists"), Wrapped], ids=["schedule", "wrapper"])
def test_the_step_is_plain_sgd_with_a_fixed_rate(make_module: Any) -> None:
    (seen,) = run_ranks(updates_of, 1, make_module)
    for update in (1, 2):
        for name, gradient in seen.gradients[update].items():
            expected = seen.parameters[update - 1][name] - LEARNING_RATE * gradient
            torch.testing.assert_close(seen.parameters[update][name], expected, rtol=0, atol=1e-15)


def test_a_schedule_runs_and_its_error_is_told() -> None:
    # it is over after one update; at the second, torch raises
    with pytest.raises(RankError, match=r"The fit failed in one process(.*\n)*.*[Tt]ried to step 2 times"):
        check(lambda: Configured("too short"))


class Subset(Bigrams):
    """All is trainable, the head alone is optimised; nobody clears the other gradients."""

    def configure_optimizers(self) -> Any:
        return SGD(self.head.parameters(), lr=0.1)


class FreezesLate(Subset):
    def configure_optimizers(self) -> Any:
        self.embed.requires_grad_(False)
        return super().configure_optimizers()


class UnfreezesLate(Bigrams):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        self.embed.requires_grad_(True)
        return SGD(self.parameters(), lr=0.1)


def test_an_optimizer_of_some_of_the_parameters() -> None:
    assert "not compared, since no optimizer holds them: 'embed.weight'" in str(check(Subset))
    report = check(FreezesLate, strategy=lambda: TokenNormDDP(find_unused_parameters=True))
    assert "not compared" not in str(report)
    with pytest.raises(RankError, match=r"Likely cause: `configure_optimizers` freezes \'embed\.weight\'"):
        check(FreezesLate)


def test_parameters_that_configure_optimizers_unfreezes() -> None:
    # plain DDP leaves them to each rank
    with pytest.raises(AssertionError, match=r"Likely cause: `configure_optimizers` unfreezes \'embed\.weight\'"):
        check(UnfreezesLate, strategy=DDPStrategy)


# ---- hooks


class UsesItsTrainer(Bigrams):
    """Logs to its logger, reads its schedule, brings callbacks that watch a validation, anneals by the update."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * self.trainer.global_step)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        self.logger.experiment.add_scalar("loss", loss, self.global_step)  # type: ignore[union-attr]
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("lr", self.lr_schedulers().get_last_lr()[0])  # type: ignore[union-attr]

    def configure_callbacks(self) -> Any:
        return [ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss"), LearningRateMonitor()]

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters())
        return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.5)]


class MadeLate(Bigrams):
    """Made in the hooks that are there for it, dropout and a frozen part included."""

    def __init__(self) -> None:
        super().__init__()
        del self.embed

    def setup(self, stage: str) -> None:
        self.drop = nn.Dropout(0.5)

    def configure_model(self) -> None:
        self.base = nn.Embedding(VOCABULARY, 4, dtype=torch.float64).requires_grad_(False)
        self.mix = nn.Linear(4, 4, dtype=torch.float64)

    def embed(self, ids: Tensor) -> Tensor:
        return self.mix(self.drop(self.base(ids)))


class WantsDataModule(Bigrams):
    def on_train_start(self) -> None:
        self.offset = self.trainer.datamodule.offset  # type: ignore[attr-defined]


def test_hooks_run_as_in_training() -> None:
    state = torch.random.get_rng_state()
    check(UsesItsTrainer)
    assert "dropout is switched off in 1 layer for" in str(check(MadeLate))
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing of it ran in this process
    with pytest.raises(AssertionError, match="is the mean of the micro-batches' means"):
        check(MadeLate, strategy=DDPStrategy)
    with pytest.raises(RankError, match=r"Likely cause: the module reads `self\.trainer\.datamodule`"):
        check(WantsDataModule)


def test_a_module_that_ends_the_epoch_early() -> None:
    with pytest.raises(AssertionError, match="2 updates instead of 3\\.\nLikely cause: updates are missing"):
        check(EndsEarly)


class EndsEarly(Bigrams):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None
