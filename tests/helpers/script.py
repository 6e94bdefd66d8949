"""Runs a user's script the way a user does: as a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(folder: Path, text: str, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Write a script into a folder, run it to its end and return what it printed; it has to succeed."""
    script = folder / "train.py"
    script.write_text(text)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
