"""The proof under every strategy: however it is given, over whatever mesh, with plain ones red and errors that help.

Modules are in float64 unless said: an error of 1e-12 shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_tokennorm import SupervisedTokens, TokenNormDDP, TokenNormFSDP, TokenNormModelParallel
from lightning_tokennorm.testing import PartitionReport, RankError, assert_partition_invariant
from lightning_tokennorm.testing.hosts import host_of
from lightning_tokennorm.testing.shards import _copy, load_parameters, optimised_gradients, optimised_parameters
from tests.helpers import tiny_lm
from tests.helpers.launch import run_ranks
from tests.helpers.tiny_lm import TinyModule
from tests.testing.test_modules import Bigrams, Unused

SAMPLES = tiny_lm.make_samples(8)
BLOCKS: dict[str, Any] = {"auto_wrap_policy": {nn.TransformerEncoderLayer}}
MEAN_OF_MEANS = "tokens in small micro-batches weigh more. This is what plain `{}` and"


def check(make_module: Any, strategy: Any, samples: Any = SAMPLES, **options: Any) -> PartitionReport:
    options = {"collate_fn": tiny_lm.collate, "accumulate": (2,), **options}
    return assert_partition_invariant(make_module, samples, strategy=strategy, **options)


class Whole(TinyModule):
    """Without the records that `TinyModule` makes, which want whole gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class Flat(Whole):
    """As `use_orig_params=False` wants it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)


class WrapsItself(Whole):
    def configure_model(self) -> None:
        self.model.block = wrap(self.model.block)
        self.model.embed, self.model.head = wrap(self.model.embed), wrap(self.model.head)


class Splits(Whole):
    """Splits itself over a mesh, tensor parallelism included; divides by a number of its own.

    Its weights are drawn when it is in shards: those of a process depend on the mesh.
    """

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        plan = {
            "block.linear1": ColwiseParallel(),
            "block.linear2": RowwiseParallel(),
            # 17 rows over 2 x 2 ranks, which torch can gather and not deal out
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self.model, mesh["tensor_parallel"], plan)
        for part in (self.model.embed, self.model.block, self.model):
            fully_shard(part, mesh=mesh["data_parallel"])
            part.set_gradient_divide_factor(8.0)  # type: ignore[operator]

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)


class ShardsAll(Bigrams):
    """Shards over all ranks of a mesh of two dimensions, each of which holds data of its own."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for part in (self.embed, self.head):
            fully_shard(part, mesh=self.device_mesh)


# ---- strategies of this package


@pytest.mark.parametrize(
    ("make_module", "strategy"),
    [
        (Whole, "tokennorm_fsdp"),
        (lambda: Whole("hand-written"), "tokennorm_fsdp_cpu_offload"),
        (Whole, TokenNormFSDP),
        (Whole, TokenNormFSDP(sharding_strategy="SHARD_GRAD_OP", sync_each_micro_batch=False, **BLOCKS)),
        (Whole, TokenNormFSDP(sharding_strategy="NO_SHARD", **BLOCKS)),
        (Whole, TokenNormFSDP(activation_checkpointing_policy={nn.TransformerEncoderLayer}, **BLOCKS)),
        (lambda: Whole("sum"), lambda: TokenNormFSDP(loss_reduction="sum", **BLOCKS)),
        (Flat, TokenNormFSDP(use_orig_params=False, **BLOCKS)),
        (WrapsItself, "tokennorm_fsdp"),
        (Whole, "tokennorm_ddp_fork"),
    ],
    ids=["name", "offload", "class", "gradients", "none", "checkpoints", "function", "flat", "wraps itself", "fork"],
)
def test_as_it_is_given(make_module: Any, strategy: Any) -> None:
    report = check(make_module, strategy, world_sizes=(2,))
    (result,) = report.results
    assert result.ok
    assert (report.rtol, report.atol) == (1e-9, 1e-12)
    assert result.max_abs_error < 1e-12
    assert "a rank without tokens" in result.split
    assert ("nothing is offloaded" in str(report)) == (strategy == "tokennorm_fsdp_cpu_offload")


def test_shards_and_replicas() -> None:
    report = check(Whole, TokenNormFSDP(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2), **BLOCKS))
    assert [result.split.split(",")[0] for result in report.results] == ["W=4 K=2"]


def test_a_mesh() -> None:
    # the sizes are left open: two replicas on two ranks, and on four ranks two of two ranks each
    report = check(Splits, "tokennorm_model_parallel", world_sizes=(2, 4))
    assert [result.split.split(",")[0] for result in report.results] == ["W=2 K=2", "W=2 on 2 ranks each K=2"]
    assert all(result.ok and result.max_abs_error < 1e-12 for result in report.results)
    assert "all splits start from the weights of one process" in str(report)


def test_a_mesh_on_which_all_ranks_have_data_of_their_own() -> None:
    over = ("data_parallel", "tensor_parallel")
    strategy = TokenNormModelParallel(data_parallel_size=2, tensor_parallel_size=2, tokens_over=over)
    (result,) = check(ShardsAll, strategy).results
    assert result.split.startswith("W=4 K=2")


# ---- controls


PLAIN_ON_TWO = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


@pytest.mark.parametrize(
    ("make_module", "strategy", "name"),
    [
        (Whole, FSDPStrategy, "FSDP"),
        (Whole, "fsdp", "FSDP"),
        (Whole, FSDPStrategy(**BLOCKS), "FSDP"),
        (ShardsAll, PLAIN_ON_TWO, "ModelParallel"),
    ],
    ids=["class", "name", "instance", "mesh"],
)
def test_plain_strategies_fail(make_module: Any, strategy: Any, name: str) -> None:
    with pytest.raises(AssertionError) as raised:
        check(make_module, strategy, world_sizes=(2,))
    text = str(raised.value)
    assert "WRONG" in text
    assert "worst in '" in text
    assert MEAN_OF_MEANS.format(f"{name}Strategy") in text
    assert f"use `TokenNorm{name}`" in text


class MeanOfRows(ShardsAll):
    """A mean over the rows of each row's sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch["labels"]
        return super().training_step(batch, batch_idx) * (labels[:, 1:] != -100).sum() / len(labels)


class DividesAgain(TokenNormFSDP):
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(closure_loss / 2, *args, **kwargs)


class Drifts(Bigrams):
    """Rank 1 goes its own way, which shards hide."""

    def on_after_backward(self) -> None:
        if dist.get_rank() == 1:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad *= 2


class DrawsLate(Whole):
    """Draws its weights when FSDP has wrapped it: each rank those of its shard."""

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)


ON_TWO = TokenNormModelParallel(data_parallel_size=2, tensor_parallel_size=1)
WRONG: dict[str, tuple[Any, Any, str]] = {
    "counter": (
        Whole,
        TokenNormFSDP(count_tokens=SupervisedTokens(shift=0)),
        "a mean over the live labels after a shift of 1, but `count_tokens` counts the live labels without a shift",
    ),
    "rows": (MeanOfRows, ON_TWO, "the rows of the batch"),
    "factor": (Whole, DividesAgain, "the gradient is 1/W = 0.5 times the right one. One component divides"),
    "start": (DrawsLate, "tokennorm_fsdp", "the module starts from other weights than in one process: 'model."),
    "replicas": (
        Drifts,
        TokenNormFSDP(sharding_strategy="NO_SHARD"),
        "the ranks do not train on one gradient. A parameter is outside of what FSDP has",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_causes(name: str) -> None:
    make_module, strategy, cause = WRONG[name]
    samples = [{**sample, "labels": sample["input_ids"]} for sample in SAMPLES] if name == "counter" else SAMPLES
    if name == "counter":
        for index, sample in enumerate(samples):
            sample["labels"] = sample["labels"].where(torch.arange(tiny_lm.LENGTH) < 2 + index % 5, -100)
    with pytest.raises(AssertionError) as raised:
        check(make_module, strategy, samples, world_sizes=(2,))
    text = str(raised.value)
    assert cause in text.split("Likely cause: ")[1]
    assert "DDP" not in text
    assert "communication hook" not in text


class UnfreezesLate(ShardsAll):
    """DDP leaves such a parameter to each rank; FSDP has it all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        self.embed.requires_grad_(True)
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_is_unfrozen_late_is_no_cause_under_fsdp() -> None:
    with pytest.raises(AssertionError) as raised:
        check(UnfreezesLate, PLAIN_ON_TWO)
    assert MEAN_OF_MEANS.format("ModelParallelStrategy") in str(raised.value)


# ---- types


class InBFloat16(ShardsAll):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (self.embed, self.head):
            fully_shard(part, mesh=self.device_mesh["data_parallel"], mp_policy=policy)


def test_tolerances_go_by_what_is_computed_in() -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert check(lambda: Bigrams().float(), TokenNormFSDP(mixed_precision=policy), world_sizes=(2,)).rtol == 5e-2
    assert check(lambda: InBFloat16().float(), ON_TWO).rtol == 5e-2


# ---- what cannot be done


@pytest.mark.parametrize(
    ("strategy", "world_sizes", "error", "text"),
    [
        (
            TokenNormModelParallel(data_parallel_size=2, tensor_parallel_size=2),
            (2,),
            ValueError,
            r"got 2, but the strategy is for 4 ranks: `data_parallel_size=2`.* Pass `world_sizes=\(4,\)`",
        ),
        (TokenNormModelParallel(tensor_parallel_size=2), (3,), ValueError, "got 3, .* for a multiple of 2 ranks"),
        (
            TokenNormFSDP(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
            (1, 2),
            ValueError,
            r"got 1, but the strategy is for 4 ranks: `device_mesh=\(2, 2\)`",
        ),
        ("deepspeed_stage_2", None, ValueError, "`DeepSpeedStrategy`, which runs on GPUs only"),
        (DeepSpeedStrategy, None, ValueError, "`DeepSpeedStrategy`, which runs on GPUs only"),
        ("tokennorm_fspd", None, ValueError, r"got 'tokennorm_fspd'; expected .* names .*tokennorm_fsdp"),
        (3, None, TypeError, "got 3; expected a strategy, the name of one"),
        (lambda: 3, None, TypeError, "which made 3; expected a strategy"),
        (SingleDeviceStrategy("cpu", accelerator=object()), None, ValueError, "a Trainer has used already"),  # type: ignore[arg-type]
        (
            lambda: TokenNormFSDP(device_mesh=init_device_mesh("cpu", (2, 2))),
            None,
            ValueError,
            "needs a process group",
        ),
        (lambda: TokenNormDDP(process_group=dist.new_group([0, 1])), None, ValueError, "needs a process group"),
    ],
    ids=["2x2", "Nx2", "hybrid", "name", "class", "no name", "number", "made", "used", "mesh", "group"],
)
def test_what_cannot_be_done(strategy: Any, world_sizes: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        check(Whole, strategy, world_sizes=world_sizes)


def test_default_numbers_of_ranks() -> None:
    def default(strategy: Any) -> list[tuple[int, ...]]:
        host = host_of(strategy)
        return [host.data_of(ranks) for ranks in host.default_world_sizes]

    assert default(None) == default("tokennorm_model_parallel") == [(0,), (0, 1)]
    assert default(TokenNormModelParallel(tensor_parallel_size=2)) == [(0, 0), (0, 0, 1, 1)]
    assert default(TokenNormModelParallel(data_parallel_size=2)) == [(0, 1), (0, 0, 1, 1)]
    over = TokenNormModelParallel(data_parallel_size=2, tensor_parallel_size=2, tokens_over="tensor_parallel")
    assert default(over) == [(0, 1, 0, 1)]


class ShardsItself(Bigrams):
    """Sharded as a whole, while `training_step` calls its parts."""

    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


class NeverUsed(Unused):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for part in (self.embed, self.head, self.never):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class OfTwoTypes(Bigrams):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make_module", "strategy", "cause"),
    [
        (Bigrams, ON_TWO, "leave it to the module to split itself, and this one has no `configure_model`"),
        (ShardsItself, None, "the module reads `self.device_mesh`, which only strategies of the model-parallel family"),
        (ShardsItself, ON_TWO, "a parameter is used while it is in shards"),
        (NeverUsed, ON_TWO, "'never.weight', 'never.bias' got no gradient in any update"),
        (OfTwoTypes, "tokennorm_fsdp", "FSDP flattens the parameters of a unit into one"),
    ],
    ids=["no configure_model", "no mesh", "whole", "never used", "types"],
)
def test_causes_of_failures(make_module: Any, strategy: Any, cause: str) -> None:
    with pytest.raises(RankError) as raised:
        check(make_module, strategy, world_sizes=(2,))
    assert cause in str(raised.value).split("Likely cause: ")[1].split("\n")[0]


# ---- whole tensors


class _Trainer:
    """What is asked of a Trainer."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.strategy = model, self
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=1.0)]


def gather(rank: int, world_size: int) -> list[bool]:
    """Gradients that are known, and parameters that are the same after they were looked at."""
    torch.manual_seed(0)
    seen = []
    unsharded: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True}
    for options in ({}, {"use_orig_params": True}, unsharded):
        layer = nn.Linear(3, 2).double()
        before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
        trainer: Any = _Trainer(FullyShardedDataParallel(layer, device_id=torch.device("cpu"), **options))
        # the sum of the two outputs for ones, times rank + 1: each gradient is 1 on rank 0 and 2 on rank 1
        (trainer.model(torch.ones(1, 3, dtype=torch.float64)).sum() * (rank + 1)).backward()
        gradients = optimised_gradients(trainer, layer)
        after = optimised_parameters(trainer, layer)
        seen.append(gradients.keys() == after.keys() == before.keys())
        seen += [bool((each == 1.5).all()) for each in gradients.values()]  # FSDP takes the mean
        seen += [torch.equal(after[name], each) for name, each in before.items()]
    return seen


def test_what_fsdp_has_in_shards_is_gathered() -> None:
    for seen in run_ranks(gather, 2, timeout_s=60):
        assert seen == [True] * 15


def deal_out(rank: int, world_size: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    wanted = {"weight": torch.arange(51.0).view(17, 3), "bias": -torch.arange(17.0)}
    seen = []
    for over_b in (Shard(0), Shard(1), Replicate()):
        layer = nn.Linear(3, 17)
        for name in list(wanted):
            placement = Replicate() if over_b == Shard(1) and name == "bias" else over_b
            dealt = distribute_tensor(torch.zeros(wanted[name].shape), mesh["b"], [placement])
            setattr(layer, name, nn.Parameter(dealt))
        fully_shard(layer, mesh=mesh["a"])
        load_parameters(layer, wanted)
        seen += [torch.equal(_copy(each), wanted[name]) for name, each in layer.named_parameters()]
    return seen


def test_parameters_are_dealt_out_in_every_way() -> None:
    for seen in run_ranks(deal_out, 4, timeout_s=60):
        assert seen == [True] * 6
