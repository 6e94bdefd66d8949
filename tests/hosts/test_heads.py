"""Several losses with a denominator each, on real processes: two heads, terms without tokens, and what goes wrong."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_tokennorm import (
    Heads,
    SupervisedTokens,
    TokenMeanMetric,
    TokenNormDDP,
    TokenNormError,
    TokenNormFSDP,
    TokenNormModelParallel,
    token_windows,
)
from lightning_tokennorm.testing.precision import KeepTypes
from tests.helpers import law
from tests.helpers.launch import run_ranks
from tests.helpers.law import LR, Case
from tests.helpers.scalar_rig import make_trainer
from tests.helpers.tiny_lm import IGNORE, VOCABULARY, WIDTH, TinyLM, collate, flat

Sample = dict[str, Tensor]
WEIGHT = 0.3
SHIFTS = {"lm": 1, "mtp": 3}


def labels_of(batch: Sample, head: str) -> Tensor:
    """The second head is taught some words only, so that whole micro-batches have none of them."""
    labels = batch["labels"][:, SHIFTS[head] :]
    return labels if head == "lm" else labels.masked_fill(labels > 4, IGNORE)


def count_rare(batch: Sample) -> int:
    return int((labels_of(batch, "mtp") != IGNORE).sum())


COUNTERS = Heads(lm=SupervisedTokens(shift=1), mtp=count_rare)


class TwoHeadLM(TinyLM):
    """Predicts the next token and, with parameters of its own, the one after the next two."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(43)
        self.mtp = nn.Linear(WIDTH, VOCABULARY).double()
        with torch.no_grad():
            for each in self.mtp.parameters():
                each.copy_(torch.randn(each.shape, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=torch.float64)
        hidden = self.block(self.embed(input_ids), src_mask=mask, is_causal=True)
        return self.head(hidden), self.mtp(hidden)

    def losses(self, batch: Sample, reduction: str) -> dict[str, Tensor]:
        """By hand: the mean over no token is NaN all the way down."""
        found = {}
        for (name, shift), logits in zip(SHIFTS.items(), self(batch["input_ids"]), strict=True):
            labels = labels_of(batch, name)
            losses = F.cross_entropy(logits[:, :-shift].transpose(1, 2), labels.clamp(min=0), reduction="none")
            live = labels != IGNORE
            found[name] = (losses * live).sum() / (live.sum() if reduction == "mean" else 1)
        return found


class TwoHeads(pl.LightningModule):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.model = TwoHeadLM()
        self.reduction = reduction

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        return {"losses": self.model.losses(batch, self.reduction)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


class Sharded(TwoHeads):
    """The second head is a module of its own to shard, which only its loss leads to."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (self.model.block, self.model.mtp, self.model):
            fully_shard(part, mesh=mesh)


class ByHand(TwoHeads):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.automatic_optimization = False

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx)["losses"])
        if self.trainer.strategy.window.is_last:
            self.optimizers().step()
            self.optimizers().zero_grad()


def expected(case: Case) -> list[Tensor]:
    """One process on the merged windows: each head's sum over its own N."""
    model, gradients = TwoHeadLM(), []
    for window in case.windows():
        batch = collate(window)
        tokens = {name: int((labels_of(batch, name) != IGNORE).sum()) for name in SHIFTS}
        sums = model.losses(batch, "sum")
        model.zero_grad()
        (sums["lm"] / tokens["lm"] + WEIGHT * sums["mtp"] / max(tokens["mtp"], 1)).backward()
        gradients.append(flat(each.grad for each in model.parameters()))
        with torch.no_grad():
            for each in model.parameters():
                each -= LR * each.grad
    return gradients


def error(case: Case, gradients: list[Tensor]) -> float:
    wanted = expected(case)
    if len(wanted) != len(gradients):
        return float("inf")
    return max((one - other).abs().max().item() for one, other in zip(wanted, gradients, strict=True))


def fit(rank: int, world_size: int, case: Case, strategy: Any, module: Any, **options: Any) -> float:
    return error(case, law.fit(rank, world_size, case, strategy, module, **options))


LONG_GONE = Case(lengths=(5, 5), empty=((0, 1), (1, 2)))


def test_heads_are_idle_alone_somewhere() -> None:
    for rank in LONG_GONE.micro_batches():
        counted = [COUNTERS(collate(samples)) for samples in rank]
        assert any(each["lm"] and not each["mtp"] for each in counted)


HOSTS: dict[str, tuple[Case, Any, Any, dict[str, Any], dict[str, Any]]] = {
    "ddp": (LONG_GONE, TokenNormDDP, TwoHeads, {}, {}),
    "ddp, K=1": (Case(accumulate=1), TokenNormDDP, TwoHeads, {}, {}),
    "ddp, sum, K=2": (Case(accumulate=2, loss="sum"), TokenNormDDP, TwoHeads, {}, {}),
    "ddp, unused": (LONG_GONE, TokenNormDDP, TwoHeads, {"find_unused_parameters": True}, {}),
    "ddp, static": (LONG_GONE, TokenNormDDP, TwoHeads, {"static_graph": True}, {}),
    "ddp, uneven stream": (Case(lengths=(5, 2), empty=((0, 1),), stream=True), TokenNormDDP, TwoHeads, {}, {}),
    "ddp, by hand": (LONG_GONE, TokenNormDDP, ByHand, {"accumulate_grad_batches": 3}, {"accumulate_grad_batches": 1}),
    "fsdp": (LONG_GONE, TokenNormFSDP, TwoHeads, {"auto_wrap_policy": {nn.TransformerEncoderLayer}}, {}),
    "fsdp, once": (LONG_GONE, TokenNormFSDP, TwoHeads, {"sync_each_micro_batch": False}, {}),
    "fsdp2": (LONG_GONE, TokenNormModelParallel, Sharded, {"data_parallel_size": 2, "tensor_parallel_size": 1}, {}),
    "fsdp2, uneven, once": (
        Case(lengths=(5, 2), empty=((0, 1),)),
        TokenNormModelParallel,
        Sharded,
        {"data_parallel_size": 2, "tensor_parallel_size": 1, "sync_each_micro_batch": False},
        {},
    ),
}


def fit_hosts(rank: int, world_size: int) -> dict[str, float]:
    errors = {}
    for name, (case, kind, module, options, trainer) in HOSTS.items():
        reduction = "sum" if case.loss == "sum" else "mean"
        strategy = kind(count_tokens=COUNTERS, head_weights={"mtp": WEIGHT}, loss_reduction=reduction, **options)
        plugins = {"plugins": KeepTypes()} if kind is TokenNormFSDP else {}
        try:
            errors[name] = fit(rank, world_size, case, strategy, module(reduction), **plugins, **trainer)
        except Exception as raised:
            raise AssertionError(f"host {name!r}") from raised
    errors["plain"] = fit(rank, world_size, LONG_GONE, DDPStrategy(find_unused_parameters=True), AddedUp())
    return errors


class AddedUp(TwoHeads):
    """What one would write for plain DDP: heads without a token are left out by hand."""

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        losses = super().training_step(batch, batch_idx)["losses"]
        sums = [losses["lm"], WEIGHT * losses["mtp"]]
        return sum((each for each in sums if each.isfinite()), 0 * self.model(batch["input_ids"])[0].sum())


@pytest.fixture(scope="module")
def hosts() -> list[dict[str, float]]:
    return run_ranks(fit_hosts, 2)


@pytest.mark.parametrize("name", HOSTS)
def test_law(name: str, hosts: list[dict[str, float]]) -> None:
    assert max(errors[name] for errors in hosts) < law.TOLERANCE


def test_plain_ddp_is_not_the_law(hosts: list[dict[str, float]]) -> None:
    assert min(errors["plain"] for errors in hosts) > 1e-3


def fit_three(rank: int, world_size: int) -> list[float]:
    found = []
    for accumulate in (1, 2, 3):
        case = Case(lengths=(4, 3, 0), accumulate=accumulate, stream=True, empty=((0, 1),))
        strategy = TokenNormDDP(count_tokens=COUNTERS, head_weights={"mtp": WEIGHT})
        found.append(fit(rank, world_size, case, strategy, TwoHeads()))
    return found


def test_law_on_three_ranks() -> None:
    assert max(max(errors) for errors in run_ranks(fit_three, 3)) < law.TOLERANCE


def loop(rank: int, world_size: int, unused: bool) -> float:
    """The same by hand; the weight is on the loss there."""
    model = DistributedDataParallel(TwoHeadLM(), find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    gradients = []
    for window in token_windows(law.make_loader(rank, LONG_GONE), accumulate=3, model=model, count_tokens=COUNTERS):
        for batch in window:
            with window.no_sync():
                out = model(batch["input_ids"])
                inner = model.module
                inner.forward = lambda ids, out=out: out  # type: ignore[method-assign]
                losses = inner.losses(batch, "mean")
                del inner.forward
                window.backward({"lm": losses["lm"], "mtp": WEIGHT * losses["mtp"]})
        assert set(window.record.heads) == {"lm", "mtp"}
        gradients.append(flat(each.grad for each in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return error(LONG_GONE, gradients)


def test_law_in_a_loop_by_hand() -> None:
    assert max(run_ranks(loop_on_ranks, 2)) < law.TOLERANCE


def loop_on_ranks(rank: int, world_size: int) -> float:
    return max(loop(rank, world_size, unused) for unused in (False, True))


def loop_over_shards(rank: int, world_size: int) -> str:
    model = TwoHeadLM()
    for part in (model.mtp, model):
        fully_shard(part)
    try:
        for window in token_windows(law.make_loader(rank, LONG_GONE), accumulate=3, model=model, count_tokens=COUNTERS):
            for batch in window:
                with window.no_sync():
                    window.backward(model.losses(batch, "mean"))
    except TokenNormError as raised:
        return str(raised)
    return "nothing"


def test_a_head_that_alone_leads_to_a_shard_is_an_error_in_a_loop() -> None:
    for text in run_ranks(loop_over_shards, 2, timeout_s=60):
        assert "leads to a part of the model only, while other ranks wait" in text


# ---- numbers by hand

Counted = dict[str, tuple[int, float]]
# S_a = t * n * x and S_b = (t + u) * n * x.
# N_a = 3 + 1 + 2 = 6, sum n * x = 3 + 5 + 4 = 12; N_b = 1 + 2 + 1 = 4, sum n * x = 4 + 2 + 6 = 12.
# With weight 0.5 for b: d/dt = 12 / 6 + 0.5 * 12 / 4 = 3.5, d/du = 1.5.
RIG: list[list[Counted]] = [
    [{"a": (3, 1.0), "b": (1, 4.0)}, {"a": (1, 5.0)}],
    [{"a": (2, 2.0), "b": (2, 1.0)}, {"b": (1, 6.0)}],
]


class Scalars(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.u = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.gradients: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = {"a": self.t, "b": self.t + self.u}
        return {"losses": {name: parts[name[0]] * x for name, (n, x) in batch.items() if n or x}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([0.0 if each.grad is None else each.grad.item() for each in (self.t, self.u)])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def tokens_of(batch: Counted) -> dict[str, int]:
    """Names only what is there, so that names differ between ranks and micro-batches."""
    return {name: n for name, (n, _) in batch.items()}


class Records(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.window.is_last:
            record = trainer.strategy.last_update
            heads = {name: (each.num_tokens, each.loss_sum.item()) for name, each in record.heads.items()}
            self.seen.append((record.num_tokens, record.loss_sum.item(), heads, outputs["loss"].item() * 2))


def fit_scalars(rank: int, world_size: int, table: Any, options: Any = None) -> Any:
    module, records = Scalars(), Records()
    options = {"count_tokens": tokens_of, "head_weights": {"b": 0.5}, **(options or {})}
    trainer = make_trainer(world_size, strategy=TokenNormDDP(**options), accumulate_grad_batches=2, callbacks=[records])
    try:
        trainer.fit(module, DataLoader(table[rank], batch_size=None))
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return module.gradients, records.seen


def test_numbers_worked_by_hand() -> None:
    first, second = run_ranks(fit_scalars, 2, RIG)
    assert first[0] == second[0] == [[3.5, 1.5]]
    # t + u = 2, so b's sums are doubled; the weighted sum of rank 0 is 8 + 0.5 * 8, and what its last step
    # returned, 5, is what others see of it
    assert first[1] == [(10, 12.0, {"a": (6, 8.0), "b": (4, 8.0)}, 5.0)]
    assert second[1] == [(10, 12.0, {"a": (6, 4.0), "b": (4, 16.0)}, 6.0)]


def test_a_head_of_weight_zero_is_counted_and_not_trained() -> None:
    ((gradients, seen),) = run_ranks(fit_scalars, 1, [RIG[0]], {"head_weights": {"b": 0.0}})
    assert gradients == [[2.0, 0.0]]  # (3 + 5) / 4
    assert seen[0][2]["b"] == (1, 8.0)


def test_a_head_that_shows_up_later() -> None:
    """The second window has one more head, on one rank only; the third has none of it."""
    late = [
        [{"a": (1, 1.0)}, {"a": (1, 3.0)}, {"a": (2, 1.0)}, {"a": (2, 1.0), "b": (4, 3.0)}, {"a": (1, 7.0)}],
        [{"a": (2, 1.0)}, {}, {"a": (4, 2.0)}, {}, {"a": (1, 3.0)}],
    ]
    (gradients, seen), _ = run_ranks(fit_scalars, 2, late, {"head_weights": None, "find_unused_parameters": True})
    # 6 / 4; (2 + 2 + 8) / 8 + 12 / 4 and 3; (7 + 3) / 2
    assert gradients == [[1.5, 0.0], [4.5, 3.0], [5.0, 0.0]]
    assert [set(each[2]) for each in seen] == [{"a"}, {"a", "b"}, {"a", "b"}]


PER_MICRO_BATCH = [
    [{"a": (3, 1.0), "b": (1, 4.0)}, {"a": (1, 5.0), "b": (1, 2.0)}],
    [{"a": (2, 2.0), "b": (1, 1.0)}],
]


def test_a_term_without_tokens_is_an_average_over_micro_batches() -> None:
    # three micro-batches have one each: (4 + 2 + 1) / 3, whatever their tokens are; the padded one has none
    (gradients, _), _ = run_ranks(fit_scalars, 2, PER_MICRO_BATCH, {"head_weights": None})
    assert gradients[0][1] == pytest.approx(7 / 3, rel=1e-15)


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one rank counts one loss": (
        [RIG[0], [{"only": (1, 1.0)}]],
        {"count_tokens": lambda batch: 3 if "only" in batch else tokens_of(batch)},
        "rank 1 counts one loss, and others count the heads 'a', 'b'",
    ),
    "a weight of no head": (RIG, {"head_weights": {"mtp": 0.3}}, "`head_weights` names 'mtp', while the heads that"),
    "negative": (RIG, {"count_tokens": lambda batch: {"a": -1}}, "returned -1"),
    "not a number": (RIG, {"count_tokens": lambda batch: {"a": "x"}}, "`count_tokens` returned for 'a' 'x'"),
    "not a name": (RIG, {"count_tokens": lambda batch: {3: 1}}, "one of them named 3"),
    "a loss of no head": (
        RIG,
        {"count_tokens": lambda batch: {"a": 1}, "head_weights": None},
        "gave a loss for 'b', while the heads",
    ),
    "a loss is missing": (
        RIG,
        {"count_tokens": lambda batch: {"a": 1, "b": 1, "c": 1}, "head_weights": None},
        "gave None as the loss of head 'c'",
    ),
    "one count": (RIG, {"count_tokens": lambda batch: 1, "head_weights": None}, "`count_tokens` returns one count"),
}


def fit_wrong(rank: int, world_size: int) -> dict[str, str]:
    return {name: str(fit_scalars(rank, world_size, table, options)) for name, (table, options, _) in WRONG.items()}


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(fit_wrong, 2, timeout_s=120)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_an_error_on_all_ranks(name: str, said: list[dict[str, str]]) -> None:
    for texts in said:
        assert texts[name].startswith("TokenNormError")
        assert WRONG[name][2] in texts[name]


class NoneWhereIdle(Scalars):
    """Says with None, or an empty tensor, that a head has nothing to say."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"losses": {"b": torch.zeros(0), "a": None, **super().training_step(batch, batch_idx)["losses"]}}


def test_losses_of_heads_without_tokens_are_not_looked_at() -> None:
    module = NoneWhereIdle()
    trainer = make_trainer(1, strategy=TokenNormDDP(count_tokens=tokens_of), accumulate_grad_batches=3)
    trainer.fit(module, DataLoader([*RIG[0], {"b": (0, 0.0), "a": (0, 0.0)}], batch_size=None))
    assert module.gradients == [[2.0 + 4.0, 4.0]]  # (3 + 5) / 4 and 4 / 1


class LosesABatch(Scalars):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return None


def test_a_batch_that_is_lost_after_it_was_counted() -> None:
    """With one loss the rest of the window is made up for; here each head would need a factor of its own."""
    trainer = make_trainer(1, strategy=TokenNormDDP(count_tokens=tokens_of))
    with pytest.raises(TokenNormError, match="whose 4 supervised tokens the ranks have counted already"):
        trainer.fit(LosesABatch(), DataLoader(RIG[0], batch_size=None))


def test_heads_without_their_counts() -> None:
    class OneLoss(Scalars):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.t + self.u

    with pytest.raises(TokenNormError, match="gave Tensor as its losses"):
        make_trainer(1, strategy=TokenNormDDP(count_tokens=tokens_of)).fit(
            OneLoss(), DataLoader(RIG[0], batch_size=None)
        )


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"mpt": 0.3}, ValueError, "did you mean 'mtp'"),
        ({"mtp": -1}, ValueError, "finite number >= 0"),
        ({"mtp": float("nan")}, ValueError, "finite number >= 0"),
        ({"mtp": "x"}, TypeError, "expected a mapping of the names"),
        ([0.3], TypeError, "expected a mapping of the names"),
    ],
)
def test_bad_weights(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        TokenNormDDP(count_tokens=COUNTERS, head_weights=given)


def test_bad_counters() -> None:
    with pytest.raises(ValueError, match="got no counter"):
        Heads()
    with pytest.raises(TypeError, match=r"Heads\(lm=\.\.\.\)` got 3"):
        Heads(lm=3)  # type: ignore[arg-type]


# ---- what is logged


class Validates(Scalars):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


class Logged(Callback):
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.window.is_last:
            self.values = {key: value.item() for key, value in trainer.callback_metrics.items()}


def fit_logged(rank: int, world_size: int, names: bool) -> dict[str, float]:
    counter: Any = Heads(a=lambda batch: batch.get("a", (0, 0))[0], b=lambda batch: batch.get("b", (0, 0))[0])
    logged = Logged()
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(count_tokens=counter if names else tokens_of, head_weights={"b": 0.5}),
        accumulate_grad_batches=2,
        callbacks=[TokenMeanMetric(perplexity=True), logged],
        num_sanity_val_steps=0,
    )
    # validation sees head a on one rank and head b on the other
    val = DataLoader([{"a": (4, 3.0)} if rank else {"b": (2, 1.0)}], batch_size=None)
    trainer.fit(Validates(), DataLoader(RIG[rank], batch_size=None), val)
    return {**logged.values, **{key: value.item() for key, value in trainer.callback_metrics.items()}}


@pytest.mark.parametrize("names", [True, False])
def test_each_head_is_logged(names: bool) -> None:
    """With t + u = 2 the means are 12 / 6 and 24 / 4, the weighted total is 2 + 0.5 * 6."""
    for logged in run_ranks(fit_logged, 2, names):
        assert logged["train_tokens"] == 10
        assert [logged[f"train_{key}_step"] for key in ("a_per_token", "b_per_token", "loss_per_token")] == [2, 6, 5]
        assert [logged[f"train_{key}_epoch"] for key in ("a_per_token", "b_per_token", "loss_per_token")] == [2, 6, 5]
        assert [logged[f"val_{key}"] for key in ("a_per_token", "b_per_token", "loss_per_token")] == [3, 2, 4]
        assert logged["train_b_perplexity_step"] == pytest.approx(math.exp(6), rel=1e-12)


def fit_under_plain(rank: int, world_size: int, names: bool) -> Any:
    counter: Any = Heads(a=lambda batch: batch.get("a", (0, 0))[0], b=lambda batch: batch.get("b", (0, 0))[0])

    class Summed(Scalars):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = super().training_step(batch, batch_idx)["losses"]
            return {"loss": sum(losses.values()) + 0 * (self.t + self.u), "losses": losses}

    trainer = make_trainer(
        world_size,
        strategy=DDPStrategy(),
        accumulate_grad_batches=2,
        callbacks=[TokenMeanMetric(count_tokens=counter if names else tokens_of)],
    )
    try:
        trainer.fit(Summed(), DataLoader(RIG[rank], batch_size=None))
    except TypeError as raised:
        return str(raised)
    keys = ("train_a_per_token_epoch", "train_b_per_token_epoch", "train_loss_per_token_epoch")
    return [trainer.callback_metrics[key].item() for key in keys]


def test_heads_under_another_strategy() -> None:
    assert run_ranks(fit_under_plain, 2, True) == [[2, 6, 8], [2, 6, 8]]
    for text in run_ranks(fit_under_plain, 2, False):
        assert "Use `count_tokens=Heads(...)`" in text
