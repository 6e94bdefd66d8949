"""`TokenNormModelParallel` on real processes: the law on FSDP2, tensor-parallel copies, replicated shards and slices.

Most cases share one set of processes: to start them takes longer than to train.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from lightning_tokennorm import TokenNormModelParallel
from tests.helpers import law
from tests.helpers.launch import run_ranks
from tests.helpers.law import Case, Module
from tests.helpers.tiny_lm import num_supervised
from tests.hosts.test_fsdp import Counts as Collectives

ONCE: dict[str, Any] = {"sync_each_micro_batch": False}
BOTH: dict[str, Any] = {"tokens_over": ("data_parallel", "tensor_parallel")}
HAND = "hand-written"
UNEVEN = {"lengths": (5, 2), "empty": ((0, 1),)}
EMPTY_RANK = {"empty": tuple((1, index) for index in range(5))}
EMPTY_WINDOW = {"empty": tuple((rank, index) for rank in range(2) for index in range(3))}


class Sharded(Module):
    """Splits itself over the mesh.

    Args:
        case: What it is trained on.
        way: What a step does with a batch without labels, in one of the ways that people write; else as usual.
        parts: What `fully_shard` is applied to: all parts and the whole, or the ``"whole"`` only.
        divisor: Given to `set_gradient_divide_factor`.
    """

    def __init__(self, case: Case, way: str = "", parts: str = "all", divisor: float | None = None) -> None:
        super().__init__(case.loss, lr=law.LR)
        self.way, self.parts, self.divisor = way, parts, divisor

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        replicas, model = mesh["data_parallel"], self.model
        if over := getattr(self.trainer.strategy, "_tokens_over", None):
            replicas = over if not isinstance(over, tuple) else mesh if self.parts == "hybrid" else mesh._flatten()
        elif mesh["tensor_parallel"].size() > 1:
            parallelize_module(
                model,
                mesh["tensor_parallel"],
                {
                    "block.linear1": ColwiseParallel(),
                    "block.linear2": RowwiseParallel(),
                    "head": ColwiseParallel(output_layouts=Replicate()),
                },
            )
        if replicas.size() == 1 and self.parts == "none":
            return
        if self.parts != "whole":
            fully_shard(model.embed, mesh=replicas)
            fully_shard(model.block, mesh=replicas)
        fully_shard(model, mesh=replicas)
        if self.divisor is not None:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(self.divisor)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if not self.way or num_supervised(batch):
            return super().training_step(batch, batch_idx)
        if "forward" in self.way:
            self.model(batch["input_ids"])
        zero = torch.zeros((), dtype=torch.float64, requires_grad="leaf" in self.way)
        return None if "none" in self.way else {"loss": zero} if "dict" in self.way else zero


class LossParallel(Sharded):
    """The loss is computed on logits that stay split over the vocabulary, so it is a DTensor."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        split = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(self.model, mesh["tensor_parallel"], {"head": split})
        fully_shard(self.model, mesh=mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.model(batch["input_ids"])[:, :-1]
        with loss_parallel():
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            super().backward(*args, **kwargs)


def fit(
    rank: int,
    world_size: int,
    case: Case,
    tensor_parallel_size: int = 1,
    options: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    **trainer: Any,
) -> list[Tensor]:
    """The gradients of a case; ranks that are copies get the same data."""
    strategy = TokenNormModelParallel(
        data_parallel_size=world_size // tensor_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
        loss_reduction="sum" if case.loss == "sum" else "mean",
        **(options or {}),
    )
    own = rank if len(case.lengths) == world_size else rank // tensor_parallel_size
    kind = LossParallel if module == LOSS_PARALLEL else Sharded
    return law.fit(own, world_size, case, strategy, kind(case, **(module or {})), **trainer)


LOSS_PARALLEL = {"parts": "loss parallel"}
Cases = dict[str, tuple[Case, dict[str, Any], dict[str, Any]]]
NO_LABELS = Case(lengths=(4, 4), empty=((0, 1), (1, 2), (1, 3)))
TWO: Cases = {
    "K=1": (Case(accumulate=1), {}, {}),
    "K=1, once": (Case(accumulate=1, loss=HAND), ONCE, {}),
    "K=2, sum": (Case(accumulate=2, loss="sum"), {}, {}),
    "K=2, sum, stream, once": (Case(accumulate=2, loss="sum", stream=True), ONCE, {}),
    "K=3": (Case(loss=HAND), {}, {}),
    "K=3, sum": (Case(loss="sum"), {}, {"parts": "whole"}),
    "K=3, stream": (Case(loss=HAND, stream=True), {}, {}),
    "K=3, once": (Case(loss=HAND), ONCE, {}),
    "rank without a token": (Case(loss=HAND, **EMPTY_RANK), ONCE, {}),
    "window without a token": (Case(loss=HAND, **EMPTY_WINDOW), {}, {}),
    "unequal ranks": (Case(loss=HAND, **UNEVEN), {}, {}),
    "unequal ranks, once": (Case(loss=HAND, **UNEVEN), ONCE, {}),
    "unequal streams": (Case(**UNEVEN, stream=True), {}, {"parts": "whole"}),
    "divisor": (Case(loss=HAND), {}, {"divisor": 1.0}),
    "divisor, once": (Case(loss=HAND), ONCE, {"divisor": 8.0}),
    "no labels: forward, dict": (NO_LABELS, {}, {"way": "forward, dict"}),
    "no labels: forward, none": (NO_LABELS, ONCE, {"way": "forward, none"}),
    "no labels: leaf": (NO_LABELS, {}, {"way": "leaf"}),
    "no labels: none": (NO_LABELS, ONCE, {"way": "none", "parts": "whole"}),
}
FOUR: Cases = {
    "K=1": (Case(accumulate=1), {}, {}),
    "K=2, sum, stream": (Case(accumulate=2, loss="sum", stream=True), {}, {}),
    "K=3": (Case(loss=HAND), {}, {}),
    "K=3, once": (Case(loss=HAND), ONCE, {}),
    "rank without a token": (Case(loss=HAND, **EMPTY_RANK), {}, {}),
    "unequal streams, once": (Case(loss=HAND, **UNEVEN, stream=True), ONCE, {}),
    "rank without a batch": (Case(lengths=(3, 0), empty=((0, 1),), stream=True), {}, {}),
    "divisor": (Case(loss=HAND), {}, {"divisor": 4.0}),
    "no labels": (NO_LABELS, {}, {"way": "none"}),
    "loss parallel": (Case(), {}, LOSS_PARALLEL),
    "loss parallel, unequal, once": (Case(**UNEVEN), ONCE, LOSS_PARALLEL),
}
OWN = Case(lengths=(5, 4, 3, 5), empty=((0, 1), (3, 2)), loss=HAND)
MESH = "a mesh made before"
OVER_ALL: Cases = {
    "slices": (OWN, BOTH, {}),
    "slices, once": (OWN, {**BOTH, **ONCE}, {}),
    "replicated shards": (OWN, BOTH, {"parts": "hybrid"}),
    "replicated shards, once": (OWN, {**BOTH, **ONCE}, {"parts": "hybrid"}),
}


def errors_of(rank: int, world_size: int, cases: Cases, tensor_parallel_size: int) -> dict[str, float]:
    found = {}
    for name, (case, options, module) in cases.items():
        try:
            gradients = fit(rank, world_size, case, tensor_parallel_size, options, module)
        except Exception as raised:
            raise AssertionError(f"case {name!r}") from raised
        found[name] = law.error(case, gradients)
    return found


def fit_two(rank: int, world_size: int) -> dict[str, float]:
    return errors_of(rank, world_size, TWO, 1)


@pytest.fixture(scope="module")
def two() -> list[dict[str, float]]:
    return run_ranks(fit_two, 2)


@pytest.mark.parametrize("name", TWO)
def test_law_on_shards(name: str, two: list[dict[str, float]]) -> None:
    assert max(errors[name] for errors in two) < law.TOLERANCE


def fit_four(rank: int, world_size: int) -> dict[str, float]:
    found = errors_of(rank, world_size, FOUR, 2) | errors_of(rank, world_size, OVER_ALL, 2)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    return found | errors_of(rank, world_size, {MESH: (OWN, {"tokens_over": mesh}, {})}, 2)


@pytest.fixture(scope="module")
def four() -> list[dict[str, float]]:
    return run_ranks(fit_four, 4)


@pytest.mark.parametrize("name", [*FOUR, *OVER_ALL, MESH])
def test_law_on_a_mesh(name: str, four: list[dict[str, float]]) -> None:
    assert max(errors[name] for errors in four) < law.TOLERANCE


def count_collectives(rank: int, world_size: int) -> list[int]:
    counted = []
    for options in ({}, ONCE):
        with Collectives() as counter:
            fit(rank, world_size, Case(lengths=(6, 6)), options=options)
        counted.append(counter["reduce_scatter"])
    return counted


def test_gradients_can_be_reduced_once_per_update() -> None:
    # three sharded modules: after each of 6 micro-batches, or after each of 2 windows
    assert run_ranks(count_collectives, 2) == [[18, 6], [18, 6]]


def fit_tensor_parallel(rank: int, world_size: int) -> dict[str, float]:
    alone = Case(lengths=(5,), empty=((0, 1),), loss=HAND)
    cases: Cases = {
        "tensor parallel only": (alone, {}, {"parts": "none"}),
        "no labels": (alone, ONCE, {"parts": "none", "way": "none"}),
        "shards of one": (alone, ONCE, {}),
    }
    return errors_of(rank, world_size, cases, 2)


def test_law_on_one_replica() -> None:
    for errors in run_ranks(fit_tensor_parallel, 2):
        assert len(errors) == 3
        assert max(errors.values()) < law.TOLERANCE


def fit_plain(rank: int, world_size: int) -> float:
    case = Case()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    return law.error(case, law.fit(rank // 2, world_size, case, strategy, Sharded(case)))


class Saves(Callback):
    """Writes a checkpoint inside a window, and goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (0, 3):
            trainer.save_checkpoint(self.path)


class WithMomentum(Sharded):
    """An optimizer with a state, which a checkpoint has to bring back."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def resume(rank: int, world_size: int, folder: Path) -> list[list[bool]]:
    found = []
    for distributed in (True, False):
        case = Case(lengths=(5, 4), empty=((0, 1),), stream=True, loss=HAND, epochs=2)
        path = folder / f"{distributed}"

        def fit_again(case: Case = case, distributed: bool = distributed, **options: Any) -> list[Tensor]:
            strategy = TokenNormModelParallel(
                data_parallel_size=2, tensor_parallel_size=world_size // 2, save_distributed_checkpoint=distributed
            )
            own = rank * 2 // world_size
            return law.fit(own, world_size, case, strategy, WithMomentum(case), **options)

        # what the parameters moved by, which momentum makes depend on all updates before
        whole = fit_again(callbacks=[Saves(path)])
        rest = fit_again(ckpt_path=path)
        assert len(whole) == 4
        found.append([len(rest) == 3, path.is_dir() is distributed, *map(torch.equal, whole[1:], rest)])
    return found


class Counts(Callback):
    """Which ranks count, and what the updates say."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        record = trainer.strategy.last_update
        if record is not None and (record.index, record.num_tokens) not in self.seen:
            self.seen.append((record.index, record.num_tokens))
            self.said = (trainer.strategy.is_copy, record.world_size, type(record.loss_sum))


def fit_clipped(rank: int, world_size: int) -> list[Tensor]:
    return fit(rank, world_size, Case(), 2, gradient_clip_val=0.01)


def refusal(rank: int, world_size: int, case: Case, own: int, **options: Any) -> str:
    """What a fit is refused with, where this rank holds the data of `own`."""
    module = options.pop("module", None) or Sharded(case)
    trainer = options.pop("trainer", {})
    strategy = TokenNormModelParallel(data_parallel_size=2, tensor_parallel_size=2, **options)
    try:
        law.fit(own, world_size, case, strategy, module, **trainer)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


class FailsOnRank:
    """A counter that fails on one tensor-parallel rank."""

    def __init__(self, rank: int) -> None:
        self.fails = rank == 3
        self.calls = 0

    def __call__(self, batch: dict[str, Tensor]) -> int:
        self.calls += 1
        if self.fails and self.calls == 5:
            raise KeyError("labels")
        return num_supervised(batch)


class TwoDivisors(Sharded):
    """Divides by one number in a part of the model and by another in the rest."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.embed.set_gradient_divide_factor(3.0)


class LeavesOut(Sharded):
    """Shards a part of the model only."""

    def configure_model(self) -> None:
        fully_shard(self.model.block, mesh=self.device_mesh["data_parallel"])


class TurnsSyncOff(Callback):
    """Does what the strategy does by itself."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.model.set_requires_gradient_sync(False)


def refuse(rank: int, world_size: int) -> dict[str, str]:
    case, alike = Case(), Case(lengths=(5, 4, 4, 4), empty=())
    same_counts = law.make_samples(1)[0]

    class OtherValues(law.Stream):
        """As many tokens on each rank, but rank 1 has its own."""

    def hold(own: int) -> str:
        sample = {name: each.clone() for name, each in same_counts.items()}
        sample["input_ids"][0] = own
        loader = law.DataLoader(OtherValues([law.collate([sample])] * 3), batch_size=None)
        strategy = TokenNormModelParallel(data_parallel_size=2, tensor_parallel_size=2)
        try:
            law.make_trainer(world_size, strategy=strategy, accumulate_grad_batches=3).fit(Sharded(case), loader)
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
        return "nothing"

    return {
        "other counts": refusal(rank, world_size, alike, rank),
        "other values": hold(int(rank == 1)),
        "same values": hold(rank // 2),
        "counter": refusal(rank, world_size, case, rank // 2, count_tokens=FailsOnRank(rank)),
        "two divisors": refusal(rank, world_size, case, rank // 2, module=TwoDivisors(case)),
        "left out": refusal(rank, world_size, case, rank // 2, module=LeavesOut(case)),
        "other ranks": refusal(
            rank, world_size, alike, rank, module=WrongMesh(alike), tokens_over=("data_parallel", "tensor_parallel")
        ),
        "sync off": refusal(rank, world_size, case, rank // 2, trainer={"callbacks": [TurnsSyncOff()]}),
        "unknown dimension": refusal(rank, world_size, case, rank // 2, tokens_over="replicas"),
    }


class WrongMesh(Sharded):
    """Shards over fewer ranks than tokens are counted over."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def fit_rest(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    counts, of_dtensors = Counts(), Counts()
    fit(rank, world_size, Case(), 2, callbacks=[counts])
    fit(rank, world_size, Case(), 2, module=LOSS_PARALLEL, callbacks=[of_dtensors])
    return {
        "plain": fit_plain(rank, world_size),
        "resume": resume(rank, world_size, folder),
        "clipped": fit_clipped(rank, world_size),
        "counts": (counts.seen, counts.said),
        "counts of DTensors": (of_dtensors.seen, of_dtensors.said),
        "refused": refuse(rank, world_size),
    }


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(fit_rest, 4, tmp_path_factory.mktemp("checkpoints"), timeout_s=170)


def test_plain_strategy_is_off(rest: list[dict[str, Any]]) -> None:
    for found in rest:
        assert 0.01 < found["plain"] < 10


def test_resume_inside_an_epoch(rest: list[dict[str, Any]]) -> None:
    """Saved inside the second window of the first epoch."""
    for found in rest:
        assert found["resume"] == [[True] * 5] * 2


def test_clipping_by_norm_over_several_meshes(rest: list[dict[str, Any]]) -> None:
    # every gradient is far longer than 0.01, so what is left of the first is its direction
    want = law.expected(Case())[0]
    for found in rest:
        assert (found["clipped"][0] - want / want.norm() * 0.01).abs().max().item() < 1e-8


@pytest.mark.parametrize("name", ["counts", "counts of DTensors"])
def test_copies_are_counted_once(name: str, rest: list[dict[str, Any]]) -> None:
    windows = Case().windows()
    want = [(i, sum(num_supervised(law.collate([each])) for each in window)) for i, window in enumerate(windows)]
    for found, copy in zip(rest, (False, True, False, True), strict=True):
        assert found[name] == (want, (copy, 2, Tensor))


REFUSED = {
    "other counts": "TokenNormError: At update 0, ranks 0, 1 are one model replica and have to be given the same",
    "other values": "TokenNormError: At update 0, ranks 0, 1 are one model replica and have to be given the same",
    "same values": "nothing",
    "counter": "TokenNormError: At update 1, the coming micro-batches cannot be used. Rank 3: KeyError: 'labels'",
    "two divisors": "MisconfigurationException: The sharded modules divide their gradients by different numbers: [",
    "left out": "MisconfigurationException: Parameter `model.embed.weight` is trained, but no module that",
    "other ranks": "MisconfigurationException: `fully_shard` reduces gradients over ranks [0, 2], while tokens ",
    "sync off": "TokenNormError: At update 0, the coming micro-batches cannot be used. All ranks: TokenNormError: ",
    "unknown dimension": "MisconfigurationException: `TokenNormModelParallel(tokens_over=...)` got 'replicas'; exp",
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse(name: str, rest: list[dict[str, Any]]) -> None:
    for found in rest:
        found["refused"]["other ranks"] = found["refused"]["other ranks"].replace("[1, 3]", "[0, 2]")
        assert found["refused"][name].startswith(REFUSED[name])


def test_text_names_ranks_and_counts(rest: list[dict[str, Any]]) -> None:
    counts = rest[0]["refused"]["other counts"]
    assert "rank 0 has " in counts
    assert ", rank 1 has " in counts
    assert "in which other values stand" not in counts
    assert "in which other values stand" in rest[3]["refused"]["other values"]


def test_options() -> None:
    with pytest.raises(TypeError, match=r"`TokenNormModelParallel\(tensor_parallel=...\)` is not an option. Did you"):
        TokenNormModelParallel(tensor_parallel=2)
    with pytest.raises(ValueError, match=r"`TokenNormModelParallel\(sync_each_micro_batch=...\)` got 'no'"):
        TokenNormModelParallel(sync_each_micro_batch="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`TokenNormModelParallel\(tokens_over=...\)` got 3; expected a `DeviceMesh`"):
        TokenNormModelParallel(tokens_over=3)  # type: ignore[arg-type]


def test_by_name() -> None:
    from lightning.pytorch import Trainer

    trainer = Trainer(accelerator="cpu", devices=2, strategy="tokennorm_model_parallel", logger=False)
    assert isinstance(trainer.strategy, TokenNormModelParallel)
