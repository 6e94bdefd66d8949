"""Notices a loader that writes the next batch into memory of one that still waits.

A batch that was read ahead is a reference: a loader that fills the same tensors anew, or yields one object that it
changes in place, would turn it into another batch before it is trained on. To repeat a batch, unchanged, is fine, and
so are views of one data set: only a change counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

_MOST_PARTS = 64
_SAMPLE_BYTES = 64

Mark: TypeAlias = tuple[Any, ...]


class BatchMark:
    """Where the parts of a batch are in memory, and what they looked like.

    Args:
        batch: The batch as the loader yields it.
    """

    __slots__ = ("_batch", "_marks", "places")

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._marks = [_mark(part) for part in _parts(batch)]
        self.places: set[Any] = {mark[0] for mark in self._marks if len(mark) > 1}
        """Where its memory is: addresses of storages, and of the batch itself where that is a container."""
        if not isinstance(batch, (Tensor, str, bytes, int, float)):
            self.places.add(id(batch))

    def has_changed(self) -> bool:
        """Whether the batch is no longer what it was when this mark was made.

        Contents are compared by samples of some hundred bytes a tensor, and by the number of in-place changes that
        torch has seen.
        """
        return self._marks != [_mark(part) for part in _parts(self._batch)]


def _parts(batch: Any) -> list[Any]:
    """The leaves of a batch of nested containers, not more than some."""
    todo: list[Any] = [batch]
    leaves: list[Any] = []
    while todo and len(leaves) < _MOST_PARTS:
        part = todo.pop()
        if isinstance(part, Tensor):
            leaves.append(part)
        elif isinstance(part, Mapping):
            todo.extend(part.values())
        elif isinstance(part, (list, tuple)):
            todo.extend(part[:_MOST_PARTS])
        elif is_dataclass(part) and not isinstance(part, type):
            todo.extend(getattr(part, field.name) for field in fields(part))
        else:
            leaves.append(part)
    return leaves


def _mark(part: Any) -> Mark:
    """What a leaf is: where it is in memory, and more if its contents can be changed there."""
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_nested:
            return id(part), part._version
        address, size = part.data_ptr(), part.nbytes
        place = part.untyped_storage().data_ptr()
        if part.device.type != "cpu" or not size or not part.is_contiguous():
            return place, part._version
        return place, part._version, *_samples(address, size)
    array = getattr(part, "__array_interface__", None)  # NumPy, without importing it
    if array is None or not part.nbytes:
        return (id(part),)
    address, _ = array["data"]
    return address, part.nbytes, *(_samples(address, part.nbytes) if array.get("strides") is None else ())


def _samples(address: int, size: int) -> tuple[bytes, ...]:
    """Bytes from the start, the middle and the end of a piece of host memory, read in place: a copy would cost more."""
    read = ctypes.string_at
    if size <= 4 * _SAMPLE_BYTES:
        return (read(address, size),)
    middle, end = address + size // 2, address + size - _SAMPLE_BYTES
    return read(address, _SAMPLE_BYTES), read(middle, _SAMPLE_BYTES), read(end, _SAMPLE_BYTES)
