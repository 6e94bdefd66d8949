"""The signal that a SLURM cluster sends before it requeues a job: all ranks save together, and training goes on.

Lightning saves inside the signal handler, which ranks run at different times: its ranks wait for each other there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scenario import ACCUMULATE, Run
from tests.faults.test_faults import HANG_S, Rank, run_pair, updates_in

pytestmark = pytest.mark.timeout(3 * HANG_S)

SCONTROL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(SCONTROL)
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    """The uninterrupted run."""
    return run_pair(Run(str(tmp_path_factory.mktemp("whole")), slurm=True))


@pytest.mark.parametrize(
    ("faults", "saved_after"),
    [
        # the second window is reported with the last micro-batch of the first one, which is still to come
        pytest.param(((0, "sigusr1", "first forward"),), 1, id="rank 0"),
        pytest.param(((1, "sigusr1", "first forward"),), 1, id="rank 1"),
        pytest.param(((0, "sigusr1", "forward"), (1, "sigusr1", "backward")), 3, id="inside the third window"),
        *(
            pytest.param(
                ((0, "sigusr1", "first forward"), (1, f"sigusr1 in {ms} ms", "first forward")), 1, id=f"{ms} ms"
            )
            for ms in (5, 20)
        ),
        pytest.param(((0, "sigusr1", "first forward"), (1, "sigusr1", "forward")), 1, id="after all have saved"),
        # the third window has been reported by then: the edge after it is the next one
        pytest.param(((1, "sigusr1", "validation"),), 3, id="in the validation"),
        pytest.param(((1, "sigusr1", "last forward"),), 4, id="in the last window"),
        pytest.param(((0, "sigusr1", "last forward"), (1, "sigusr1", "last forward")), 4, id="in the last window, all"),
        pytest.param(((1, "sigusr1", "setup"),), 0, id="before the first window"),
    ],
)
def test_requeue(faults: Any, saved_after: int, whole: list[Rank], cluster: Path) -> None:
    requeue(Run(str(cluster), faults=faults, slurm=True), saved_after, whole)


@pytest.mark.parametrize("host", ["fsdp", "model_parallel"])
def test_requeue_under_a_sharded_host(host: str, cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = run_pair(Run(str(tmp_path_factory.mktemp("whole")), slurm=True, host=host))
    requeue(Run(str(cluster), faults=((1, "sigusr1", "first forward"),), slurm=True, host=host), 1, whole)


def requeue(run: Run, saved_after: int, whole: list[Rank]) -> None:
    """All ranks save at the same edge, and both this run and the next job are the uninterrupted one."""
    cluster = Path(run.folder)
    ranks = run_pair(run)
    for rank, uninterrupted in zip(ranks, whole, strict=True):
        assert rank.exitcode == 0, rank.output
        assert rank.exceptions == []
        # training goes on until the cluster ends it
        assert rank.samples == uninterrupted.samples
        assert rank.parameters == uninterrupted.parameters
    assert (cluster / "bin" / "calls").read_text() == "requeue 4711\n"  # once
    (saved,) = cluster.glob("hpc_ckpt_*.ckpt")
    assert updates_in(saved) == saved_after
    # the next job goes on from it by itself
    for path in cluster.glob("rank*"):
        path.unlink()
    for rank, uninterrupted in zip(run_pair(replace(run, faults=())), whole, strict=True):
        assert rank.exitcode == 0, rank.output
        assert rank.samples == uninterrupted.samples[saved_after * ACCUMULATE :]
        assert rank.parameters == uninterrupted.parameters[saved_after:]
