"""What cannot work, refused with the reason and the remedy before it goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lightning_tokennorm import _compat
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.strategies.comm_hooks import group_of, is_torch_hook


def refuse_module(module: pl.LightningModule, strategy: str) -> None:
    """Refuse a module that fetches its own batches.

    Args:
        module: The module.
        strategy: The strategy's name, for error texts.

    Raises:
        MisconfigurationException: It does.
    """
    if _compat.takes_dataloader_iter(module):
        raise MisconfigurationException(
            f"`{strategy}` counts the tokens of a window before its first micro-batch, but"
            f" `{type(module).__name__}.training_step(dataloader_iter)` fetches its batches itself. Take"
            " `training_step(self, batch, batch_idx)`."
        )


def refuse_hook_over_another_group(hook: Any, state: Any, group: dist.ProcessGroup | None) -> None:
    """Refuse one of torch's communication hooks that reduces over other ranks than DDP's.

    Raises:
        MisconfigurationException: It does.
    """
    if is_torch_hook(hook) and group_of(state) is not group:
        raise MisconfigurationException(
            "`ddp_comm_hook` reduces over another process group than DDP (`ddp_comm_state` names it, or means the"
            " whole world when it is None). Give the state the group that you give as `process_group`."
        )


def refuse_changed_ddp(ddp: Any, hook: Any) -> None:
    """Refuse what was done to the DDP module behind the strategy's back.

    Args:
        ddp: The `DistributedDataParallel` module.
        hook: The communication hook that the strategy was given, which is known.

    Raises:
        MisconfigurationException: A hook was registered on it, or it is in its ``join``.
    """
    if hook is None and getattr(ddp, "_comm_hooks", None):
        raise MisconfigurationException(
            "A communication hook was registered on the DDP module itself, and what it does to the scale is not"
            " known. Pass it as `TokenNormDDP(ddp_comm_hook=..., ddp_hook_reduces='mean' or 'sum')`."
        )
    if getattr(getattr(ddp, "_join_config", None), "enable", False):
        raise MisconfigurationException(
            "Training runs inside `DistributedDataParallel.join()`, which lets ranks go on alone and does not work"
            " with the `no_sync` of gradient accumulation. Leave it out: ranks of unequal length are padded here."
        )


def refuse_output_without_gradient(output: STEP_OUTPUT, *, rank: int, batch_idx: int) -> None:
    """Refuse what a training step returned where no backward can be run of it.

    What is no loss at all, a number or a dict without the key, is left to Lightning, which says what it takes.

    Raises:
        TokenNormError: There is nothing, or the loss has no graph.
    """
    loss = output.get("loss", 0.0) if isinstance(output, Mapping) else output
    if loss is not None and not (isinstance(loss, Tensor) and not loss.requires_grad):
        return
    got = f"{output!r}" if loss is None else f"a loss without a graph ({loss!r})"
    raise TokenNormError(
        f"`training_step` returned {got} on rank {rank} for batch {batch_idx}; expected a loss to run the backward of,"
        " or a dict with the key 'loss': every rank runs one for every micro-batch. To leave a batch out, give it no"
        " supervised token (labels of -100): it then weighs nothing."
    )
