"""What modules, optimizers and hooks of other people do to a step, told and resumed as it happened."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP, TokenNormError
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R0, R1, ScalarModule, make_loader, make_trainer
from tests.trainer import test_resume as resumes
from tests.trainer.test_field_cases import fit_rig, run_alone
from tests.trainer.test_precision import Rig, precision_options

TOLERANCE = 1e-12
NOT_STEPPED = "`optimizer_step` of the module did not step the optimizer"
NO_TOKENS = "no rank has a supervised token in this window"
NOT_FINITE = "the gradients are not finite: the scaler skipped it"


# ---- the module's own `optimizer_step` (https://github.com/Lightning-AI/pytorch-lightning/issues/4956)


class OwnStep(resumes.Module):
    """Eight micro-batches in windows of 3, 3 and 2; what it does with the step of one of them is its own affair."""

    def __init__(self, how: str, at: int = 1) -> None:
        super().__init__()
        self.how, self.at = how, at
        self.steps = 0

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps - 1 != self.at:
            optimizer.step(closure=optimizer_closure)
        elif self.how == "closure, no step":
            optimizer_closure()
        elif self.how == "closure, then step":
            optimizer_closure()
            optimizer.step()
        else:
            assert self.how == "two steps"  # to do without the closure at all is refused by Lightning itself
            optimizer.step(closure=optimizer_closure)
            optimizer.step()


def own_step(rank: int, world_size: int, folder: str) -> None:
    def fit(how: str, path: Any = None, **options: Any) -> tuple[OwnStep, int]:
        module = OwnStep(how, at=1 if path is None else -1)
        trainer = make_trainer(1, strategy=TokenNormDDP(), accumulate_grad_batches=3, max_epochs=2, **options)
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, resumes.make_stateful_loader("stream"), ckpt_path=path)
        return module, trainer.global_step

    for how in ("closure, no step", "closure, then step", "two steps"):
        whole, whole_steps = fit(how)
        assert whole_steps == 6, how  # Lightning counts the hook's calls
        assert [record.applied for record in whole.records] == [True, "step" in how and "no" not in how, *[True] * 4]
        assert whole.records[1].skipped_because == (None if whole.records[1].applied else NOT_STEPPED)
        assert whole.trained == [*range(8), *range(8)], how
        # a checkpoint after that window, and after the one that follows
        for at, done in ((5, 2), (7, 3)):
            path = Path(folder) / f"{how}-{at}.ckpt"
            fit(how, callbacks=[resumes.Saves(path, at)])
            progress = torch.load(path, weights_only=False)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            assert progress["current"]["ready"] in (at + 1, 0), how
            resumed, _ = fit(how, path)
            assert resumed.parameters_after == whole.parameters_after[done:], (how, at)
            assert len(resumed.parameters_after) == 6 - done


def test_a_module_that_steps_its_own_way(tmp_path: Path) -> None:
    run_alone(own_step, str(tmp_path))


class Guard(Rig):
    """Leaves the step out where the gradient is not finite, as such guards are usually written."""

    def __init__(self, at: int, precision: str = "64-true") -> None:
        super().__init__(precision, lambda parameters: torch.optim.SGD(parameters, lr=0.5))
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == self.at else loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:  # type: ignore[override]
        optimizer_closure()
        assert self.t.grad is not None
        if torch.isfinite(self.t.grad):
            optimizer.step()


def guard(rank: int, world_size: int) -> tuple[list[Any], list[float]]:
    module = fit_rig(R1[rank] * 2, 3, world_size, Guard(at=1 if rank == 1 else -1))  # type: ignore[operator]
    return [
        (record.index, record.applied, record.skipped_because) for record in module.records
    ], module.parameters_after


def test_a_guard_against_gradients_that_are_not_finite() -> None:
    # the sum over ranks is what is looked at, so all of them leave the step out; then 1 - 0.5 * 1.75
    for records, parameters in run_ranks(guard, 2):
        assert records == [(0, False, NOT_STEPPED), (1, True, None)]
        assert parameters == pytest.approx([1.0, 0.125], abs=TOLERANCE)


# ---- optimizers (https://github.com/kozistr/pytorch_optimizer/issues/122)


class Lookahead(torch.optim.Optimizer):
    """Lookahead (Zhang et al., 2019) as it is usually published: around another optimizer, whose parts it shows."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        # without `super().__init__()`, on purpose
        self.optimizer = optimizer
        self.k, self.alpha = k, alpha
        self.param_groups = self.optimizer.param_groups
        self.state = defaultdict(dict)
        self.defaults = self.optimizer.defaults
        for group in self.param_groups:
            group["counter"] = 0
        self.slow = [[each.detach().clone() for each in group["params"]] for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            group["counter"] += 1
            if group["counter"] % self.k == 0:
                for fast, each in zip(group["params"], slow, strict=True):
                    each.add_(fast.detach() - each, alpha=self.alpha)
                    fast.data.copy_(each)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return {"inner": self.optimizer.state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict["inner"])
        self.param_groups = self.optimizer.param_groups
        self.slow = state_dict["slow"]


class Lookaheads(resumes.Module):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))


def wrapped_optimizer(rank: int, world_size: int, folder: str) -> None:
    # (3 + 5 + 8) / 8 = 2 and the same again: t = 1 - 0.5 * 2, then -1, of which Lookahead takes 1 + 0.5 * (-1 - 1) = 0
    make = lambda parameters: Lookahead(torch.optim.SGD(parameters, lr=0.5))  # noqa: E731
    for precision in ("64-true", "16-mixed"):
        module = Rig(precision, make)
        fit_rig(R1[0] * 2, 3, module=module, **precision_options(precision))  # type: ignore[operator]
        assert module.gradients == pytest.approx([2.0, 2.0], rel=1e-6), precision
        assert module.parameters_after == pytest.approx([0.0, 0.0], abs=1e-6), precision
        assert [(each.index, each.applied) for each in module.records] == [(0, True), (1, True)]
    # an overflow is noticed, too
    overflowing = Guard(at=1, precision="16-mixed")
    overflowing.make_optimizer = make
    overflowing.optimizer_step = super(Guard, overflowing).optimizer_step  # type: ignore[method-assign]
    fit_rig(R1[0] * 2, 3, module=overflowing, **precision_options("16-mixed"))  # type: ignore[operator]
    assert [record.skipped_because for record in overflowing.records] == [NOT_FINITE, None]

    # resumes
    def fit(path: Any = None, **options: Any) -> Lookaheads:
        module = Lookaheads()
        trainer = make_trainer(1, strategy=TokenNormDDP(), accumulate_grad_batches=3, max_epochs=2, **options)
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, resumes.make_stateful_loader("stream"), ckpt_path=path)
        return module

    whole = fit()
    path = Path(folder) / "lookahead.ckpt"
    fit(callbacks=[resumes.Saves(path, 5)])
    resumed = fit(path)
    # its own state, the slow weights, is in the checkpoint, but not its count of steps: two were done, and k = 2
    assert resumed.parameters_after == whole.parameters_after[2:]


def test_an_optimizer_that_wraps_another_one(tmp_path: Path) -> None:
    run_alone(wrapped_optimizer, str(tmp_path))


class Sharpness(torch.optim.Optimizer):
    """SAM-like: goes up by `rho` along the gradient, takes the gradient there, and steps from where it was."""

    def __init__(self, parameters: Any, lr: float = 0.1, rho: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        (parameter,) = self.param_groups[0]["params"]
        before, up = parameter.detach().clone(), self.param_groups[0]["rho"] * parameter.grad.sign()
        parameter.data.add_(up)
        with torch.enable_grad():
            closure()
        parameter.data.copy_(before - self.param_groups[0]["lr"] * parameter.grad)
        return loss


class Squares(ScalarModule):
    """The gradient depends on where it is taken: that of the loss ``t**2 * n * x`` is ``2 t n x``."""

    def __init__(self, make_optimizer: Any) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.t

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


MAKERS = (Sharpness, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))


def several_evaluations_of_windows(rank: int, world_size: int) -> None:
    for make in MAKERS:
        module = Squares(make)
        with pytest.raises(TokenNormError, match=r"micro-batch 3 of a window of 3 was run again.*LBFGS, SAM"):
            fit_rig(R1[rank], 3, world_size, module)
        assert module.records == []


def several_evaluations(rank: int, world_size: int) -> None:
    for make in MAKERS:
        module = fit_rig(R1[rank], 1, world_size, Squares(make))
        assert [record.applied for record in module.records] == [True] * 3
        if make is not Sharpness:
            assert len(module.gradients) > 3  # the hook runs in each evaluation
            continue
        # token means 7/5, 15/11 and 20/8: gradients 2 t m, up by 0.5, and down from where it was by 0.1 times that
        t = 1.0
        for seen, mean in zip(module.parameters_after, (7 / 5, 15 / 11, 20 / 8), strict=True):
            t -= 0.1 * 2 * (t + 0.5) * mean
            assert seen == pytest.approx(t, abs=TOLERANCE)


def test_optimizers_that_evaluate_several_times() -> None:
    # https://github.com/Lightning-AI/pytorch-lightning/issues/4083
    run_ranks(several_evaluations, 2)
    run_alone(several_evaluations_of_windows)


# ---- no batch, no loss


class LeavesOut(Rig):
    """Returns None from the step, or from a transfer hook, of some micro-batches."""

    def __init__(self, at: tuple[int, ...], how: str = "training_step", precision: str = "64-true") -> None:
        super().__init__(precision, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        self.at, self.how = at, how
        self.current = -1
        self.batch_starts = 0

    def drop(self, hook: str, batch: Any) -> Any:
        return None if hook == self.how and self.current in self.at else batch

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.current += 1
        return self.drop("on_before_batch_transfer", batch)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return self.drop("transfer_batch_to_device", batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.drop("on_after_batch_transfer", batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert batch is not None
        self.batch_starts += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "training_step" and batch_idx in self.at:
            return None
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs if "loss" in outputs else {"loss": torch.zeros(())}, batch, batch_idx)


HOWS = ["training_step", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]


def left_out(rank: int, world_size: int) -> None:
    # (micro-batches, K, left out, gradients, N)
    cases: list[tuple[Any, int, tuple[int, ...], list[float], list[int]]] = [
        ([(3, 1), (1, 5)], 2, (1,), [1.0], [3]),
        ([(3, 1), (1, 5)], 2, (0,), [5.0], [1]),
        ([(3, 1), (1, 5)], 2, (0, 1), [], [0]),
        ([(3, 1), (1, 5)], 1, (1,), [1.0], [3, 0]),
        ([(3, 1), (1, 5)], 1, (0,), [5.0], [0, 1]),
        # a window with one left out, then a whole one, and one in a tail
        ([(3, 1), (1, 5), (4, 2)] * 2, 3, (1,), [11 / 7, 2.0], [7, 8]),
        ([(3, 1), (1, 5), (4, 2), (3, 1)], 3, (3,), [2.0], [8, 0]),
        ([(0, 0), (1, 5)], 2, (0,), [5.0], [1]),
        ([(3, 1), (0, 0)], 2, (1,), [1.0], [3]),
    ]
    for how in HOWS:
        for micro_batches, accumulate, at, gradients, tokens in cases:
            module, case = LeavesOut(at, how), (how, micro_batches, accumulate, at)
            trainer = make_trainer(
                1, strategy=TokenNormDDP(), accumulate_grad_batches=accumulate, callbacks=[TokenMeanMetric()]
            )
            trainer.fit(module, make_loader(micro_batches))
            # hooks before a step run in one that is not made, too, where they can: a window without any token
            assert module.batch_starts == len(micro_batches), case
            assert [record.num_tokens for record in module.records] == tokens, case
            assert [record.skipped_because for record in module.records] == [
                None if count else NO_TOKENS for count in tokens
            ], case
            steps = [1.0]
            for gradient in gradients:
                steps.append(steps[-1] - gradient)
            made = [after for after, count in zip(module.parameters_after, tokens, strict=True) if count]
            assert made == pytest.approx(steps[1:], abs=TOLERANCE), case
            assert module.t.item() == pytest.approx(steps[-1], abs=TOLERANCE), case
            logged = trainer.callback_metrics
            if tokens[-1]:
                assert logged["train_tokens"] == tokens[-1], case


def test_none_in_one_process_weighs_nothing() -> None:
    # https://github.com/Lightning-AI/pytorch-lightning/issues/20708
    run_alone(left_out)


def left_out_scaled(rank: int, world_size: int) -> None:
    for how in HOWS[::2]:
        for at, gradients, clipped in (((1,), 1.0, 0.75), ((0,), 5.0, 0.75), ((0, 1), None, None)):
            module = LeavesOut(at, how, "16-mixed")
            fit_rig([(3, 1), (1, 5)], 2, module=module, gradient_clip_val=0.75, **precision_options("16-mixed"))
            (record,) = module.records
            assert record.applied == (gradients is not None), (how, at)
            assert module.t.item() == pytest.approx(1.0 if clipped is None else 1 - clipped, rel=1e-4)
            if gradients is not None:
                assert module.gradients == pytest.approx([gradients], rel=1e-6)  # before clipping


def test_none_in_one_process_under_a_scaler_and_clipping() -> None:
    run_alone(left_out_scaled)


def dropped_on_ranks(rank: int, world_size: int, table: Any, at: tuple[int, ...], how: str) -> Any:
    module = LeavesOut(at if rank == 0 else (), how)
    trainer = make_trainer(
        world_size, strategy=TokenNormDDP(), accumulate_grad_batches=2, callbacks=[TokenMeanMetric()]
    )
    try:
        trainer.fit(module, make_loader(table[rank]))
    except TokenNormError as error:
        return str(error), module.t.item()
    return module.gradients, module.t.item(), trainer.callback_metrics["train_loss_per_token"].item()


@pytest.mark.parametrize("how", HOWS[1:])
def test_a_transfer_hook_that_drops_a_batch_without_tokens(how: str) -> None:
    for at in ((0,), (1,), (0, 1)) if how == HOWS[2] else ((1,),):
        for gradients, t, logged in run_ranks(dropped_on_ranks, 2, R0, at, how):
            assert gradients == pytest.approx([2.0], abs=TOLERANCE)
            assert t == pytest.approx(-1.0, abs=TOLERANCE)
            assert logged == pytest.approx(2.0, abs=TOLERANCE)


@pytest.mark.parametrize("at", [0, 1])
def test_a_transfer_hook_that_drops_tokens_is_an_error(at: int) -> None:
    (own, mine), (other, theirs) = run_ranks(dropped_on_ranks, 2, R1, (at,), HOWS[2])
    assert f"A transfer hook returned None for batch {at} on rank 0, whose {(3, 1)[at]} supervised tokens" in own
    assert f"The first to fail was rank 0, batch {at - 1}" in other
    assert "labels to -100" in other
    assert mine == theirs == 1.0


# ---- anomaly detection


def anomaly(rank: int, world_size: int) -> list[float]:
    module = fit_rig(R0[rank], 2, world_size, detect_anomaly=True)
    return module.gradients


def test_an_empty_micro_batch_is_no_anomaly() -> None:
    # https://github.com/Lightning-AI/pytorch-lightning/issues/8313
    assert run_ranks(anomaly, 2) == [pytest.approx([2.0], abs=TOLERANCE)] * 2


class Anomalous(ScalarModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (0.0 * self.t).sqrt() * 0.0  # 0 * inf in its backward


def true_anomaly(rank: int, world_size: int) -> str:
    try:
        fit_rig(R1[0], 3, module=Anomalous(), detect_anomaly=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_true_anomaly_is_still_found() -> None:
    assert "returned nan values" in run_alone(true_anomaly)
