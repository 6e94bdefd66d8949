"""`token_windows`: the law for training loops that are written by hand, with or without Fabric or Accelerate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_tokennorm import _compat
from lightning_tokennorm.accounting import WindowAccounting
from lightning_tokennorm.counting import Count, SupervisedTokens, TokenCounter, counter_for
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.gradients import zero_gradients
from lightning_tokennorm.lookahead import LookaheadFetcher
from lightning_tokennorm.reduction import Reduction, reduction_of
from lightning_tokennorm.strategies import failures
from lightning_tokennorm.strategies.comm_hooks import what_hook_leaves
from lightning_tokennorm.strategies.options import check_choice
from lightning_tokennorm.syncing import Syncing, syncing_of
from lightning_tokennorm.window import LossReduction, UpdateRecord, WindowPlan


def token_windows(
    loader: Iterable[Any],
    *,
    accumulate: int,
    model: nn.Module | None = None,
    group: dist.ProcessGroup | None = None,
    divided_by: float = 1,
    count_tokens: TokenCounter | None = None,
    loss_reduction: LossReduction = "mean",
    on_empty: Literal["skip", "error"] = "skip",
    uneven: Literal["pad", "error"] = "pad",
) -> Iterator[TokenWindow]:
    """One pass over a loader in accumulation windows, each an optimizer update of ``(sum of all tokens' losses) / N``.

    Every rank goes through the same windows, each with the same number of micro-batches. The loader is read ahead by
    one window at most. Leave the loop on all ranks at the same point, or on none: a rank that leaves alone is an error
    on the others.

    Args:
        loader: This rank's batches: any iterable. They are yielded as they are, on the device where they are.
        accumulate: ``K``: micro-batches per window; the last window can be shorter.
        model: The model as it is trained: what DDP, FSDP, `fully_shard`, `fabric.setup` or `accelerator.prepare` has
            made of it. It says over which ranks gradients are averaged.
        group: The ranks, where the model does not say it: whoever trains averages the gradients over these after each
            window.
        divided_by: By what the backward that is used divides the loss: 1 for ``loss.backward`` and ``fabric.backward``,
            Accelerate's ``gradient_accumulation_steps`` for ``accelerator.backward``.
        count_tokens: Counts the supervised tokens of a batch as the loader yields it, of each loss where there are
            several (`Heads`). Default: `SupervisedTokens()`.
        loss_reduction: What the loss is: the ``"mean"`` over the micro-batch's supervised tokens, or their ``"sum"``.
        on_empty: What happens to a window in which no rank has a token: with ``"skip"`` no rank gets it, so there is
            nothing to step on, and a warning is given at the first; 50 such windows at the start are an error. With
            ``"error"`` all ranks raise.
        uneven: What happens where ranks have different numbers of batches: with ``"pad"`` a rank whose data has ended
            gets copies of a batch, which add nothing; with ``"error"`` all ranks raise.

    Returns:
        An iterator over the windows.

    Raises:
        TypeError: ``count_tokens`` is not callable, or a number is none.
        ValueError: Another option has a value that is not listed above, or the model does not say how its gradients
            are averaged.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> data = [{"x": torch.ones(n, 1), "labels": torch.ones(1, n, dtype=torch.long)} for n in (3, 1)]
        >>> for window in token_windows(data, accumulate=2, model=model, count_tokens=lambda batch: len(batch["x"])):
        ...     for batch in window:
        ...         with window.no_sync():
        ...             window.backward(model(batch["x"]).mean())
        ...     print(window.num_tokens, model.weight.grad.item())  # every x is 1, and so is its gradient
        4 1.0
    """
    _check_number("accumulate", accumulate, int)
    _check_number("divided_by", divided_by, (int, float))
    for option, value, choices in (
        ("loss_reduction", loss_reduction, ("mean", "sum")),
        ("on_empty", on_empty, ("skip", "error")),
        ("uneven", uneven, ("pad", "error")),
    ):
        check_choice("token_windows", option, value, choices)
    if count_tokens is not None and not callable(count_tokens):
        raise TypeError(
            f"`token_windows(count_tokens=...)` got {count_tokens!r}; expected a callable that takes a batch and"
            " returns its number of supervised tokens."
        )
    trained = _as_trained(model)
    reduction = _reduction_of(trained, group)
    accounting = WindowAccounting(
        WindowExchange.spanning(reduction.group),
        counter_for(SupervisedTokens() if count_tokens is None else count_tokens, trained),
        loss_reduction=loss_reduction,
        on_empty=on_empty,
        uneven=uneven,
        ranks_divided_by=reduction.divided_by,
        copies=reduction.copies,
    )
    return _windows(_Loop(loader, accumulate, divided_by, accounting, syncing_of(trained)))


class TokenWindow:
    """The micro-batches of one optimizer update; iterate it once for its batches.

    Each batch needs a `backward`; after that of the last one the gradients are those of the update.

    Args:
        loop: The pass over the loader.
        plan: What all ranks agree on.
        first: The first batch.
    """

    def __init__(self, loop: _Loop, plan: WindowPlan, first: Any) -> None:
        self._loop = loop
        self._plan = plan
        self._first = [first]
        self._make_record: Callable[[], UpdateRecord] | None = None
        self._record: UpdateRecord | None = None

    @property
    def num_tokens(self) -> Count:
        """``N``: the supervised tokens of all micro-batches on all ranks; never 0."""
        return self._plan.num_tokens

    def __len__(self) -> int:
        """The number of micro-batches, the same on all ranks."""
        return self._plan.micro_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches; copies stand in for those that other ranks have and this one does not."""
        if not self._first or self._loop.window is not self:
            raise TokenNormError("A window was iterated twice, or after the next one had started. Iterate it once.")
        yield self._first.pop()
        for _ in range(1, len(self)):
            yield self._loop.next_batch()

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch in hand is the window's last: after its backward the optimizer steps."""
        return self._loop.window is not self or self._loop.accounting.micro_batch == len(self) - 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for the forward and the backward of each micro-batch: ranks reduce gradients at the last one only.

        An error inside is told to the other ranks, which would wait for this one.
        """
        loop = self._loop
        with loop.leaving_on_error():
            if loop.syncing.waits_in_forward():
                loop.accounting.refuse_to_wait_in_vain()
            with loop.syncing.let_through() if self.is_last else loop.syncing.held_back():
                yield

    def backward(self, loss: Tensor | Mapping[str, Tensor], backward: Callable[[Tensor], Any] | None = None) -> None:
        """Run the backward of the micro-batch in hand, with the weight that its tokens have in the window.

        Args:
            loss: Its loss, the mean or the sum over its supervised tokens; of any value where it has none. A mapping of
                names to losses where ``count_tokens`` counts several.
            backward: Runs the backward of a loss: ``fabric.backward``, ``accelerator.backward``. Default:
                ``loss.backward``.

        Raises:
            TypeError: The loss is not a tensor.
            TokenNormError: The loss leads to no parameter of the model, the micro-batch has had its backward, or a rank
                has left.
        """
        with self._loop.leaving_on_error():
            if self._loop.window is not self or self._make_record is not None:
                raise TokenNormError("`window.backward` was called after the window's last micro-batch had had it.")
            device = self._loop.backward(loss, backward)
            if self.is_last:
                self._make_record = self._loop.take_record(device)

    @property
    def record(self) -> UpdateRecord:
        """What went into the update, from its last backward on; that it is applied is left to the loop.

        Raises:
            TokenNormError: The window's last micro-batch has not had its backward.
        """
        if self._record is None:
            if self._make_record is None:
                raise TokenNormError("`window.record` is made by the backward of the window's last micro-batch.")
            self._record = self._make_record()
        return self._record


class _Loop:
    """One pass over a loader on one rank; a `WindowOwner`."""

    def __init__(
        self,
        loader: Iterable[Any],
        accumulate: int,
        divided_by: float,
        accounting: WindowAccounting,
        syncing: Syncing,
    ) -> None:
        self.accounting = accounting
        self.syncing = syncing
        self.window: TokenWindow | None = None
        """The window in hand."""
        self._loader = loader
        self._accumulate = accumulate
        self._divided_by = divided_by
        self._plan: WindowPlan | None = None
        self._fetcher: LookaheadFetcher | None = None
        self._has_run_backward = True
        self._over = False

    def open(self) -> None:
        """Open the loader; on all ranks, which prepared ones of Accelerate meet in."""
        self._fetcher = LookaheadFetcher(self)
        self._fetcher.setup(_compat.Batches(self._loader))
        iter(self._fetcher)

    def next_batch(self) -> Any:
        """Go on to the next micro-batch, and to the next window where that is its first."""
        assert self._fetcher is not None
        with self.leaving_on_error():
            if self._over:
                raise TokenNormError("The windows have ended with an error before: there is none to go on with.")
            if not self._has_run_backward:
                raise TokenNormError(
                    f"There was no `window.backward` for {self._where()}, so the window is not whole: `N` counts its"
                    " tokens. Call it for every batch of the window, in place of `loss.backward`, and do not leave a"
                    " window early; to leave a batch out, set its labels to -100."
                )
            return next(self._fetcher)[0]

    def next_window(self) -> TokenWindow | None:
        """Go on to the next window in which some rank has a token; ``None`` at the end."""
        last, self.window = self.window, None
        if last is not None and self.accounting.has_window:
            self._has_run_backward = False  # it was left early
        while True:
            try:
                first = self.next_batch()
            except StopIteration:
                # also from a rank that has left after the last window: its word must not be there for the next pass
                self.accounting.refuse_to_wait_in_vain()
                self._over = True
                self._tell_of_skipped_windows()
                return None
            assert self._plan is not None
            if self._plan.num_tokens:
                self.window = TokenWindow(self, self._plan, first)
                return self.window
            self._skip_window(self._plan.micro_batches)

    def _skip_window(self, micro_batches: int) -> None:
        # No rank gets it, so no host waits for a forward, and nobody can step on it.
        accounting = self.accounting
        if accounting.empty_windows == 1 and accounting.exchange.rank == 0:
            warnings.warn(
                f"No rank has a supervised token in any of the {micro_batches} micro-batches of window"
                f" {accounting.windows}: it is left out. If that is not what the data should be, look at the labels and"
                " at `count_tokens`; `on_empty='error'` raises.",
                stacklevel=4,
            )
        self._has_run_backward = True
        for _ in range(1, micro_batches):
            self.next_batch()
            self._has_run_backward = True

    def _tell_of_skipped_windows(self) -> None:
        accounting = self.accounting
        if accounting.empty_windows > 1 and accounting.exchange.rank == 0:
            warnings.warn(
                f"{accounting.empty_windows} of {accounting.windows} windows had no supervised token on any rank and"
                " were left out.",
                stacklevel=4,
            )

    def backward(self, loss: Tensor | Mapping[str, Tensor], backward: Callable[[Tensor], Any] | None) -> torch.device:
        """Run the backward of the micro-batch in hand; returns the device of its loss."""
        accounting, where = self.accounting, self._where()
        if accounting.has_heads or isinstance(loss, Mapping):
            loss = accounting.combine(loss, where)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
            raise TypeError(f"`window.backward` got a loss of {shape} for {where}; expected a tensor with one element.")
        if self._has_run_backward:
            raise TokenNormError(
                f"A second `window.backward` for {where}: its tokens would be counted again. Add losses up before it."
            )
        is_last = self._is_last
        factor = accounting.factor(loss, self._divided_by)
        prepared = self.syncing.prepare(loss, where, has_tokens=not accounting.has_idle_head)
        if self.syncing.waits_in_backward(is_last=is_last):
            accounting.refuse_to_wait_in_vain()
        if prepared is not None:
            scaled = prepared * factor
            run = torch.autograd.backward if backward is None else backward
            try:
                if factor:
                    self.syncing.start_backward()
                    run(scaled)
                    self.syncing.check_backward(scaled, where)
                else:
                    with zero_gradients(scaled):
                        self.syncing.start_backward()
                        run(scaled)
            except RuntimeError as error:
                failures.name_failed_rank(error, accounting.exchange)
                raise
        self._has_run_backward = True
        return loss.device

    def take_record(self, device: torch.device) -> Callable[[], UpdateRecord]:
        """What went into the update; the window's last micro-batch has had its backward."""
        self.accounting.note_step(None)
        return self.accounting.take_record(device)

    @property
    def _is_last(self) -> bool:
        return self._plan is not None and self.accounting.micro_batch == self._plan.micro_batches - 1

    def _where(self) -> str:
        accounting = self.accounting
        micro_batch, rank = accounting.micro_batch + 1, accounting.exchange.rank
        return f"micro-batch {micro_batch} of window {accounting.windows} on rank {rank}"

    # ---- the way out

    @contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """Let the other ranks know of an error that ends the loop on this one."""
        try:
            yield
        except StopIteration:
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error: BaseException | None) -> None:
        """End the loop before its end, of which other ranks hear where they would wait for this one."""
        if self._over:
            return
        self._over = True
        if isinstance(error, TokenNormError) and error.together:
            return
        if error is not None and not isinstance(error, GeneratorExit):
            failures.tell(error, self.accounting.exchange, self._where())
        self.accounting.exchange.leave()

    # ---- what the fetcher asks

    @property
    def accumulate(self) -> int:
        return self._accumulate

    @property
    def length(self) -> float:
        # Lengths that loaders tell are not needed: the end of the data is known one window ahead in any case.
        return math.inf

    @property
    def windows_left(self) -> float:
        return math.inf

    def has_trained_on(self, micro_batches: int) -> bool:
        return True

    def take_start(self) -> tuple[bool, int]:
        return False, 0

    def report_window(self, batches: Sequence[Any], accumulate: int, failure: Exception | None, borrows: bool) -> None:
        self.accounting.report_window(batches, accumulate, failure=failure, borrows=borrows)

    def goes_on(self) -> bool:
        return self.accounting.goes_on()

    def start_window(self, batch: Any) -> tuple[int, Any]:
        accounting = self.accounting
        self._plan = accounting.start_window(update=accounting.windows, batch=batch)
        if self._plan is None:
            return 0, None
        return self._plan.micro_batches, accounting.lent_batch

    def start_micro_batch(self, index: int, stands_in: bool) -> None:
        self.accounting.start_micro_batch(index, stands_in)
        self._has_run_backward = False


def _windows(loop: _Loop) -> Iterator[TokenWindow]:
    # A generator of its own: nothing else holds it, so a `break` closes it at once.
    try:
        loop.open()
        while (window := loop.next_window()) is not None:
            yield window
    except BaseException as error:
        loop.leave(error)
        raise


def _as_trained(model: nn.Module | None) -> nn.Module | None:
    """The model whose gradients are reduced, without what Fabric and `torch.compile` put around it."""
    inner = getattr(model, "_orig_mod", model)
    inner = _compat.unwrapped_by_fabric(inner)
    trained: nn.Module | None = getattr(inner, "_orig_mod", inner)
    return trained


def _reduction_of(model: nn.Module | None, group: dist.ProcessGroup | None) -> Reduction:
    reduction = reduction_of(model, group)
    if not isinstance(model, DistributedDataParallel):
        return reduction
    for hook, state in model._comm_hooks:
        try:
            what_hook_leaves(hook, None, state, None)
        except ValueError:
            raise ValueError(
                f"`model` got a DDP module with the communication hook `{getattr(hook, '__name__', hook)}`, and what it"
                " does to the scale cannot be seen from outside; expected none, or one of torch's that average."
            ) from None
    return reduction


def _check_number(option: str, value: Any, kinds: Any) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"`token_windows({option}=...)` got {value!r}; expected a number.")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"`token_windows({option}=...)` got {value!r}; expected a positive number.")
