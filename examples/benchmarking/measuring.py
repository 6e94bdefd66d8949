"""What is measured of a fit: time per window, the collectives of a window, peak memory, and spread over many."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarking.workload import flat_gradient

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Probe:
    """What a contestant calls while it fits."""

    window_starts: Callable[[], None] = _nothing
    """With the first micro-batch of each window in hand."""
    before_step: Callable[[nn.Module], None] = _nothing
    """With the model, when its gradients are complete."""


class WindowClock:
    """Takes the time from the start of each window to that of the next: on a GPU in its queue, else on the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """A window starts."""
        if self._on_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self._marks.append(mark)
        else:
            self._marks.append(time.perf_counter())

    def intervals_ms(self) -> list[float]:
        """Milliseconds from start to start: one less than there were windows."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._on_gpu:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in pairs]
        return [1e3 * (end - start) for start, end in pairs]


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that this rank takes part in, from wherever they are called.

    All of them pass torch's dispatcher, those of DDP's reducer and those inside `all_gather_object` too, which a
    wrapper around the functions of `torch.distributed` would not see. Every operation becomes slower: not for a timed
    fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now: Counter[tuple[str, str, str, int]] = Counter()
        self._at_windows: list[Counter[tuple[str, str, str, int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            # Only what shares gradients communicates during a backward: these are DDP's buckets.
            where = "buckets" if torch._C._current_graph_task_id() != -1 else "outside"
            mine = _contributed(args)
            size = sum(tensor.numel() * tensor.element_size() for tensor in mine)
            dtype = str(mine[0].dtype).removeprefix("torch.") if mine else "nothing"
            self._now[where, func.name().removeprefix("c10d::").strip("_"), dtype, size] += 1
        return func(*args, **(kwargs or {}))

    def mark(self) -> None:
        """A window starts."""
        self._at_windows.append(self._now.copy())

    def last_window(self) -> list[dict[str, Any]]:
        """The collectives between the last two starts of a window, one row for each kind, type and size."""
        difference = self._at_windows[-1] - self._at_windows[-2]
        return [
            {"where": where, "op": op, "dtype": dtype, "bytes": size, "count": count}
            for (where, op, dtype, size), count in sorted(difference.items())
        ]


def _contributed(args: Any) -> list[Tensor]:
    """What this rank puts in: gathers and scatters name their output first, then their input, others one buffer."""
    tensors = [part for part in map(_tensors, args) if part]
    return tensors[1] if len(tensors) > 1 else tensors[0] if tensors else []


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


class PeakMemory:
    """The most memory that a fit holds: allocated on a GPU, else what the process's resident size grows by.

    Example:
        >>> memory = PeakMemory(torch.device("cpu"))
        >>> memory.start()
        >>> megabytes = memory.stop()
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._before = 0.0

    def start(self) -> None:
        """Give back what earlier fits have left, and forget their peak."""
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return
        with suppress(OSError, AttributeError):  # Linux with glibc; elsewhere the growth of the process's own peak
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _peak_resident_mb()

    def stop(self) -> float:
        """Megabytes since the start."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated() / 2**20
        return _peak_resident_mb() - self._before


def return_memory_at_once() -> None:
    """Keep no freed memory on the CPU, for what is held to be what is used: with glibc, and from now on.

    Else freed blocks wait for the next allocation that fits, and what a fit adds to the resident size depends on the
    fits before it. Every allocation of a tensor becomes slower.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)


def _peak_resident_mb() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class FirstGradient:
    """Keeps the gradient of a fit's first update."""

    gradient: Tensor
    """All of it in one vector of float64, on the CPU."""

    def record(self, model: nn.Module) -> None:
        """The gradients of an update are complete."""
        if not hasattr(self, "gradient"):
            self.gradient = flat_gradient(model)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return dict.fromkeys(("q1", "median", "q3"), values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"q1": q1, "median": median, "q3": q3}


def gradient_errors(gradient: Tensor, reference: Tensor) -> dict[str, float]:
    """Relative L2 and greatest absolute difference of two flat gradients."""
    difference = gradient - reference
    return {
        "relative_l2": (difference.norm() / reference.norm()).item(),
        "greatest_absolute": difference.abs().max().item(),
    }


def machine(device: str) -> dict[str, Any]:
    """The kind of machine and the versions that a figure belongs to."""
    kind: dict[str, Any] = {"cpu": _cpu_model(), "cores": usable_cores()}
    if device == "cuda":
        kind |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    for package in ("torch", "lightning", "lightning-tokennorm", "transformers", "accelerate"):
        with suppress(PackageNotFoundError):
            kind[package] = version(package)
    return kind


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
