"""DDP's options under accumulation: each right or refused by name. Nothing may be quietly ``W`` times off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.utils.checkpoint import checkpoint

from lightning_tokennorm import TokenNormDDP
from tests.helpers.ddp_hooks import count_buckets, own_mean_hook, sum_hook
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R1, R2, ScalarModule, deal, make_loader, make_trainer

TOLERANCE = 1e-12


HOOKS: dict[str, tuple[dict[str, Any], float]] = {
    # name: options, relative tolerance of what the hook's compression leaves (the gradients are of size 1)
    "allreduce": ({"ddp_comm_hook": default_hooks.allreduce_hook}, TOLERANCE),
    "fp16": ({"ddp_comm_hook": default_hooks.fp16_compress_hook}, 2**-10),
    "fp16 wrapper": (
        {"ddp_comm_hook": default_hooks.allreduce_hook, "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper},
        2**-10,
    ),
    "own sum": ({"ddp_comm_hook": sum_hook, "ddp_hook_reduces": "sum"}, TOLERANCE),
    "own mean": ({"ddp_comm_hook": own_mean_hook, "ddp_hook_reduces": "mean"}, TOLERANCE),
}


def fit_with_hook(rank: int, world_size: int, name: str) -> list[float]:
    module = ScalarModule()
    trainer = make_trainer(world_size, strategy=TokenNormDDP(**HOOKS[name][0]), accumulate_grad_batches=3)
    trainer.fit(module, make_loader(R2[rank]))
    return module.gradients


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_the_cpu_give_the_token_mean(name: str) -> None:
    # Lightning alone would not even register them here
    for gradients in run_ranks(fit_with_hook, 2, name):
        assert gradients == pytest.approx([1.75, 1.375], rel=HOOKS[name][1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ddp_comm_hook": sum_hook}, "`ddp_comm_hook=sum_hook` is not one of torch's averaging hooks"),
        ({"ddp_comm_hook": debugging_hooks.noop_hook}, "noop_hook"),
        (
            {"ddp_comm_hook": default_hooks.allreduce_hook, "ddp_comm_wrapper": lambda hook: hook},
            "lambda>\\(allreduce_hook\\)",
        ),
        ({"ddp_comm_hook": post_localSGD_hook.post_localSGD_hook}, "local SGD"),
        ({"ddp_comm_hook": default_hooks.allreduce_hook, "ddp_hook_reduces": "sum"}, "averages"),
        ({"ddp_comm_hook": sum_hook, "ddp_hook_reduces": "sum", "static_graph": True}, "only a mean survives"),
    ],
)
def test_hooks_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TokenNormDDP(**options)


class RegistersItself(ScalarModule):
    def on_fit_start(self) -> None:
        self.trainer.strategy.model.register_comm_hook(None, sum_hook)  # type: ignore[union-attr,operator]


def error_of_fit(rank: int, world_size: int, kind: type[ScalarModule], **options: Any) -> str:
    try:
        make_trainer(world_size, strategy=TokenNormDDP(**options)).fit(kind(), make_loader(R1[rank]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_hook_registered_behind_our_back_is_refused() -> None:
    for text in run_ranks(error_of_fit, 2, RegistersItself):
        assert "A communication hook was registered on the DDP module itself" in text


class Joins(ScalarModule):
    def on_train_start(self) -> None:
        self.trainer.strategy.model.join().__enter__()  # type: ignore[union-attr,operator]


def test_join_is_refused() -> None:
    for text in run_ranks(error_of_fit, 2, Joins):
        assert text.startswith("MisconfigurationException: Training runs inside `DistributedDataParallel.join()`")


# ---- process groups


def fit_in_subgroups(rank: int, world_size: int) -> tuple[list[float], int]:
    # ranks 0, 1 train one model and ranks 2, 3 another, each pair with DDP over itself
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tables = [R1, [[(3, 1)] * 3, [(1, 5)] * 3]]
    module = ScalarModule()
    strategy = TokenNormDDP(process_group=pairs[rank // 2])
    make_trainer(world_size, strategy=strategy, accumulate_grad_batches=3).fit(
        module, make_loader(tables[rank // 2][rank % 2])
    )
    return module.gradients, module.records[0].world_size


def test_w_and_n_come_from_ddps_own_group() -> None:
    # R1 in the first pair; (9 * 1 + 3 * 5) / 12 = 2 in the second. N over the world would be 36.
    results = run_ranks(fit_in_subgroups, 4)
    assert [gradients for gradients, _ in results] == [[pytest.approx(g, abs=TOLERANCE)] for g in (1.75, 1.75, 2, 2)]
    assert [world_size for _, world_size in results] == [2] * 4


def fit_with_a_foreign_hook_group(rank: int, world_size: int) -> str:
    options = {"process_group": dist.new_group([0, 1]), "ddp_comm_hook": default_hooks.allreduce_hook}
    return error_of_fit(rank, world_size, ScalarModule, **options)


def test_a_hook_over_another_group_is_refused() -> None:
    for text in run_ranks(fit_with_a_foreign_hook_group, 2):
        assert "reduces over another process group than DDP" in text


# ---- the number of collectives


def fit_and_count(rank: int, world_size: int) -> tuple[int, int, int]:
    counter: Counter[str] = Counter()
    gather = dist.all_gather

    def counted(outputs: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        counter["exchanges"] += 1
        counter["bytes"] = max(counter["bytes"], outputs[0].nbytes)
        return gather(outputs, *args, **kwargs)

    dist.all_gather = counted  # type: ignore[assignment]
    strategy = TokenNormDDP(ddp_comm_hook=count_buckets, ddp_comm_state=counter, ddp_hook_reduces="mean")
    module = ScalarModule()
    make_trainer(world_size, strategy=strategy, accumulate_grad_batches=3, max_epochs=2).fit(
        module, make_loader(R2[rank])
    )
    assert module.gradients == pytest.approx([1.75, 1.375] * 2, abs=TOLERANCE)
    return counter["buckets"], counter["exchanges"], counter["bytes"]


def test_one_reduction_per_bucket_and_one_exchange_per_window() -> None:
    # four windows of 3, 2, 3, 2 micro-batches, one bucket; a row each, one at the end of each epoch, and one at the end
    # of training, where ranks tell each other how far they have come
    for buckets, exchanges, size in run_ranks(fit_and_count, 2):
        assert (buckets, exchanges) == (4, 4 + 2 + 1)
        assert size <= 128


# ---- modules that strain DDP, against one process on the merged window


class Strained(nn.Module):
    """Two linear layers in float64; subclasses add what DDP finds hard. Sums the squares of the live rows."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)
        self.build()
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def build(self) -> None:
        """Add modules."""

    def body(self, x: Tensor, index: int) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor, live: Tensor, index: int) -> Tensor:
        """The loss sum over the live rows: `x` is ``[rows, 4]``, `live` is ``[rows]``, `index` the micro-batch."""
        return ((self.body(x, index) ** 2).sum(1) * live).sum()


class EarlyOnly(Strained):
    """A branch that only the first micro-batch of a window uses."""

    def build(self) -> None:
        self.branch = nn.Linear(4, 6)

    def body(self, x: Tensor, index: int) -> Tensor:
        hidden = self.first(x) + (self.branch(x) if index % 2 == 0 else 0)
        return self.second(torch.tanh(hidden))


class Reentrant(Strained):
    reentrant = True

    def body(self, x: Tensor, index: int) -> Tensor:
        x = x.clone().requires_grad_()  # reentrant checkpointing needs an input with a gradient
        hidden = checkpoint(lambda y: torch.tanh(self.first(y)), x, use_reentrant=self.reentrant)
        return self.second(hidden)


class NonReentrant(Reentrant):
    reentrant = False


class Tied(Strained):
    def build(self) -> None:
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


class Frozen(Strained):
    def build(self) -> None:
        self.first.requires_grad_(False)


class LowRank(Strained):
    """A frozen layer with a trained low-rank correction, as LoRA has it."""

    def build(self) -> None:
        self.first.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)

    def body(self, x: Tensor, index: int) -> Tensor:
        return self.second(torch.tanh(self.first(x) + self.up(self.down(x))))


class StrainedModule(ScalarModule):
    def __init__(self, kind: type[Strained], wrap: Callable[[nn.Module], Any] = lambda model: model) -> None:
        super().__init__()
        del self.t
        self.model = kind()
        self.called = wrap(self.model)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, live, _ = batch
        return self.called(x, live, batch_idx) / live.sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append([None if p.grad is None else p.grad.tolist() for p in self.model.parameters()])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...


def strained_data(world_size: int, micro_batches: int) -> list[list[Any]]:
    """Per rank: micro-batches of 1 to 4 rows; the second one of rank 0 has no live row at all."""
    generator = torch.Generator().manual_seed(11)
    dealt = []
    for rank in range(world_size):
        rank_batches = []
        for index in range(micro_batches):
            rows = int(torch.randint(1, 5, (), generator=generator))
            live = torch.ones(rows, dtype=torch.float64) * (0 if (rank, index) == (0, 1) else 1)
            rank_batches.append((torch.randn(rows, 4, generator=generator, dtype=torch.float64), live, live.sum()))
        dealt.append(rank_batches)
    return dealt


def strained_reference(kind: type[Strained], dealt: list[list[Any]], accumulate: int) -> list[Any]:
    model, windows = kind(), []
    for start in range(0, len(dealt[0]), accumulate):
        model.zero_grad()
        batches = [(*rank[k], k) for rank in dealt for k in range(start, min(start + accumulate, len(rank)))]
        num_tokens = sum(float(count) for _, _, count, _ in batches)
        loss_sum = sum((model(x, live, k) for x, live, _, k in batches), start=torch.zeros((), dtype=torch.float64))
        (loss_sum / num_tokens).backward()
        windows.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
    return windows


def power_sgd() -> dict[str, Any]:
    """Starts compressing after two of the four updates; matrices as small as these it then sends as they are."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    return {"ddp_comm_hook": powerSGD_hook.powerSGD_hook, "ddp_comm_state": state}


def compile_without_codegen(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager", dynamic=True)


def fit_strained(rank: int, world_size: int, kind: type[Strained], options: Any, accumulate: int, wrap: Any) -> Any:
    dealt = strained_data(world_size, 4)
    module = StrainedModule(kind, wrap) if wrap is not None else StrainedModule(kind)
    strategy = TokenNormDDP(count_tokens=lambda batch: batch[2], **(options() if callable(options) else options))
    trainer = make_trainer(world_size, strategy=strategy, accumulate_grad_batches=accumulate)
    try:
        trainer.fit(module, make_strained_loader(dealt[rank]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return module.seen


def make_strained_loader(batches: list[Any]) -> Any:
    return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "options", "accumulate", "wrap"),
    [
        (Strained, {}, 2, None),
        (EarlyOnly, {"find_unused_parameters": True}, 2, None),
        (Strained, {"gradient_as_bucket_view": True}, 2, None),
        (Strained, {"static_graph": True}, 1, None),
        (Reentrant, {}, 2, None),
        (NonReentrant, {}, 2, None),
        (NonReentrant, {"find_unused_parameters": True}, 2, None),
        (Reentrant, {"static_graph": True}, 1, None),
        (Strained, {"static_graph": True}, 2, None),
        (Reentrant, {"static_graph": True, "gradient_as_bucket_view": True}, 3, None),
        (Tied, {}, 2, None),
        (Frozen, {}, 2, None),
        (LowRank, {}, 2, None),
        (Strained, {}, 2, compile_without_codegen),
        (Strained, power_sgd, 1, None),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_modules_that_strain_ddp(kind: type[Strained], options: Any, accumulate: int, wrap: Any) -> None:
    expected = strained_reference(kind, strained_data(2, 4), accumulate)
    results = run_ranks(fit_strained, 2, kind, options, accumulate, wrap)
    for windows in results:
        assert not isinstance(windows, str), windows
        assert len(windows) == len(expected)
        for ours, reference in zip(windows, expected, strict=True):
            for gradient, wanted in zip(ours, reference, strict=True):
                if wanted is None:
                    assert gradient is None or not torch.tensor(gradient).any()
                else:
                    torch.testing.assert_close(
                        torch.tensor(gradient, dtype=torch.float64),
                        torch.tensor(wanted, dtype=torch.float64),
                        rtol=TOLERANCE,
                        atol=TOLERANCE,
                    )


def test_reentrant_checkpointing_with_unused_parameters_is_torchs_own_error() -> None:
    for text in run_ranks(fit_strained, 2, Reentrant, {"find_unused_parameters": True}, 2, None):
        assert "Expected to mark a variable ready only once" in text


class MixesRows(Strained):
    """SyncBatchNorm needs GPUs; its buffers and its refusal on the CPU are torch's own."""

    def build(self) -> None:
        self.norm = nn.SyncBatchNorm(6)

    def body(self, x: Tensor, index: int) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def test_sync_batch_norm_on_the_cpu_is_torchs_own_error() -> None:
    for text in run_ranks(fit_strained, 2, MixesRows, {}, 2, None):
        assert "SyncBatchNorm layers only work with GPU modules" in text


def test_deal_keeps_the_tokens() -> None:
    for world_size in (1, 2, 3, 4):
        dealt = deal(R1, world_size)
        assert sum(n for row in dealt for n, _ in row) == 24
