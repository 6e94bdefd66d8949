"""The project's reference numbers, small enough to check by hand, through real Trainers in real processes.

A fault that the numbers name is shown, too: by plain `DDPStrategy`, or by the mistake itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_tokennorm import SupervisedTokens, TokenMeanMetric, TokenNormDDP
from tests.helpers import tiny_lm
from tests.helpers.ddp_hooks import count_buckets, sum_hook
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import ScalarModule, make_batch, make_trainer
from tests.helpers.scalar_rig import make_loader as make_rig_loader

TOLERANCE = 1e-12

Sample = tuple[float, ...]
"""The inputs of a sample, and its target as the last number."""


def make_rows(samples: Sequence[Sample], num_inputs: int) -> dict[str, Tensor]:
    """A micro-batch of a row per sample: ``x`` of shape ``[rows, num_inputs]``, ``y`` of shape ``[rows]``."""
    table = torch.tensor([list(sample) for sample in samples], dtype=torch.float64).view(-1, num_inputs + 1)
    return {"x": table[:, :-1], "y": table[:, -1]}


def num_rows(batch: dict[str, Tensor]) -> int:
    """Each sample is one token here."""
    return len(batch["y"])


class Squares(pl.LightningModule):
    """The mean over rows of ``factor * (w . x - y) ** 2``; over no row it is NaN, and its gradient zero."""

    def __init__(self, weights: Sequence[float], factor: float, lr: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weights, dtype=torch.float64))
        self.factor, self.lr = factor, lr
        self.gradients: list[list[float]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self.factor * (batch["x"] @ self.weight - batch["y"]) ** 2).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.weight.grad is not None
        self.gradients.append(self.weight.grad.tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit_squares(
    rank: int,
    world_size: int,
    samples: Sequence[Sequence[Sample]],
    weights: Sequence[float],
    factor: float,
    lr: float,
    options: dict[str, Any] | None,
) -> tuple[list[list[float]], list[float]]:
    """Fit on this rank's samples in one micro-batch; without options under plain DDP.

    Returns:
        The gradient of each update, and the weights after the last.
    """
    module = Squares(weights, factor, lr)
    strategy = DDPStrategy() if options is None else TokenNormDDP(count_tokens=num_rows, **options)
    loader = DataLoader([make_rows(samples[rank], len(weights))], batch_size=None)  # type: ignore[arg-type,var-annotated]
    make_trainer(world_size, strategy=strategy).fit(module, loader)
    return module.gradients, module.weight.tolist()


def check_squares(results: Any, gradient: Sequence[float], weights: Sequence[float]) -> None:
    for gradients, after in results:
        assert gradients == [pytest.approx(gradient, abs=TOLERANCE)]
        assert after == pytest.approx(weights, abs=TOLERANCE)
        assert after == results[0][1], "the weights differ between ranks"


# ---- four tokens on two ranks: (theta - y) ** 2 / 2, so the gradient of a token is theta - y


def tokens(*targets: float) -> list[Sample]:
    return [(1.0, target) for target in targets]


@pytest.mark.parametrize(
    ("ranks", "theta", "gradient", "plain"),
    [
        # theta = 0: rank 0 adds 0, rank 1 adds 3 * -2: -6 / 4. The mean of the ranks' means is (0 - 2) / 2.
        ([[0], [2, 2, 2]], 0.0, -1.5, -1.0),
        # split 2 + 2, both ways round: (0 - 2) + (-2 - 2) = -6 over 4, and equal ranks leave plain DDP right
        ([[0, 2], [2, 2]], 0.0, -1.5, -1.5),
        ([[2, 2], [2, 0]], 0.0, -1.5, -1.5),
        # rank 0 is empty: 2 * -2 = -4 over 2. Plain DDP averages over it as well: (0 - 2) / 2.
        ([[], [2, 2]], 0.0, -2.0, -1.0),
        # theta = 1: 1 + 3 * -1 = -2 over 4. The mean of the ranks' means is (1 - 1) / 2: it does not learn at all.
        ([[0], [2, 2, 2]], 1.0, -0.5, 0.0),
        ([[0, 2], [2, 2]], 1.0, -0.5, -0.5),
        ([[2, 2], [2, 0]], 1.0, -0.5, -0.5),
        ([[], [2, 2]], 1.0, -1.0, -0.5),
    ],
)
def test_four_tokens_on_two_ranks(
    ranks: Sequence[Sequence[float]], theta: float, gradient: float, plain: float
) -> None:
    samples = [tokens(*targets) for targets in ranks]
    check_squares(run_ranks(fit_squares, 2, samples, [theta], 0.5, 0.5, {}), [gradient], [theta - 0.5 * gradient])
    for gradients, _ in run_ranks(fit_squares, 2, samples, [theta], 0.5, 0.5, None):
        assert gradients == [pytest.approx([plain], abs=TOLERANCE)]


@pytest.mark.parametrize("theta", [0.0, 1.0])
def test_no_token_on_any_rank_is_no_update(theta: float) -> None:
    for gradients, after in run_ranks(fit_squares, 2, [[], []], [theta], 0.5, 0.5, {}):
        assert (gradients, after) == ([], [theta])  # on both ranks, and the optimizer never saw a gradient
    for gradients, _ in run_ranks(fit_squares, 2, [[], []], [theta], 0.5, 0.5, None):
        assert gradients == [[0.0]]  # plain DDP steps, and weight decay or momentum would move the weight


# ---- linear regression y = w x: the gradient of a sample is 2 * x * (w * x - t)


FOUR: list[Sample] = [(2, 3), (3, 5), (1, 2), (4, 6)]
SUMMING: dict[str, Any] = {"ddp_comm_hook": sum_hook}


def test_linear_regression() -> None:
    # w = 1: 4 * (2 - 3) + 6 * (3 - 5) + 2 * (1 - 2) + 8 * (4 - 6) = -4 - 12 - 2 - 16 = -34 over 4; w = 1 + 0.01 * 8.5
    check_squares(run_ranks(fit_squares, 1, [FOUR], [1.0], 1.0, 0.01, {}), [-8.5], [1.085])
    # two ranks of two: (-16 / 2 - 18 / 2) / 2; plain DDP is right as well where all ranks have as many
    for options in ({}, None):
        results = run_ranks(fit_squares, 2, [FOUR[:2], FOUR[2:]], [1.0], 1.0, 0.01, options)
        check_squares(results, [-8.5], [1.085])


def test_three_samples_and_one() -> None:
    # the same four, split 3 + 1: plain DDP averages -18 / 3 and -16 to -11
    check_squares(run_ranks(fit_squares, 2, [FOUR[:3], FOUR[3:]], [1.0], 1.0, 0.01, {}), [-8.5], [1.085])
    results = run_ranks(fit_squares, 2, [FOUR[:3], FOUR[3:]], [1.0], 1.0, 0.01, None)
    check_squares(results, [-11.0], [1.11])


@pytest.mark.parametrize(
    ("declared", "gradient", "weight"),
    [
        ("sum", -8.5, 1.085),
        ("mean", -17.0, 1.17),  # the fault: DDP's sum taken for its average, W = 2 times too large
    ],
)
def test_sum_instead_of_average(declared: str, gradient: float, weight: float) -> None:
    options = {**SUMMING, "ddp_hook_reduces": declared}
    results = run_ranks(fit_squares, 2, [FOUR[:2], FOUR[2:]], [1.0], 1.0, 0.01, options)
    check_squares(results, [gradient], [weight])


EIGHT: list[Sample] = [
    (1, 2, 1),
    (2, 1, 2),
    (0.5, 1.5, 0.5),
    (1.5, 0.5, 1.5),
    (3, 1, 3),
    (1, 3, 1),
    (2, 2, 2.5),
    (0.5, 0.5, 0.5),
]


@pytest.mark.parametrize("sizes", [(8,), (2, 2, 2, 2), (1, 4, 0, 3)])
def test_eight_samples_on_four_ranks(sizes: tuple[int, ...]) -> None:
    # w = (0.5, -0.3): residuals w . x - t are -1.1, -1.3, -0.7, -0.9, -1.8, -1.4, -2.1, -0.4. Times x1 they add up to
    # -1.1 - 2.6 - 0.35 - 1.35 - 5.4 - 1.4 - 4.2 - 0.2 = -16.6, times x2 to -15.4; 2 / 8 of that: (-4.15, -3.85).
    # SGD with lr 0.1: (0.5 + 0.415, -0.3 + 0.385)
    rest = iter(EIGHT)
    samples = [[next(rest) for _ in range(size)] for size in sizes]
    results = run_ranks(fit_squares, len(sizes), samples, [0.5, -0.3], 1.0, 0.1, {})
    check_squares(results, [-4.15, -3.85], [0.915, 0.085])


# ---- weighted merge


def fit_rig(rank: int, world_size: int, table: Any, plain: bool) -> list[float]:
    module = ScalarModule()
    strategy = DDPStrategy() if plain else TokenNormDDP()
    make_trainer(world_size, strategy=strategy).fit(module, make_rig_loader(table[rank]))
    return module.gradients


def test_weighted_merge() -> None:
    # (n, gradient of the local mean) = (1, 2) and (3, 6): (1 * 2 + 3 * 6) / 4 = 5
    for gradients in run_ranks(fit_rig, 2, [[(1, 2)], [(3, 6)]], False):
        assert gradients == [pytest.approx(5.0, abs=TOLERANCE)]
    for gradients in run_ranks(fit_rig, 2, [[(1, 2)], [(3, 6)]], True):
        assert gradients == [pytest.approx(4.0, abs=TOLERANCE)]  # the fault: (2 + 6) / 2


def test_three_ranks_of_which_one_is_empty() -> None:
    # 2, 0 and 5 tokens: the first two of EIGHT, nothing, the next five. One process on all seven of them: the sums
    # above without the last sample's -0.4 * 0.5, so -16.4 and -15.2, times 2 / 7.
    three = run_ranks(fit_squares, 3, [EIGHT[:2], [], EIGHT[2:7]], [0.5, -0.3], 1.0, 0.1, {})
    one = run_ranks(fit_squares, 1, [EIGHT[:7]], [0.5, -0.3], 1.0, 0.1, None)
    gradient = [-16.4 * 2 / 7, -15.2 * 2 / 7]
    for results in (three, one):
        check_squares(results, gradient, [0.5 - 0.1 * gradient[0], -0.3 - 0.1 * gradient[1]])


# ---- a window of 2 ranks x 2 micro-batches, target counts (2, 6) and (4, 8)

# rank 0 has rows 0:2 and 2:8, rank 1 rows 8:12 and 12:20: N = 2 + 6 + 4 + 8 = 20
SPLIT = [[slice(0, 2), slice(2, 8)], [slice(8, 12), slice(12, 20)]]


def make_classifier() -> nn.Linear:
    """Torch's own initialisation, drawn in float64 from seed 42."""
    torch.manual_seed(42)
    return nn.Linear(4, 3, dtype=torch.float64)


def make_rows_and_classes() -> tuple[Tensor, Tensor]:
    """First the inputs, of shape ``[20, 4]`` in float64, then the classes, of shape ``[20]``."""
    generator = torch.Generator().manual_seed(2026)
    inputs = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (20,), generator=generator)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = make_classifier()
        self.gradients: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, classes = batch
        return F.cross_entropy(self.linear(inputs), classes)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(tiny_lm.flat(parameter.grad for parameter in self.linear.parameters()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_classifier(rank: int, world_size: int, plain: bool) -> tuple[Any, Any, int]:
    inputs, classes = make_rows_and_classes()
    counter: Counter[str] = Counter()
    strategy: DDPStrategy = DDPStrategy()
    if not plain:
        strategy = TokenNormDDP(
            count_tokens=lambda batch: len(batch[1]),
            ddp_comm_hook=count_buckets,
            ddp_comm_state=counter,
            ddp_hook_reduces="mean",
        )
    module = Classifier()
    batches = [(inputs[rows], classes[rows]) for rows in SPLIT[rank]]
    trainer = make_trainer(world_size, strategy=strategy, accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    (gradient,) = module.gradients
    return gradient.numpy(), tiny_lm.flat(module.parameters()).numpy(), counter["buckets"]


def merged_classifier() -> tuple[Tensor, Tensor]:
    """The gradient of all 20 rows at once, and the parameters after SGD with lr 0.1."""
    linear = make_classifier()
    inputs, classes = make_rows_and_classes()
    F.cross_entropy(linear(inputs), classes).backward()  # type: ignore[no-untyped-call]
    gradient = tiny_lm.flat(parameter.grad for parameter in linear.parameters())
    return gradient, tiny_lm.flat(linear.parameters()) - 0.1 * gradient


def test_window_of_two_by_two(record_property: Any) -> None:
    gradient, parameters = merged_classifier()
    for ours, after, buckets in run_ranks(fit_classifier, 2, False):
        error = (torch.from_numpy(ours) - gradient).abs().max().item()
        record_property("greatest_error", error)
        assert error < TOLERANCE
        assert (torch.from_numpy(after) - parameters).abs().max() < TOLERANCE
        assert buckets == 1
    for ours, _, _ in run_ranks(fit_classifier, 2, True):
        # the mean of four means, whose 2, 6, 4 and 8 rows weigh the same
        error = (torch.from_numpy(ours) - gradient).abs().max().item()
        assert error == pytest.approx(0.0948, abs=5e-5)


def count_reductions(rank: int, world_size: int) -> list[int]:
    """Bucket reductions of one window by hand: all synchronised, `no_sync` around both, only around the backward."""
    inputs, classes = make_rows_and_classes()
    counts = []
    for outside, inside in ((False, False), (True, False), (False, True)):
        counter: Counter[str] = Counter()
        model = DistributedDataParallel(make_classifier())
        model.register_comm_hook(counter, count_buckets)
        for index, rows in enumerate(SPLIT[rank]):
            last = index == 1
            with model.no_sync() if outside and not last else nullcontext():
                loss = F.cross_entropy(model(inputs[rows]), classes[rows])
                with model.no_sync() if inside and not last else nullcontext():
                    loss.backward()  # type: ignore[no-untyped-call]
        counts.append(counter["buckets"])
    return counts


def test_what_the_number_of_reductions_tells() -> None:
    """The controls for ``buckets == 1``: DDP decides in the forward, so `no_sync` around the backward is too late."""
    assert run_ranks(count_reductions, 2) == [[2, 1, 2]] * 2


# ---- a causal transformer in float32 and under bfloat16 autocast

LAYERS, HIDDEN, HEADS, VOCABULARY, ROWS, LENGTH = 2, 64, 4, 128, 8, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        qkv = self.qkv(self.norms[0](hidden)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))


class SmallLM(nn.Module):
    """Float32, no dropout; labels line up with the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.embed, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss over live labels."""
        ids = batch["input_ids"]
        hidden = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.blocks(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class SmallModule(Classifier):
    """The transformer in the classifier's place; it leaves the parameters where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = SmallLM()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.linear(batch)


def make_text() -> dict[str, Tensor]:
    """Random ids; row ``i`` has its last ``4 * i`` labels masked: 8 * 64 - 4 * 28 = 400 of 512 are live."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(2026))
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, LENGTH - 4 * row :] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def whole_batch(precision: str) -> Tensor:
    model = SmallLM()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        loss = model(make_text())
    loss.backward()
    return tiny_lm.flat(parameter.grad for parameter in model.parameters())


def fit_text(rank: int, world_size: int, precision: str, plain: bool) -> dict[int, tuple[Any, Any]]:
    """By rows per micro-batch: the gradient of the one update, and ``N`` of the window."""
    text = make_text()
    seen: dict[int, tuple[Any, Any]] = {}
    for rows in (4, 2, 1):
        batches = [{key: part[i : i + rows] for key, part in text.items()} for i in range(0, ROWS, rows)]
        strategy = DDPStrategy() if plain else TokenNormDDP(count_tokens=SupervisedTokens(shift=0))
        module = SmallModule()
        trainer = make_trainer(
            world_size,
            strategy=strategy,
            precision=precision,
            accumulate_grad_batches=len(batches) // world_size,
        )
        trainer.fit(module, DataLoader(batches[rank::world_size], batch_size=None))  # type: ignore[arg-type]
        (gradient,) = module.gradients
        record = getattr(strategy, "last_update", None)
        seen[rows] = (gradient.numpy(), record and record.num_tokens)
    return seen


def distance(gradient: Tensor, reference: Tensor) -> float:
    """The relative L2 error."""
    return ((gradient.double() - reference.double()).norm() / reference.double().norm()).item()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_causal_transformer(world_size: int, precision: str, record_property: Any) -> None:
    reference = whole_batch(precision)
    # What the same tokens may differ by is what their order of summation rounds away. Float32 has 2 ** -24 = 6e-8 per
    # operation; the reference numbers, of a larger model, allow 1.2e-6. Under bfloat16 autocast each product is rounded
    # to 8 bits, and the rows of a micro-batch differently than those of the whole batch: two ways to round are as far
    # from each other as one is from float32, which is measured here on the whole batch; not more than twice that.
    rounding = distance(reference, whole_batch("32-true"))
    assert (rounding > 1e-3) == (precision == "bf16-mixed"), "autocast was not on, or was"
    tolerance = 1.2e-6 if precision == "32-true" else 2 * rounding
    record_property("tolerance", tolerance)
    errors, controls = {}, {}
    for seen in run_ranks(fit_text, world_size, precision, False):
        for rows, (gradient, num_tokens) in seen.items():
            errors[rows] = max(errors.get(rows, 0.0), distance(torch.from_numpy(gradient), reference))
            assert num_tokens == 400
    for seen in run_ranks(fit_text, world_size, precision, True):
        controls.update({rows: distance(torch.from_numpy(gradient), reference) for rows, (gradient, _) in seen.items()})
    record_property("errors", errors)
    record_property("controls", controls)
    assert max(errors.values()) < tolerance
    # means of micro-batches that weigh the same: 232 and 168 live labels in halves, 64 to 36 in rows
    assert min(controls.values()) > 0.05


# ---- clip order


class Clipped(ScalarModule):
    """Plain SGD with lr 1 from 0, so that the parameter shows what was left of the gradient."""

    def __init__(self, clip_each: bool) -> None:
        super().__init__(start=0.0, lr=1.0)
        if clip_each:
            self.t.register_hook(lambda gradient: gradient.clamp(-1, 1))  # type: ignore[no-untyped-call]


def fit_clipped(
    rank: int, world_size: int, values: Sequence[float], algorithm: str, clip_each: bool
) -> tuple[list[float], float]:
    batches = [make_batch(1, value) for value in values]
    module = Clipped(clip_each)
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        accumulate_grad_batches=len(values) // world_size,
        gradient_clip_val=1.0,
        gradient_clip_algorithm=algorithm,
    )
    trainer.fit(module, DataLoader(batches[rank::world_size], batch_size=None))  # type: ignore[arg-type]
    return module.gradients, -module.t.item()


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("world_size", [1, 2], ids=["two micro-batches", "two ranks"])
@pytest.mark.parametrize(
    ("values", "added"),
    [
        ([6, -4], 1.0),  # contributions 6 / 2 = 3 and -4 / 2 = -2: added 1, which the threshold leaves
        ([12, -4], 4.0),  # contributions 6 and -2: added 4, clipped to 1
    ],
)
def test_clip_comes_after_the_sum(values: Sequence[float], added: float, world_size: int, algorithm: str) -> None:
    # torch's clipping by norm divides by the norm plus 1e-6
    tolerance = 2e-6 if algorithm == "norm" else TOLERANCE
    for gradients, clipped in run_ranks(fit_clipped, world_size, values, algorithm, False):
        assert gradients == [pytest.approx(added, abs=TOLERANCE)]
        assert clipped == pytest.approx(1.0, abs=tolerance)
    # the fault: each contribution is clipped where it arises, to 1 and -1
    for _, clipped in run_ranks(fit_clipped, world_size, values, algorithm, True):
        assert clipped == pytest.approx(0.0, abs=TOLERANCE)


# ---- sampler arithmetic


@pytest.mark.parametrize(
    ("num_samples", "num_ranks", "drop_last", "dealt"),
    [
        (7, 3, False, [[0, 3, 6], [1, 4, 0], [2, 5, 1]]),
        (7, 3, True, [[0, 3], [1, 4], [2, 5]]),
        (2, 4, False, [[0], [1], [0], [1]]),
        (5, 2, False, [[0, 2, 4], [1, 3, 0]]),
        (0, 2, False, [[], []]),
    ],
)
def test_what_torchs_sampler_deals(num_samples: int, num_ranks: int, drop_last: bool, dealt: list[list[int]]) -> None:
    samples = range(num_samples)
    for rank, expected in enumerate(dealt):
        sampler = DistributedSampler(samples, num_ranks, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type,var-annotated]
        assert list(sampler) == expected


class Evaluated(ScalarModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen += batch["values"][:, 1].tolist()
        return self.loss(batch)


SEVEN = [make_batch(1, value) for value in range(7)]  # sample i has one token of value i


def join_rows(batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def evaluate(rank: int, world_size: int, how: str) -> tuple[list[float], float]:
    # Each sample once: a rank takes every W-th one, and Lightning adds no sampler of its own. Ranks may then have
    # different numbers of batches, here 3, 2 and 2: the metric's sums are exchanged once, at the end.
    samples = SEVEN[rank::world_size] if how == "strided" else SEVEN
    trainer = make_trainer(
        world_size,
        strategy=TokenNormDDP(),
        use_distributed_sampler=how == "lightning",
        callbacks=[TokenMeanMetric()],
    )
    module = Evaluated()
    loader = DataLoader(samples, batch_size=1, collate_fn=join_rows)  # type: ignore[arg-type]
    trainer.validate(module, loader, verbose=False)
    return module.seen, trainer.callback_metrics["val_loss_per_token"].item()


def test_an_evaluation_counts_each_sample_once() -> None:
    results = run_ranks(evaluate, 3, "strided")
    assert [seen for seen, _ in results] == [[0, 3, 6], [1, 4], [2, 5]]  # 7 in all
    assert [loss for _, loss in results] == pytest.approx([21 / 7] * 3, abs=TOLERANCE)
    # the fault: Lightning's sampler repeats samples 0 and 1, 9 in all: (21 + 0 + 1) / 9
    results = run_ranks(evaluate, 3, "lightning")
    assert [seen for seen, _ in results] == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert [loss for _, loss in results] == pytest.approx([22 / 9] * 3, abs=TOLERANCE)
