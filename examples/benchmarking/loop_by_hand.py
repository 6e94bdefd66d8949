"""The fit without a trainer: a loop by hand with the same law, under whatever reduces gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from benchmarking.measuring import Probe
from benchmarking.sharding import Wrapped
from benchmarking.workload import IGNORE, Batch, Job


def fit_by_hand(wrap: Callable[[Job], Wrapped], job: Job, probe: Probe) -> None:
    """What the law costs without a trainer around it: the limit.

    It reads ahead as far as it has to and no faster than it trains, sends one number per window and waits for no
    device.
    """
    model, no_sync = wrap(job)
    optimizer = job.new_optimizer(model)
    for number, (num_tokens, window) in enumerate(windows(job.loader(), job.accumulate)):
        total = torch.full((), float(num_tokens), device=job.device)
        dist.all_reduce(total)
        share = total / job.world_size  # whatever reduces divides the ranks' sum by W
        for index, batch in enumerate(window):
            batch = {name: value.to(job.device, non_blocking=True) for name, value in batch.items()}
            if index == 0:
                probe.window_starts()
                if number == job.windows - 1:
                    return
            last = index == job.accumulate - 1
            with nullcontext() if last else no_sync():
                with job.autocast():
                    loss = model(**batch, num_items_in_batch=share)["loss"]
                loss.backward()
        probe.before_step(model)
        optimizer.step()
        optimizer.zero_grad()


def windows(loader: Any, accumulate: int) -> Iterator[tuple[int, Iterator[Batch]]]:
    """Each window's number of supervised tokens and its micro-batches; serving one reads one of the next window."""
    coming = iter(loader)
    ahead = deque(islice(coming, accumulate))

    def serve(size: int) -> Iterator[Batch]:
        for _ in range(size):
            batch = ahead.popleft()
            ahead.extend(islice(coming, 1))
            yield batch

    while ahead:
        yield sum(int((batch["labels"] != IGNORE).sum()) for batch in ahead), serve(len(ahead))
