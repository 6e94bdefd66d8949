"""Tells whether ranks that have to hold the same batches do: a number that goes with each rank's report of a window."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_SAMPLES = 256


def fingerprint(batch: Any, before: int = 0) -> int:
    """A number that is the same on all ranks whose batches hold the same values, as far as samples show it.

    Args:
        batch: Nested containers. Of each tensor and array on the host up to some hundred values are looked at, evenly
            spread; of tensors elsewhere only the shape, lest the host wait for a device. Nothing else in it counts.
        before: The number of the batches before this one.
    """
    found = zlib.crc32(type(batch).__name__.encode(), before)
    if isinstance(batch, Tensor):
        found = zlib.crc32(f"{batch.dtype}{tuple(batch.shape)}".encode(), found)
        if batch.device.type == "cpu" and batch.layout is torch.strided and not (batch.is_nested or batch.is_quantized):
            values = batch.detach().reshape(-1)
            samples = values[:: max(1, values.numel() // _SAMPLES)].contiguous()
            found = zlib.crc32(samples.view(torch.uint8).numpy().tobytes(), found)
    elif isinstance(batch, Mapping):
        for each in batch.values():
            found = fingerprint(each, found)
    elif isinstance(batch, (list, tuple)):
        for each in batch:
            found = fingerprint(each, found)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            found = fingerprint(getattr(batch, field.name), found)
    elif hasattr(batch, "__array_interface__") and batch.dtype.kind in "biufc":  # NumPy, without importing it
        values = batch.reshape(-1)
        found = zlib.crc32(values[:: max(1, values.size // _SAMPLES)].tobytes(), found)
    return found
