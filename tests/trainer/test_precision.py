"""Mixed precision and clipping: one scale per window, unscale before clip, fused optimizers included.

The scaler is torch's real one on the CPU, through Lightning's own plugin.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.amp import GradScaler

from lightning_tokennorm import TokenNormDDP
from lightning_tokennorm.window import RankReport, WindowPlan
from tests.helpers import tiny_lm
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R0, R00, R1, R2, ScalarModule, Table, make_loader, make_trainer
from tests.helpers.tiny_lm import TinyModule

SCALE = 1024.0

# What the rig's own arithmetic leaves in each precision: its sums and means of small integers are exact in float32,
# the division by N = 24 rounds once; bfloat16 has 8 bits, and loss and factor are rounded to them a few times.
PRECISIONS = {"32-true": 1e-6, "64-true": 1e-12, "16-mixed": 1e-6, "bf16-mixed": 1e-6, "bf16-true": 2**-6}


class Rig(ScalarModule):
    """The scalar rig in the parameter's own precision."""

    def __init__(self, precision: str, make_optimizer: Any = None, reduction: str = "mean") -> None:
        super().__init__(reduction)
        if precision != "64-true":
            self.float()
        self.make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.0))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss({**batch, "values": batch["values"].to(self.t.dtype)})

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def precision_options(precision: str, scale: float = SCALE, device: str = "cpu") -> dict[str, Any]:
    where = {"accelerator": "gpu" if device == "cuda" else device}
    if precision == "16-mixed":
        return {"plugins": [MixedPrecision("16-mixed", device, GradScaler(device, init_scale=scale))], **where}
    return {"precision": precision, **where}


def fit(
    rank: int,
    world_size: int,
    precision: str,
    table: Table,
    accumulate: int,
    reduction: str = "mean",
    plain: bool = False,
    clip: float | None = None,
    device: str = "cpu",
) -> tuple[list[float], list[float]]:
    module = Rig(precision, reduction=reduction)
    strategy = DDPStrategy() if plain else TokenNormDDP(loss_reduction=reduction)  # type: ignore[arg-type]
    trainer = make_trainer(
        world_size,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        **precision_options(precision, device=device),
    )
    trainer.fit(module, make_loader(table[rank]))
    return module.gradients, module.parameters_after


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_true_gradients_before_the_step(precision: str, reduction: str) -> None:
    for gradients, _ in run_ranks(fit, 2, precision, R2, 3, reduction):
        assert gradients == pytest.approx([1.75, 1.375], rel=PRECISIONS[precision])
    for gradients, _ in run_ranks(fit, 2, precision, R0, 2, reduction):
        assert gradients == pytest.approx([2.0], rel=PRECISIONS[precision])
    for gradients, parameters in run_ranks(fit, 2, precision, R00, 2, reduction):
        assert (gradients, parameters) == ([], [1.0])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_plain_ddp_is_off_in_every_precision(precision: str) -> None:
    for gradients, _ in run_ranks(fit, 2, precision, R1, 3, "mean", True):
        assert gradients == pytest.approx([7 / 3], rel=PRECISIONS[precision])


# ---- the order, and how often


class Order(Callback):
    """Records what happens to a window, and what the gradient is when it does."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.scales: list[float] = []

    def spy(self, owner: Any, name: str, label: str | None = None) -> None:
        original = getattr(owner, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            self.events.append(label or name)
            return original(*args, **kwargs)

        setattr(owner, name, spied)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if scaler := getattr(trainer.precision_plugin, "scaler", None):
            for name in ("unscale_", "step", "update"):
                self.spy(scaler, name)
        self.spy(trainer.optimizers[0], "step", "optimizer")
        self.spy(trainer.strategy.model, "no_sync")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.events.append("backward")
        if scaler := getattr(trainer.precision_plugin, "scaler", None):
            self.scales.append(scaler.get_scale())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.events.append(f"hook sees {pl_module.t.grad.item():.6g}")


class OwnClipping(Rig):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        order = next(callback for callback in self.trainer.callbacks if isinstance(callback, Order))  # type: ignore[attr-defined]
        assert self.t.grad is not None
        order.events.append(f"clip sees {self.t.grad.item():.6g}")
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        order.events.append(f"clip leaves {self.t.grad.item():.4g}")  # torch adds 1e-6 to the norm


def record_order(rank: int, world_size: int, precision: str, algorithm: str) -> tuple[list[str], list[float]]:
    order = Order()
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        gradient_clip_val=1.0,
        gradient_clip_algorithm=algorithm,
        callbacks=[order],
        **precision_options(precision),
    )
    trainer.fit(OwnClipping(precision), make_loader(R2[rank]))
    return order.events, order.scales


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_order_of_a_window(precision: str, algorithm: str) -> None:
    def window(micro_batches: int, gradient: str) -> list[str]:
        events = ["no_sync", "backward"] * (micro_batches - 1)
        middle = [f"hook sees {gradient}", f"clip sees {gradient}", "clip leaves 1"]
        if precision == "16-mixed":
            return [*events, "backward", "unscale_", *middle, "step", "optimizer", "update"]
        # without a scaler torch's optimizer runs the closure itself
        return [*events, "optimizer", "backward", *middle]

    for events, scales in run_ranks(record_order, 2, precision, algorithm):
        assert events == window(3, "1.75") + window(2, "1.375")
        assert set(scales) <= {SCALE}


def clip(rank: int, world_size: int) -> list[float]:
    # K = 2, one token each, gradients 3 and -2 on the only rank with tokens: their mean is 0.5
    module = Rig("16-mixed", lambda parameters: torch.optim.SGD(parameters, lr=1.0), "sum")
    strategy = TokenNormDDP(count_tokens=lambda batch: 0.5, loss_reduction="sum")
    trainer = make_trainer(
        world_size,
        strategy=strategy,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        **precision_options("16-mixed"),
    )
    trainer.fit(module, make_loader([(1, 3.0), (1, -2.0)]))
    return module.parameters_after


def test_contributions_are_added_and_then_clipped() -> None:
    # weights of 0.5 each: (3 - 2) / 1 = 1, not clipped; clipping each first would give 1 - 1 = 0. From t = 1: 0.
    assert run_ranks(clip, 1)[0] == pytest.approx([0.0], abs=1e-6)


# ---- fused optimizers


def fit_fused(
    rank: int, world_size: int, precision: str, kind: str, fused: bool, clip: float | None, device: str = "cpu"
) -> Any:
    torch.manual_seed(0)
    options = {"lr": 0.1, "weight_decay": 0.1} | ({"momentum": 0.9} if kind == "SGD" else {})
    make = lambda parameters: getattr(torch.optim, kind)(parameters, fused=fused, **options)  # noqa: E731
    module = Rig(precision, make)
    order = Order()
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        gradient_clip_val=clip,
        callbacks=[order],
        max_epochs=3,
        **precision_options(precision, device=device),
    )
    trainer.fit(module, make_loader(R2[rank]))
    assert getattr(module.trainer.optimizers[0], "_step_supports_amp_scaling", False) is fused  # as it was
    return module.parameters_after, module.gradients, Counter(order.events)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("clip", [1.0, None])
def test_fused_equals_unfused(precision: str, kind: str, clip: float | None) -> None:
    results = {fused: run_ranks(fit_fused, 2, precision, kind, fused, clip) for fused in (True, False)}
    for (fused, seen, events), (plain, expected, _) in zip(results[True], results[False], strict=True):
        assert fused == pytest.approx(plain, rel=1e-6)
        assert seen == expected == pytest.approx([1.75, 1.375] * 3, rel=1e-6)  # true gradients, fused or not
        if precision == "16-mixed":
            assert (events["unscale_"], events["step"], events["update"]) == (6, 6, 6)


def fit_beyond_the_epoch(rank: int, world_size: int) -> tuple[list[float], Counter[str]]:
    order = Order()
    module = Rig("16-mixed")
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=7,
        callbacks=[order],
        max_epochs=2,
        **precision_options("16-mixed"),
    )
    trainer.fit(module, make_loader(R1[rank]))
    return module.gradients, Counter(order.events)


def test_one_unscale_and_update_per_window_where_k_exceeds_the_epoch() -> None:
    for gradients, events in run_ranks(fit_beyond_the_epoch, 2):
        assert gradients == pytest.approx([1.75, 1.75], rel=1e-6)
        assert (events["unscale_"], events["step"], events["update"]) == (2, 2, 2)


# ---- overflow


class Overflows(Rig):
    """The gradient of one batch, `at`, is infinite on the last rank in the first epoch."""

    at = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        last_rank = self.trainer.world_size - 1
        overflows = (self.global_rank, batch_idx, self.current_epoch) == (last_rank, self.at, 0)
        return loss * math.inf if overflows else loss


def overflow(rank: int, world_size: int, fused: bool, at: int = 1, device: str = "cpu") -> Any:
    make = lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=fused)  # noqa: E731
    module = Overflows("16-mixed", make)
    module.at = at
    options = precision_options("16-mixed", device=device)
    trainer = make_trainer(world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3, max_epochs=2, **options)
    trainer.fit(module, make_loader(R1[rank]))
    clean = Rig("16-mixed", make)
    without = precision_options("16-mixed", device=device)
    trainer = make_trainer(world_size, strategy=TokenNormDDP(), accumulate_grad_batches=3, **without)
    trainer.fit(clean, make_loader(R1[rank]))
    scaler = options["plugins"][0].scaler
    records = [(record.applied, record.skipped_because) for record in module.records]
    return records, module.parameters_after, module.gradients, clean.parameters_after, scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_overflow_on_one_rank_skips_on_all(fused: bool, at: int) -> None:
    for records, parameters, gradients, clean, scale in run_ranks(overflow, 2, fused, at):
        assert records == [(False, "the gradients are not finite: the scaler skipped it"), (True, None)]
        assert parameters[0] == 1.0
        assert gradients[1] == pytest.approx(1.75, rel=1e-6)  # nothing stale in the next window
        assert parameters[1] == pytest.approx(clean[0], rel=1e-6)  # as if the window had not been
        assert scale == SCALE / 2


# ---- a scale that moves


class MovesScale(Callback):
    def __init__(self, hook: str, batch_idx: int, how: str) -> None:
        self.hook, self.batch_idx, self.how = hook, batch_idx, how

    def _move(self, trainer: Any, hook: str) -> None:
        if (hook, trainer.fit_loop.batch_idx) == (self.hook, self.batch_idx):
            scaler = trainer.precision_plugin.scaler
            if self.how == "update":
                scaler.update(2.0)
            elif self.how == "load":
                scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
            else:
                scaler._scale = scaler._scale * 2

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._move(trainer, "start")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._move(trainer, "after")


def fit_with_moving_scale(rank: int, world_size: int, callback: Callback) -> tuple[str | None, list[float]]:
    module = Rig("16-mixed")
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        callbacks=[callback],
        **precision_options("16-mixed"),
    )
    try:
        trainer.fit(module, make_loader(R2[rank]))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", module.gradients
    return None, module.gradients


@pytest.mark.parametrize(
    ("hook", "batch_idx", "how", "seen_at"),
    [
        ("after", 0, "update", 1),  # right after the very first micro-batch of all
        ("start", 1, "update", 2),
        ("start", 2, "load", 3),
        ("after", 1, "replace", 2),
        ("after", 2, "update", 3),  # after the window's last backward, before its gradients are unscaled
    ],
)
def test_a_scale_that_moves_inside_a_window_is_an_error(hook: str, batch_idx: int, how: str, seen_at: int) -> None:
    for error, gradients in run_ranks(fit_with_moving_scale, 2, MovesScale(hook, batch_idx, how)):
        assert error is not None
        assert error.startswith("TokenNormError: The scale of the GradScaler has changed inside a window")
        assert f"micro-batch {seen_at}:" in error
        assert gradients == []


def test_a_scale_that_is_set_between_windows_is_fine() -> None:
    for error, gradients in run_ranks(fit_with_moving_scale, 2, MovesScale("start", 3, "update")):
        assert error is None
        assert gradients == pytest.approx([1.75, 1.375], rel=1e-6)


# ---- range


def fit_large_counts(rank: int, world_size: int, reduction: str) -> tuple[list[float], float]:
    class Large(Rig):
        largest = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # a mean of 1, or its sum over the tokens
            return self.t * (batch["tokens"] if reduction == "sum" else 1.0)

        def on_before_backward(self, loss: Tensor) -> None:
            Large.largest = max(Large.largest, loss.item())

    module = Large("16-mixed", reduction=reduction)
    strategy = TokenNormDDP(count_tokens=lambda batch: batch["tokens"], loss_reduction=reduction)  # type: ignore[arg-type]
    trainer = make_trainer(
        world_size, strategy=strategy, accumulate_grad_batches=10, **precision_options("16-mixed", 65536.0)
    )
    trainer.fit(module, torch.utils.data.DataLoader([{"tokens": 50_000}] * 10, batch_size=None))  # type: ignore[arg-type]
    return module.gradients, Large.largest


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_million_tokens_per_window_stay_in_range(reduction: str) -> None:
    # 2 ranks x 10 micro-batches x 50 000 tokens: what is backpropagated of each micro-batch is its share of the token
    # mean, W * n / N = 0.1, times the scale, as in plain Lightning; not a sum of 10**6, far beyond float16's range
    for gradients, largest in run_ranks(fit_large_counts, 2, reduction):
        assert gradients == pytest.approx([1.0], rel=1e-6)
        assert largest == pytest.approx(6553.6, rel=1e-6)


def test_factors_have_the_size_of_the_mean() -> None:
    # with equal counts the factor on a mean is 1, however many ranks, micro-batches and tokens there are
    for world_size, accumulate, tokens in ((1, 1, 1), (2, 16, 10**6), (64, 128, 4096)):
        rank = RankReport(accumulate * tokens, accumulate, accumulate)
        plan = WindowPlan.agreed([rank] * world_size, (tokens,) * accumulate)
        assert plan.factor(0, "mean", plan.accumulate) == pytest.approx(1.0, rel=1e-12)


# ---- low precision throughout, and callbacks that watch


class LowPrecision(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        dtype = self.model.head.weight.dtype
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tiny_lm.LENGTH, dtype=dtype)
        hidden = self.model.block(self.model.embed(batch["input_ids"]), src_mask=mask, is_causal=True)
        logits = self.model.head(hidden)[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"][:, 1:].flatten())


def first_gradients(rank: int, world_size: int, plain: bool, precision: str) -> list[Any]:
    gradients = []
    for seed in range(4):
        micro_batches = [[sample] for sample in tiny_lm.make_samples(8, seed=seed)]
        module = LowPrecision()
        strategy = DDPStrategy() if plain else TokenNormDDP()
        trainer = make_trainer(world_size, strategy=strategy, accumulate_grad_batches=4, precision=precision)
        trainer.fit(module, tiny_lm.make_loader(micro_batches[rank::2]))
        gradients.append(module.gradients[0].double().numpy())
    return gradients


def test_bf16_true_loses_no_more_than_plain_ddp_does() -> None:
    errors = {}
    for plain in (False, True):
        exact, rounded = (run_ranks(first_gradients, 2, plain, p)[0] for p in ("64-true", "bf16-true"))
        relative = [
            abs(torch.tensor(a - b)).norm() / torch.tensor(a).norm() for a, b in zip(exact, rounded, strict=True)
        ]
        errors[plain] = sum(relative) / len(relative)
    # bfloat16 itself is off by about 1 %; the factor adds a rounding of 2**-9 = 0.2 % at most
    assert errors[False] < errors[True] + 2**-9
    assert errors[False] < 0.05


class NormLogger(Callback):
    """Logs gradient norms where Lightning promises true ones."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        norms = grad_norm(pl_module, norm_type=2)
        self.norms.append(norms["grad_2.0_norm_total"].item())


def fit_watched(rank: int, world_size: int) -> tuple[list[float], float]:
    logger = NormLogger()
    module = Rig("16-mixed", lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=3,
        gradient_clip_val=1.5,
        callbacks=[logger, WeightAveraging()],
        **precision_options("16-mixed"),
    )
    trainer.fit(module, make_loader(R2[rank]))
    return logger.norms, module.t.item()


def test_norms_and_averaged_weights() -> None:
    # norms before clipping: 1.75 and 1.375. t goes 1 -> -0.5 (clipped to 1.5) -> -1.875; `WeightAveraging` leaves the
    # average over the two updates
    for norms, averaged in run_ranks(fit_watched, 2):
        assert norms == pytest.approx([1.75, 1.375], rel=1e-3)
        assert averaged == pytest.approx((-0.5 - 1.875) / 2, rel=1e-4)
