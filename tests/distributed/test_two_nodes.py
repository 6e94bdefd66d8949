"""Two nodes of one process each, as `torchrun` starts them, over loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT_S = 500

SCRIPT = """
import json, os, sys
from pathlib import Path

Path(sys.argv[1], "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
from tests.helpers.scalar_rig import R1, ScalarModule, make_loader, make_trainer

if __name__ == "__main__":
    module = ScalarModule()
    trainer = make_trainer(
        1, num_nodes=2, strategy=TokenNormDDP(), accumulate_grad_batches=3, callbacks=[TokenMeanMetric()]
    )
    trainer.fit(module, make_loader(R1[trainer.global_rank]))
    record = trainer.strategy.last_update
    seen = {
        "node": trainer.node_rank,
        "local_rank": trainer.local_rank,
        "gradients": module.gradients,
        "logged": trainer.callback_metrics["train_loss_per_token"].item(),
        "num_tokens": record.num_tokens,
        "world_size": record.world_size,
    }
    with open(f"{sys.argv[1]}/rank{trainer.global_rank}.json", "w") as file:
        json.dump(seen, file)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_node(node: int, port: int, script: Path, log: Path) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    loopback = "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    options = [
        "--nnodes=2",
        f"--node-rank={node}",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
    ]
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(script.parent)],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def end(node: subprocess.Popen[bytes], pid_of_rank: Path) -> None:
    """End a `torchrun` that is still there, and the rank that it has started in a session of its own."""
    if node.poll() is None:
        node.kill()
        node.wait()
        if pid_of_rank.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid_of_rank.read_text()), signal.SIGKILL)


def test_window_over_two_nodes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port, deadline = free_port(), time.monotonic() + TIMEOUT_S
    logs = [tmp_path / f"node{node}.log" for node in (0, 1)]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for node in (0, 1):
            nodes.append(start_node(node, port, script, logs[node]))
        codes = [node.wait(max(1.0, deadline - time.monotonic())) for node in nodes]
    finally:
        for node, started in enumerate(nodes):
            end(started, tmp_path / f"pid{node}")
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    for rank in (0, 1):
        # R1: rank 0 has 3 + 5 + 8 over 8 tokens, rank 1 has 4 + 10 + 12 over 16: 42 / 24
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == {
            "node": rank,
            "local_rank": 0,
            "gradients": [pytest.approx(1.75, abs=1e-12)],
            "logged": pytest.approx(1.75, abs=1e-12),
            "num_tokens": 24,
            "world_size": 2,
        }
