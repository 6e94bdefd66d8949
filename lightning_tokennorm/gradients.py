"""What a micro-batch without supervised tokens adds to the gradients: exactly nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def zero_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let every backward in this context add zeros to the parameters' gradients, whatever flows through the graph.

    The mean over no tokens is NaN, and so may be every gradient behind it: 0 * NaN is NaN, so scaling does not remove
    it. A hook on the leaf replaces what arrives just before it is accumulated. The backward itself still runs, so
    DDP sees each parameter become ready as in any other micro-batch, and no rank waits for this one.

    Args:
        parameters: The parameters to protect; those without ``requires_grad`` are left alone.
    """
    handles = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
