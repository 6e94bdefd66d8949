"""Counting other things than tokens, and weights of tokens: what is counted, and what is refused."""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_tokennorm import (
    BatchCount,
    Heads,
    PerMicroBatch,
    SupervisedSamples,
    SupervisedTokens,
    WeightedTokens,
    token_weight_report,
)
from lightning_tokennorm.counting import check_count, counter_for, describe_counter, to_host
from lightning_tokennorm.window import RankReport, WindowPlan

X = -100
NAN, INF = float("nan"), float("inf")


def labels(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


class MeansNoShift(nn.Module):
    """Has what tells a Hugging Face model whose labels line up with its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True, model_type="t5", to_dict=dict)
        self.loss_type = "ForConditionalGeneration"
        self.weight = nn.Parameter(torch.zeros(()))


# ---- samples


@pytest.mark.parametrize(
    ("rows", "shift", "expected"),
    [
        ([[1, 2, 3], [1, X, 3], [X, X, X]], 1, 2),
        ([[1, X, X], [X, X, 3]], 1, 1),  # the first row's only label is never predicted
        ([[1, X, X], [X, X, 3]], 0, 2),
        ([[1], [2]], 1, 0),  # rows of width one have nothing to predict
        ([[X, X]], 1, 0),
        # a sample is an entry of the first dimension, whatever it holds: 2 of 3 have a live label after the shift
        ([[[X, 1], [1, X]], [[1, X], [1, X]], [[X, X], [X, 5]]], 1, 2),
    ],
)
def test_samples_with_a_live_label_after_the_shift(rows: Any, shift: int, expected: int) -> None:
    counted = SupervisedSamples(shift=shift)({"labels": torch.tensor(rows)})
    assert (counted, type(counted)) == (expected, int)


def test_one_label_per_sample() -> None:
    assert SupervisedSamples(shift=0)({"labels": torch.tensor([3, X, 1])}) == 2


def test_samples_of_no_row() -> None:
    assert SupervisedSamples()({"labels": torch.zeros(0, 5, dtype=torch.long)}) == 0


def test_samples_are_found_as_labels_are() -> None:
    assert SupervisedSamples(labels=1, ignore_index=0)((None, labels([1, 0, 2], [1, 0, 0]))) == 1


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_samples_of_nested_labels(layout: torch.layout) -> None:
    rows = [torch.tensor(row, dtype=torch.long) for row in ([X, 2, 3], [5], [], [6, X, 7, X])]
    batch = {"labels": torch.nested.nested_tensor(rows, layout=layout)}
    assert SupervisedSamples(shift=0)(batch) == 3
    assert SupervisedSamples()(batch) == 2


# ---- weights


def weighted(weights: Any, *rows: list[int]) -> dict[str, Any]:
    return {"labels": labels(*rows), "loss_weights": weights}


def test_weights_are_shifted_with_their_labels() -> None:
    # positions 1, 2 of the first row and 2 of the second: 0.5 + 2 + 0.25
    batch = weighted(torch.tensor([[9.0, 0.5, 2.0], [9.0, 9.0, 0.25]]), [7, 8, 9], [7, X, 9])
    counted = WeightedTokens()(batch)
    assert (counted, type(counted)) == (2.75, float)
    assert WeightedTokens(shift=0)(batch) == 9 + 2.75 + 9
    assert WeightedTokens(shift=2)(batch) == 2.25
    assert WeightedTokens(shift=5)(batch) == 0


def test_weights_where_no_label_is_live_are_not_looked_at() -> None:
    assert WeightedTokens()(weighted(torch.tensor([[INF, NAN, 2.0, -1.0]]), [7, X, 9, X])) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_weights_are_added_up_in_float64(dtype: torch.dtype) -> None:
    # 4096 * 255 is beyond float16, and beyond what bfloat16 can tell from its neighbours; no overflow of uint8
    weights = torch.full((1, 4097), 255).to(dtype)
    exact = 4096 * weights[0, 0].double().item()
    assert WeightedTokens()(weighted(weights, [1] * 4097)) == exact


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_weights_of_nested_labels(layout: torch.layout) -> None:
    def nested(*rows: Any) -> Tensor:
        return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=layout)

    batch = {"labels": nested([1, 2, X], [5, 6]), "loss_weights": nested([9.0, 0.5, 9.0], [9.0, 2.0])}
    assert WeightedTokens()(batch) == 2.5
    batch["loss_weights"] = nested([9.0, 0.5], [9.0, 2.0])
    with pytest.raises(ValueError, match=r"shapes \[\[3\], \[2\]\] .* shapes \[\[2\], \[2\]\]"):
        WeightedTokens()(batch)
    batch["loss_weights"] = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"a nested tensor of 2 rows .* a tensor of shape \[2, 3\]"):
        WeightedTokens()(batch)


def test_weights_that_are_learnt() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert WeightedTokens()(weighted(torch.ones(1, 3, requires_grad=True), [1, 2, 3])) == 2


def test_where_weights_are_found() -> None:
    batch = (labels([1, 2, 3]), torch.tensor([[9.0, 1.0, 0.5]]))
    assert WeightedTokens(labels=0, weights=1)(batch) == 1.5
    assert WeightedTokens(weights="w")(SimpleNamespace(labels=batch[0], w=batch[1])) == 1.5
    with pytest.raises(ValueError, match=r"no weights at `weights='loss_weights'`.*'labels': a tensor of shape \[1, 3"):
        WeightedTokens()({"labels": batch[0]})
    with pytest.raises(ValueError, match=r"no labels at `labels='labels'`"):
        WeightedTokens()({"loss_weights": batch[1]})


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        # the sum of all of them is 3, 4, …: it says nothing of the one that is wrong
        ([1.0, -1.0, 3.0], r"weights from -1\.0 to 3\.0"),
        ([1.0, -1e-300, 3.0], r"weights from -1e-300 to 3\.0"),
        ([1.0, -INF, INF], r"weights from -inf to inf"),
        ([1.0, NAN, 3.0], r"weights from nan to nan"),
        ([1.0, INF, 3.0], r"weights from 1\.0 to inf"),
        ([1e308, 1e308, 1e308], r"weights from 1e\+308 to 1e\+308"),
    ],
)
def test_weights_that_are_no_weights(bad: list[float], text: str) -> None:
    weights = torch.tensor([[0.0, *bad]], dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"`WeightedTokens` found {text} at `weights='loss_weights'`; expected"):
        WeightedTokens()(weighted(weights, [1, 2, 3, 4]))


def test_weights_of_another_shape() -> None:
    for shape in ((1, 3), (4,), (1, 4, 1), (2, 2), ()):
        with pytest.raises(
            ValueError, match=r"labels, a tensor of shape \[1, 4\] .* weights, a tensor of .*same shape"
        ):
            WeightedTokens()(weighted(torch.ones(shape), [1, 2, 3, 4]))


def test_weights_on_another_device() -> None:
    with pytest.raises(ValueError, match=r"on cpu, .* on meta; .*same device"):
        WeightedTokens()(weighted(torch.ones(1, 4, device="meta"), [1, 2, 3, 4]))


@pytest.mark.parametrize(
    ("unusable", "text"),
    [
        (torch.ones(1, 4, dtype=torch.bool), r"a tensor of shape \[1, 4\] and dtype bool"),
        (torch.ones(1, 4, dtype=torch.complex64), r"a tensor of shape \[1, 4\] and dtype complex64"),
        ("abc", r"'abc' \(str\)"),
        ([[1.0, 1.0, 1.0, 1.0]], r"\[\[1\.0, .*\(list\)"),
        (None, r"None \(NoneType\)"),
        (True, r"True \(bool\)"),
        (0.5, r"0\.5 \(float\)"),
    ],
)
def test_unusable_weights(unusable: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"`WeightedTokens` found {text} at .*expected a tensor of numbers"):
        WeightedTokens()(weighted(unusable, [1, 2, 3, 4]))


def test_sums_of_weights_do_not_depend_on_the_order_of_ranks() -> None:
    # 2**53 + 1 + 1 is 2**53 if added up from the left, and 2**53 + 2 from the right
    counts = [WeightedTokens()(weighted(torch.tensor([[0.0, w]], dtype=torch.float64), [1, 2])) for w in (2**53, 1, 1)]
    assert counts[0] + counts[1] + counts[2] != counts[1] + counts[2] + counts[0]
    for order in itertools.permutations(counts):
        plan = WindowPlan.agreed([RankReport(count, 1, 1) for count in order], (order[0],))
        assert plan.num_tokens == 2**53 + 2


# ---- what the batch brings along


@pytest.mark.parametrize(
    ("count", "expected"),
    [(11, 11), (2.5, 2.5), (0, 0), (torch.tensor(4), 4), (torch.tensor(0.5), 0.5), (np.int32(3), 3)],
    ids=lambda value: f"{type(value).__name__} {value}",
)
def test_counts_of_batches(count: Any, expected: Any) -> None:
    counted = BatchCount()({"num_tokens": count})
    assert (counted, type(counted)) == (expected, type(expected))


def test_where_counts_of_batches_are_found() -> None:
    assert BatchCount("n")(SimpleNamespace(n=3)) == 3
    assert BatchCount(-1)((torch.zeros(2), 3)) == 3
    with pytest.raises(ValueError, match=r"no count at `key='num_tokens'`.*'ids': 1 \(int\).*at the count"):
        BatchCount()({"ids": 1})


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (True, TypeError, r"found True \(bool\)"),
        (torch.tensor(True), TypeError, r"found a tensor of shape \[\] and dtype bool"),
        ("11", TypeError, r"found '11' \(str\)"),
        (None, TypeError, r"found None \(NoneType\)"),
        ([3, 4], TypeError, r"found \[3, 4\] \(list\)"),
        (torch.tensor([3, 4]), ValueError, r"found a tensor of shape \[2\] .*collate function"),  # default_collate's
        (torch.tensor([3]), ValueError, r"found a tensor of shape \[1\] .*collate function"),
        (np.array([3, 4]), ValueError, r"found array.*collate function"),
        ({"lm": 3, "mtp": 2}, ValueError, r"found \{'lm': 3.*Heads\(lm=BatchCount"),
    ],
    ids=repr,
)
def test_what_is_no_count_of_a_batch(bad: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=rf"`BatchCount\(key='num_tokens'\)` {text}"):
        BatchCount()({"num_tokens": bad})


@pytest.mark.parametrize("bad", [-1, NAN, INF])
def test_counts_of_batches_are_checked_as_any_counter_s(bad: float) -> None:
    with pytest.raises(ValueError, match="expected a finite count from 0"):
        to_host([check_count(BatchCount()({"num_tokens": bad}))])


# ---- micro-batches


@pytest.mark.parametrize("batch", [{"labels": torch.full((2, 4), X)}, {}, (), torch.zeros(3), "text"])
def test_each_micro_batch_is_one(batch: Any) -> None:
    assert PerMicroBatch()(batch) == 1


# ---- all of them


@pytest.mark.parametrize("counter", [SupervisedSamples(), WeightedTokens()])
def test_on_a_device_the_count_stays_there(counter: Any) -> None:
    # A meta tensor has no value: whatever waits for one fails.
    weights = torch.ones(2, 4, device="meta")
    count = counter({"labels": torch.zeros(2, 4, dtype=torch.long, device="meta"), "loss_weights": weights})
    assert isinstance(count, Tensor)
    assert (count.device.type, count.shape) == ("meta", ())


def test_on_a_device_a_count_is_the_batch_s_own_tensor() -> None:
    assert BatchCount()({"num_tokens": torch.ones((), device="meta")}).device.type == "meta"


def test_on_a_device_a_negative_weight_is_refused_later() -> None:
    # stands in for a device: what is left of the sum there
    num_tokens = WeightedTokens.add_up(torch.tensor([1.0, -1.0, 3.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="returned nan; expected a finite count"):
        to_host([check_count(num_tokens)])


@pytest.mark.parametrize("kind", [SupervisedSamples, WeightedTokens])
def test_labels_are_checked_as_for_tokens(kind: Any) -> None:
    name = kind.__name__
    with pytest.raises(ValueError, match=rf"`{name}` found no labels at `labels='labels'`"):
        kind()({"ids": 1})
    with pytest.raises(TypeError, match=rf"`{name}` found a tensor of shape \[1, 2\] and dtype float32 .*integer"):
        kind()({"labels": torch.zeros(1, 2)})
    with pytest.raises(ValueError, match=rf"`{name}\(shift=1\)` found a tensor of shape \[3\].*two dimensions"):
        kind()({"labels": torch.zeros(3, dtype=torch.long)})


@pytest.mark.parametrize("kind", [SupervisedTokens, SupervisedSamples, WeightedTokens])
def test_labels_without_a_dimension(kind: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{kind.__name__}\(shift=0\)` found a tensor of shape \[\]"):
        kind(shift=0)({"labels": torch.tensor(3), "loss_weights": torch.tensor(1.0)})


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: SupervisedSamples(labels=1.5), TypeError, r"`SupervisedSamples\(labels=\.\.\.\)` got 1\.5"),
        (lambda: SupervisedSamples(shift=-1), ValueError, r"`SupervisedSamples\(shift=\.\.\.\)` got -1"),
        (lambda: WeightedTokens(ignore_index=None), TypeError, r"`WeightedTokens\(ignore_index=\.\.\.\)` got None"),
        (lambda: WeightedTokens(shift="atuo"), ValueError, r"`WeightedTokens\(shift=\.\.\.\)` got 'atuo'"),
        (lambda: WeightedTokens(weights=True), TypeError, r"`WeightedTokens\(weights=\.\.\.\)` got True"),
        (lambda: WeightedTokens(weights=None), TypeError, r"`WeightedTokens\(weights=\.\.\.\)` got None"),
        (lambda: BatchCount(1.5), TypeError, r"`BatchCount\(key=\.\.\.\)` got 1\.5"),
        (lambda: BatchCount(False), TypeError, r"`BatchCount\(key=\.\.\.\)` got False"),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("counter", "text"),
    [
        (SupervisedSamples(shift=1), "samples with labels after a shift of 1: as given"),
        (SupervisedSamples(labels=1, shift=0), "samples with labels at 1 without a shift: as given"),
        (WeightedTokens(), "weights of labels, shifted as the module means it"),
        (BatchCount(), "the batch's own 'num_tokens'"),
        (PerMicroBatch(), "1 for each micro-batch"),
        (
            Heads(lm=SupervisedSamples(shift=0), balance=PerMicroBatch()),
            "lm: samples with labels without a shift: as given; balance: 1 for each micro-batch",
        ),
    ],
)
def test_descriptions(counter: Any, text: str) -> None:
    assert describe_counter(counter) == text


@pytest.mark.parametrize("counter", [SupervisedSamples(labels="y"), WeightedTokens(weights="w", ignore_index=0)])
def test_the_module_says_whether_labels_are_shifted(counter: Any) -> None:
    resolved = counter_for(counter, MeansNoShift())
    assert (type(resolved), resolved.shift) == (type(counter), 0)
    assert "MeansNoShift" in describe_counter(resolved)
    for name in ("labels", "ignore_index", *(("weights",) if isinstance(counter, WeightedTokens) else ())):
        assert getattr(resolved, name) == getattr(counter, name)
    assert counter.shift == "auto"
    assert counter_for(counter, nn.Linear(1, 1)).shift == 1


@pytest.mark.parametrize("counter", [BatchCount(), PerMicroBatch()])
def test_counters_that_no_module_changes(counter: Any) -> None:
    assert counter_for(counter, MeansNoShift()) is counter


@pytest.mark.parametrize("counter", [SupervisedSamples(), WeightedTokens(), BatchCount(), PerMicroBatch()])
def test_counters_cannot_be_changed_and_compare(counter: Any) -> None:
    assert counter == type(counter)()
    assert hash(counter) == hash(type(counter)())
    with pytest.raises(AttributeError):
        counter.anything = 1
    assert counter != SupervisedTokens()


def test_weights_of_samples_under_plain_ddp() -> None:
    # W = 1, K = 2: micro-batches of 1 and 3 samples; plain, a sample weighs 4 / (2 * 1) = 2 and 4 / (2 * 3) of what
    # it should
    loader = [{"labels": labels([1, 2, 3])}, {"labels": labels([1, 2, 3], [1, 2, X], [1, X, 3])}]
    report = token_weight_report(loader, accumulate=2, count_tokens=SupervisedSamples())
    assert (report.num_tokens, report.heaviest, report.lightest) == (4, 2.0, pytest.approx(2 / 3))
