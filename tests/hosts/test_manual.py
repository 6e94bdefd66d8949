"""Manual optimization on real processes: modules that run their own backwards and steps, window by window."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP, TokenNormFSDP, TokenNormModelParallel
from lightning_tokennorm.testing.precision import KeepTypes
from tests.helpers import law
from tests.helpers.launch import run_ranks
from tests.helpers.law import Case, Module
from tests.helpers.scalar_rig import R0, R1, R2, ScalarModule, make_loader, make_trainer
from tests.hosts.test_fsdp import WrapsItself
from tests.hosts.test_model_parallel import Sharded

HAND = "hand-written"
FSDP: dict[str, Any] = {"trainer": {"plugins": KeepTypes()}}
ONCE: dict[str, Any] = {"sync_each_micro_batch": False}
UNEVEN = {"lengths": (5, 2), "empty": ((0, 1),)}


class ByHand(LightningModule):
    """Goes before a module that has a `training_step`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if self.trainer.strategy.window.is_last:
            self.step()
        return loss

    def step(self) -> None:
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class Manual(ByHand, Module):
    """The small transformer."""


class ManualSharded(ByHand, Sharded):
    """The same in shards."""


class ManualWrapped(ByHand, WrapsItself):
    """The same with FSDP's units."""


class ManualScalar(ByHand, ScalarModule):
    """One parameter."""


DDP: dict[str, tuple[Case, dict[str, Any]]] = {
    "K=1": (Case(accumulate=1), {}),
    "K=2, sum": (Case(accumulate=2, loss="sum"), {}),
    "K=2, stream": (Case(accumulate=2, loss=HAND, stream=True), {}),
    "K=3": (Case(loss=HAND, epochs=2), {}),
    "rank without a token": (Case(loss=HAND, empty=tuple((1, index) for index in range(5))), {}),
    "window without a token": (Case(empty=tuple((rank, index) for rank in range(2) for index in range(3))), {}),
    "unequal ranks": (Case(loss=HAND, **UNEVEN, epochs=2), {}),
    "unequal streams": (Case(**UNEVEN, stream=True), {}),
    "views": (Case(loss=HAND), {"gradient_as_bucket_view": True}),
    "static": (Case(loss=HAND, epochs=2), {"static_graph": True}),
    "unused": (Case(loss=HAND, **UNEVEN), {"find_unused_parameters": True}),
}
THREE = {
    "K=2": (Case(lengths=(5, 2, 0), accumulate=2, stream=True, loss=HAND, empty=((0, 1),)), {}),
    "K=3": (Case(lengths=(4, 4, 4), loss="sum", epochs=2), {}),
}
SHARDED: dict[str, tuple[Case, dict[str, Any]]] = {
    "K=1": (Case(accumulate=1, loss=HAND), {}),
    "K=3": (Case(loss=HAND, **UNEVEN), {}),
    "K=3, once": (Case(loss=HAND, **UNEVEN, stream=True), ONCE),
}


def fit(rank: int, world_size: int, case: Case, kind: Any, module: Any = None, **options: Any) -> list[Tensor]:
    trainer = options.pop("trainer", {})
    strategy = kind(
        accumulate_grad_batches=case.accumulate, loss_reduction="sum" if case.loss == "sum" else "mean", **options
    )
    module = Manual(case.loss, lr=law.LR) if module is None else module
    return law.fit(rank, world_size, case, strategy, module, accumulate_grad_batches=1, **trainer)


def fit_ddp(rank: int, world_size: int, cases: Any) -> dict[str, float]:
    return {
        name: law.error(case, fit(rank, world_size, case, TokenNormDDP, **options))
        for name, (case, options) in cases.items()
    }


@pytest.fixture(scope="module")
def ddp() -> list[dict[str, float]]:
    return run_ranks(fit_ddp, 2, DDP)


@pytest.mark.parametrize("name", DDP)
def test_law(name: str, ddp: list[dict[str, float]]) -> None:
    assert max(errors[name] for errors in ddp) < law.TOLERANCE


def test_law_on_three_ranks() -> None:
    for errors in run_ranks(fit_ddp, 3, THREE):
        assert max(errors.values()) < law.TOLERANCE


def test_law_in_one_process() -> None:
    case = Case(lengths=(5,), empty=((0, 1),), loss=HAND)
    assert law.error(case, fit(0, 1, case, TokenNormDDP)) < law.TOLERANCE


def fit_sharded(rank: int, world_size: int, tensor_parallel_size: int) -> dict[str, float]:
    found = {}
    for name, (case, options) in SHARDED.items():
        sizes = {
            "data_parallel_size": world_size // tensor_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
        }
        own = rank // tensor_parallel_size
        gradients = fit(own, world_size, case, TokenNormModelParallel, ManualSharded(case), **sizes, **options)
        found[name] = law.error(case, gradients)
    return found


@pytest.mark.parametrize(("world_size", "tensor_parallel_size"), [(2, 1), (4, 2)])
def test_law_on_shards(world_size: int, tensor_parallel_size: int) -> None:
    for errors in run_ranks(fit_sharded, world_size, tensor_parallel_size):
        assert len(errors) == len(SHARDED)
        assert max(errors.values()) < law.TOLERANCE


def fit_fsdp(rank: int, world_size: int) -> list[float]:
    case = Case(**UNEVEN)
    return [
        law.error(
            case,
            fit(rank, world_size, case, TokenNormFSDP, ManualWrapped(), trainer={"plugins": KeepTypes()}, **options),
        )
        for options in ({}, ONCE)
    ]


def test_law_with_fsdp_units() -> None:
    assert max(max(errors) for errors in run_ranks(fit_fsdp, 2)) < law.TOLERANCE


class PlainByHand(Module):
    """The recipe for plain Lightning: divides the loss, steps every third time and at the end."""

    def __init__(self) -> None:
        super().__init__(lr=law.LR)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx) / 3)
        if batch_idx % 3 == 2 or self.trainer.is_last_batch:
            self.optimizers().step()
            self.optimizers().zero_grad()


def fit_plain(rank: int, world_size: int, strategy: Any = None) -> Any:
    case = Case(empty=())
    try:
        strategy = strategy or DDPStrategy()
        gradients = law.fit(rank, world_size, case, strategy, PlainByHand(), accumulate_grad_batches=1)
    except Exception as raised:
        return str(raised)
    return law.error(case, gradients)


def fit_recipes(rank: int, world_size: int) -> list[Any]:
    return [fit_plain(rank, world_size), fit_plain(rank, world_size, TokenNormDDP())]


def test_the_recipe_for_plain_lightning() -> None:
    """Under DDP it is the mean of means; under ours it would be, too, and is refused with what to do."""
    for plain, ours in run_ranks(fit_recipes, 2):
        assert plain > 1e-2
        assert "The gradients of the window before are still there" in ours
        assert "`accumulate_grad_batches=...` of the strategy" in ours


# ---- several optimizers


class TwoNetworks(LightningModule):
    """Two networks that look at each other, each with an optimizer of its own, as in a GAN.

    ``S = (a + d(b)) * n * x`` for the first, ``(b + d(a)) * 2 * n * x`` for the second, where ``d`` detaches nothing:
    `toggle_optimizer` keeps their gradients apart.
    """

    def __init__(self, order: str = "a, b") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.b = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.order = order.split(", ")
        self.gradients: dict[str, list[float]] = {"a": [], "b": []}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        live = batch["labels"][:, 1:] != -100
        mean = (batch["values"][:, 1:] * live).sum() / live.sum()
        for name, optimizer, weight in zip(("a", "b"), self.optimizers(), (1, 2), strict=True):
            if name in self.order:
                self.toggle_optimizer(optimizer)
                self.manual_backward((self.a + self.b) * mean * weight)
                if self.trainer.strategy.window.is_last:
                    self.gradients[name].append(getattr(self, name).grad.item())
                    optimizer.step()
                    optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
        return mean

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.a], lr=0.0), torch.optim.SGD([self.b], lr=0.0)]


def fit_two_networks(rank: int, world_size: int) -> list[Any]:
    module = TwoNetworks()
    trainer = make_trainer(world_size, strategy=TokenNormDDP(accumulate_grad_batches=3, find_unused_parameters=True))
    trainer.fit(module, make_loader(R2[rank]))
    return [module.gradients, trainer.global_step, trainer.accumulate_grad_batches]


class XAxis(Callback):
    """The step that loggers are given with each update."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.window.is_last:
            self.steps.append(trainer.fit_loop.epoch_loop._batches_that_stepped)


def test_loggers_count_windows_and_not_steps(tmp_path: Path) -> None:
    """Six windows of two steps each; saved inside the second, from where a run goes on with it."""

    def fit_on(**options: Any) -> list[int]:
        axis = XAxis()
        strategy = TokenNormDDP(accumulate_grad_batches=2, find_unused_parameters=True)
        trainer = make_trainer(1, strategy=strategy, max_epochs=2, callbacks=[axis, *options.pop("callbacks", [])])
        trainer.fit(TwoNetworks(), make_loader(R2[0]), **options)
        return axis.steps

    assert fit_on(callbacks=[Saves(tmp_path / "inside.ckpt", at=2)]) == [0, 1, 2, 3, 4, 5]
    assert fit_on(ckpt_path=tmp_path / "inside.ckpt") == [1, 2, 3, 4, 5]


def test_two_optimizers() -> None:
    # R2: 42 / 24 and 22 / 16, the second network has twice that; two windows, two steps each.
    expected = [{"a": [1.75, 1.375], "b": [3.5, 2.75]}, 4, 1]
    assert run_ranks(fit_two_networks, 2) == [expected, expected]


class Critic(ManualScalar):
    """Trains several times on each batch, which is what a window of one micro-batch is for."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        for _ in range(3):
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.step()
        return loss


def test_several_steps_on_one_micro_batch() -> None:
    trainer = make_trainer(1, strategy=TokenNormDDP())
    trainer.fit(Critic(), make_loader(R1[0]))
    assert trainer.global_step == 9
    with pytest.raises(Exception, match="Step after the last one"):
        make_trainer(1, strategy=TokenNormDDP(accumulate_grad_batches=3)).fit(Critic(), make_loader(R1[0]))
    with pytest.raises(Exception, match="a second time on a window of 3"):
        make_trainer(1, strategy=TokenNormDDP(accumulate_grad_batches=3)).fit(StepsTwice(), make_loader(R1[0]))


class StepsTwice(ManualScalar):
    def step(self) -> None:
        super().step()
        super().step()


class Scaled(TwoNetworks):
    """Records the scale at each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def on_after_backward(self) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def test_the_scale_is_constant_in_a_window() -> None:
    """Each step asks the scaler to grow; with two optimizers it would, between the steps of one window."""
    module = Scaled()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    trainer = make_trainer(
        1,
        strategy=TokenNormDDP(accumulate_grad_batches=3, find_unused_parameters=True),
        plugins=MixedPrecision("16-mixed", "cpu", scaler),
    )
    trainer.fit(module, make_loader(R2[0]))
    assert module.scales == [2.0] * 6 + [4.0] * 4
    assert scaler.get_scale() == 8.0


# ---- what goes wrong


class RawBackward(ManualScalar):
    """One of three losses is run back by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx != 1:
            return super().training_step(batch, batch_idx)
        loss = self.loss(batch)
        loss.backward()
        return loss


class RawBesides(ManualScalar):
    """Adds a term by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (self.t * 1e-3).backward()
        return super().training_step(batch, batch_idx)


class NoBackward(ManualScalar):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class ClearsTooEarly(ManualScalar):
    set_to_none = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().zero_grad(set_to_none=self.set_to_none)
        return super().training_step(batch, batch_idx)


class ClearsToZero(ClearsTooEarly):
    set_to_none = False


class NeverClears(ManualScalar):
    def step(self) -> None:
        self.optimizers().step()


class StepsAlways(ManualScalar):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.step()


WRONG = {
    RawBackward: "ran a backward of its own for batch 1 on rank 0",
    RawBesides: "ran a backward of its own for batch 0 on rank 0",
    NoBackward: "did not call `self.manual_backward(loss)` for batch 1 on rank 0, while its tokens are counted",
    ClearsTooEarly: "Before batch 1 on rank 0, the gradients of earlier micro-batches of the window were cleared",
    ClearsToZero: "Before batch 1 on rank 0, the gradients of earlier micro-batches of the window were cleared",
    NeverClears: "still there at batch 3 on rank 0, the first backward of a new window",
    StepsAlways: "steps after micro-batch 1 of a window of 3",
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_what_would_lose_the_law_is_an_error(kind: Any) -> None:
    trainer = make_trainer(1, strategy=TokenNormDDP(accumulate_grad_batches=3))
    with pytest.raises(RuntimeError, match=WRONG[kind].replace("(", r"\(").replace(")", r"\)")):
        trainer.fit(kind(), make_loader(R2[0]))
    assert trainer.accumulate_grad_batches == 1


class RawOnShards(ManualSharded):
    """Runs all backwards by itself."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class RawOnUnits(ManualWrapped):
    manual_backward = RawOnShards.manual_backward

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=self.lr)


def fit_raw(rank: int, world_size: int) -> list[str]:
    said = []
    for kind, module, options in (
        (TokenNormModelParallel, RawOnShards(Case()), {"data_parallel_size": 2, "tensor_parallel_size": 1}),
        (TokenNormFSDP, RawOnUnits(), {"use_orig_params": False}),
        (TokenNormFSDP, Manual(), {}),
        (TokenNormDDP, NoBackwardOnOneRank(rank), {}),
    ):
        try:
            fit(rank, world_size, Case(empty=()), kind, module, **options)
        except Exception as raised:
            said.append(str(raised))
    return said


class NoBackwardOnOneRank(Manual):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.leaves_out = rank == 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.leaves_out and batch_idx == 2 else super().training_step(batch, batch_idx)


def test_all_ranks_end_with_an_error() -> None:
    for rank, (*raw, whole, alone) in enumerate(run_ranks(fit_raw, 2, timeout_s=120)):
        assert all(f"ran a backward of its own for batch 0 on rank {rank}" in text for text in raw)
        assert "Wrap the parts of the module in `configure_model`" in whole
        assert "`self.manual_backward(loss)` for batch 2 on rank 1" in alone


def test_a_window_without_a_token_may_be_left_alone() -> None:
    module = NoBackwardWithoutTokens(lr=1.0)
    trainer = make_trainer(1, strategy=TokenNormDDP(accumulate_grad_batches=2))
    with pytest.warns(UserWarning, match="it is left out"):
        trainer.fit(module, make_loader([(0, 0), (0, 0), (2, 3)]))
    # the second window: its only micro-batch has the mean 3
    assert module.t.item() == 1.0 - 3.0


class NoBackwardWithoutTokens(ManualScalar):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (batch["labels"][:, 1:] != -100).any():
            return super().training_step(batch, batch_idx)
        return self.loss(batch)


# ---- what else a window is for


class Records(Callback):
    """The record of each update."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.window.is_last:
            record = trainer.strategy.last_update
            self.records.append((record.num_tokens, record.loss_sum.item(), record.applied))


class CountsSteps(ManualScalar):
    """Has an attribute that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def fit_with_metric(rank: int, world_size: int, folder: Path) -> list[Any]:
    records, module = Records(), CountsSteps()
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(accumulate_grad_batches=3),
        callbacks=[records, TokenMeanMetric()],
        logger=CSVLogger(folder),
    )
    trainer.fit(module, make_loader(R2[rank][: 5 - rank]))
    return [records.records, trainer.callback_metrics["train_loss_per_token_epoch"].item(), module.steps]


def test_metric_and_records(tmp_path: Path) -> None:
    (first, epoch, steps), (second, _, fewer) = run_ranks(fit_with_metric, 2, tmp_path)
    # t = 1, so S = n * x: 16 and 26 in the first window, 8 and 4 in the second, of which rank 1 has one micro-batch
    assert first == [(24, 16.0, True), (6, 8.0, True)]
    assert second == [(24, 26.0, True), (6, 4.0, True)]
    assert epoch == pytest.approx(54 / 30, rel=1e-12)
    assert (steps, fewer) == (5, 4)
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train_tokens"]]
    logged = [(int(row["step"]), float(row["train_loss_per_token_step"]), float(row["train_tokens"])) for row in rows]
    assert logged == [(0, 42 / 24, 24.0), (1, 12 / 6, 6.0)]


def count_reductions(rank: int, world_size: int) -> int:
    buckets = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        buckets.append(bucket.index())
        return allreduce_hook(state, bucket)

    fit(rank, world_size, Case(lengths=(6, 6)), TokenNormDDP, ddp_comm_hook=hook, ddp_hook_reduces="mean")
    return len(buckets)


def test_ddp_reduces_once_per_window() -> None:
    assert run_ranks(count_reductions, 2) == [2, 2]


class Saves(Callback):
    """Writes a checkpoint inside a window, and goes on."""

    def __init__(self, path: Path, at: int = 3) -> None:
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (0, self.at):
            trainer.save_checkpoint(self.path)


class WithMomentum(Manual):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def resume(rank: int, world_size: int, folder: Path) -> list[bool]:
    case = Case(lengths=(5, 4), empty=((0, 1),), stream=True, loss=HAND, epochs=2)

    def again(**options: Any) -> list[Tensor]:
        return fit(rank, world_size, case, TokenNormDDP, WithMomentum(case.loss, lr=law.LR), trainer=options)

    whole = again(callbacks=[Saves(folder / "inside.ckpt")])
    rest = again(ckpt_path=folder / "inside.ckpt")
    # one of four updates was made; what the parameters move by, momentum makes depend on all updates before
    return [len(whole) == 4, len(rest) == 3, *map(torch.equal, whole[1:], rest)]


def test_resume_inside_a_window(tmp_path: Path) -> None:
    assert all(all(same) for same in run_ranks(resume, 2, tmp_path))


def fit_rank_without_tokens(rank: int, world_size: int) -> list[float]:
    module = ManualScalar()
    make_trainer(world_size, strategy=TokenNormDDP(accumulate_grad_batches=2)).fit(module, make_loader(R0[rank]))
    return module.gradients


def test_a_rank_without_a_token() -> None:
    # 12 / 6; the loss of the empty rank is NaN all the way down
    assert run_ranks(fit_rank_without_tokens, 2) == [[2.0], [2.0]]


# ---- the option


@pytest.mark.parametrize(("given", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
@pytest.mark.parametrize("kind", [TokenNormDDP, TokenNormFSDP, TokenNormModelParallel])
def test_a_bad_number_of_micro_batches(kind: Callable[..., Any], given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"accumulate_grad_batches=\.\.\.\)` got {given}; expected a whole number"):
        kind(accumulate_grad_batches=given)


def test_with_automatic_optimization_it_is_the_trainers() -> None:
    trainer = make_trainer(1, strategy=TokenNormDDP(accumulate_grad_batches=2))
    with pytest.raises(Exception, match=r"Set it on the Trainer: `Trainer\(accumulate_grad_batches=2\)`"):
        trainer.fit(ScalarModule(), make_loader(R1[0]))
    with pytest.raises(Exception, match="not supported for manual optimization"):
        make_trainer(1, strategy=TokenNormDDP(), accumulate_grad_batches=2).fit(ManualScalar(), make_loader(R1[0]))


class ReturnsNothing(ManualScalar):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def test_a_step_that_returns_no_loss_is_told() -> None:
    trainer = make_trainer(1, strategy=TokenNormDDP(), callbacks=[TokenMeanMetric()])
    with pytest.warns(UserWarning, match="ReturnsNothing.training_step` returned no loss, so `TokenMeanMetric`"):
        trainer.fit(ReturnsNothing(), make_loader(R1[0]))
