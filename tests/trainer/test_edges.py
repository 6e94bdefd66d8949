"""Where epochs and fits end early, and what loaders may yield: each window is exact on two ranks, or not stepped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_tokennorm import TokenMeanMetric, TokenNormDDP, TokenNormError
from tests.helpers.launch import RankError, run_ranks
from tests.helpers.scalar_rig import R1, R2, Batches, ScalarModule, make_batch, make_loader, make_trainer
from tests.trainer import test_resume as resumes

TOLERANCE = 1e-12


class StopsEarly(ScalarModule):
    """Ends the epoch, or the training, at one batch of each epoch."""

    def __init__(self, how: str, at: int, on_ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.how, self.at, self.on_ranks = how, at, on_ranks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if batch_idx == self.at and self.how == "-1" and self.global_rank in self.on_ranks:
            return -1
        return None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.at and self.how == "should_stop" and self.global_rank in self.on_ranks:
            self.trainer.should_stop = True
        if self.how == "max_time":
            time.sleep(0.3)
        return super().training_step(batch, batch_idx)


def stop_early(rank: int, world_size: int, how: str, at: int, options: dict[str, Any]) -> dict[str, Any]:
    module = StopsEarly(how, at)
    trainer = make_trainer(
        world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3, callbacks=[TokenMeanMetric()], **options
    )
    trainer.fit(module, make_loader(R2[rank], sized=False))
    return {"gradients": module.gradients, "steps": trainer.global_step, "batches": sum(map(len, module.windows))}


def test_an_epoch_that_on_train_batch_start_ends() -> None:
    # at batch 4 of 5, in the second window: it is not stepped, and leaves nothing to the next epoch's first one
    for result in run_ranks(stop_early, 2, "-1", 4, {"max_epochs": 2}):
        assert result["gradients"] == pytest.approx([1.75, 1.75], abs=TOLERANCE)
        assert (result["steps"], result["batches"]) == (2, 8)


@pytest.mark.parametrize(("at", "steps"), [(2, 1), (3, 1), (4, 2)])
def test_should_stop_inside_a_window(at: int, steps: int) -> None:
    # Lightning leaves after the batch: at 3, the second window has one of its two and is not stepped
    for result in run_ranks(stop_early, 2, "should_stop", at, {}):
        assert result["gradients"] == pytest.approx([1.75, 1.375][:steps], abs=TOLERANCE)
        assert (result["steps"], result["batches"]) == (steps, at + 1)


def test_min_steps_keeps_going() -> None:
    for result in run_ranks(stop_early, 2, "should_stop", 0, {"min_steps": 2}):
        assert result["gradients"] == pytest.approx([1.75, 1.375], abs=TOLERANCE)


def test_max_time_inside_a_window() -> None:
    options = {"max_time": {"seconds": 2}, "max_epochs": -1}
    first, second = run_ranks(stop_early, 2, "max_time", 0, options)
    assert first["steps"] == second["steps"] > 0
    assert first["batches"] == second["batches"]  # the ranks stop together
    for result in (first, second):
        assert result["gradients"] == pytest.approx(([1.75, 1.375] * 9)[: result["steps"]], abs=TOLERANCE)


def stop_on_one_rank(rank: int, world_size: int, how: str) -> None:
    module = StopsEarly(how, 3, on_ranks=(1,))
    timeout = timedelta(seconds=5)
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timeout)  # type: ignore[union-attr]
    strategy = TokenNormDDP(timeout=timeout)
    trainer = make_trainer(world_size, strategy=strategy, accumulate_grad_batches=3, max_epochs=2)
    trainer.fit(module, make_loader(R2[rank]))


@pytest.mark.parametrize("how", ["-1", "should_stop"])
def test_a_rank_that_stops_alone_is_an_error_after_the_timeout(how: str) -> None:
    # it has left the window for good, and the other one waits for it in DDP's own collective
    with pytest.raises(RankError):
        run_ranks(stop_on_one_rank, 2, how, timeout_s=40)


def no_rows(rank: int, world_size: int, reduction: str) -> list[float]:
    batches: list[Any] = [make_batch(*micro_batch) for micro_batch in R1[rank]]
    empty = {key: value[:0] for key, value in batches[0].items()}
    module = ScalarModule(reduction)
    strategy = TokenNormDDP(loss_reduction=reduction)  # type: ignore[arg-type]
    trainer = make_trainer(world_size, strategy=strategy, accumulate_grad_batches=4)
    trainer.fit(module, DataLoader(_Given([*batches, empty] if rank else [empty, *batches]), batch_size=None))
    return module.gradients


class _Given(Batches):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batches_without_rows(reduction: str) -> None:
    assert run_ranks(no_rows, 2, reduction) == [pytest.approx([1.75], abs=TOLERANCE)] * 2


def overfit(rank: int, world_size: int) -> list[float]:
    module = ScalarModule()
    trainer = make_trainer(
        world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3, overfit_batches=4, max_epochs=2
    )
    trainer.fit(module, make_loader(R2[rank]), make_loader(R2[rank]))
    return module.gradients


def test_overfit_batches() -> None:
    # four batches: R1's window, and a tail of R1's first column, (3 + 4) / (3 + 2)
    assert run_ranks(overfit, 2) == [pytest.approx([1.75, 1.4] * 2, abs=TOLERANCE)] * 2


class Fails(ScalarModule):
    """Goes wrong at one batch on one rank."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.what, self.failing_rank = what, rank

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == self.failing_rank:
            if self.what == "raises":
                raise ValueError("a bad sample")
            return {"none": None, "dict": {"loss": None}, "fresh": torch.tensor(1.0)}[self.what]
        return super().training_step(batch, batch_idx)


def fail(rank: int, world_size: int, what: str, failing_rank: int) -> tuple[str, str]:
    trainer = make_trainer(world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3)
    try:
        trainer.fit(Fails(what, failing_rank), make_loader(R1[rank]))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("none", "`training_step` returned None on rank {} for batch 1; expected a loss"),
        ("dict", "`training_step` returned {{'loss': None}} on rank {} for batch 1; expected a loss"),
        ("fresh", "`training_step` returned a loss without a graph (tensor(1.)) on rank {} for batch 1"),
        ("raises", "a bad sample"),
    ],
)
def test_a_step_that_fails_on_one_rank_ends_all(what: str, text: str, failing_rank: int) -> None:
    started = time.monotonic()
    results = run_ranks(fail, 2, what, failing_rank)
    assert time.monotonic() - started < 30  # the other rank waits in its backward until the process has ended
    kind, own = results[failing_rank]
    assert kind == ("ValueError" if what == "raises" else "TokenNormError")
    assert text.format(failing_rank) in own
    kind, other = results[1 - failing_rank]
    assert kind == "TokenNormError"
    assert f"The first to fail was rank {failing_rank}, batch 1, update 0" in other
    assert text.format(failing_rank) in other


class _StopsAfter(Callback):
    def __init__(self, batch_idx: int) -> None:
        self.batch_idx = batch_idx

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == self.batch_idx


def save_after_the_fit(rank: int, world_size: int, folder: str) -> None:
    whole = resumes.fit("stream", world_size=world_size)
    cases: list[tuple[int | None, dict[str, Any]]] = [(None, {"max_steps": 1}), (4, {}), (None, {"max_steps": 5})]
    for at, options in cases:
        module = resumes.Module()
        if at is not None:
            options["callbacks"] = [_StopsAfter(at)]
        trainer = make_trainer(world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3, max_epochs=2, **options)
        trainer.fit(module, resumes.make_stateful_loader("stream"))
        path = Path(folder) / f"{at}-{len(options)}-{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        resumed = resumes.fit("stream", path=path, world_size=world_size)
        updates = len(resumed.parameters_after)
        assert updates == 6 - trainer.global_step
        assert resumed.parameters_after == whole.parameters_after[-updates:]


def test_a_checkpoint_saved_after_a_fit_that_ended_inside_an_epoch(tmp_path: Path) -> None:
    run_ranks(save_after_the_fit, 2, str(tmp_path))


def test_uneven_error_is_raised_before_validation() -> None:
    # 4 and 6 batches, K = 4, validation after 5: the unequal window is told before anybody validates
    for error in run_ranks(uneven_with_validation, 2):
        assert "rank 0 has 0, rank 1 has 2" in error or "the epoch of rank 0 ends" in error


def uneven_with_validation(rank: int, world_size: int) -> str:
    trainer = make_trainer(
        world_size, strategy=TokenNormDDP(uneven="error"), accumulate_grad_batches=4, val_check_interval=5
    )
    try:
        trainer.fit(ScalarModule(), make_loader([(1, 1)] * (6 if rank else 4), sized=False), make_loader(R1[rank]))
    except TokenNormError as error:
        return str(error)
    return ""


class Listed:
    """Yields these micro-batches; `None` stands for a batch that is none."""

    def __init__(self, micro_batches: list[tuple[int, float] | None]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[Any]:
        return iter([None if each is None else make_batch(*each) for each in self.micro_batches])

    def __len__(self) -> int:
        return len(self.micro_batches)


@pytest.mark.filterwarnings("ignore:.*no rank has a supervised token", "ignore:.*had no supervised token")
@pytest.mark.parametrize(
    ("micro_batches", "gradients"),
    [
        ([None, (3, 1), (1, 5)], [1.0, 5.0]),  # windows of two: (3 * 1) / 3, then the tail
        ([(3, 1), None, None, (1, 5)], [1.0, 5.0]),
        ([None, None, (4, 2)], [2.0]),  # nothing to step on in the first window
        ([None, None, None], []),
    ],
)
def test_batches_that_are_none_in_one_process(
    micro_batches: list[tuple[int, float] | None], gradients: list[float]
) -> None:
    class Module(ScalarModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pass  # without a batch there is no output either

    module = Module()
    make_trainer(1, accumulate_grad_batches=2, strategy=TokenNormDDP()).fit(module, Listed(micro_batches))
    assert module.gradients == gradients
