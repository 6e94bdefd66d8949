"""Every test starts from the same seed and threads, and leaves no process group behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-windows", type=int, default=600, help="how many windows tests/soak goes through")
    parser.addoption("--all-faults", action="store_true", help="whether tests/faults goes through all faults per host")
    parser.addoption("--simulate-all", action="store_true", help="whether tests/simulation looks at all of its worlds")


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    environment = dict(os.environ)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    os.environ.clear()
    os.environ.update(environment)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
