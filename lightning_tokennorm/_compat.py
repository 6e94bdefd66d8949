"""Every private name of Lightning that this package touches, each behind one function or class.

A name that moved raises an error that says which one, so that a new Lightning release breaks loudly and in one place.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

import lightning.pytorch as pl
from lightning.fabric import is_wrapped
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops import fetchers
from lightning.pytorch.loops import fit_loop as fit_loop_module
from lightning.pytorch.overrides import distributed
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities import combined_loader as combined_loader_module
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from packaging.version import Version

if TYPE_CHECKING:
    from torchmetrics import Metric


def _private(owner: Any, name: str) -> Any:
    """Get a private attribute, or say clearly that this Lightning release does not have it."""
    try:
        return getattr(owner, name)
    except AttributeError:
        where = owner.__name__ if hasattr(owner, "__name__") else type(owner).__name__
        raise ImportError(
            f"lightning_tokennorm needs `{where}.{name}`, which lightning {version('lightning')} does not have."
            " Install a release that CHANGELOG.md names as tested, or report this."
        ) from None


_Stateful: Any = _private(combined_loader_module, "_Stateful")

BaseFetcher: Any = _private(fetchers, "_DataFetcher")
"""The base of the objects through which the loops read batches."""


def profiled_read(fetcher: Any) -> Any:
    """Read one batch as the fetcher's base class does: under the profiler of the loop that owns it."""
    start, stop = _private(fetcher, "_start_profiler"), _private(fetcher, "_stop_profiler")
    start()
    try:
        return next(fetcher.iterator)
    finally:
        stop()


def replace_fetcher(
    trainer: pl.Trainer, make_fetcher: Callable[[], Any], agree_on_length: Callable[[int | None], int | None]
) -> Callable[[], None]:
    """Let the fit loop read its batches through a fetcher of ours.

    Lightning has no hook where it chooses one, and opens the loaders with it at once: in `setup_data`, at the start of
    `fit` and again where `reload_dataloaders_every_n_epochs` asks for it. While that runs, our choice is in the place
    of its own, so no batch is read by another fetcher first.

    The lengths that it asks for there are agreed on by the ranks as well: Lightning takes each rank's own for the end
    of the epoch and for validation, waits for ever where only some ranks have one, and raises where one is zero.

    Args:
        trainer: The Trainer whose fit loop is meant.
        make_fetcher: Makes a fetcher, a `BaseFetcher`.
        agree_on_length: Takes the number of batches of this rank's loader (``None`` if unknown), returns what is true
            of all ranks; called by all of them.

    Returns:
        A function that takes the change back.
    """
    fit_loop = trainer.fit_loop
    setup_data = fit_loop.setup_data
    ours = {
        "_select_data_fetcher": lambda trainer, stage: make_fetcher(),
        "has_len_all_ranks": lambda loader, *_: agree_on_length(sized_len(loader)) is not None,
        "sized_len": lambda loader: agree_on_length(sized_len(loader)),
    }
    theirs = {name: _private(fit_loop_module, name) for name in ours}
    load_states = _private(fit_loop, "_load_combined_loader_states")

    def setup_data_with_ours() -> None:
        vars(fit_loop_module).update(ours)
        try:
            setup_data()
        finally:
            vars(fit_loop_module).update(theirs)
        loaders = _private(fit_loop, "_combined_loader")
        if loaders is not None and fit_loop.restarting and _private(fit_loop, "_combined_loader_states_to_load"):
            # They were set up before the checkpoint was read, for a hook that asked for their lengths.
            load_states()
            iter(_private(fit_loop, "_data_fetcher"))

    def restore() -> None:
        fit_loop.__dict__.pop("setup_data", None)

    fit_loop.setup_data = setup_data_with_ours  # type: ignore[method-assign]
    return restore


def defer_sigterm(trainer: pl.Trainer, note: Callable[[], None]) -> Callable[[], None]:
    """Leave it to the ranks together when a SIGTERM ends the training.

    Lightning raises on the rank that got the signal, between two micro-batches; since 2.5.6 it broadcasts rank 0's
    flag before every micro-batch, and once more inside the signal handler, which the other ranks do not expect there.
    Here a signal is only noted, and handed on to processes that this one has started, until `end_by_sigterm`.

    Args:
        trainer: The Trainer, before it registers its signal handlers.
        note: Called in the signal handler.

    Returns:
        A function that takes the change back.
    """
    connector, epoch_loop = _private(trainer, "_signal_connector"), trainer.fit_loop.epoch_loop
    _private(connector, "_sigterm_notifier_fn")
    noted = False

    def ours(signum: int, frame: Any) -> None:
        nonlocal noted
        launcher = trainer.strategy.launcher
        if not noted and launcher is not None:
            launcher.kill(signum)
        noted = True
        note()

    connector._sigterm_notifier_fn = ours  # which Lightning registers
    if hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
        epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def restore() -> None:
        connector.__dict__.pop("_sigterm_notifier_fn", None)
        epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        connector.received_sigterm |= noted

    return restore


def defer_requeue(trainer: pl.Trainer, note: Callable[[], None]) -> Callable[[], None]:
    """Leave it to the ranks together when a job saves and is requeued.

    On a SLURM cluster Lightning saves a checkpoint inside the handler of the signal that comes before the job's end,
    which ranks get at different times; until `save_and_requeue` it is only noted here.

    Args:
        trainer: The Trainer, before it registers its signal handlers.
        note: Called in the signal handler.

    Returns:
        A function that takes the change back.
    """
    connector = _private(trainer, "_signal_connector")
    _private(connector, "_slurm_sigusr_handler_fn")
    connector._slurm_sigusr_handler_fn = lambda signum, frame: note()  # which Lightning registers
    return lambda: connector.__dict__.pop("_slurm_sigusr_handler_fn", None)


def save_and_requeue(trainer: pl.Trainer) -> None:
    """Do what Lightning does on a SLURM cluster's signal before the job's end; called by all ranks together."""
    connector = _private(trainer, "_signal_connector")
    _private(type(connector), "_slurm_sigusr_handler_fn")(connector, signal.SIGUSR1, None)


def end_by_sigterm(trainer: pl.Trainer) -> NoReturn:
    """End the training as Lightning does on a SIGTERM; called by all ranks together."""
    _private(trainer, "_signal_connector").received_sigterm = True
    raise SIGTERMException


def stateful_loaders(fetcher: Any) -> list[Any]:
    """The loaders whose states Lightning saves, in its order; none where no loader has been set up."""
    combined = _private(fetcher, "_combined_loader")
    return [] if combined is None else [each for each in combined.flattened if isinstance(each, _Stateful)]


def rewind_checkpoint(checkpoint: dict[str, Any], states: list[Any], edge: int, *, stream_has_ended: bool) -> None:
    """Change a checkpoint's loops so that a run resumes some micro-batches earlier.

    Args:
        checkpoint: The checkpoint, before it is written; it `has_progress`.
        states: The loaders' states from before the first batch to train on; empty where they start afresh.
        edge: How many micro-batches of the epoch are done.
        stream_has_ended: Whether a loader of unknown length is at its end. Lightning goes on with the next epoch then,
            but would count its batches from where the last one ended, and so cut its windows elsewhere.
    """
    loops = checkpoint["loops"]["fit_loop"]
    set_loader_states(checkpoint, states)
    progress = loops["epoch_loop.batch_progress"]
    torn = progress["current"]["processed"] < progress["current"]["ready"]
    undone = progress["current"]["ready"] - edge
    for counts, behind in (
        (progress["current"], progress["current"]["ready"] if stream_has_ended else undone),
        (progress["total"], undone),
    ):
        ready = counts["ready"]
        for name in counts:
            # a batch that has failed half-way is not one that is complete but for its last hooks
            counts[name] = (ready if torn else counts[name]) - behind
    if not progress["is_last_batch"]:
        # A fit that stops inside an epoch (`max_steps`, `should_stop`) counts it as over; here it goes on.
        for counts in (loops["epoch_progress"]["current"], loops["epoch_progress"]["total"]):
            for name in ("processed", "completed"):
                counts[name] = max(0, min(counts[name], counts["started"] - 1))


def set_loader_states(checkpoint: dict[str, Any], states: list[Any]) -> None:
    """Change the loader states that Lightning gives back to the loaders; empty for none."""
    loop_state = checkpoint["loops"]["fit_loop"]["state_dict"]
    loop_state.pop("combined_loader", None)
    if states:
        loop_state["combined_loader"] = states


def has_loader_states(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds states for loaders."""
    return bool(checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader"))


def has_progress(checkpoint: dict[str, Any]) -> bool:
    """Whether a checkpoint says how far the training has come, and can be gone on from; not one with weights only."""
    # Lightning writes its loops' counters into both.
    return "fit_loop" in checkpoint.get("loops", {}) and "callbacks" in checkpoint


def align_logged_step(trainer: pl.Trainer, updates: int) -> None:
    """Let the loggers' x axis go on at a number of updates.

    A resumed loop guesses from its counters whether the last update was counted for the loggers already, and guesses
    wrong where it goes back to the start of a window.
    """
    _private(trainer.fit_loop.epoch_loop, "_batches_that_stepped")
    trainer.fit_loop.epoch_loop._batches_that_stepped = updates


def logged_step(trainer: pl.Trainer) -> int:
    """Where the loggers' x axis stands."""
    step: int = _private(trainer.fit_loop.epoch_loop, "_batches_that_stepped")
    return step


def trainer_of(module: Any) -> pl.Trainer | None:
    """The Trainer that a module is attached to, if any."""
    trainer: pl.Trainer | None = getattr(module, "_trainer", None)
    return trainer


def forget_loaders(trainer: pl.Trainer) -> None:
    """Let the fit loop set its loaders up anew."""
    _private(trainer.fit_loop, "_combined_loader")
    trainer.fit_loop._combined_loader = None


def describe_accumulation(trainer: pl.Trainer) -> str:
    """``K``, or how it is scheduled."""
    schedules = [c.scheduling for c in _private(trainer, "callbacks") if isinstance(c, GradientAccumulationScheduler)]
    if not schedules:
        return str(trainer.accumulate_grad_batches)
    return ", ".join(f"from epoch {epoch} on {k}" if epoch else str(k) for epoch, k in sorted(schedules[0].items()))


def warn_of_other_namespace(*, frames: int) -> None:
    """Warn where `pytorch_lightning` is imported: its Trainer does not take what is made for `lightning`.

    Args:
        frames: How many frames of this package lie between the caller's and the user's.
    """
    if "pytorch_lightning" in sys.modules:
        warnings.warn(
            "`pytorch_lightning` is imported beside `lightning`. They are two packages with the same classes, and a"
            " `pytorch_lightning.Trainer` does not accept the strategies and callbacks of `lightning_tokennorm`"
            " ('invalid strategy name'): use `from lightning.pytorch import Trainer, LightningModule`.",
            stacklevel=frames + 2,
        )


def skips_backward(trainer: pl.Trainer) -> bool:
    """Whether the fit loop runs forwards only."""
    return trainer.fit_loop._skip_backward  # asked several times per micro-batch


def micro_batches_done(trainer: pl.Trainer) -> int:
    """Micro-batches of the epoch that have been trained on, each to its end; -1 while one is in hand.

    A batch that a hook has refused (`on_train_batch_start` returned -1) counts as one in hand.
    """
    counts: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return counts.ready if counts.ready == counts.started == counts.processed else -1


def remember_logged(trainer: pl.Trainer) -> Callable[[], None]:
    """Remember what the step in hand has logged so far, with `LightningModule.log`.

    Returns:
        A function that takes back what has been logged since: values are as before, and keys that are new weigh
        nothing. Keys stay, since ranks that log the same keys exchange them at the end of an epoch.
    """
    results = _private(trainer, "_results")
    if results is None:
        return lambda: None
    before = {key: dict(vars(metric)) for key, metric in results.items()}

    def restore() -> None:
        for key, metric in results.items():
            logged = not metric.has_reset
            if key in before:
                vars(metric).update(before[key])
            elif metric.is_tensor:
                metric.reset()
            metric.has_reset = not logged

    return restore


def watch_division_of_loss(trainer: pl.Trainer, note: Callable[[int], None]) -> Callable[[], None]:
    """Tell by how much Lightning divides each training loss, where it does so; as `watch_training_steps`."""
    return watch_training_steps(trainer, lambda output, divided_by: note(divided_by))


def watch_training_steps(trainer: pl.Trainer, note: Callable[[Any, int], None]) -> Callable[[], None]:
    """Show what each training step has returned, and by how much Lightning divides its loss, where it does so.

    That is ``K`` as it is when `training_step` has returned, and no hook runs there: whatever is read in one may have
    been changed before or after.

    Args:
        trainer: The Trainer; with manual optimization nothing is divided and nothing is told.
        note: Called with what the step has returned, and with the divisor.

    Returns:
        A function that takes the change back.
    """
    loop = _private(trainer.fit_loop.epoch_loop, "automatic_optimization")
    result_class: Any = _private(loop, "output_result_cls")

    watches = True

    class Noting(result_class):  # type: ignore[misc]
        @classmethod
        def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> Any:
            if watches:
                note(training_step_output, normalize)
            return super().from_training_step_output(training_step_output, normalize)

    loop.output_result_cls = Noting

    def restore() -> None:
        nonlocal watches
        watches = False
        if loop.output_result_cls is Noting:  # else somebody watches on top of this, and goes on
            loop.output_result_cls = result_class

    return restore


def logs_this_update(trainer: pl.Trainer) -> bool:
    """Whether Lightning writes to the loggers after the update in hand.

    Only from counters that are the same on all ranks: `Trainer.should_stop`, which Lightning looks at too, may differ,
    and a collective that hangs on it would not be joined by all.
    """
    every = log_every_n_steps(trainer)
    updates = logged_step(trainer) + 1
    return every > 0 and updates % every == 0


def log_every_n_steps(trainer: pl.Trainer) -> int:
    """After how many updates Lightning writes to the loggers; 0 for never."""
    every: int = _private(trainer, "log_every_n_steps")
    return every


def set_step_value(metric: Metric, value: Any) -> None:
    """Set what Lightning logs as the step value of a metric; ``None`` for nothing."""
    _private(metric, "_forward_cache")
    metric._forward_cache = value


def register_comm_hook(strategy: Any) -> None:
    """Register the user's DDP communication hook where Lightning does not: it drops it on everything but CUDA."""
    if strategy.root_device.type == "cuda":
        return
    _private(distributed, "_register_ddp_comm_hook")(
        model=strategy.model,
        ddp_comm_state=_private(strategy, "_ddp_comm_state"),
        ddp_comm_hook=_private(strategy, "_ddp_comm_hook"),
        ddp_comm_wrapper=_private(strategy, "_ddp_comm_wrapper"),
    )


def process_group_timeout(strategy: Any) -> timedelta | None:
    """The timeout that the user gave to the strategy for its collectives."""
    timeout: timedelta | None = _private(strategy, "_timeout")
    return timeout


def saves_in_shards(strategy: Any) -> bool:
    """Whether an FSDP strategy writes each rank's shards of a checkpoint."""
    return bool(_private(strategy, "_state_dict_type") == "sharded")


def takes_dataloader_iter(module: pl.LightningModule) -> bool:
    """Whether `training_step` fetches its batches by itself."""
    return is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


def num_eval_loaders(trainer: pl.Trainer) -> int:
    """How many loaders the running validation or test goes through, one after the other."""
    loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    if isinstance(loaders, CombinedLoader) and _private(loaders, "_mode") != "sequential":
        return 1
    return len(trainer.num_test_batches if trainer.testing else trainer.num_val_batches)


def loader_suffix(index: int) -> str:
    """What Lightning appends to the keys of one of several loaders; before 2.5.3 it let nobody else do so."""
    return f"/dataloader_idx_{index}" if Version(version("lightning")) >= Version("2.5.3") else f"/loader_{index}"


def unwrapped_by_fabric(model: Any) -> Any:
    """What Fabric's strategy has made of a module, without Fabric's own wrapper; any other model as it is."""
    return _private(model, "_forward_module") if is_wrapped(model) else model


class Batches:
    """Any iterable of batches in the form in which fetchers read loaders: of unknown length, and without a state.

    Args:
        batches: The iterable.
    """

    flattened: tuple[Any, ...] = ()

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        return ((batch, index, 0) for index, batch in enumerate(self._batches))
