"""`token_weight_report`: a token's weight under plain DDP, relative to 1/N, worked out by hand."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_tokennorm import SupervisedTokens, token_weight_report
from lightning_tokennorm.weights import TokenWeightReport
from tests.helpers.scalar_rig import R1, Batches, deal

# R1 as one process reads it, rank after rank: K = 3, W = 2, N = 24, so a token of n weighs 24 / (6 n) = 4 / n.
COUNTS = [3, 2, 1, 10, 4, 4]


def report(counts: Iterable[Any], **options: Any) -> TokenWeightReport:
    return token_weight_report(counts, **{"accumulate": 3, "world_size": 2, "count_tokens": lambda n: n, **options})


def by_hand(counts: list[float], divided_by: int, num_tokens: float) -> float:
    """1 over the mean of the squared weights, token by token: only for whole numbers of tokens."""
    squares = [(num_tokens / (divided_by * n)) ** 2 for n in counts for _ in range(int(n))]
    return len(squares) / sum(squares)


def test_a_full_window() -> None:
    of_r1 = report(COUNTS)
    assert (of_r1.num_tokens, of_r1.micro_batches, of_r1.empty_micro_batches) == (24, 6, 0)
    assert of_r1.lightest == pytest.approx(0.4, abs=1e-15)  # of the ten
    assert of_r1.heaviest == 4.0  # the one that is alone
    assert of_r1.share_off_by_two == pytest.approx(11 / 24, abs=1e-15)  # twice 1/N (n = 2) is not more than twice
    # 4^2 * (3 / 9 + 2 / 4 + 1 + 10 / 100 + 4 / 16 + 4 / 16) / 24 = 16 * 73 / 30 / 24 = 73 / 45
    assert of_r1.effective_fraction == pytest.approx(45 / 73, abs=1e-15)
    assert of_r1.effective_fraction == pytest.approx(by_hand(COUNTS, 6, 24), abs=1e-12)
    assert of_r1.long_answer_shrinkage == pytest.approx(0.6, abs=1e-15)  # only ten is more than four
    (window,) = of_r1.windows
    assert (window.lightest, window.heaviest, window.num_tokens) == (of_r1.lightest, of_r1.heaviest, 24)
    assert window.total_weight == 1.0


def test_a_short_window_is_divided_by_the_full_k() -> None:
    # tail: 3, 2, 1, 10 are two rounds of three: N = 16, relative weight 16 / (3 * 2 * n) = 8 / (3 n)
    both = report([*COUNTS, 3, 2, 1, 10])
    tail = both.windows[1]
    assert tail.tokens == (3, 2, 1, 10)
    assert tail.lightest == pytest.approx(8 / 30, abs=1e-15)
    assert tail.heaviest == pytest.approx(8 / 3, abs=1e-15)
    assert tail.share_off_by_two == 11 / 16  # the one token at 2.67, the ten at 0.27
    # light are the ten (8 / 30) and the three (8 / 9): their mean weight is (10 * 8 / 30 + 3 * 8 / 9) / 13 = 16 / 39
    assert tail.long_answer_shrinkage == pytest.approx(23 / 39, abs=1e-15)
    assert tail.total_weight == pytest.approx(4 / 6, abs=1e-15)
    # over both: the weights of either window relative to its own N
    assert (both.num_tokens, both.micro_batches, len(both.windows)) == (40, 10, 2)
    assert both.lightest == tail.lightest
    assert both.heaviest == 4.0
    assert both.share_off_by_two == 22 / 40
    squares = 24 * 73 / 45 + sum(64 / 9 / n for n in (3, 2, 1, 10))
    assert both.effective_fraction == pytest.approx(40 / squares, abs=1e-15)


def test_equal_counts_are_not_affected() -> None:
    equal = report([7] * 12)
    assert (equal.lightest, equal.heaviest, equal.share_off_by_two) == (1.0, 1.0, 0.0)
    assert (equal.effective_fraction, equal.long_answer_shrinkage) == (1.0, 0.0)


def test_the_last_round_may_not_reach_all_ranks() -> None:
    # K = 2, W = 3: rounds (1, 2, 3) and (6); rank 0 has two micro-batches, ranks 1 and 2 one each. N = 12, 12 / (6 n).
    uneven = report([1, 2, 3, 6], accumulate=2, world_size=3)
    (window,) = uneven.windows
    assert (window.heaviest, window.lightest) == (2.0, pytest.approx(1 / 3, abs=1e-15))
    assert window.empty_micro_batches == 0  # a micro-batch that is not there is none
    assert window.total_weight == pytest.approx(4 / 6, abs=1e-15)


def test_micro_batches_and_windows_without_tokens() -> None:
    # K = 2, W = 1: (4, 0), (0, 0), (0, None): a token weighs 4 / (2 * 4) = 1/2 in the first, and nothing elsewhere
    some = report([4, 0, 0, 0, 0, None], accumulate=2, world_size=1)
    assert (some.empty_micro_batches, some.num_tokens) == (5, 4)
    assert (some.lightest, some.heaviest, some.share_off_by_two) == (0.5, 0.5, 0.0)  # exactly half is not less
    assert some.effective_fraction == 4.0  # 1 / (1/2)^2: with missing weight it is no size of a sample
    assert [window.num_tokens for window in some.windows] == [4, 0, 0]
    assert all(math.isnan(each) for each in (some.windows[1].lightest, some.windows[1].effective_fraction))
    assert "nan" not in str(some)


def test_float_counts_are_sums_of_weights() -> None:
    # K = 2, W = 1: N = 2.0, relative weights 2 / (2 * 0.5) = 2 and 2 / (2 * 1.5) = 2/3
    weighted = report([0.5, 1.5], accumulate=2, world_size=1)
    assert (weighted.num_tokens, weighted.heaviest) == (2.0, 2.0)
    assert weighted.lightest == pytest.approx(2 / 3, abs=1e-15)
    # mean square (0.5 * 4 + 1.5 * 4 / 9) / 2 = 4 / 3
    assert weighted.effective_fraction == pytest.approx(0.75, abs=1e-15)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: Batches(deal(R1, 1)[0]).batches,
    "generator": lambda: iter(Batches(deal(R1, 1)[0])),
    "DataLoader": lambda: DataLoader(Batches(deal(R1, 1)[0]), batch_size=None),
    "workers": lambda: DataLoader(Batches(deal(R1, 1)[0]), batch_size=None, num_workers=1),
    "data set without __iter__": lambda: _Indexed(),
}


class _Indexed:
    def __getitem__(self, index: int) -> Any:
        return Batches(deal(R1, 1)[0]).batches[index]


@pytest.mark.parametrize("kind", list(LOADERS))
def test_labels_of_any_loader(kind: str) -> None:
    # the default counter drops the first label, which is live in every row of the rig
    of_r1 = token_weight_report(LOADERS[kind](), accumulate=3, world_size=2)
    assert of_r1.windows[0].tokens == tuple(COUNTS)
    unshifted = token_weight_report(LOADERS[kind](), accumulate=3, count_tokens=SupervisedTokens(shift=0))
    assert [window.tokens for window in unshifted.windows] == [(4, 3, 2), (11, 5, 5)]


def test_a_stream_is_read_for_as_many_windows_and_not_further() -> None:
    read = []

    def endless() -> Iterator[int]:
        while True:
            read.append(1)
            yield 5

    assert len(report(endless(), windows=3).windows) == 3
    assert len(read) == 3 * 6
    assert len(report([5] * 6, windows=3).windows) == 1  # fewer than asked for


def test_counts_on_a_device_and_numpy() -> None:
    assert report([torch.tensor(3), torch.tensor(1.5)]).windows[0].tokens == (3, 1.5)
    assert report([torch.tensor(3).numpy()]).windows[0].tokens == (3,)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"accumulate": 0}, ValueError, r"accumulate=\.\.\.\)` got 0; expected a whole number from 1 upwards\."),
        ({"accumulate": 2.0}, TypeError, r"accumulate=\.\.\.\)` got 2\.0; expected a whole number"),
        ({"accumulate": True}, TypeError, r"accumulate=\.\.\.\)` got True"),
        ({"accumulate": None}, TypeError, r"accumulate=\.\.\.\)` got None"),
        ({"world_size": 0}, ValueError, r"world_size=\.\.\.\)` got 0"),
        ({"windows": 0}, ValueError, r"windows=\.\.\.\)` got 0; expected a whole number from 1 upwards, or None"),
        ({"count_tokens": 3}, TypeError, r"count_tokens=\.\.\.\)` got 3; expected a callable"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        report(COUNTS, **options)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([], r"found no batch in its loader: there is nothing to weigh"),
        ([0, 0.0, None], r"found 3 batches without a single supervised token"),
        ([3, 2, -1], r"could not count batch 2 of its loader: ValueError: `count_tokens` returned -1"),
        ([3, math.nan], r"could not count batch 1 of its loader: ValueError: `count_tokens` returned nan"),
        ([3, "many"], r"could not count batch 1 of its loader: TypeError: .*'many'"),
    ],
)
def test_bad_data(counts: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        report(counts)


def test_a_counter_that_fails_names_the_batch() -> None:
    def fail(batch: dict[str, int]) -> int:
        return batch["tokens"]

    with pytest.raises(ValueError, match=r"could not count batch 1 .*KeyError: 'tokens'") as caught:
        report([{"tokens": 2}, {}], count_tokens=fail)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ValueError, match=r"could not count batch 0 .*found no labels"):
        report([{"values": 1}], count_tokens=None)
    with pytest.raises(TypeError, match=r"got 5 as its loader; expected an iterable"):
        report(5)  # type: ignore[arg-type]


def test_errors_of_the_loader_are_its_own() -> None:
    def breaks() -> Iterator[int]:
        yield 3
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        report(breaks())


def test_printed_it_is_a_table() -> None:
    lines = str(report(COUNTS)).splitlines()
    assert lines[0].endswith("relative to 1/N (K=3, W=2; 1 is right)")
    for row in ("lightest token         0.4", "heaviest token         4", "off by more than 2x    45.8% of tokens"):
        assert f"  {row}" in lines
    assert lines[-1].split() == ["0", "6", "0", "24", "0.4", "4", "45.8%", "61.6%", "-60.0%"]
    assert str(report(COUNTS * 20)).endswith("... and 8 more windows (`report.windows`)")


@pytest.mark.parametrize("counts", [COUNTS, COUNTS * 30, [7] * 12, [1e-20, 1e5], [4, 0, 0, 0, 0, 0, 0]])
def test_plot(counts: list[float], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report(counts).plot(tmp_path / "weights.png")
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"plot` draws with matplotlib.*lightning-tokennorm\[plot\]"):
        report(COUNTS).plot(tmp_path / "weights.png")
