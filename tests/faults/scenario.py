"""A small training run on two ranks in which faults happen where a test says so.

A rank is a process of its own: started by a test, or by Lightning's launcher from
``python -m tests.faults.scenario '{"folder": "run"}'``. It writes down what it does as it does it, so that one
that is killed leaves its record, too.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_tokennorm import SupervisedTokens, TokenNormDDP, TokenNormFSDP, TokenNormModelParallel
from lightning_tokennorm.exchange import WindowExchange
from lightning_tokennorm.testing.precision import KeepTypes
from lightning_tokennorm.window import RankReport
from tests.helpers.scalar_rig import make_batch, make_loader, make_trainer

HANGS_AFTER_S = 240
LENGTH, ACCUMULATE = 11, 3  # windows of 3, 3, 3 and 2
QUOTA = 32 * 1024
"""Bytes: fewer than a checkpoint has, more than any other file of a run."""

REACHED = {
    "setup": 1,  # before the first window, in the module's `on_train_start`
    "first report": 1,  # sent when the first window starts, before which all ranks wait for it
    "early report": 3,  # of the third window: sent before the second one's last micro-batch
    "report": 4,  # of the fourth window: sent before the third one's last micro-batch
    "loader": 8,  # in the third window: told to the others with the report of it
    "counter": 8,
    "first forward": 1,
    "last forward": 11,
    "validation": 1,  # after the second window
    "forward": 8,  # of 7, 8 and 9: the other rank goes on alone until the backward of 9
    "backward": 9,  # in which the ranks' gradients are reduced
    "step": 3,  # the parameters have just changed, no checkpoint has them
    "save": 5,  # Lightning saves twice after each update: step=3.ckpt, ...
    "write": 6,  # ... then last.ckpt
    "move": 6,
}
"""The points of a run, and the how many-eth time one is reached: from `report` on in the third window or right
after its update."""


def _passing(act: Callable[[], Any]) -> Callable[[Any], Any]:
    def act_and_pass(value: Any) -> Any:
        act()
        return value

    return act_and_pass


def _signal(signum: signal.Signals) -> Callable[[Any], Any]:
    return _passing(lambda: os.kill(os.getpid(), signum))


def _wait_for_sigusr2() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    signal.sigwait({signal.SIGUSR2})


def _raise(value: Any) -> Any:
    raise ValueError("this sample cannot be used")


ACTS: dict[str, Callable[[Any], Any]] = {
    "kill": _signal(signal.SIGKILL),
    "freeze": _signal(signal.SIGSTOP),
    "sigterm": _signal(signal.SIGTERM),
    "sigterm in 1 s": _passing(lambda: threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()),
    "sigusr1": _signal(signal.SIGUSR1),
    **{
        f"sigusr1 in {ms} ms": _passing(
            lambda ms=ms: threading.Timer(ms / 1000, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        )
        for ms in (5, 20)
    },
    "lag": _passing(lambda: time.sleep(4)),
    "stall": _passing(_wait_for_sigusr2),
    "quota": _passing(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (QUOTA, resource.RLIM_INFINITY))),
    "raise": _raise,
    "None": lambda loss: None,
    "no graph": lambda loss: torch.ones(()),
}
"""What can happen at a point: takes the value that passes there, returns the one that goes on."""


@dataclass(frozen=True)
class Run:
    """What all ranks are told."""

    folder: str
    """Where records and checkpoints go."""
    faults: tuple[tuple[int, str, str], ...] = ()
    """Rank, act and point of each; one for a point."""
    ckpt_path: str | None = None
    timeout_s: float = 2000
    """How long ranks wait for each other: by default longer than a test does, so that an end was not waited for."""
    saves_on_exception: bool = False
    host: str = "ddp"
    """Or ``"fsdp"``, ``"model_parallel"``."""
    slurm: bool = False
    """Whether a SLURM cluster started the ranks, which requeues a job that gets SIGUSR1."""


class Record:
    """The record of one rank: an event a line, on the disk at once."""

    def __init__(self, run: Run, rank: int) -> None:
        self.path = Path(run.folder) / f"rank{rank}.jsonl"

    def add(self, kind: str, value: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([kind, value]) + "\n")

    def all(self, kind: str) -> list[Any]:
        events = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        return [value for name, value in events if name == kind]


class Faults:
    """Makes a rank's faults happen when it reaches their points."""

    def __init__(self, run: Run, rank: int) -> None:
        self.acts = {point: ACTS[act] for at, act, point in run.faults if at == rank}
        self.reached: Counter[str] = Counter()
        self.record = Record(run, rank)

    def reach(self, point: str, value: Any = None) -> Any:
        self.reached[point] += 1
        if point in self.acts and self.reached[point] == REACHED[point]:
            self.record.add("fault", time.monotonic())  # one clock for all processes of a machine
            return self.acts[point](value)
        return value

    def install(self) -> None:
        """Put the points that no hook leads to into the functions themselves."""
        send, write = WindowExchange.send, LocalFileOpener.write

        def write_in_halves(file: LocalFileOpener, data: bytes) -> Any:
            half = len(data) // 2
            write(file, data[:half])
            file.flush()
            self.reach("write")
            return half + write(file, data[half:])

        def send_or_fail(exchange: WindowExchange, report: RankReport) -> None:
            if not report.meets:  # for a checkpoint, as all ranks save it
                for point in ("first report", "early report", "report"):
                    report = self.reach(point, report)
            send(exchange, report)

        WindowExchange.send = send_or_fail  # type: ignore[method-assign]
        LocalFileOpener.write = write_in_halves
        if "move" in self.acts:
            shutil.move = self._copy_in_halves

    def _copy_in_halves(self, source: str, target: str) -> None:
        # what `shutil.move` does from one file system to another, where nothing can be renamed
        data = Path(source).read_bytes()
        with open(target, "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            self.reach("move")
            file.write(data[len(data) // 2 :])
        os.remove(source)


class Stream:
    """A stateful loader of unknown length; each rank has samples of its own."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.position < LENGTH:
            self.faults.reach("loader")
            self.position += 1
            yield make_batch(1 + self.position % 4, float(self.position + 20 * dist.get_rank()))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Scale(nn.Module):
    """The parameters, two so that each rank can hold a shard; a loss is quadratic in them.

    So every update depends on those before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.t[0] * self.t[1]

    def held(self) -> float:
        """What this rank holds of them: all, or its shard."""
        t = self.t.detach()
        return float(getattr(t, "to_local", lambda: t)().sum())


class Module(pl.LightningModule):
    """Faults happen to it where it has a hook, or computes."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.scale = Scale()
        self.register_buffer("ballast", torch.zeros(2 * QUOTA, dtype=torch.uint8))

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            fully_shard(self.scale, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        live = batch["labels"][:, 1:] != -100
        losses = self.scale(batch["values"][:, 1:])
        if losses.requires_grad:
            losses.register_hook(lambda gradient: self.faults.reach("backward", gradient))
        return (losses * live).sum() / live.sum()

    def on_train_start(self) -> None:
        self.faults.reach("setup")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        for point in ("first forward", "forward", "last forward"):
            loss = self.faults.reach(point, loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.faults.reach("validation", self.loss(batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.faults.reach("save")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.5)
        optimizer.register_step_post_hook(lambda *_: self.faults.reach("step"))
        return optimizer


class Writes(Callback):
    """Writes down each sample that is trained on and the parameters after each update, to the last bit."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.updates = 0

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        self.updates = trainer.global_step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: dict[str, Tensor], *args: Any) -> None:
        self.record.add("sample", batch["values"][0, 1].item())

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step > self.updates:
            self.updates = trainer.global_step
            self.record.add("parameter", module.scale.held().hex())

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.record.add("exception", type(exception).__name__)


def make_strategy(run: Run, faults: Faults) -> Any:
    counts = SupervisedTokens()

    def count(batch: dict[str, Tensor]) -> Any:
        faults.reach("counter")
        return counts(batch)

    options: dict[str, Any] = {"count_tokens": count, "timeout": timedelta(seconds=run.timeout_s)}
    if run.host == "fsdp":
        return TokenNormFSDP(auto_wrap_policy={Scale}, **options)
    if run.host == "model_parallel":
        return TokenNormModelParallel(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False, **options
        )
    return TokenNormDDP(**options)


def train(run: Run, rank: int) -> None:
    torch.set_num_threads(1)
    tempfile.tempdir = run.folder  # a checkpoint is written there and then renamed, on one file system
    faults = Faults(run, rank)
    faults.install()
    saves = ModelCheckpoint(
        run.folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True, enable_version_counter=False
    )
    saves_last = ModelCheckpoint(run.folder, "last_words", every_n_epochs=9, save_last=True, save_on_exception=True)
    trainer = make_trainer(
        2,
        strategy=make_strategy(run, faults),
        accumulate_grad_batches=ACCUMULATE,
        enable_checkpointing=True,
        callbacks=[Writes(Record(run, rank)), saves]
        + ([OnExceptionCheckpoint(run.folder), saves_last] if run.saves_on_exception else []),
        plugins=[SLURMEnvironment(auto_requeue=True)] * run.slurm + [KeepTypes()] * (run.host == "fsdp"),
        **(_on_slurm(run, rank) if run.slurm else {}),
    )
    validates = make_loader([(1, 1.0)]) if run.slurm else None
    trainer.fit(Module(faults), Stream(faults), validates, ckpt_path=run.ckpt_path)
    Record(run, rank).add("end", trainer.global_step)


def _on_slurm(run: Run, rank: int) -> dict[str, Any]:
    os.environ |= {
        **{"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0"},
        **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        "PATH": f"{run.folder}/bin:{os.environ['PATH']}",
    }
    return {
        "default_root_dir": run.folder,
        "num_sanity_val_steps": 0,
        "val_check_interval": 2 * ACCUMULATE,
        "check_val_every_n_epoch": None,
    }


def run_rank(rank: int, port: int, run: Run) -> None:
    """The main function of a rank that a test starts."""
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo" if os.path.exists("/sys/class/net/lo") else "lo0",
    }
    log = os.open(f"{run.folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(HANGS_AFTER_S)  # where it hangs, if it does
    try:
        train(run, rank)
    finally:
        atexit._run_exitfuncs()  # as at the end of a program


if __name__ == "__main__":
    train(Run(**json.loads(sys.argv[1])), int(os.environ.get("LOCAL_RANK", "0")))
