"""Runs a test body on several real processes: fresh ones for each call, forked from a server that has imported all."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from lightning_tokennorm.testing import ranks

# No rank inherits state from another test, and none spends seconds on imports.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lightning.pytorch", "lightning_tokennorm", "lightning_tokennorm.testing"])

RankError = ranks.RankError


def run_ranks(body: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300) -> list[Any]:
    """Call ``body(rank, world_size, *args)`` on processes: `body` is a function at the top level of a module."""
    return ranks.run_ranks(body, world_size, *args, timeout_s=timeout_s, context=_CONTEXT)
