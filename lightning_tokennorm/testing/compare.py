"""Compares the updates that ranks made with those of one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_tokennorm.testing.module import as_real, listed
from lightning_tokennorm.testing.watch import Seen

_TOLERANCES = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-6)}
_TOLERANCES |= {torch.complex128: _TOLERANCES[torch.float64], torch.complex64: _TOLERANCES[torch.float32]}
"""Relative and absolute tolerance by the type of the parameters; both far below what any known mistake leaves."""
_LOW_PRECISION = (5e-2, 1e-3)

DIFFER = "the parameters differ between ranks"
"""What is wrong where the ranks do not even make the same update."""


def tolerances(dtypes: Iterable[torch.dtype]) -> tuple[float, float]:
    """Relative and absolute tolerance for parameters of these types: those of the coarsest."""
    found = [_TOLERANCES.get(dtype, _LOW_PRECISION) for dtype in dtypes]
    return max(relative for relative, _ in found), max(absolute for _, absolute in found)


@dataclass(frozen=True)
class Comparison:
    """How far the updates are apart."""

    max_abs: float
    """Greatest absolute error of a gradient or a parameter, over all updates."""
    rel_l2: float
    """Greatest relative L2 error of the gradient of one parameter, over all updates."""
    wrong: tuple[int, str] | None
    """The first update that is off, and what is worst about it."""


def compare(ranks: Sequence[Seen], reference: Seen, rtol: float, atol: float) -> Comparison:
    """Compare the updates of all ranks with the reference.

    Args:
        ranks: What each rank saw.
        reference: What one process on the merged windows saw.
        rtol: Relative tolerance of a parameter's gradient, in the L2 norm.
        atol: Absolute tolerance, added to it.
    """
    max_abs = rel_l2 = 0.0
    wrong: tuple[int, str] | None = None
    observed = ranks[0]
    if len({seen.start_digest for seen in ranks}) > 1:
        return _apart(0, f"{DIFFER} before it")
    if len(observed.gradients) != len(reference.gradients):
        return _apart(0, f"{len(observed.gradients)} updates instead of {len(reference.gradients)}")
    for update, expected in enumerate(reference.gradients):
        if differ := expected.keys() ^ observed.gradients[update].keys():
            return _apart(update, f"the optimizer holds other parameters than in one process: {listed(sorted(differ))}")
        worst, worst_text = 0.0, ""
        for name, gradient in expected.items():
            gradient = as_real(gradient)
            error = as_real(observed.gradients[update][name]) - gradient
            norm, size = error.norm().item(), gradient.norm().item()
            moved = as_real(observed.parameters[update][name]) - as_real(reference.parameters[update][name])
            after = _greatest(moved)
            max_abs = _worse(max_abs, _greatest(error), after)
            # how many times the tolerance: NaN is worse than anything
            excess = _worse(
                _ratio(norm, rtol * size + atol * gradient.numel() ** 0.5),
                _ratio(after, rtol * size + atol + (update + 1) * _rounding(reference.parameters[update][name])),
            )
            if size > atol:
                rel_l2 = _worse(rel_l2, norm / size)
            if excess > worst or excess != excess:
                worst = excess
                worst_text = f"worst in {name!r}: relative L2 error {norm / size if size else norm:.2e}"
        if len({seen.digests[update] for seen in ranks}) > 1:
            worst, worst_text = float("inf"), DIFFER
        if wrong is None and not worst <= 1:
            wrong = (update, worst_text)
    return Comparison(max_abs, rel_l2, wrong)


def _apart(update: int, text: str) -> Comparison:
    return Comparison(float("inf"), float("inf"), (update, text))


def _ratio(error: float, allowed: float) -> float:
    if error == 0:
        return 0.0
    return error / allowed if allowed else float("inf")


def _rounding(parameter: Tensor) -> float:
    """By how much one step may be rounded differently: what low precision is about."""
    return torch.finfo(parameter.dtype).eps * _greatest(parameter.detach())


def _greatest(error: Tensor) -> float:
    return error.abs().max().item() if error.numel() else 0.0


def _worse(*values: float) -> float:
    return float("nan") if any(value != value for value in values) else max(values)
