"""Faults that users of such trainers have reported in public, as small inputs with right answers (their numbers: Bnn).

Bodies run in processes of their own, many small fits in one where ranks do not matter.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_tokennorm import SupervisedTokens, TokenMeanMetric, TokenNormDDP
from tests.helpers import tiny_lm
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import (
    R1,
    R2,
    MicroBatch,
    ScalarModule,
    make_batch,
    make_loader,
    make_trainer,
)
from tests.helpers.tiny_lm import TinyModule

TOLERANCE = 1e-12


def fit_rig(
    micro_batches: Sequence[MicroBatch],
    accumulate: int,
    world_size: int = 1,
    module: ScalarModule | None = None,
    strategy: TokenNormDDP | None = None,
    loader: Any = None,
    **trainer_options: Any,
) -> ScalarModule:
    module = module or ScalarModule()
    trainer = make_trainer(
        world_size,
        strategy=strategy or TokenNormDDP(loss_reduction=module.reduction),  # type: ignore[arg-type]
        accumulate_grad_batches=accumulate,
        **trainer_options,
    )
    trainer.fit(module, loader or make_loader(micro_batches))
    return module


def run_alone(body: Any, *args: Any) -> Any:
    return run_ranks(body, 1, *args)[0]


# ---- B01, B05, B06: any split of the same tokens


def one_process(rank: int, world_size: int) -> None:
    # B01 with W = 1: 16 / 8, the mean of means would be 2.6667
    assert fit_rig(R1[0], 3).gradients == pytest.approx([2.0], abs=TOLERANCE)
    # B05: 310 / 110, the mean of means would be 2
    assert fit_rig([(10, 1), (100, 3)], 2, loader=_loader([(10, 1), (100, 3)], 100)).gradients == pytest.approx(
        [310 / 110], abs=TOLERANCE
    )
    generator = random.Random(7)
    for parts in range(1, 11):
        # the same 110 tokens cut at random into micro-batches, of one value each
        values = [1.0] * 10 + [3.0] * 100
        generator.shuffle(values)
        cuts = [0, *sorted(generator.sample(range(1, 110), parts - 1)), 110]
        batches = [_mixed(values[a:b]) for a, b in itertools.pairwise(cuts)]
        module = fit_rig([], parts, loader=DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        assert module.gradients == pytest.approx([310 / 110], abs=TOLERANCE)


def _loader(micro_batches: Sequence[MicroBatch], width: int) -> DataLoader[Any]:
    return DataLoader([make_batch(n, x, width) for n, x in micro_batches], batch_size=None)  # type: ignore[arg-type]


def _mixed(values: Sequence[float]) -> dict[str, Tensor]:
    """One micro-batch whose tokens have these values."""
    return {
        "labels": torch.ones(1, len(values) + 1, dtype=torch.long),
        "values": torch.tensor([[0.0, *values]], dtype=torch.float64),
    }


def test_any_split_in_one_process() -> None:
    run_alone(one_process)


def permuted(rank: int, world_size: int) -> list[float]:
    gradients = []
    for seed in range(6):
        micro_batches = [micro_batch for row in R1 for micro_batch in row]
        random.Random(seed).shuffle(micro_batches)
        gradients += fit_rig(micro_batches[rank * 3 : rank * 3 + 3], 3, world_size).gradients
    return gradients


def test_micro_batches_moved_between_ranks() -> None:
    # B06: a count per rank would give 1.8125 for one of the layouts
    for gradients in run_ranks(permuted, 2):
        assert gradients == pytest.approx([1.75] * 6, abs=TOLERANCE)


# ---- B02, B39: token weights


class Weighted(ScalarModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.t * batch["sum"]


def token_weights(rank: int, world_size: int) -> None:
    # sums 3, 5, 8 with weights 1.5 + 0.5 + 2 = 4: 16 / 4; an int cast of the weights would give 16 / 3
    rows = [{"sum": 3.0, "weight": 1.5}, {"sum": 5.0, "weight": 0.5}, {"sum": 8.0, "weight": 2.0}]
    for as_tensor in (False, True):
        strategy = TokenNormDDP(
            count_tokens=lambda batch, as_tensor=as_tensor: (
                torch.tensor(batch["weight"]) if as_tensor else batch["weight"]
            ),
            loss_reduction="sum",
        )
        module = fit_rig([], 3, module=Weighted("sum"), strategy=strategy, loader=DataLoader(rows, batch_size=None))
        assert module.gradients == pytest.approx([4.0], abs=TOLERANCE)
        assert module.records[0].num_tokens == 4.0


def test_token_weights_are_not_cut_to_ints() -> None:
    run_alone(token_weights)


class ClassWeighted(pl.LightningModule):
    """Cross entropy with class weights: the sum of ``weight[target] * loss`` over live targets."""

    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4))
        self.gradient: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, targets = batch["rows"], batch["targets"]
        return F.cross_entropy(self.logits[rows], targets, weight=self.weights, reduction="sum")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.logits.grad is not None
        self.gradient = self.logits.grad.clone()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def weight_of(batch: Any) -> Tensor:
    targets = batch["targets"]
    return ClassWeighted.weights[targets[targets >= 0]].sum()


def class_weights(rank: int, world_size: int) -> None:
    def gradient(*batches: tuple[list[int], list[int]]) -> Tensor:
        rows = [{"rows": torch.tensor(r), "targets": torch.tensor(t)} for r, t in batches]
        module = ClassWeighted()
        strategy = TokenNormDDP(count_tokens=weight_of, loss_reduction="sum")
        trainer = make_trainer(1, strategy=strategy, accumulate_grad_batches=len(rows))
        trainer.fit(module, DataLoader(rows, batch_size=None))  # type: ignore[arg-type]
        assert module.gradient is not None
        return module.gradient

    # targets 1, -, 3, -, 0: weights 2 + 4 + 1 = 7
    logits = ClassWeighted().logits
    live = [(0, 1), (2, 3), (4, 0)]
    by_hand = sum(ClassWeighted.weights[c] * -F.log_softmax(logits[row], 0)[c] for row, c in live) / 7
    (expected,) = torch.autograd.grad(by_hand, logits)
    for split in (
        [([0, 1, 2, 3, 4], [1, -100, 3, -100, 0])],
        [([0, 2, 4], [1, 3, 0])],  # without the ignored rows
        [([0, 1], [1, -100]), ([2, 3, 4], [3, -100, 0])],
    ):
        torch.testing.assert_close(gradient(*split), expected, rtol=0, atol=TOLERANCE)


def test_class_weights_with_ignored_targets() -> None:
    run_alone(class_weights)


# ---- B08, B10, B14, B23: what is declared, and what is not touched


class Recorder(ScalarModule):
    def training_step(self, batch: Any) -> Tensor:  # no batch_idx
        return self.loss(batch)


class TakesAnything(ScalarModule):
    seen: dict[str, Any]

    def training_step(self, batch: Any, batch_idx: int, **kwargs: Any) -> Tensor:
        self.seen = kwargs
        return self.loss(batch)


class OwnForward(ScalarModule):
    def forward(self, x: Tensor) -> Tensor:  # takes exactly (x)
        return self.t * x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        live = batch["labels"][:, 1:] != -100
        return (self(batch["values"][:, 1:]) * live).sum() / live.sum()


def signatures(rank: int, world_size: int) -> None:
    for kind in (Recorder, TakesAnything, OwnForward):
        module = fit_rig(R1[0], 3, module=kind())
        assert module.gradients == pytest.approx([2.0], abs=TOLERANCE)
        assert getattr(module, "seen", {}) == {}


def test_no_argument_is_added_anywhere() -> None:
    run_alone(signatures)


def schedules(rank: int, world_size: int) -> None:
    # K = 1 in the first epoch, 3 from the second on: means of single micro-batches, then 16 / 8
    scheduler = GradientAccumulationScheduler({0: 1, 1: 3})
    module = fit_rig(R1[0], 1, callbacks=[scheduler], max_epochs=2)
    assert module.gradients == pytest.approx([1.0, 5.0, 2.0, 2.0], abs=TOLERANCE)
    assert [record.micro_batches for record in module.records] == [1, 1, 1, 3]


def test_accumulation_by_schedule() -> None:
    run_alone(schedules)


class OwnAccumulation(TokenNormDDP):
    handles_gradient_accumulation = True  # type: ignore[assignment]


class FetchesItself(ScalarModule):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


def impossible_setups(rank: int, world_size: int) -> list[str]:
    texts = []
    for module, strategy in (
        (FetchesItself(), TokenNormDDP()),
        (ScalarModule(), OwnAccumulation()),
    ):
        try:
            fit_rig(R1[rank], 1, world_size, module, strategy)
        except pl.utilities.exceptions.MisconfigurationException as error:
            texts.append(str(error))
    return texts


def test_impossible_setups_are_refused_with_the_remedy() -> None:
    for fetches, accumulates in run_ranks(impossible_setups, 2):
        assert "FetchesItself.training_step(dataloader_iter)`" in fetches
        assert "OwnAccumulation.handles_gradient_accumulation` is True" in accumulates


def uncountable(rank: int, world_size: int, what: str) -> tuple[str, list[float]]:
    batches = [make_batch(*micro_batch) for micro_batch in R1[rank]]
    if rank == 1 and what == "missing":
        batches[1] = {"input_ids": batches[1]["labels"], "values": batches[1]["values"]}
    if rank == 1 and what == "negative":
        strategy = TokenNormDDP(count_tokens=lambda batch: -3)
    elif rank == 1 and what == "type":
        strategy = TokenNormDDP(count_tokens=lambda batch: None)  # type: ignore[arg-type,return-value]
    else:
        strategy = TokenNormDDP()
    module = ScalarModule()
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    if rank == 1 and what == "loader":
        loader = _Broken()
    try:
        fit_rig([], 3, world_size, module, strategy, loader)
    except Exception as error:
        return f"{type(error).__name__}: {error}", module.returned
    return "no error", module.returned


class _Broken:
    def __iter__(self) -> Any:
        yield make_batch(1, 1.0)
        raise OSError("the disk is gone")

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("missing", ["ValueError: `SupervisedTokens` found no labels", "'input_ids': a tensor of shape [1, 13]"]),
        ("negative", ["`count_tokens` returned -3"]),
        ("type", ["`count_tokens` returned None (NoneType)"]),
        ("loader", ["OSError: the disk is gone"]),
    ],
)
def test_a_rank_that_cannot_count_stops_all_before_any_forward(what: str, parts: list[str]) -> None:
    # B08: never a quiet return to the old rule
    for text, forwards in run_ranks(uncountable, 2, what):
        assert text.startswith("TokenNormError: At update 0, the coming micro-batches cannot be used. Rank 1: ")
        for part in parts:
            assert part in text
        assert forwards == []


class BackwardFromOutside(ScalarModule):
    def on_train_start(self) -> None:
        self.trainer.strategy.backward(self.t * 2, None)


class ChangesAccumulation(ScalarModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.accumulate_grad_batches = 2


def misused(rank: int, world_size: int) -> list[str]:
    texts = []
    for module in (BackwardFromOutside(), ChangesAccumulation()):
        try:
            fit_rig(R1[rank], 3, world_size, module)
        except RuntimeError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_backward_without_a_count_and_a_window_that_changes() -> None:
    # B23: the micro-batch's own count is never used in place of the window's
    for outside, changes in run_ranks(misused, 2):
        assert outside.startswith("TokenNormError: `backward` was called outside an accumulation window")
        assert changes.startswith("TokenNormError: `accumulate_grad_batches` went from 3 to 2 inside a window")


# ---- B09, B13: the same data at any K


def laid_out(rank: int, world_size: int) -> list[tuple[float, float]]:
    row = [float(x) for n, x in R1[rank] for _ in range(n)]
    empty = _mixed([])
    layouts = {
        1: [_mixed(row)],
        3: [make_batch(*micro_batch) for micro_batch in R1[rank]],
        6: [batch for micro_batch in R1[rank] for batch in (make_batch(*micro_batch), empty)],
    }
    seen = []
    for accumulate, batches in layouts.items():
        metric = TokenMeanMetric()
        trainer = make_trainer(
            world_size, strategy=TokenNormDDP(), accumulate_grad_batches=accumulate, callbacks=[metric]
        )
        module = ScalarModule()
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        seen.append((module.gradients[0], trainer.callback_metrics["train_loss_per_token"].item()))
    return seen


def test_loss_and_gradient_do_not_depend_on_k() -> None:
    # a factor of K too much would show 5.25, one too little 0.5833
    for seen in run_ranks(laid_out, 2):
        for gradient, logged in seen:
            assert (gradient, logged) == (pytest.approx(1.75, abs=TOLERANCE), pytest.approx(1.75, abs=TOLERANCE))


class Smoothed(TinyModule):
    """(1 - smoothing) * negative log likelihood + smoothing * uniform term, as sums over live tokens."""

    smoothing = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"])[:, :-1].flatten(0, 1)
        return F.cross_entropy(
            logits, batch["labels"][:, 1:].flatten(), reduction="sum", label_smoothing=self.smoothing
        )


def smoothed(rank: int, world_size: int) -> None:
    samples = tiny_lm.make_samples(6)
    for smoothing in (0.0, 0.1, 1.0):
        gradients = []
        for rows in (6, 2, 1):
            module = Smoothed("sum")
            module.smoothing = smoothing
            trainer = make_trainer(1, strategy=TokenNormDDP(loss_reduction="sum"), accumulate_grad_batches=6 // rows)
            trainer.fit(module, tiny_lm.make_loader([samples[i : i + rows] for i in range(0, 6, rows)]))
            gradients.append(module.gradients[0])
        for gradient in gradients[1:]:
            torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=TOLERANCE)


def test_label_smoothing() -> None:
    run_alone(smoothed)


# ---- B11: labels at position 0


def shifts(rank: int, world_size: int) -> list[float]:
    gradients = []
    for shift in (1, 0):
        strategy = TokenNormDDP(count_tokens=SupervisedTokens(shift=shift), loss_reduction="sum")
        module = fit_rig(R1[rank], 3, world_size, ScalarModule("sum"), strategy)
        gradients += module.gradients
    return gradients


def test_position_zero_does_not_count() -> None:
    # the rig's six rows have a live label at position 0: counted, it would be 42 / 30
    for gradients in run_ranks(shifts, 2):
        assert gradients == pytest.approx([1.75, 1.4], abs=TOLERANCE)


# ---- B15, B85, B94: windows over epochs


def windows(rank: int, world_size: int) -> None:
    for length in range(1, 8):
        for accumulate in range(1, 5):
            module = fit_rig([(1, 1.0)] * length, accumulate, max_epochs=2)
            expected = [list(range(s, min(s + accumulate, length))) for s in range(0, length, accumulate)]
            assert [window for window in module.windows if window] == expected * 2
            assert module.trainer.global_step == 2 * len(expected)


def test_windows_partition_every_epoch() -> None:
    run_alone(windows)


# ---- B20, B95: memory


class Watching(ScalarModule):
    """Counts the activations of earlier micro-batches, and the batches on the device, that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.activations: list[Any] = []
        self.moved: list[Any] = []
        self.alive: list[int] = []
        self.batches_alive: list[int] = []

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        moved = {key: value.clone() for key, value in batch.items()}
        self.moved.append(weakref.ref(moved["values"]))
        return moved

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.alive.append(sum(reference() is not None for reference in self.activations))
        self.batches_alive.append(sum(reference() is not None for reference in self.moved))
        activation = self.t * batch["values"]
        self.activations.append(weakref.ref(activation))
        return activation.mean()


def memory(rank: int, world_size: int) -> tuple[int, int]:
    module = fit_rig([(2, 1.0)] * 16, 8, module=Watching())
    return max(module.alive), max(module.batches_alive)


def test_only_the_current_micro_batch_is_alive() -> None:
    activations, batches = run_alone(memory)
    assert activations == 0  # the graph of a micro-batch is gone before the next forward
    assert batches <= 2  # the one in hand, and the one that Lightning lets go of next


# ---- B27: the same samples in any batch size


def batch_sizes(rank: int, world_size: int) -> None:
    samples = tiny_lm.make_samples(60)
    after = []
    for rows in (60, 20, 10, 7):
        module = TinyModule("mean", lr=0.1)
        micro_batches = [samples[i : i + rows] for i in range(0, 60, rows)]
        trainer = make_trainer(1, strategy=TokenNormDDP(), accumulate_grad_batches=len(micro_batches), max_epochs=3)
        trainer.fit(module, tiny_lm.make_loader(micro_batches))
        assert trainer.global_step == 3
        after.append(module.after[-1])
    for parameters in after[1:]:
        torch.testing.assert_close(parameters, after[0], rtol=0, atol=1e-10)


def test_three_steps_do_not_depend_on_the_batch_size() -> None:
    run_alone(batch_sizes)


# ---- B28: windows and tails and nothing at all, in one run


def all_in_one(rank: int, world_size: int) -> tuple[list[float], list[Any]]:
    module = fit_rig([*R2[rank][:3], (0, 0), (0, 0), (0, 0), *R2[rank][3:]], 3, world_size)
    return module.gradients, [record.num_tokens for record in module.records]


def test_full_empty_and_short_windows_in_one_run() -> None:
    for gradients, tokens in run_ranks(all_in_one, 2):
        assert gradients == pytest.approx([1.75, 1.375], abs=TOLERANCE)
        assert tokens == [24, 0, 16]


# ---- B32, B40: labels that are not per token; kernels that take a scalar


def narrow(rank: int, world_size: int) -> list[Any]:
    batches = [make_batch(0, 0, width=0)] * 3 if rank == 0 else [make_batch(*m) for m in R1[1]]
    module = fit_rig([], 3, world_size, loader=DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return [record.num_tokens for record in module.records]


def test_rows_of_width_one_on_one_rank() -> None:
    assert run_ranks(narrow, 2) == [[16], [16]]


class ScalarKernel(torch.autograd.Function):
    """Multiplies by the upstream gradient and cannot take anything but a scalar, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(total)
        return t * total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        assert grad_output.numel() == 1
        return ctx.saved_tensors[0] * grad_output, None


class Fused(ScalarModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        live = batch["labels"][:, 1:] != -100
        return ScalarKernel.apply(self.t, (batch["values"][:, 1:] * live).sum())  # type: ignore[no-any-return,no-untyped-call]


def fused(rank: int, world_size: int) -> list[float]:
    return fit_rig(R1[rank], 3, world_size, Fused("sum")).gradients


def test_what_is_backpropagated_is_a_scalar() -> None:
    for gradients in run_ranks(fused, 2):
        assert gradients == pytest.approx([1.75], abs=TOLERANCE)


# ---- B37: large counts


def declared(rank: int, world_size: int) -> int:
    strategy = TokenNormDDP(count_tokens=lambda batch: 2**30)
    return int(fit_rig(R1[0][:2], 2, world_size, strategy=strategy).records[0].num_tokens)


def test_counts_beyond_int32() -> None:
    assert run_ranks(declared, 2) == [4294967296] * 2


# ---- B61: a loss without tokens adds nothing, whatever it is


class Nine(ScalarModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.t * 9 if batch_idx == 1 else self.loss(batch)


def nine(rank: int, world_size: int) -> list[float]:
    return fit_rig([(4, 1), (0, 0)], 2, module=Nine()).gradients


def test_a_loss_without_tokens_adds_nothing() -> None:
    assert run_alone(nine) == pytest.approx([1.0], abs=TOLERANCE)


# ---- B101, B105: evaluation


def eval_in_batches_of(rank: int, world_size: int) -> list[float]:
    values = [float(x) for row in R1 for n, x in row for _ in range(n)]
    seen = []
    for rows in (1, 2, 5, 6, 24):
        batches = [
            {
                # a first tensor of another length: the weight is the declared count, not a guess from the batch
                "other": torch.zeros(7),
                "labels": torch.ones(len(chunk), 2, dtype=torch.long),
                "values": torch.tensor([[0.0, x] for x in chunk], dtype=torch.float64),
            }
            for chunk in (values[i : i + rows] for i in range(0, 24, rows))
        ]
        trainer = make_trainer(1, strategy="auto", callbacks=[TokenMeanMetric()])
        trainer.validate(ScalarModule(), DataLoader(batches, batch_size=None), verbose=False)  # type: ignore[arg-type]
        seen.append(trainer.callback_metrics["val_loss_per_token"].item())
    return seen


def test_evaluation_does_not_depend_on_the_batch_size() -> None:
    assert run_alone(eval_in_batches_of) == pytest.approx([1.75] * 5, abs=TOLERANCE)
