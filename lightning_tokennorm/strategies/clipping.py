"""Clipping by the norm of all gradients, where they lie on several device meshes: torch raises there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def clip_over_meshes(parameters: Sequence[Tensor], max_norm: float) -> bool:
    """Clip by the norm over parameters on several meshes, as some are split over ranks that others are copies on.

    Args:
        parameters: The parameters; all ranks call this with theirs.
        max_norm: The largest norm that is left as it is.

    Returns:
        Whether that was done; not where all are on one mesh, which torch can do, or torch is older than 2.6.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            by_mesh.setdefault(getattr(each, "device_mesh", None), []).append(each)
    if len(by_mesh) < 2 or not hasattr(torch.nn.utils, "get_total_norm"):
        return False
    norms = [torch.nn.utils.get_total_norm([each.grad for each in group]) for group in by_mesh.values()]  # type: ignore[misc]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return True
