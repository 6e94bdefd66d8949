"""Runs a user's script the way a user does: as a program of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

LAST_RESORT_S = 900
"""For `pytest.mark.timeout` where programs run: they import all that there is, on a machine that has other work."""


def run_script(folder: Path, text: str, *arguments: str, succeeds: bool = True) -> subprocess.CompletedProcess[str]:
    """Write a script into a folder, run it to its end and return what it printed.

    Where the test is given up, all processes of the script end with it.
    """
    script = folder / "train.py"
    script.write_text(text)
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode == 0) == succeeds, stderr
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
