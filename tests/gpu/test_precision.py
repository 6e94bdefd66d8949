"""The bodies of the mixed-precision tests on a GPU: the same numbers as on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import R00, R1, deal
from tests.trainer import test_precision as on_cpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA's scaler and kernels")

TABLE = deal(R1, 1)  # R1's 24 tokens in six micro-batches of one process


@pytest.mark.parametrize("precision", on_cpu.PRECISIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_true_gradients_before_the_step(precision: str, reduction: str) -> None:
    ((gradients, _),) = run_ranks(on_cpu.fit, 1, precision, TABLE, 6, reduction, False, None, "cuda")
    assert gradients == pytest.approx([1.75], rel=on_cpu.PRECISIONS[precision])
    ((gradients, parameters),) = run_ranks(on_cpu.fit, 1, precision, R00, 2, reduction, False, None, "cuda")
    assert (gradients, parameters) == ([], [1.0])


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("clip", [1.0, None])
def test_fused_equals_unfused(precision: str, kind: str, clip: float | None) -> None:
    ((fused, seen, _),) = run_ranks(on_cpu.fit_fused, 1, precision, kind, True, clip, "cuda")
    ((plain, expected, _),) = run_ranks(on_cpu.fit_fused, 1, precision, kind, False, clip, "cuda")
    assert fused == pytest.approx(plain, rel=1e-5)
    assert seen == expected


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_an_overflow_is_skipped(fused: bool) -> None:
    ((records, parameters, _, clean, scale),) = run_ranks(on_cpu.overflow, 1, fused, 1, "cuda")
    assert [applied for applied, _ in records] == [False, True]
    assert parameters[0] == 1.0
    assert parameters[1] == pytest.approx(clean[0], rel=1e-5)
    assert scale == on_cpu.SCALE / 2
