"""What tells copies of a batch from other batches."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_tokennorm.fingerprint import fingerprint
from lightning_tokennorm.window import RankReport, differing_copies


@dataclass
class Batch:
    ids: torch.Tensor


def make(kind: str, value: int, length: int) -> Any:
    ids = torch.arange(length)
    ids[length // 2] = value
    return {
        "tensor": ids,
        "dict": {"labels": torch.zeros(2), "ids": ids},
        "Mapping": UserDict(ids=ids),
        "list": [None, "text", (ids,)],
        "dataclass": Batch(ids),
        "NumPy": ids.numpy(),
        "not contiguous": torch.stack([ids, ids]).T,
        "bfloat16": ids.bfloat16(),
        "bool": ids == value,
        "shape": torch.zeros(value + 1),
    }[kind]


KINDS = ["tensor", "dict", "Mapping", "list", "dataclass", "NumPy", "bfloat16", "bool", "shape"]


@pytest.mark.parametrize("kind", [*KINDS, "not contiguous"])
def test_same_values_same_number(kind: str) -> None:
    assert fingerprint(make(kind, 3, 40)) == fingerprint(make(kind, 3, 40))
    assert fingerprint(make(kind, 3, 40)) != fingerprint(make(kind, 7, 40))


def test_large_tensors_are_sampled_evenly() -> None:
    # 256 of a million: the first of each 3906
    one, other = torch.zeros(10**6), torch.zeros(10**6)
    other[3906 * 17] = 1
    assert fingerprint(one) != fingerprint(other)


def test_order_of_batches_counts_and_other_things_do_not() -> None:
    first, second = torch.zeros(2), torch.ones(2)
    assert fingerprint(second, fingerprint(first)) != fingerprint(first, fingerprint(second))
    assert fingerprint({"name": "a", "ids": first}) == fingerprint({"name": "b", "ids": first})
    assert fingerprint([np.array([object()])]) == fingerprint([np.array([object()])])
    assert fingerprint(None) != fingerprint(first)
    assert fingerprint(torch.empty(0)) == fingerprint(torch.empty(0))


def test_copies_have_to_agree() -> None:
    # ranks 0, 1 are one replica, 2, 3 the other
    copies = ((0, 1), (2, 3))
    reports = [RankReport(8, 3, 3), RankReport(8, 3, 3), RankReport(5, 3, 3), RankReport(5, 3, 3)]
    assert differing_copies(reports, copies) is None
    assert differing_copies(reports, ((0,), (1,), (2,), (3,))) is None
    reports[3] = RankReport(5, 2, 3)
    problem = differing_copies(reports, copies)
    assert problem is not None
    assert "ranks 2, 3 are one model replica" in problem
    assert "rank 2 has 5 tokens in 3 micro-batches, rank 3 has 5 tokens in 2 micro-batches. Deal" in problem
    reports[3] = RankReport(5, 3, 3, fingerprint=1)
    problem = differing_copies(reports, copies)
    assert problem is not None
    assert "in which other values stand" in problem
    reports[3] = RankReport(5, 3, 3, borrows=True)
    assert differing_copies(reports, copies) is not None
