"""Counting the supervised tokens of a batch."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_tokennorm import SupervisedTokens
from lightning_tokennorm.counting import check_count, to_host
from lightning_tokennorm.window import RankReport, WindowPlan

X = -100


def labels(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("rows", "shift", "expected"),
    [
        ([[1, 2, 3, 4]], 1, 3),  # position 0 is never predicted
        ([[1, 2, 3, 4]], 0, 4),
        ([[1, X, X, 4], [X, 2, 3, X]], 1, 3),
        ([[1], [2]], 1, 0),  # rows of width one have nothing to predict
        ([[1, X, X]], 1, 0),  # the only live label is at position 0
        ([[X, X], [X, X]], 1, 0),
        ([[1, 2, 3]], 5, 0),  # a shift beyond the row
        # packed documents of lengths 4, 3, 2, each start masked: 3 + 2 + 1 are predicted, nothing is subtracted again
        ([[X, 1, 1, 1, X, 1, 1, X, 1]], 1, 6),
        ([[1, 1, 1, 1, 1, 1, 1, 1, 1]], 1, 8),  # the same row unmasked
        # two packed rows, documents 4 + 3 and 5 + 2: (3 + 2) + (4 + 1)
        ([[X, 1, 1, 1, X, 1, 1], [X, 1, 1, 1, 1, X, 1]], 1, 10),
    ],
)
def test_live_labels_after_the_shift(rows: list[list[int]], shift: int, expected: int) -> None:
    assert SupervisedTokens(shift=shift)({"labels": labels(*rows)}) == expected


def test_labels_decide_and_not_the_attention_mask() -> None:
    # 10 positions are attended to, 4 are supervised; a live label on a padded position counts, as it does in the loss
    batch = {
        "attention_mask": torch.ones(1, 10),
        "labels": labels([X, X, X, X, X, X, 1, 2, 3, 4]),
    }
    assert SupervisedTokens()(batch) == 4
    batch["attention_mask"] = torch.zeros(1, 10)
    assert SupervisedTokens()(batch) == 4


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize(("shift", "expected"), [(0, 6), (1, 4), (2, 2), (5, 0)])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_labels_lose_the_start_of_each_row(layout: torch.layout, shift: int, expected: int) -> None:
    # live are 3 + 1 + 0 + 2 = 6; after a shift of 1: 3 + 0 + 0 + 1, of 2: 2 + 0
    rows = [torch.tensor(row, dtype=torch.long) for row in ([X, 2, 3, 4], [5], [], [6, 7, X])]
    batch = {"labels": torch.nested.nested_tensor(rows, layout=layout)}
    assert SupervisedTokens(shift=shift)(batch) == expected
    with pytest.raises(
        TypeError, match=r"a nested tensor of 4 rows and dtype float32 at .*; expected a tensor of integer"
    ):
        SupervisedTokens()({"labels": batch["labels"].float()})


def test_one_label_per_row() -> None:
    assert SupervisedTokens(shift=0)({"labels": torch.tensor([3, 1, X])}) == 2


@dataclass
class Holder:
    input_ids: Tensor
    labels: Tensor


def test_where_labels_are_found() -> None:
    target = labels([1, 2, 3])
    assert SupervisedTokens()(UserDict(labels=target)) == 2  # what BatchEncoding is
    assert SupervisedTokens()(Holder(target, target)) == 2
    assert SupervisedTokens(labels=1)((None, target)) == 2
    assert SupervisedTokens(labels=-1)([None, target]) == 2
    assert SupervisedTokens(labels="targets", ignore_index=2)({"targets": target}) == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int64])
def test_integer_types(dtype: torch.dtype) -> None:
    assert SupervisedTokens()({"labels": labels([1, X, 3]).to(dtype)}) == 1


def test_on_a_device_the_count_stays_there() -> None:
    # A meta tensor has no value: whatever waits for one fails.
    count = SupervisedTokens()({"labels": torch.zeros(2, 4, dtype=torch.long, device="meta")})
    assert isinstance(count, Tensor)
    assert (count.device.type, count.shape, count.dtype) == ("meta", (), torch.int64)


@pytest.mark.parametrize(
    ("counter", "batch", "parts"),
    [
        (
            SupervisedTokens(),
            {"ids": torch.zeros(2, 3)},
            ["`labels='labels'`", "'ids': a tensor", "[2, 3]"],
        ),
        (SupervisedTokens(labels=2), (torch.zeros(1), "text"), ["`labels=2`", "0: a tensor", "1: 'text' (str)"]),
        (
            SupervisedTokens("target"),
            Holder(torch.ones(1), torch.ones(2)),
            ["a Holder", "'labels': a tensor of shape [2]"],
        ),
        (SupervisedTokens(), None, ["None (NoneType)"]),
        (SupervisedTokens(labels=0), {"labels": 1}, ["'labels': 1 (int)"]),
        (SupervisedTokens(), torch.zeros(3), ["a tensor of shape [3]"]),
        (SupervisedTokens(), {"labels": torch.zeros(4, dtype=torch.long)}, ["at least two dimensions", "shift=0"]),
    ],
)
def test_missing_labels_list_what_the_batch_holds(counter: Any, batch: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="SupervisedTokens") as raised:
        counter(batch)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize("unusable", [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), "abc", None, [[1, 2]]])
def test_unusable_labels(unusable: Any) -> None:
    with pytest.raises(TypeError, match="expected a tensor of integer labels"):
        SupervisedTokens()({"labels": unusable})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"labels": 1.5}, TypeError),
        ({"labels": True}, TypeError),
        ({"shift": -1}, ValueError),
        ({"shift": 1.0}, TypeError),
        ({"shift": None}, TypeError),
        ({"shift": "atuo"}, ValueError),
        ({"ignore_index": "auto"}, TypeError),
        ({"ignore_index": None}, TypeError),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="SupervisedTokens"):
        SupervisedTokens(**arguments)


def test_counts_of_users() -> None:
    counts = [3, 2.5, torch.tensor(4), torch.tensor(0.5)]
    assert to_host([check_count(count) for count in counts]) == (3, 2.5, 4, 0.5)
    assert [type(count) for count in to_host([check_count(count) for count in counts])] == [int, float, int, float]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.float64(2.5), 2.5),
        (np.float32(2.5), 2.5),
        (np.float16(2.5), 2.5),
        (np.longdouble(2.5), 2.5),
        (np.array(3), 3),
        (np.array(2.5), 2.5),  # `__index__` of an array would cut this to 2
        (Fraction(5, 2), 2.5),
    ],
    ids=lambda value: f"{type(value).__name__} {value}",
)
def test_counts_that_are_no_python_numbers(count: Any, expected: int | float) -> None:
    checked = check_count(count)
    assert (checked, type(checked)) == (expected, type(expected))


@pytest.mark.parametrize(
    "value", [np.bool_(True), np.array([3]), np.array([1, 2]), np.str_("3"), np.complex64(1), np.datetime64("2020")]
)
def test_numpy_values_that_are_no_counts(value: Any) -> None:
    with pytest.raises(TypeError, match="`count_tokens` returned"):
        check_count(value)


@pytest.mark.parametrize("value", [1e-310, 5e-324, 1e-31, torch.tensor(1e-40)])
def test_counts_too_small_to_divide_by(value: Any) -> None:
    with pytest.raises(ValueError, match=r"expected 0 or a count from 2\*\*-100 .* upwards"):
        to_host([1, check_count(value)])
    assert to_host([0.0, 2.0**-100]) == (0.0, 2.0**-100)
    # what is divided by the smallest one still fits into float32
    plan = WindowPlan.agreed([RankReport(2.0**-100, 1, 64)] * 1024, (2.0**-100,))
    assert torch.tensor(plan.factor(0, "sum", 64), dtype=torch.float32).isfinite()


@pytest.mark.parametrize("value", [None, "3", torch.zeros(2), True, torch.tensor(True), {"a": 1}])
def test_counts_of_a_wrong_type(value: Any) -> None:
    with pytest.raises(TypeError, match="`count_tokens` returned"):
        check_count(value)


def test_counts_of_several_heads_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"counts of several heads.*expected one number"):
        check_count({"a": 8, "b": 5})


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 2**63])
def test_counts_of_a_wrong_value(value: Any) -> None:
    with pytest.raises(ValueError, match="`count_tokens` returned"):
        to_host([1, value])


def test_large_counts_are_exact() -> None:
    assert sum(to_host([2**30] * 4)) == 4294967296
    assert to_host([2**62 + 1]) == (2**62 + 1,)
    with pytest.raises(ValueError, match="in all for one window"):
        to_host([2**62, 2**62])
