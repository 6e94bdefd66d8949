"""What the processes of a proof run: fits of a user's module on several ranks, and on one for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_tokennorm.counting import Count, SupervisedTokens, TokenCounter, counter_for
from lightning_tokennorm.testing.causes import Probe, count_on_host, flat, possible_denominators
from lightning_tokennorm.testing.failures import cause_of_failure, describe_missing_tokens
from lightning_tokennorm.testing.hosts import Host
from lightning_tokennorm.testing.module import build
from lightning_tokennorm.testing.ranks import RankError, run_ranks
from lightning_tokennorm.testing.shards import Named
from lightning_tokennorm.testing.splits import MicroBatch, Split, make_batches
from lightning_tokennorm.testing.watch import Facts, Seen, fit


@dataclass(frozen=True)
class Case:
    """What all processes have to know."""

    make_module: Callable[[], pl.LightningModule]
    samples: Sequence[Any]
    collate_fn: Callable[[list[Any]], Any]
    host: Host
    counter: TokenCounter
    loss_reduction: str

    def batches(self, micro_batches: Sequence[MicroBatch]) -> list[Any]:
        """Micro-batches, made anew."""
        return make_batches(micro_batches, self.samples, self.collate_fn, self._clear_labels)

    def _clear_labels(self, batch: Any) -> None:
        assert isinstance(self.counter, SupervisedTokens)
        self.counter.find_labels(batch).fill_(self.counter.ignore_index)

    def merged_batches(self, split: Split) -> list[Any]:
        """One batch per window."""
        return self.batches([MicroBatch(tuple(split.merged(window))) for window in range(len(split.windows))])

    def fit_alone(self, batches: Sequence[Any], **options: Any) -> Seen:
        """Fit the module in one process, with a strategy of Lightning's own."""
        return fit(build(self.make_module), batches, strategy=self.host.in_one_process(), undo_divisor=True, **options)


def run(
    body: Callable[..., Any], world_size: int, case: Case, *args: Any, facts: Facts | None, timeout_s: float = 300
) -> list[Any]:
    """Run ranks; where they fail, say first what that means.

    Args:
        body: One of the functions below.
        world_size: How many processes.
        case: The case.
        args: Further arguments.
        facts: What the module was like in one process; ``None`` if that is not known yet.
        timeout_s: After this it fails.

    Raises:
        RankError: It failed.
    """
    try:
        return run_ranks(body, world_size, case, *args, timeout_s=timeout_s)
    except RankError as error:
        alone = "on a mesh of one rank" if case.host.has_mesh else "without any strategy"
        where = next((f"with {arg}" for arg in args if isinstance(arg, Split)), f"in one process, {alone}")
        cause = cause_of_failure(str(error), facts, case.host)
        likely = f"Likely cause: {cause}\n" if cause else ""
        raise RankError(f"The fit failed {where}, so nothing could be compared.\n{likely}\n{error}") from None


# ---- in the processes


def take_counter(rank: int, world_size: int, case: Case) -> TokenCounter:
    """The counter that fits the module, which `configure_model` may have built only in a fit."""
    module = build(case.make_module)
    with suppress(Exception):  # is told where the fits are run that the proof is about
        fit(module, case.batches([MicroBatch((0,))]), strategy=case.host.in_one_process())
    return counter_for(case.counter, module)


def look_at_labels(rank: int, world_size: int, case: Case) -> tuple[str | None, bool]:
    """Why there is nothing to train on, and whether the samples can tell a model that shifts labels from others."""
    batches = case.batches([MicroBatch((index,)) for index in range(len(case.samples))])
    if not any(count_on_host(case.counter, batch) for batch in batches):
        return describe_missing_tokens(case.counter, batches, case.host), True
    found = [possible_denominators(batch, case.counter, None) for batch in batches]
    return None, any(name.get("shifted") != name.get("unshifted") for name in found) or not any(found)


def build_twice(rank: int, world_size: int, case: Case) -> list[str]:
    """The weights that differ from one module to the next."""
    first, second = build(case.make_module).state_dict(), build(case.make_module).state_dict()
    return [name for name, value in first.items() if isinstance(value, Tensor) and not _alike(value, second[name])]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def fit_twice(rank: int, world_size: int, case: Case) -> tuple[Facts, list[float]]:
    """All samples in one batch, twice from the start: with other random numbers."""
    everything = MicroBatch(tuple(range(len(case.samples))))
    fits = [case.fit_alone([batch], seed=seed) for seed, batch in enumerate(case.batches([everything, everything]))]
    return fits[0].facts, [fits[0].losses[0], fits[1].losses[0]]


def fit_merged(rank: int, world_size: int, case: Case, splits: Sequence[Split]) -> list[tuple[Seen, list[Count]]]:
    """The reference: one process, one batch per window, none of this package's scaling."""
    references = []
    for split in splits:
        batches = case.merged_batches(split)
        num_tokens = [count_on_host(case.counter, batch) for batch in batches]  # before a step can change them
        # a window without tokens is no update
        divide_by = [count if case.loss_reduction == "sum" else float(count > 0) for count in num_tokens]
        references.append((case.fit_alone(batches, divide_by=divide_by), num_tokens))
    return references


def fit_split(rank: int, world_size: int, case: Case, split: Split, start: Named) -> Seen:
    """What the proof is about: the micro-batches of this rank, under the strategy."""
    return fit(
        build(case.make_module),
        case.batches(split.ranks[split.data_of[rank]]),
        strategy=case.host.on_cpu(world_size),
        world_size=world_size,
        accumulate=split.accumulate,
        # what is drawn on a mesh depends on its size
        start_from=start if case.host.has_mesh else None,
    )


def probe(rank: int, world_size: int, case: Case, split: Split, window: int, parameters: Named | None) -> list[Probe]:
    """Each micro-batch of a window that keeps its labels, and last the merged window, alone from given parameters."""
    parts = [m for by_rank in split.windows[window] for m in by_rank if m.supervised]
    parts.append(MicroBatch(tuple(split.merged(window))))
    before, batches = case.batches(parts), case.batches(parts)
    seen = case.fit_alone(batches, learning_rate=0.0, start_from=parameters)
    return [
        Probe(
            flat(gradient),
            count_on_host(case.counter, untouched),
            count_on_host(case.counter, used),
            possible_denominators(untouched, case.counter, returned),
        )
        for gradient, untouched, used, returned in zip(seen.gradients, before, batches, seen.num_tokens, strict=True)
    ]
