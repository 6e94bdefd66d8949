"""Faults of real processes: the other ranks end with an error in time, and the last checkpoint resumes exactly.

Every run is the one of `scenario`: two ranks, windows of 3, 3, 3 and 2 micro-batches, a checkpoint after each update.
Faults come in the third window, when two updates are in the last checkpoint.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.scenario import ACCUMULATE, HANGS_AFTER_S, Record, Run, run_rank

HANG_S, LAUNCH_S = HANGS_AFTER_S + 60, 600
"""A last resort: nothing here is a matter of seconds, also on a machine that has other work."""
TIMEOUT_S = 15
"""Of the ranks, where one is waited for in vain."""

pytestmark = pytest.mark.timeout(LAUNCH_S + 2 * HANG_S)

# Each rank is a process of its own, forked from a server that has imported all.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lightning.pytorch", "lightning_tokennorm", "tests.faults.scenario"])


@dataclass(frozen=True)
class Rank:
    """What is left of a rank."""

    exitcode: int | None
    ended_at: float
    output: str
    samples: list[float]
    parameters: list[str]
    exceptions: list[str]
    faults: list[float]
    """When they happened."""


def run_pair(
    run: Run, port: int | None = None, on_first_end: Callable[[list[Any]], None] = lambda processes: None
) -> list[Rank]:
    """Run both ranks to their ends; it fails where they have none."""
    port = port or free_port()
    processes: list[Any] = [_CONTEXT.Process(target=run_rank, args=(rank, port, run)) for rank in (0, 1)]
    deadline = time.monotonic() + HANG_S
    ended_at: dict[int, float] = {}
    for process in processes:
        process.start()
    try:
        while len(ended_at) < 2:
            alive = {process.sentinel: rank for rank, process in enumerate(processes) if rank not in ended_at}
            ended = wait(list(alive), deadline - time.monotonic())
            if not ended:
                raise TimeoutError([f"rank {rank} hangs: {read_output(run, rank)}" for rank in alive.values()])
            if not ended_at:
                on_first_end(processes)
            ended_at |= {alive[sentinel]: time.monotonic() for sentinel in ended}
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [what_is_left(run, rank, process.exitcode, ended_at[rank]) for rank, process in enumerate(processes)]


def what_is_left(run: Run, rank: int, exitcode: int | None, ended_at: float) -> Rank:
    events = [Record(run, rank).all(kind) for kind in ("sample", "parameter", "exception", "fault")]
    return Rank(exitcode, ended_at, read_output(run, rank), *events)


def read_output(run: Run, rank: int) -> str:
    path = Path(run.folder) / f"rank{rank}.log"
    return path.read_text() if path.exists() else ""


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def whole_under(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Rank]]:
    """The uninterrupted run under a host."""

    @cache
    def run(host: str) -> list[Rank]:
        ranks = run_pair(Run(str(tmp_path_factory.mktemp("whole")), host=host))
        assert [rank.exitcode for rank in ranks] == [0, 0], ranks
        assert [len(rank.samples) for rank in ranks] == [11, 11]
        assert (ranks[0].parameters == ranks[1].parameters) == (host == "ddp")  # else each has a shard
        assert [len(set(rank.parameters)) for rank in ranks] == [4, 4]
        return ranks

    return run


@pytest.fixture
def whole(whole_under: Callable[[str], list[Rank]]) -> list[Rank]:
    """The uninterrupted run under DDP."""
    return whole_under("ddp")


def assert_interrupted(ranks: list[Rank], whole: list[Rank]) -> None:
    """Up to its end, the run is the uninterrupted one."""
    for rank, uninterrupted in zip(ranks, whole, strict=True):
        assert len(rank.samples) in range(6, 10)
        assert rank.samples == uninterrupted.samples[: len(rank.samples)]
        assert rank.parameters == uninterrupted.parameters[: len(rank.parameters)]


def assert_ends_soon(ranks: list[Rank]) -> None:
    """Nobody has waited for the timeout: it is longer than `run_pair` waits, and no error speaks of it."""
    assert all("Timed out" not in rank.output for rank in ranks), [rank.output for rank in ranks]
    assert any(rank.faults for rank in ranks)


def wake(processes: list[Any]) -> None:
    """End a stall."""
    os.kill(processes[1].pid, signal.SIGUSR2)


def assert_resumes(path: Path, whole: list[Rank], updates: int, host: str = "ddp") -> None:
    """From a checkpoint on, the run is the uninterrupted one."""
    folder = path.parent / "resumed"
    folder.mkdir()
    for rank, uninterrupted in zip(run_pair(Run(str(folder), ckpt_path=str(path), host=host)), whole, strict=True):
        assert rank.exitcode == 0, rank.output
        assert rank.samples == uninterrupted.samples[updates * ACCUMULATE :]
        assert rank.parameters == uninterrupted.parameters[updates:]


def updates_in_checkpoints(folder: Path) -> dict[str, int | None]:
    """How many updates are in each checkpoint of a folder; ``None`` where it cannot be read."""
    return {path.name: updates_in(path) for path in folder.glob("*.ckpt")}


def updates_in(path: Path) -> int | None:
    with suppress(Exception):
        return int(torch.load(path, weights_only=False)["global_step"])
    return None


# ---- kill -9


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["report", "forward", "backward", "step", "save"])
def test_killed(point: str, rank: int, whole: list[Rank], tmp_path: Path) -> None:
    ranks = run_pair(Run(str(tmp_path), faults=((rank, "kill", point),)))
    other = ranks[1 - rank]
    assert ranks[rank].exitcode == -signal.SIGKILL
    assert other.exitcode == 1
    if point in ("report", "forward", "backward") and rank == 0:
        assert "Another rank has ended inside a window. The store of the process group is gone." in other.output
    else:
        assert re.search(r"^RuntimeError: \[.*gloo/transport", other.output, re.MULTILINE), other.output
    assert_ends_soon(ranks)
    assert_interrupted(ranks, whole)
    updates = updates_in_checkpoints(tmp_path)
    assert None not in updates.values()
    assert updates["last.ckpt"] == 2
    assert_resumes(tmp_path / "last.ckpt", whole, updates=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_before_the_first_window(rank: int, tmp_path: Path) -> None:
    ranks = run_pair(Run(str(tmp_path), faults=((rank, "kill", "first report"),)))
    assert [ranks[rank].exitcode, ranks[1 - rank].exitcode] == [-signal.SIGKILL, 1]
    assert f"Rank {1 - rank} of 2 waited for the other ranks at the start of a window" in ranks[1 - rank].output
    assert_ends_soon(ranks)
    assert ranks[1 - rank].samples == []


def test_killed_while_writing(whole: list[Rank], tmp_path: Path) -> None:
    ranks = run_pair(Run(str(tmp_path), faults=((0, "kill", "write"),)))
    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL, 1]
    assert_ends_soon(ranks)
    assert_interrupted(ranks, whole)
    # Lightning writes beside the checkpoint before it and puts the new one in its place when it is whole
    assert updates_in_checkpoints(tmp_path) == {"step=1.ckpt": 1, "step=2.ckpt": 2, "step=3.ckpt": 3, "last.ckpt": 2}
    assert_resumes(tmp_path / "last.ckpt", whole, updates=2)


def test_killed_while_a_checkpoint_moves_between_file_systems(whole: list[Rank], tmp_path: Path) -> None:
    # Lightning writes in the folder for temporary files. Where that is on another file system it then copies, over the
    # checkpoint that is there: last.ckpt is lost. What saves the run is a checkpoint whose name does not recur.
    ranks = run_pair(Run(str(tmp_path), faults=((0, "kill", "move"),)))
    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL, 1]
    assert_ends_soon(ranks)
    updates = updates_in_checkpoints(tmp_path)
    assert updates.pop("last.ckpt") is None
    assert updates == {"step=1.ckpt": 1, "step=2.ckpt": 2, "step=3.ckpt": 3}
    assert_resumes(tmp_path / "step=3.ckpt", whole, updates=3)


# ---- SIGTERM


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(((0, "sigterm", "forward"),), id="rank 0"),
        pytest.param(((1, "sigterm", "forward"),), id="rank 1"),
        pytest.param(((0, "sigterm", "forward"), (1, "sigterm", "backward")), id="all"),
        # in the second window, when the report of the third is made already: the fourth window's is the next one
        pytest.param(((1, "sigterm", "early report"),), id="after the report"),
        pytest.param(((0, "sigterm in 1 s", "early report"), (1, "lag", "early report")), id="rank 0 waits for rank 1"),
    ],
)
def test_sigterm(faults: Any, whole: list[Rank], tmp_path: Path) -> None:
    run = Run(str(tmp_path), faults=faults, saves_on_exception=True)
    ranks = run_pair(run)
    assert [rank.exceptions for rank in ranks] == [["SIGTERMException"]] * 2
    assert [rank.exitcode for rank in ranks] == [0, 0]  # Lightning's exception is a `SystemExit` without a code
    assert_ends_soon(ranks)
    assert_interrupted(ranks, whole)
    # the third window is still done, by both ranks
    assert [(len(rank.samples), len(rank.parameters)) for rank in ranks] == [(9, 3)] * 2
    updates = updates_in_checkpoints(tmp_path)
    assert updates["last.ckpt"] == updates["on_exception.ckpt"] == 3
    # Lightning goes on from on_exception.ckpt by itself, and the records go on in their files
    for rank, uninterrupted in zip(run_pair(Run(str(tmp_path), saves_on_exception=True)), whole, strict=True):
        assert rank.exitcode == 0, rank.output
        assert rank.samples == uninterrupted.samples
        assert rank.parameters == uninterrupted.parameters


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_before_the_first_window(rank: int, tmp_path: Path) -> None:
    ranks = run_pair(Run(str(tmp_path), faults=((rank, "sigterm", "setup"),)))
    assert [rank.exceptions for rank in ranks] == [["SIGTERMException"]] * 2
    assert_ends_soon(ranks)
    assert [rank.samples for rank in ranks] == [[], []]


# ---- stalls


@pytest.mark.parametrize("point", ["report", "forward"])
def test_stalled_for_longer_than_the_timeout(point: str, whole: list[Rank], tmp_path: Path) -> None:
    ranks = run_pair(Run(str(tmp_path), faults=((1, "stall", point),), timeout_s=TIMEOUT_S), on_first_end=wake)
    assert [rank.exitcode for rank in ranks] == [1, 1]
    assert f"Timed out waiting {TIMEOUT_S}000ms" in ranks[0].output
    assert ranks[0].ended_at < ranks[1].ended_at  # which finds the other gone
    assert_interrupted(ranks, whole)
    assert_resumes(tmp_path / "last.ckpt", whole, updates=2)


def test_stalled_before_the_first_window(tmp_path: Path) -> None:
    run = Run(str(tmp_path), faults=((1, "stall", "first report"),), timeout_s=TIMEOUT_S)
    ranks = run_pair(run, on_first_end=wake)
    assert [rank.exitcode for rank in ranks] == [1, 1]
    assert "Rank 0 of 2 waited for the other ranks at the start of a window" in ranks[0].output
    assert "A rank has ended or stalled: look for its own error, or raise `timeout`." in ranks[0].output
    assert ranks[0].ended_at < ranks[1].ended_at
    assert ranks[0].samples == []


def test_rank_0_stands_still(whole: list[Rank], tmp_path: Path) -> None:
    # and the store that it keeps for all ranks with it
    def thaw(processes: list[Any]) -> None:
        os.kill(processes[0].pid, signal.SIGCONT)

    run = Run(str(tmp_path), faults=((0, "freeze", "report"),), timeout_s=TIMEOUT_S)
    ranks = run_pair(run, on_first_end=thaw)
    assert [rank.exitcode for rank in ranks] == [1, 1]
    assert "The store of the process group does not answer." in ranks[1].output
    assert ranks[1].ended_at < ranks[0].ended_at  # which was frozen until then
    assert_interrupted(ranks, whole)
    assert_resumes(tmp_path / "last.ckpt", whole, updates=2)


# ---- the machine


def test_disk_full(whole: list[Rank], tmp_path: Path) -> None:
    # from the third window on, rank 0 cannot write files as large as a checkpoint
    ranks = run_pair(Run(str(tmp_path), faults=((0, "quota", "report"),)))
    assert [rank.exitcode for rank in ranks] == [1, 1]
    assert "OSError: [Errno 27] File too large" in ranks[0].output
    assert "gloo/transport" in ranks[1].output
    assert_ends_soon(ranks)
    assert_interrupted(ranks, whole)
    assert updates_in_checkpoints(tmp_path) == {"step=1.ckpt": 1, "step=2.ckpt": 2, "last.ckpt": 2}
    assert_resumes(tmp_path / "last.ckpt", whole, updates=2)


@pytest.fixture
def taken_port() -> Iterator[socket.socket]:
    with closing(socket.socket()) as owner:
        owner.bind(("127.0.0.1", 0))
        yield owner


def test_port_taken(taken_port: socket.socket, tmp_path: Path) -> None:
    ranks = run_pair(Run(str(tmp_path), timeout_s=5), port=taken_port.getsockname()[1])
    assert [rank.exitcode for rank in ranks] == [1, 1]
    assert "EADDRINUSE" in ranks[0].output
    assert "The client socket has timed out after 5000ms" in ranks[1].output


# ---- errors of one rank


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("act", "error"),
    [
        pytest.param("None", "`training_step` returned None on rank {} for batch 7; expected a loss", id="None"),
        pytest.param("no graph", "a loss without a graph (tensor(1.)) on rank {} for batch 7; expected", id="no graph"),
        pytest.param("raise", "ValueError: this sample cannot be used", id="raise"),
    ],
)
def test_training_step_fails(act: str, error: str, rank: int, whole: list[Rank], tmp_path: Path) -> None:
    ranks = run_pair(Run(str(tmp_path), faults=((rank, act, "forward"),)))
    assert [each.exitcode for each in ranks] == [1, 1]
    assert error.format(rank) in ranks[rank].output
    if act != "raise":
        assert "To leave a batch out, give it no supervised token" in ranks[rank].output
    if sys.version_info >= (3, 11):
        assert f"This was rank {rank}, batch 7, update 2." in ranks[rank].output
    assert "Another rank has ended inside a window." in ranks[1 - rank].output
    named = f"The first to fail was rank {rank}, batch 7, update 2: " in ranks[1 - rank].output
    # where rank 0 fails, the store that it keeps may be gone before rank 1 has read it
    assert named or (rank == 0 and "The store of the process group is gone. Rank 0 keeps it" in ranks[1].output)
    assert_ends_soon(ranks)
    assert_interrupted(ranks, whole)
    assert updates_in(tmp_path / "last.ckpt") == 2


@pytest.mark.parametrize("point", ["first report", "report", "backward", "step", "save"])
def test_failed_rank_is_named_wherever_the_other_waits(point: str, tmp_path: Path) -> None:
    ranks = run_pair(Run(str(tmp_path), faults=((1, "raise", point),)))
    assert [rank.exitcode for rank in ranks] == [1, 1]
    assert "The first to fail was rank 1, batch" in ranks[0].output
    assert_ends_soon(ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoint_on_exception(rank: int, whole: list[Rank], tmp_path: Path) -> None:
    # rank 0 writes it: when it fails itself in the middle of the window, or with the other in the window's backward
    ranks = run_pair(Run(str(tmp_path), faults=((rank, "raise", "forward"),), saves_on_exception=True))
    assert [each.exitcode for each in ranks] == [1, 1]
    assert_ends_soon(ranks)
    assert_interrupted(ranks, whole)
    assert updates_in(tmp_path / "on_exception.ckpt") == 2
    assert_resumes(tmp_path / "on_exception.ckpt", whole, updates=2)


# ---- hosts that keep the parameters in shards: ranks wait for each other in every forward and every backward

SHARDED = ["fsdp", "model_parallel"]
KILLED = [
    (host, point, rank)
    for host in SHARDED
    for point in ("report", "forward", "backward", "step", "save")
    for rank in (0, 1)
]
RAISES = [
    (host, point, rank)
    for host in SHARDED
    for point in ("first report", "first forward", "forward", "backward", "step", "save")
    for rank in (0, 1)
]
REFUSES = [(host, point, rank) for host in ("ddp", *SHARDED) for point in ("loader", "counter") for rank in (0, 1)]
TELLING = {
    "killed": [
        ("fsdp", "forward", 1),
        ("fsdp", "step", 0),
        ("model_parallel", "report", 0),
        ("model_parallel", "backward", 1),
    ],
    "raises": [("fsdp", "forward", 1), ("fsdp", "save", 0), ("model_parallel", "backward", 0)],
    "refuses": [("ddp", "loader", 0), ("fsdp", "loader", 1), ("model_parallel", "counter", 0)],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All of them take minutes: ``make test ARGS="tests/faults --all-faults"``."""
    everything = {"killed": KILLED, "raises": RAISES, "refuses": REFUSES}
    for name, faults in everything.items():
        if name in metafunc.fixturenames:
            all_faults = metafunc.config.getoption("--all-faults")
            metafunc.parametrize(
                name, faults if all_faults else TELLING[name], ids=lambda each: ", ".join(map(str, each))
            )


def test_rank_of_a_sharded_host_is_killed(
    killed: tuple[str, str, int], whole_under: Callable[[str], list[Rank]], tmp_path: Path
) -> None:
    host, point, rank = killed
    whole = whole_under(host)
    ranks = run_pair(Run(str(tmp_path), faults=((rank, "kill", point),), host=host))
    assert [ranks[rank].exitcode, ranks[1 - rank].exitcode] == [-signal.SIGKILL, 1]
    assert re.search(r"gloo/transport|Another rank has ended", ranks[1 - rank].output), ranks[1 - rank].output
    assert_ends_soon(ranks)
    assert_interrupted(ranks, whole)
    updates = updates_in_checkpoints(tmp_path)
    assert None not in updates.values()
    assert updates["last.ckpt"] == 2
    assert_resumes(tmp_path / "last.ckpt", whole, updates=2, host=host)


@pytest.mark.parametrize("host", SHARDED)
def test_sigterm_to_one_rank_of_a_sharded_host(
    host: str, whole_under: Callable[[str], list[Rank]], tmp_path: Path
) -> None:
    whole = whole_under(host)
    run = Run(str(tmp_path), faults=((1, "sigterm", "forward"),), saves_on_exception=True, host=host)
    ranks = run_pair(run)
    assert [rank.exceptions for rank in ranks] == [["SIGTERMException"]] * 2
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert_ends_soon(ranks)
    assert [(len(rank.samples), len(rank.parameters)) for rank in ranks] == [(9, 3)] * 2
    assert updates_in(tmp_path / "on_exception.ckpt") == 3
    for rank, uninterrupted in zip(run_pair(replace(run, faults=())), whole, strict=True):
        assert rank.exitcode == 0, rank.output
        assert rank.samples == uninterrupted.samples
        assert rank.parameters == uninterrupted.parameters


def test_rank_of_a_sharded_host_fails(
    raises: tuple[str, str, int], whole_under: Callable[[str], list[Rank]], tmp_path: Path
) -> None:
    """Also where `OnExceptionCheckpoint` wants to save then, which needs all ranks."""
    host, point, rank = raises
    run = Run(str(tmp_path), faults=((rank, "raise", point),), saves_on_exception=True, host=host)
    ranks = run_pair(run)
    assert [each.exitcode for each in ranks] == [1, 1]
    assert "ValueError: this sample cannot be used" in ranks[rank].output
    other = ranks[1 - rank].output
    named = f"The first to fail was rank {rank}, batch " in other
    assert named or (rank == 0 and "The store of the process group is gone. Rank 0 keeps it" in other), other
    assert_ends_soon(ranks)
    for each in ranks:
        assert "No checkpoint is written" in each.output, each.output
    assert not (tmp_path / "on_exception.ckpt").exists()
    if not point.startswith("first"):
        assert updates_in(tmp_path / "last.ckpt") == 2
        assert_resumes(tmp_path / "last.ckpt", whole_under(host), updates=2, host=host)


def test_loader_or_counter_of_one_rank_fails(
    refuses: tuple[str, str, int], whole_under: Callable[[str], list[Rank]], tmp_path: Path
) -> None:
    """What the loader or the counter of one rank raises, all ranks raise together at the update that needs it."""
    host, point, rank = refuses
    ranks = run_pair(Run(str(tmp_path), faults=((rank, "raise", point),), host=host, saves_on_exception=True))
    assert [each.exitcode for each in ranks] == [1, 1]
    for each in ranks:
        assert f"At update 2, the coming micro-batches cannot be used. Rank {rank}: ValueError: this" in each.output
        assert (len(each.samples), len(each.parameters)) == (6, 2)
    assert_ends_soon(ranks)
    # all of them are there to write a checkpoint
    assert updates_in(tmp_path / "on_exception.ckpt") == 2
    assert_resumes(tmp_path / "on_exception.ckpt", whole_under(host), updates=2, host=host)


# ---- Lightning's launcher


def launch(run: Run, **environment: str) -> tuple[int, str]:
    """Run the scenario as a user does; rank 0 launches rank 1.

    Returns:
        The exit code of rank 0 and the output of both. It ends when the last process that can write to it has ended,
        so that none is left then.
    """
    command = [sys.executable, "-m", "tests.faults.scenario", json.dumps(vars(run))]
    inherited = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    rank_0 = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = rank_0.communicate(timeout=LAUNCH_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(rank_0.pid, signal.SIGKILL)  # the session of this test
    return rank_0.returncode, output


@pytest.mark.parametrize(("rank", "exitcode"), [(0, -signal.SIGKILL), (1, 1)])
def test_launched_ranks_end_together(rank: int, exitcode: int, tmp_path: Path) -> None:
    run = Run(str(tmp_path), faults=((rank, "kill", "forward"),))
    code, output = launch(run)
    assert len(Record(run, rank).all("fault")) == 1
    assert "Timed out" not in output
    assert code == exitcode
    assert re.search(rf"\[rank{1 - rank}\]: .*Error: ", output), output
    assert updates_in(tmp_path / "last.ckpt") == 2


def test_launcher_hands_sigterm_on(tmp_path: Path) -> None:
    run = Run(str(tmp_path), faults=((0, "sigterm", "forward"),))
    code, output = launch(run)
    assert code == 0, output
    for rank in (0, 1):
        assert Record(run, rank).all("exception") == ["SIGTERMException"]
        assert len(Record(run, rank).all("parameter")) == 3
    assert updates_in(tmp_path / "last.ckpt") == 3


def test_launcher_with_the_port_taken(taken_port: socket.socket, tmp_path: Path) -> None:
    taken_port.listen()  # by something that lets rank 1 in and never answers
    code, output = launch(Run(str(tmp_path)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken_port.getsockname()[1]))
    assert code == 1
    assert "EADDRINUSE" in output
