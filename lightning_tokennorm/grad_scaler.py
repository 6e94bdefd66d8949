"""Mixed precision's loss scale: one scale per window, and gradients that are unscaled before anybody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class ConstantScale:
    """Notices a scale that moves between a window's first and last backward, without reading it.

    Gradients of one window are added up, so they have to be on one scale. The scaler keeps it in a tensor that it
    changes in place; autograd counts such changes on the host, so looking at the count never waits for the device.
    """

    def __init__(self) -> None:
        self._seen: tuple[Tensor, int] | None = None

    def start_window(self, scaler: Any, device: torch.device) -> None:
        """Remember the scale as it is before the window's first backward.

        Args:
            scaler: The ``torch.amp.GradScaler``, or ``None`` without one.
            device: The device of the loss.
        """
        self._seen = None
        if scaler is not None and scaler.is_enabled():
            # The tensor is made when the scaler first scales something. Do that now: a change right after the very
            # first micro-batch would go unseen otherwise.
            scaler.scale(torch.zeros((), device=device))
            self._seen = (scaler._scale, scaler._scale._version)

    def has_moved(self, scaler: Any) -> bool:
        """Whether the scale was set or replaced since the window started."""
        if self._seen is None:
            return False
        tensor, version = self._seen
        return scaler._scale is not tensor or tensor._version != version


@contextmanager
def unscaled_before_step(optimizer: Optimizer) -> Iterator[None]:
    """Let gradients be unscaled before the optimizer's step, also where it could unscale them inside of it.

    A fused optimizer takes the scale along into its kernel, so hooks and clipping before the step would see scaled
    gradients; Lightning therefore refuses to clip for it. With the optimizer's mark taken off, scaler and Lightning
    treat it like any other: unscale, hooks, clip, look for infinities once, and a step that is still the fused one.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        yield
        return
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


@contextmanager
def one_update(scaler: Any) -> Iterator[None]:
    """Let a scaler set its scale anew once in this context, at its end, however often it is asked to.

    Where several optimizers step on one window, what a later one's loss adds has to be on the scale of what is there.

    Args:
        scaler: The ``torch.amp.GradScaler``, or ``None`` without one.
    """
    if scaler is None or not scaler.is_enabled():
        yield
        return
    asked: list[tuple[Any, ...]] = []
    scaler.update = lambda *args: asked.append(args)
    try:
        yield
    finally:
        del scaler.update
    if asked:
        scaler.update(*asked[-1])


@contextmanager
def noting_steps(optimizer: Any, precision: Any) -> Iterator[Callable[[], bool]]:
    """Notice whether a scaler has let the optimizer step: it does not where gradients are not finite.

    Without a scaler nobody holds a step back. No hook of the optimizer's is used, since wrappers of optimizers that
    Lightning takes may have none.

    Args:
        optimizer: Anything with a method ``step``.
        precision: The precision plugin, with a ``scaler`` or without.

    Yields:
        Whether a step was let through, to be called after it.
    """
    scaler = getattr(precision, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        yield lambda: True
        return
    step, own = optimizer.step, vars(optimizer).get("step")
    stepped = False

    def noting(*args: Any, **kwargs: Any) -> Any:
        nonlocal stepped
        stepped = True
        return step(*args, **kwargs)

    optimizer.step = noting
    try:
        yield lambda: stepped
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own
