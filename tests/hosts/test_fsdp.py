"""`TokenNormFSDP` on real processes: the law for each way to shard, and where sharding makes a difference.

Most cases share one pair of processes: to start them takes longer than to train.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import wrap

from lightning_tokennorm import TokenMeanMetric, TokenNormFSDP
from lightning_tokennorm.strategies.fsdp_on_cpu import FSDPOnCPU
from lightning_tokennorm.testing.precision import KeepTypes
from tests.helpers import law
from tests.helpers.launch import run_ranks
from tests.helpers.law import Case, Module
from tests.helpers.tiny_lm import collate, num_supervised, reference

BLOCKS: dict[str, Any] = {"auto_wrap_policy": {nn.TransformerEncoderLayer}}
PIECES: dict[str, Any] = {"auto_wrap_policy": {nn.TransformerEncoderLayer, nn.Embedding}}
ONCE: dict[str, Any] = {"sync_each_micro_batch": False}
HAND = "hand-written"
UNEVEN = {"lengths": (5, 2), "empty": ((0, 1),)}
EMPTY_RANK = {"empty": tuple((1, index) for index in range(5))}
EMPTY_WINDOW = {"empty": tuple((rank, index) for rank in range(2) for index in range(3))}


class FlatOptimizer(Module):
    """As `use_orig_params=False` wants it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=self.lr)


class WithoutLabels(Module):
    """Treats a batch without labels in one of the ways that people write."""

    def __init__(self, way: str) -> None:
        super().__init__(lr=law.LR)
        self.way = way

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if num_supervised(batch):
            return super().training_step(batch, batch_idx)
        if "forward" in self.way:
            self.model(batch["input_ids"])
        zero = torch.zeros((), dtype=torch.float64, requires_grad="leaf" in self.way)
        return None if "none" in self.way else {"loss": zero} if "dict" in self.way else zero


class WrapsItself(Module):
    """Wraps parts of itself in `configure_model`, so that the whole is not wrapped."""

    def __init__(self, parts: str = "all") -> None:
        super().__init__(lr=law.LR)
        self.parts = parts

    def configure_model(self) -> None:
        self.model.block = wrap(self.model.block)
        if self.parts == "all":
            self.model.embed, self.model.head = wrap(self.model.embed), wrap(self.model.head)


MODULES = {"FlatOptimizer": FlatOptimizer, "WrapsItself": WrapsItself}

LAW: dict[str, tuple[Case, dict[str, Any], str]] = {
    "K=1": (Case(accumulate=1), {}, ""),
    "K=1, once": (Case(accumulate=1, loss=HAND), {**BLOCKS, **ONCE}, ""),
    "K=2, sum": (Case(accumulate=2, loss="sum"), BLOCKS, ""),
    "K=2, sum, stream, once": (Case(accumulate=2, loss="sum", stream=True), {**PIECES, **ONCE}, ""),
    "K=3, sum": (Case(loss="sum"), {}, ""),
    "K=3": (Case(loss=HAND), PIECES, ""),
    "K=3, stream": (Case(loss=HAND, stream=True, epochs=2), BLOCKS, ""),
    "K=3, once": (Case(loss=HAND), {**BLOCKS, **ONCE}, ""),
    "K=3, one unit, once": (Case(loss=HAND, epochs=2), ONCE, ""),
    "rank without a token": (Case(loss=HAND, **EMPTY_RANK), {**BLOCKS, **ONCE}, ""),
    "window without a token": (Case(loss=HAND, **EMPTY_WINDOW, epochs=2), BLOCKS, ""),
    "unequal ranks": (Case(loss=HAND, **UNEVEN, epochs=2), BLOCKS, ""),
    "unequal ranks, once": (Case(**UNEVEN), {**PIECES, **ONCE}, ""),
    "unequal streams": (Case(**UNEVEN, stream=True, epochs=2), {}, ""),
    "gradients sharded": (Case(loss=HAND), {"sharding_strategy": "SHARD_GRAD_OP", **BLOCKS}, ""),
    "gradients sharded, unequal, once": (
        Case(loss=HAND, **UNEVEN),
        {"sharding_strategy": "SHARD_GRAD_OP", **BLOCKS, **ONCE},
        "",
    ),
    "nothing sharded": (Case(loss=HAND, **UNEVEN), {"sharding_strategy": "NO_SHARD", **BLOCKS}, ""),
    "nothing sharded, once": (Case(loss=HAND), {"sharding_strategy": "NO_SHARD", **BLOCKS, **ONCE}, ""),
    "flat parameters": (Case(loss=HAND), {"use_orig_params": False, **BLOCKS}, "FlatOptimizer"),
    "flat parameters, unequal, once": (
        Case(**UNEVEN),
        {"use_orig_params": False, **BLOCKS, **ONCE},
        "FlatOptimizer",
    ),
    "checkpoints": (
        Case(loss=HAND),
        {"activation_checkpointing_policy": {nn.TransformerEncoderLayer}, **BLOCKS},
        "",
    ),
    "wraps itself": (Case(), {}, "WrapsItself"),
    "wraps itself, unequal, once": (Case(**UNEVEN), ONCE, "WrapsItself"),
}
for way in ("forward, dict", "forward, none", "forward, leaf", "dict", "none"):
    LAW[f"no labels: {way}"] = (Case(lengths=(4, 4), empty=((0, 1), (1, 2), (1, 3))), BLOCKS, f"way:{way}")
LAW["no labels: one unit"] = (Case(empty=((0, 0), (1, 2))), {}, "way:zero")
LAW["no labels: once"] = (Case(empty=((0, 1), (1, 2), (1, 4))), {**PIECES, **ONCE}, "way:zero")


def make_module(name: str, case: Case) -> Module:
    if name.startswith("way:"):
        return WithoutLabels(name.removeprefix("way:"))
    module = MODULES.get(name, Module)()
    module.loss_kind, module.lr = case.loss, law.LR
    return module


def fit_all(rank: int, world_size: int, cases: dict[str, tuple[Case, dict[str, Any], str]]) -> dict[str, list[Tensor]]:
    """The gradients of each case."""
    gradients = {}
    for name, (case, options, module) in cases.items():
        strategy = TokenNormFSDP(loss_reduction="sum" if case.loss == "sum" else "mean", **options)
        try:
            gradients[name] = law.fit(
                rank, world_size, case, strategy, make_module(module, case), plugins=[KeepTypes()]
            )
        except Exception as raised:
            raise AssertionError(f"case {name!r}") from raised
    return gradients


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    return run_ranks(run_pair, 2, timeout_s=240)


def run_pair(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"law": fit_all(rank, world_size, LAW)}
    for run in (fit_plain, count_collectives, fit_clipped, fit_in_half, log, refuse):
        found[run.__name__] = run(rank, world_size)
    return found


@pytest.mark.parametrize("name", LAW)
def test_law(name: str, pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert law.error(LAW[name][0], found["law"][name]) < law.TOLERANCE


ALONE = {
    "one": (Case(lengths=(5,), empty=((0, 1),)), {}, ""),
    "one, once": (Case(lengths=(5,), empty=((0, 1),), loss="sum"), ONCE, ""),
}


def test_law_in_one_process() -> None:
    (gradients,) = run_ranks(fit_all, 1, ALONE)
    for name, (case, *_) in ALONE.items():
        assert law.error(case, gradients[name]) < law.TOLERANCE


EMPTY = ((0, 1), (3, 2))
HYBRID = {"sharding_strategy": "HYBRID_SHARD", **BLOCKS}


def fit_four(rank: int, world_size: int) -> list[float]:
    four, two = Case(lengths=(5, 4, 3, 5), empty=EMPTY, loss=HAND), Case(loss=HAND)
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    cases = {
        "mesh": (four, {**HYBRID, "device_mesh": (2, 2)}, ""),
        "mesh, once": (four, {**HYBRID, "device_mesh": (2, 2), **ONCE}, ""),
        "groups": (four, {**HYBRID, "process_group": (shards, replicas)}, ""),
        # two trainings of two ranks each
        "part of the world": (two, {**BLOCKS, "process_group": shards}, ""),
    }
    gradients = fit_all(rank, world_size, cases)
    return [law.error(case, gradients[name]) for name, (case, *_) in cases.items()]


def test_law_on_shards_and_replicas() -> None:
    for errors in run_ranks(fit_four, 4):
        assert max(errors) < law.TOLERANCE


def fit_plain(rank: int, world_size: int) -> float:
    case = Case()
    return law.error(case, law.fit(rank, world_size, case, FSDPOnCPU(**BLOCKS), plugins=[KeepTypes()]))


def test_plain_fsdp_is_off(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert 0.01 < found["fit_plain"] < 10


class Counts:
    """Counts the collectives that FSDP starts."""

    NAMES = ("reduce_scatter_tensor", "reduce_scatter_single", "all_reduce")

    def __enter__(self) -> Counter[str]:
        self.counter: Counter[str] = Counter()
        self.own = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}
        for name, function in self.own.items():
            setattr(dist, name, self._counting(name, function))
        return self.counter

    def _counting(self, name: str, function: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.counter[name.removesuffix("_single").removesuffix("_tensor")] += 1
            return function(*args, **kwargs)

        return counting

    def __exit__(self, *exception: object) -> None:
        for name, function in self.own.items():
            setattr(dist, name, function)


def count_collectives(rank: int, world_size: int) -> list[int]:
    case, counted = Case(lengths=(6, 6)), []
    for options in (BLOCKS, {**BLOCKS, **ONCE}):
        with Counts() as counter:
            fit_all(rank, world_size, {"": (case, options, "")})
        counted.append(counter["reduce_scatter"])
    return counted


def test_gradients_can_be_reduced_once_per_update(pair: list[dict[str, Any]]) -> None:
    # two units: after each of 6 micro-batches, or after each of 2 windows
    assert [found["count_collectives"] for found in pair] == [[12, 4], [12, 4]]


def fit_clipped(rank: int, world_size: int) -> list[Any]:
    case = Case()
    found: list[Any] = []
    for options in ({**BLOCKS}, {**BLOCKS, **ONCE, "sharding_strategy": "SHARD_GRAD_OP"}):
        found.append(law.fit(rank, world_size, case, TokenNormFSDP(**options), gradient_clip_val=0.01))
    try:
        law.fit(rank, world_size, case, TokenNormFSDP(), plugins=[KeepTypes()], gradient_clip_val=0.01)
    except Exception as raised:
        found.append(f"{type(raised).__name__}: {raised}")
    return found


def test_clipping_by_norm(pair: list[dict[str, Any]]) -> None:
    # float32: every first gradient is far longer than 0.01, so what is left is its direction
    want = law.expected(Case())[0]
    for found in pair:
        *clipped, refused = found["fit_clipped"]
        for gradients in clipped:
            assert (gradients[0] * 100).norm().item() == pytest.approx(1, abs=1e-3)
            assert (gradients[0] * 100 - want / want.norm()).abs().max().item() < 1e-3
        assert refused.startswith("MisconfigurationException: `gradient_clip_algorithm='norm'` got with parameters in")


class Overflows(Module):
    """Rank 1's gradient of one micro-batch is too large for float16."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e6 if (dist.get_rank(), batch_idx) == (1, 1) else loss


class Applied(Callback):
    """Remembers which updates were applied, and the scale after each."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        record = trainer.strategy.last_update
        if record is not None and record.index == len(self.seen):
            self.seen.append((record.applied, trainer.precision_plugin.scaler.get_scale()))


def fit_in_half(rank: int, world_size: int) -> tuple[list[tuple[bool, float]], list[Tensor]]:
    plugin, applied = FSDPPrecision("16-mixed"), Applied()
    plugin.scaler = ShardedGradScaler(device="cpu", init_scale=64.0)
    case = Case(loss=HAND, empty=((0, 0), (1, 4)))
    module = Overflows(case.loss, lr=law.LR).float()
    gradients = law.fit(rank, world_size, case, TokenNormFSDP(**BLOCKS), module, plugins=[plugin], callbacks=[applied])
    return applied.seen, gradients


def test_an_infinity_on_one_rank_skips_the_step_on_all(pair: list[dict[str, Any]]) -> None:
    case = Case(loss=HAND, empty=((0, 0), (1, 4)))
    (want,), _ = reference(case.windows()[1:], law.LR)  # the parameters are still those of the start
    for found in pair:
        applied, gradients = found["fit_in_half"]
        assert applied == [(False, 32.0), (True, 32.0)]
        assert gradients[0].abs().max() == 0
        assert (gradients[1] - want).norm() < 0.01 * want.norm()


def offload(rank: int, world_size: int) -> tuple[list[float], str]:
    # What torch needs an accelerator for with offloading: memory that can be copied from in the background.
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign,assignment]
    torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]
    cases = {
        "": (Case(loss=HAND), {**BLOCKS, **ONCE, "cpu_offload": True}, ""),
        "K=1": (Case(accumulate=1), {**BLOCKS, "cpu_offload": True}, ""),
    }
    gradients = fit_all(rank, world_size, cases)
    gradients["by name"] = law.fit(rank, world_size, Case(), "tokennorm_fsdp_cpu_offload", plugins=[KeepTypes()])
    errors = [law.error(Case(accumulate=1) if name == "K=1" else Case(), each) for name, each in gradients.items()]
    return errors, refusal(rank, world_size, TokenNormFSDP(cpu_offload=True))


def refusal(rank: int, world_size: int, strategy: TokenNormFSDP, module: Module | None = None, **options: Any) -> str:
    try:
        law.fit(rank, world_size, Case(), strategy, module, plugins=[KeepTypes()], **options)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


def test_offloading_needs_one_reduction_per_update() -> None:
    case = Case(loss=HAND)
    assert law.expected(case)[0].equal(law.expected(Case())[0])  # the loss is the same but for its NaN
    for errors, refused in run_ranks(offload, 2):
        assert len(errors) == 3
        assert max(errors) < law.TOLERANCE
        assert refused.startswith("MisconfigurationException: `TokenNormFSDP(cpu_offload=...)` got with `accumulate_gr")


class Logged(Callback):
    """Keeps what was logged."""

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        self.values = {name: value.item() for name, value in trainer.callback_metrics.items()}


def log(rank: int, world_size: int) -> dict[str, float]:
    logged = Logged()
    callbacks = [TokenMeanMetric(), logged]
    law.fit(rank, world_size, Case(), TokenNormFSDP(**BLOCKS), plugins=[KeepTypes()], callbacks=callbacks)
    return logged.values


def test_metric(pair: list[dict[str, Any]]) -> None:
    last = collate(Case().windows()[-1])
    for found in pair:
        assert found["log"] == pair[0]["log"]
        assert found["log"]["train_tokens"] == num_supervised(last)
        assert 1 < found["log"]["train_loss_per_token_epoch"] < 10


class RegistersHook(Callback):
    """Does behind the strategy's back what FSDP allows."""

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.model.register_comm_hook(None, lambda state, *gradients: None)


def refuse(rank: int, world_size: int) -> list[str]:
    module = Module(lr=law.LR)
    return [
        refusal(rank, world_size, TokenNormFSDP(), callbacks=[RegistersHook()]),
        refusal(rank, world_size, TokenNormFSDP(ignored_states=[module.model.head.weight]), module),
        refusal(rank, world_size, TokenNormFSDP(), WrapsItself("block")),
        # torch makes the shards of the devices of a node, of which a CPU is one
        refusal(rank, world_size, TokenNormFSDP(sharding_strategy="HYBRID_SHARD", **BLOCKS)),
    ]


def test_what_fsdp_would_not_reduce_is_refused(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        hook, ignored, outside, alone = found["refuse"]
        assert "A communication hook was registered on the FSDP module" in hook
        assert "Parameter `model.head.weight` is trained, but FSDP does not reduce" in ignored
        assert "Parameter `model.embed.weight` is trained, but FSDP does not reduce" in outside
        assert "wrapped in FSDP over 1 ranks, while the strategy counts tokens over 2" in alone


class Detached(Module):
    """Rank 0's second micro-batch has tokens, and a loss that leads to no parameter."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss.detach().requires_grad_() if (dist.get_rank(), batch_idx) == (0, 1) else loss


def fail_alone(rank: int, world_size: int, module: str) -> str:
    made = Detached(lr=law.LR) if module == "detached" else WithoutLabels("zero")
    case = Case(empty=((0, 0),))
    try:
        law.fit(rank, world_size, case, TokenNormFSDP(**BLOCKS), made, plugins=[KeepTypes()])
    except Exception as raised:
        return f"{raised} {getattr(raised, '__notes__', '')}"
    return "nothing"


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("zero", "did not run the model for a micro-batch without supervised tokens, batch 0 on rank 0"),
        ("detached", "The loss of batch 1 on rank 0 has supervised tokens, but no way leads from it to a parameter"),
    ],
    ids=["first micro-batch runs nothing", "loss leads nowhere"],
)
def test_a_rank_that_others_would_wait_for_says_so(module: str, text: str) -> None:
    alone, other = run_ranks(fail_alone, 2, module)
    assert text in alone
    assert "Another rank has ended" in other
    assert text in other


def test_options() -> None:
    with pytest.raises(TypeError, match=r"`TokenNormFSDP\(sync_each_microbatch=...\)` is not an option. Did you mean"):
        TokenNormFSDP(sync_each_microbatch=True)
    with pytest.raises(ValueError, match=r"`TokenNormFSDP\(sync_each_micro_batch=...\)` got 'no'"):
        TokenNormFSDP(sync_each_micro_batch="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not an option"):
        TokenNormFSDP(ddp_hook_reduces="mean")
