"""Around the windows: validation in between, fits and evaluations in a row, loaders, precision plugins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R1, R2, ScalarModule, make_loader, make_trainer

TOLERANCE = 1e-12


def validated(rank: int, world_size: int) -> dict[str, Any]:
    module = ScalarModule()
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        val_check_interval=2,  # inside a window
        num_sanity_val_steps=1,
        callbacks=[TokenMeanMetric()],
    )
    trainer.fit(module, make_loader(R2[rank]), make_loader(R1[rank]))
    logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return {"gradients": module.gradients, **logged}


def test_validation_inside_a_window() -> None:
    for result in run_ranks(validated, 2):
        assert result["gradients"] == pytest.approx([1.75, 1.375], abs=TOLERANCE)
        assert result["val_loss_per_token"] == pytest.approx(1.75, abs=TOLERANCE)
        assert result["train_loss_per_token_epoch"] == pytest.approx(1.6, abs=TOLERANCE)


def in_a_row(rank: int, world_size: int) -> dict[str, Any]:
    module = ScalarModule()
    trainer = make_trainer(
        world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3, callbacks=[TokenMeanMetric()]
    )
    validations = [trainer.validate(module, make_loader(R1[rank]), verbose=False)[0]["val_loss_per_token"]]
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, make_loader(R2[rank]))
        assert "setup_data" not in vars(trainer.fit_loop)  # Lightning's loop is as it was
        validations.append(trainer.validate(module, make_loader(R1[rank]), verbose=False)[0]["val_loss_per_token"])
    tested = trainer.test(module, make_loader(R1[rank]), verbose=False)[0]["test_loss_per_token"]
    predicted = trainer.predict(_Predicts(), make_loader(R1[rank]))
    return {
        "gradients": module.gradients,
        "losses": [*validations, tested],
        "predicted": len(predicted or []),
        "last": trainer.strategy.last_update,  # type: ignore[attr-defined]
    }


class _Predicts(ScalarModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def test_fits_and_evaluations_in_a_row() -> None:
    for result in run_ranks(in_a_row, 2):
        assert result["gradients"] == pytest.approx([1.75, 1.375] * 2, abs=TOLERANCE)
        assert result["losses"] == pytest.approx([1.75] * 4, abs=TOLERANCE)
        assert result["predicted"] == 3
        assert result["last"].index == 3  # counts on, as `global_step` does


def reloaded(rank: int, world_size: int, sized: bool) -> list[float]:
    class Module(ScalarModule):
        def train_dataloader(self) -> Any:
            return make_loader(R2[rank], sized=sized)

    module = Module()
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(module)
    return module.gradients


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
def test_loaders_made_anew_every_epoch(sized: bool) -> None:
    for gradients in run_ranks(reloaded, 2, sized):
        assert gradients == pytest.approx([1.75, 1.375] * 2, abs=TOLERANCE)


def combined(rank: int, world_size: int, mode: str) -> list[float]:
    class Module(ScalarModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return sum(self.loss(part) for part in batch.values() if part is not None)  # type: ignore[return-value]

    def count(batch: Any) -> int:
        return sum(int((part["labels"][:, 1:] != -100).sum()) for part in batch.values() if part is not None)

    loaders = CombinedLoader({"a": make_loader(R1[rank]), "b": make_loader(R1[rank][:1])}, mode)  # type: ignore[arg-type]
    module = Module("sum")
    strategy = TokenNormDDP(count_tokens=count, loss_reduction="sum")
    make_trainer(world_size, strategy=strategy, accumulate_grad_batches=3).fit(module, loaders)
    return module.gradients


@pytest.mark.parametrize(
    ("mode", "gradients"),
    [
        # "a" is R1, "b" its first column, (3, 1) and (2, 2): 7 over 5 tokens
        ("max_size", [(42 + 7) / (24 + 5)]),  # "b" once, then None
        ("max_size_cycle", [(42 + 3 * 7) / (24 + 3 * 5)]),
        ("min_size", [14 / 10]),  # one micro-batch of both
    ],
)
def test_combined_loaders(mode: str, gradients: list[float]) -> None:
    for seen in run_ranks(combined, 2, mode):
        assert seen == pytest.approx(gradients, abs=TOLERANCE)


class Adam(ScalarModule):
    """float32 with AdamW, so that a step with a zero gradient would still move the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.float()
        self.states: list[Any] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss({**batch, "values": batch["values"].float()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
                "interval": "step",
            },
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        optimizer = self.trainer.optimizers[0]
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.states.append(
            {
                "t": self.t.item(),
                "adam": {key: value.item() for key, value in optimizer.state[self.t].items()},
                "scaler": None if scaler is None else (scaler.get_scale(), scaler._get_growth_tracker()),
                "lr": optimizer.param_groups[0]["lr"],
                "global_step": self.trainer.global_step,
            }
        )


def with_an_empty_window(rank: int, world_size: int, precision: str) -> list[Any]:
    table = [[R1[rank][0], (0, 0), R1[rank][1]] for rank in range(2)]
    plugins = []
    if precision == "16-mixed":
        plugins, precision_option = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))], None
    else:
        precision_option = precision
    module = Adam()
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        plugins=plugins,
        precision=precision_option,  # type: ignore[arg-type]
        gradient_clip_val=1.0,
    )
    trainer.fit(module, make_loader(table[rank]))
    return module.states


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_empty_window_leaves_the_optimizer_alone(precision: str) -> None:
    for before, empty, after in run_ranks(with_an_empty_window, 2, precision):
        for untouched in ("t", "adam", "scaler"):
            assert empty[untouched] == before[untouched]
        assert (before["lr"], empty["lr"], after["lr"]) == (0.05, 0.025, 0.0125)
        assert (empty["global_step"], after["global_step"]) == (2, 3)
        assert after["t"] != empty["t"]
        assert after["adam"]["step"] == 2


def in_half_precision(rank: int, world_size: int) -> list[float]:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    module = Adam()
    trainer = make_trainer(world_size, strategy=TokenNormDDP(), plugins=[plugin], accumulate_grad_batches=3)
    trainer.fit(module, make_loader(R2[rank]))
    return module.gradients


def test_gradients_are_unscaled_token_means_under_a_grad_scaler() -> None:
    # the rig's arithmetic is float32 outside autocast's operators, and a scale of 2**16 is exact
    for gradients in run_ranks(in_half_precision, 2):
        assert gradients == pytest.approx([1.75, 1.375], rel=1e-6)
