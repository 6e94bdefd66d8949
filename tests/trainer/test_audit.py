"""`audit=True`: the count that a loss was made with is the one that was counted ahead, or all ranks stop."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lightning_tokennorm import SupervisedTokens, TokenNormDDP
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R1, R2, ScalarModule, make_loader, make_trainer


class Declares(ScalarModule):
    """Returns its own count, which `change` may make wrong at one batch of one rank."""

    def __init__(self, change: str | None = None) -> None:
        super().__init__()
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        if self.change == "masks" and (self.global_rank, batch_idx) == (1, 4):
            batch["labels"][:, 6:] = -100  # of the 10 tokens, at positions 1 to 10, 5 are left
        loss: Tensor = super().training_step(batch, batch_idx)
        live = (batch["labels"][:, 1:] != -100).sum()
        if self.change == "floats":
            return {"loss": loss, "num_tokens": live.double()}
        return {"loss": loss, "num_tokens": live} if self.change != "silent" else loss


def fit(rank: int, world_size: int, change: str | None, shift: int = 1) -> tuple[list[float], list[float], str | None]:
    module = Declares(change)
    strategy = TokenNormDDP(audit=True, count_tokens=SupervisedTokens(shift=shift))
    trainer = make_trainer(world_size, strategy=strategy, accumulate_grad_batches=3)
    try:
        trainer.fit(module, make_loader(R2[rank]))
    except RuntimeError as error:
        return module.gradients, module.parameters_after, f"{type(error).__name__}: {error}"
    return module.gradients, module.parameters_after, None


@pytest.mark.parametrize("change", [None, "floats", "silent"])
def test_counts_that_agree_pass(change: str | None) -> None:
    for gradients, _, error in run_ranks(fit, 2, change):
        assert error is None
        assert gradients == pytest.approx([1.75, 1.375], abs=1e-12)


def test_labels_changed_in_the_step_stop_all_ranks_before_the_update() -> None:
    for gradients, parameters, error in run_ranks(fit, 2, "masks"):
        assert error is not None
        assert error.startswith("TokenNormError: At update 1, the tokens counted ahead are not those")
        assert "Rank 1: batch 4: 10 counted ahead, 5 used." in error
        assert "Usual reasons: the loss shifts labels and the counter does not" in error
        assert gradients == pytest.approx([1.75], abs=1e-12)  # the window before it was right
        assert len(parameters) == 1


def test_a_counter_without_the_shift_names_every_rank() -> None:
    for gradients, _, error in run_ranks(fit, 2, None, 0):
        assert error is not None
        # position 0 of each row is live: one too many for each of the micro-batches
        assert "Rank 0: batch 0: 4 counted ahead, 3 used. batch 1: 2 counted ahead, 1 used." in error
        assert "Rank 1: batch 0: 3 counted ahead, 2 used." in error
        assert gradients == []


def fit_without_audit(rank: int, world_size: int) -> list[float]:
    module = Declares("masks")
    make_trainer(world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3).fit(module, make_loader(R1[rank]))
    return module.gradients


def test_a_dict_with_a_count_is_fine_without_the_audit() -> None:
    for gradients in run_ranks(fit_without_audit, 2):
        assert gradients == pytest.approx([1.75], abs=1e-12)
