"""What a DDP communication hook does to the scale: whether it leaves the ranks' mean or their sum.

DDP itself averages over its ranks, and so do torch's own hooks; what another one does cannot be seen from outside, and
a wrong guess would make every update ``W`` times too large or too small. So it has to be declared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

HookReduces: TypeAlias = Literal["mean", "sum"]

_AVERAGING_HOOKS: tuple[Callable[..., Any], ...] = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
    powerSGD_hook.powerSGD_hook,
    powerSGD_hook.batched_powerSGD_hook,
)
_KEEPING_WRAPPERS: tuple[Callable[..., Any], ...] = (
    default_hooks.fp16_compress_wrapper,
    default_hooks.bf16_compress_wrapper,
)


def what_hook_leaves(
    hook: Callable[..., Any] | None,
    wrapper: Callable[..., Any] | None,
    state: object,
    declared: HookReduces | None,
) -> HookReduces:
    """Whether gradients are the ranks' mean or their sum once a hook has run.

    Args:
        hook: The hook of DDP's gradient buckets; ``None`` for DDP's own reduction.
        wrapper: What the hook is wrapped into, if anything.
        state: The hook's state.
        declared: What the user says of a hook that is not one of torch's averaging ones.

    Returns:
        ``"mean"`` or ``"sum"``.

    Raises:
        ValueError: The hook does not synchronise all ranks in every update, is not known and not declared, or is
            declared to do what it does not do.
    """
    if hook is post_localSGD_hook or isinstance(state, PostLocalSGDState):
        raise ValueError(
            "`ddp_comm_hook=post_localSGD_hook` got; expected a hook that reduces over all ranks in every update:"
            " with local SGD each rank steps on its own tokens, so no update has one weight per token. Use another"
            " hook, or `DDPStrategy`."
        )
    if hook is None:
        if wrapper is not None or declared is not None:
            raise ValueError(
                f"`ddp_hook_reduces={declared!r}` and `ddp_comm_wrapper={_name(wrapper)}` got without a"
                " `ddp_comm_hook`; expected both only with one. DDP's own reduction averages."
            )
        return "mean"
    known = hook in _AVERAGING_HOOKS and (wrapper is None or wrapper in _KEEPING_WRAPPERS)
    if known and declared == "sum":
        raise ValueError(
            f"`ddp_hook_reduces='sum'` got, but torch's `{_name(hook)}` averages; expected 'mean' or nothing."
        )
    if not known and declared is None:
        parts = _name(hook) if wrapper is None else f"{_name(wrapper)}({_name(hook)})"
        raise ValueError(
            f"`ddp_comm_hook={parts}` is not one of torch's averaging hooks, and what it does to the scale cannot be"
            " seen from outside. Say whether it leaves the ranks' mean or their sum: `ddp_hook_reduces='mean'` or"
            " `ddp_hook_reduces='sum'`."
        )
    return declared or "mean"


def group_of(state: object) -> dist.ProcessGroup | None:
    """The group over which one of torch's hooks reduces, from its state: for ``None`` they all take the world."""
    group = state if isinstance(state, dist.ProcessGroup) else getattr(state, "process_group", None)
    return group if group is not None else dist.group.WORLD


def is_torch_hook(hook: Callable[..., Any] | None) -> bool:
    """Whether the hook is one of torch's averaging ones, whose state names their group."""
    return hook in _AVERAGING_HOOKS


def _name(function: Callable[..., Any] | None) -> str:
    return getattr(function, "__name__", repr(function))
