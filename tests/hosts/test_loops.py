"""`token_windows` under every host that a loop by hand can have: the law on a small transformer, and the ways out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_tokennorm import TokenNormError, token_windows
from tests.helpers.launch import run_ranks
from tests.helpers.tiny_lm import IGNORE, TinyLM, collate, flat, make_samples, num_supervised, reference

LR = 0.5
TOLERANCE = 1e-12

# ---- what is trained on


@dataclass(frozen=True)
class Case:
    accumulate: int
    loss: str = "mean"
    lengths: tuple[int, ...] = (5, 5)
    empty: tuple[tuple[int, int], ...] = ((0, 1), (1, 2))
    stream: bool = False

    def micro_batches(self) -> list[list[list[dict[str, Tensor]]]]:
        """The samples of each rank's micro-batches, one to three in each; `empty` ones have no token."""
        samples = iter(make_samples(3 * sum(self.lengths)))
        dealt = [
            [[next(samples) for _ in range(1 + (rank + index) % 3)] for index in range(length)]
            for rank, length in enumerate(self.lengths)
        ]
        for rank, index in self.empty:
            if rank < len(dealt) and index < len(dealt[rank]):
                dealt[rank][index] = make_samples(2, empty=(0, 1))
        return dealt

    def windows(self) -> list[list[dict[str, Tensor]]]:
        """The samples of each update; a window without a token is none."""
        dealt = self.micro_batches()
        windows = [
            [sample for rank in dealt for each in rank[start : start + self.accumulate] for sample in each]
            for start in range(0, max(self.lengths), self.accumulate)
        ]
        return [window for window in windows if any(num_supervised(collate([sample])) for sample in window)]


SCENARIOS: list[dict[str, Any]] = [
    {},
    {"lengths": (5, 2), "stream": True},
    {"lengths": (4, 0)},
    {"empty": tuple((1, index) for index in range(5))},  # a rank without a single token
]
CASES = [
    Case(accumulate, loss, **scenario)
    for accumulate, loss, scenario in itertools.product((1, 2, 3), ("mean", "sum"), SCENARIOS)
]
SOME_CASES = [case for index, case in enumerate(CASES) if index % 4 == index // 4 % 4 or index in (17, 18, 19)]
"""Each length and loss in turn with one of the scenarios, and one with all of them."""


def alone(case: Case) -> Case:
    """The case of one process."""
    return Case(case.accumulate, case.loss, case.lengths[:1], case.empty, case.stream)


def loss_of(model: nn.Module, batch: dict[str, Tensor], reduction: str) -> Tensor:
    """The mean is written by hand: over no token it is NaN all the way down."""
    logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    live = labels != IGNORE
    return (losses * live).sum() / (live.sum() if reduction == "mean" else 1)


# ---- hosts


@dataclass
class Host:
    """A model as a host trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[Tensor], Any] | None = None
    options: Any = None
    finish: Callable[[], None] = lambda: None
    """Called before the step."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def plain(accumulate: int) -> Host:
    model = TinyLM()
    return Host(model, sgd(model))


def averaged_by_hand(accumulate: int) -> Host:
    model = TinyLM()

    def average() -> None:
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()

    return Host(model, sgd(model), options={"group": dist.group.WORLD}, finish=average)


def ddp(accumulate: int, **options: Any) -> Host:
    model = DistributedDataParallel(TinyLM(), **options)
    return Host(model, sgd(model))


def ddp_unused(accumulate: int) -> Host:
    return ddp(accumulate, find_unused_parameters=True)


def ddp_static(accumulate: int) -> Host:
    return ddp(accumulate, static_graph=True)


def sharded(accumulate: int, mesh: Any = None, factor: float | None = None) -> Host:
    model = TinyLM()
    for each in (model.block, model):
        fully_shard(each, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)))
        if factor is not None:
            each.set_gradient_divide_factor(factor)
    return Host(model, sgd(model))


def sharded_and_summed(accumulate: int) -> Host:
    return sharded(accumulate, factor=1.0)


def two_dimensions() -> Any:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))


def sharded_and_replicated(accumulate: int) -> Host:
    return sharded(accumulate, mesh=two_dimensions())


def sharded_and_split(accumulate: int) -> Host:
    """Tensor parallelism inside of two replicas, each of which is sharded with the other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "parts"))
    model = TinyLM()
    plan = {"block.linear1": ColwiseParallel(), "block.linear2": RowwiseParallel()}
    parallelize_module(model, mesh["parts"], plan)
    for each in (model.block, model):
        fully_shard(each, mesh=mesh["replicas"])
    return Host(model, sgd(model))


def fsdp(accumulate: int, **options: Any) -> Host:
    options = {"device_id": torch.device("cpu"), "use_orig_params": True, **options}
    model = TinyLM()
    model.block = FullyShardedDataParallel(model.block, **options)
    model = FullyShardedDataParallel(model, **options)
    return Host(model, sgd(model))


def fsdp_hybrid(accumulate: int) -> Host:
    return fsdp(accumulate, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=two_dimensions())


def fabric(accumulate: int, strategy: Any, devices: int, precision: Any = "64-true") -> Host:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision=precision)
    fabric.launch()
    model = fabric.setup_module(TinyLM())
    return Host(model, fabric.setup_optimizers(sgd(model)), fabric.backward)


def fabric_single(accumulate: int) -> Host:
    return fabric(accumulate, "auto", 1)


def fabric_ddp(accumulate: int) -> Host:
    return fabric(accumulate, "ddp", dist.get_world_size())


def fabric_model_parallel(accumulate: int) -> Host:
    from lightning.fabric.strategies import ModelParallelStrategy

    def parallelize(model: Any, mesh: Any) -> Any:
        for each in (model.block, model):
            fully_shard(each, mesh=mesh["data_parallel"])
        return model

    world_size = dist.get_world_size()
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=world_size, tensor_parallel_size=1)
    host = fabric(accumulate, strategy, world_size, "32-true")  # which leaves float64 as it is
    with host.model._strategy._backward_sync_control.no_backward_sync(host.model._forward_module, enabled=False):
        pass  # which leaves the reduction off
    return host


def accelerate(accumulate: int) -> Host:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = TinyLM()
    model, optimizer = accelerator.prepare(model, sgd(model))
    return Host(model, optimizer, accelerator.backward, {"divided_by": accumulate})


def full_parameters(model: nn.Module) -> Tensor:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return flat(model.parameters()).clone()
    return flat(getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()).clone()


# ---- the loop


def batches_of(case: Case, rank: int) -> Any:
    batches = [collate(samples) for samples in case.micro_batches()[rank]]
    return (batch for batch in batches) if case.stream else batches


def train(rank: int, host: Host, case: Case) -> list[Tensor]:
    """The gradient of each update, as plain SGD has made parameters of it."""
    gradients = []
    windows = token_windows(
        batches_of(case, rank),
        accumulate=case.accumulate,
        model=None if host.options and "group" in host.options else host.model,
        loss_reduction=case.loss,
        **(host.options or {}),
    )
    for window in windows:
        before = full_parameters(host.model)
        for batch in window:
            with window.no_sync():
                window.backward(loss_of(host.model, batch, case.loss), host.backward)
        host.finish()
        host.optimizer.step()
        host.optimizer.zero_grad()
        gradients.append((before - full_parameters(host.model)) / LR)
        assert window.record.num_tokens == window.num_tokens
        assert window.record.micro_batches == len(window)
    return gradients


@lru_cache
def wanted_gradients(case: Case) -> list[Tensor]:
    return reference(case.windows(), LR)[0]


def worst_error(case: Case, gradients: list[Tensor]) -> float:
    wanted = wanted_gradients(case)
    assert len(wanted) == len(gradients)
    return max(float((want - each).abs().max()) for want, each in zip(wanted, gradients, strict=True))


def train_all(rank: int, world_size: int, hosts: list[Callable[[int], Host]], cases: list[Case]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)  # to which Fabric casts what a model returns
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    return {
        f"{make.__name__}, {case}": worst_error(case, train(rank, make(case.accumulate), case))
        for make in hosts
        for case in cases
    }


def check(results: list[dict[str, Any]]) -> None:
    for errors in results:
        assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("make", [plain, fabric_single], ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:No rank has a supervised token")
def test_law_in_one_process(make: Callable[[int], Host]) -> None:
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for case in dict.fromkeys(alone(case) for case in CASES):
            assert worst_error(case, train(0, make(case.accumulate), case)) <= TOLERANCE
    finally:
        torch.set_default_dtype(default)


SHARDED = [sharded, fsdp]
LIBRARIES = [fabric_ddp, fabric_model_parallel, accelerate]
VARIANTS = [ddp_unused, ddp_static, averaged_by_hand, sharded_and_summed]


def test_law_on_two_ranks_with_ddp() -> None:
    check(run_ranks(train_all, 2, [ddp], CASES, timeout_s=150))


@pytest.mark.parametrize("hosts", [SHARDED, LIBRARIES], ids=["sharded", "libraries"])
def test_law_on_two_ranks(hosts: list[Callable[[int], Host]]) -> None:
    check(run_ranks(train_all, 2, hosts, SOME_CASES, timeout_s=150))


def test_law_on_two_ranks_with_options_of_hosts() -> None:
    check(run_ranks(train_all, 2, VARIANTS, SOME_CASES[-4:], timeout_s=150))


def test_law_on_two_by_two_ranks() -> None:
    cases = [Case(2, lengths=(3, 2, 3, 0)), Case(3, "sum", lengths=(3, 4, 4, 4))]
    check(run_ranks(train_all, 4, [sharded_and_replicated, fsdp_hybrid], cases, timeout_s=150))


def train_copies(rank: int, world_size: int, cases: list[Case]) -> tuple[dict[str, Any], list[str]]:
    torch.set_default_dtype(torch.float64)
    errors = {
        f"{case}": worst_error(case, train(rank // 2, sharded_and_split(case.accumulate), case)) for case in cases
    }
    refused = []
    for own in (rank, rank // 2 + 2 * (rank == 3)):  # each rank its own, and one of them
        case = Case(2, lengths=(2, 2, 2, 2), empty=())
        try:
            train(own, sharded_and_split(2), case)
            refused.append("")
        except TokenNormError as error:
            refused.append(str(error))
    return errors, refused


def test_law_with_tensor_parallel_copies() -> None:
    """Two replicas of two ranks, which have to be given the same batches."""
    cases = [Case(3, "mean"), Case(2, "sum", lengths=(5, 2), stream=True), Case(1, lengths=(3, 0), empty=())]
    results = run_ranks(train_copies, 4, cases, timeout_s=150)
    check([errors for errors, _ in results])
    for _, (all_differ, one_differs) in results:
        assert all_differ.startswith("At update 0, ranks 0, 1 are one model replica and have to be given the same")
        assert one_differs.startswith("At update 0, ranks 2, 3 are one model replica and have to be given the same")


def train_with_loader_of_accelerate(rank: int, world_size: int) -> tuple[int, float]:
    """Batch i goes to rank i % 2; there are eleven."""
    from accelerate import Accelerator, DataLoaderConfiguration

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    model = TinyLM()
    model, optimizer = accelerator.prepare(model, sgd(model))
    samples = make_samples(11)
    loader = accelerator.prepare_data_loader(DataLoader(samples, batch_size=1), device_placement=False)
    tokens, gradients = 0, []
    for window in token_windows(loader, accumulate=2, model=model, divided_by=2):
        before = full_parameters(model)
        for batch in window:
            with window.no_sync():
                window.backward(loss_of(model, batch, "mean"), accelerator.backward)
        optimizer.step()
        optimizer.zero_grad()
        tokens += window.num_tokens
        gradients.append((before - full_parameters(model)) / LR)
    wanted, _ = reference([samples[start : start + 4] for start in range(0, 11, 4)], LR)
    pairs = zip(wanted, gradients, strict=True)
    return tokens, max(float((want - each).abs().max()) for want, each in pairs)


def test_law_with_a_loader_of_accelerate() -> None:
    tokens = num_supervised(collate(make_samples(11)))
    for counted, error in run_ranks(train_with_loader_of_accelerate, 2):
        assert counted == tokens
        assert error <= TOLERANCE


def mean_of_means(rank: int, world_size: int) -> float:
    """The usual loop: the mean of each micro-batch, over K and W."""
    case = Case(3, empty=())
    model = DistributedDataParallel(TinyLM())
    batches = batches_of(case, rank)[:3]
    for index, batch in enumerate(batches):
        model.require_backward_grad_sync = index == 2
        (loss_of(model, batch, "mean") / 3).backward()
    return worst_error(Case(3, empty=(), lengths=(3, 3)), [flat(each.grad for each in model.parameters())])


def test_a_loop_of_means_is_off() -> None:
    assert min(run_ranks(mean_of_means, 2)) > 1e-3


def without_no_sync(rank: int, world_size: int) -> float:
    """Gradients are reduced after each micro-batch, which costs time and changes nothing."""
    case, gradients = Case(3), []
    host = ddp(3)
    for window in token_windows(batches_of(case, rank), accumulate=3, model=host.model):
        for batch in window:
            window.backward(loss_of(host.model, batch, "mean"))
        gradients.append(flat(each.grad for each in host.model.parameters()))
        host.optimizer.step()
        host.optimizer.zero_grad()
    return worst_error(case, gradients)


def test_no_sync_is_for_speed_only() -> None:
    assert max(run_ranks(without_no_sync, 2)) <= TOLERANCE


def reductions(rank: int, world_size: int) -> list[int]:
    """How many buckets DDP reduces in each window."""
    model, counted = DistributedDataParallel(TinyLM()), []

    def counting_hook(state, bucket):  # torch takes no annotation that is a string
        counted.append(1)
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, counting_hook)
    model._comm_hooks.clear()  # of which the test knows what it does
    per_window = []
    for window in token_windows(batches_of(Case(3), rank), accumulate=3, model=model):
        counted.clear()
        for batch in window:
            with window.no_sync():
                window.backward(loss_of(model, batch, "mean"))
        per_window.append(len(counted))
    return per_window


def test_gradients_are_reduced_once_per_window() -> None:
    for first, second in run_ranks(reductions, 2):
        assert first == second > 0  # three micro-batches, and two


# ---- the ways out


class OwnError(Exception):
    pass


def go_through(host: Host, batches: Any, leave_at: str | None) -> None:
    """Four windows of two micro-batches, of which one is left."""
    for number, window in enumerate(token_windows(batches, accumulate=2, model=host.model)):
        for index, batch in enumerate(window):
            here = leave_at if (number, index) == (1, 1) else None
            if here == "before the forward":
                return
            with window.no_sync():
                loss = loss_of(host.model, batch, "mean")
                if here == "before the backward":
                    return
                if here == "by an error":
                    raise OwnError("disk full")
                if here == "without a backward":
                    continue
                if here == "by a backward of its own":
                    loss.detach().requires_grad_().backward()
                    continue
                if here == "with a detached loss":
                    loss = loss.detach()
                window.backward(loss)
            if here == "after the backward":
                return
        if number == 1 and leave_at == "between windows":
            break
        host.optimizer.step()
        host.optimizer.zero_grad()


WAYS_OUT = [
    "before the forward",
    "before the backward",
    "after the backward",
    "between windows",
    "by an error",
    "without a backward",
    "by a backward of its own",
    "with a detached loss",
]


def leave(rank: int, world_size: int, makes: list[Callable[[int], Host]]) -> dict[str, tuple[str, str]]:
    """Rank 1 leaves alone, stays alive and goes on elsewhere: into a barrier."""
    seen = {}
    batches = [collate(make_samples(2, seed=seed)) for seed in range(8)]
    for make in makes:
        for way in WAYS_OUT:
            host = make(2)
            try:
                go_through(host, batches, way if rank == 1 else None)
                seen[f"{make.__name__}: {way}"] = ("", "")
            except Exception as error:
                seen[f"{make.__name__}: {way}"] = (type(error).__name__, str(error))
            dist.barrier()
    return seen


def ddp_with_buffers(accumulate: int) -> Host:
    """Its forward waits as well: for rank 0's buffers."""
    model = TinyLM()
    model.register_buffer("seen", torch.zeros(1))
    model = DistributedDataParallel(model)
    return Host(model, sgd(model))


def test_a_rank_that_leaves_alone_is_an_error_on_the_others() -> None:
    left, right = run_ranks(leave, 2, [ddp, ddp_with_buffers, sharded], timeout_s=150)
    assert len(left) == 3 * len(WAYS_OUT)
    for name, (kind, text) in left.items():
        assert kind == "TokenNormError", name
        assert "rank 1 has left" in text, name
        its_kind, its_text = right[name]
        _, way = name.split(": ")
        if way == "by an error":
            assert (its_kind, its_text) == ("OwnError", "disk full")
            assert "OwnError: disk full" in text
        elif way == "with a detached loss":
            assert "no way leads from it to a parameter" in its_text
            assert "no way leads from it to a parameter" in text
        elif way not in ("without a backward", "by a backward of its own"):
            assert its_kind == ""
        else:
            assert "no `window.backward` for micro-batch 2 of window 2 on rank 1" in its_text


def leave_together(rank: int, world_size: int) -> list[float]:
    """Leave at one place after the other, and go on with a whole pass each time."""
    errors = []
    case = Case(2, lengths=(4, 4), empty=())
    for make in (ddp, sharded):
        for way in WAYS_OUT[:4]:
            go_through(make(2), [collate(make_samples(2, seed=seed)) for seed in range(8)], way)
            errors.append(worst_error(case, train(rank, make(2), case)))
    return errors


def test_ranks_may_leave_together() -> None:
    for errors in run_ranks(leave_together, 2):
        assert len(errors) == 8
        assert max(errors) <= TOLERANCE
