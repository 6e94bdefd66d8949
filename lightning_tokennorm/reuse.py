"""Notices a loader that writes the next batch into memory of one that still waits.

A batch that was read ahead is a reference: a loader that fills the same tensors anew, or yields one object that it
changes in place, would turn it into another batch before it is trained on. To repeat a batch, unchanged, is fine, and
so are views of one data set: only a change counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

_MOST_PARTS = 64
_CHUNKS, _CHUNK_BYTES = 8, 64

Mark: TypeAlias = tuple[Any, ...]


class BatchMark:
    """Where the parts of a batch are in memory, and what they looked like.

    Args:
        batch: The batch as the loader yields it.
    """

    __slots__ = ("_batch", "_marks", "places")

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._marks: list[Mark] = []
        self.places: set[int] = (
            {id(batch)} if isinstance(batch, (Mapping, list)) or hasattr(batch, "__dict__") else set()
        )
        """Where its memory is: addresses of storages and of containers that can be changed."""
        for part in _parts(batch):
            mark, place = _mark(part)
            self._marks.append(mark)
            if place is not None:
                self.places.add(place)

    def has_changed(self) -> bool:
        """Whether the batch is no longer what it was when this mark was made.

        Contents are compared by samples of some hundred bytes a tensor, and by the number of in-place changes that
        torch has seen.
        """
        return self._marks != [_mark(part)[0] for part in _parts(self._batch)]


def _parts(batch: Any, depth: int = 4) -> Iterator[Any]:
    """The leaves of a batch of nested containers, not more than some."""
    todo, found = [(batch, depth)], 0
    while todo and found < _MOST_PARTS:
        part, left = todo.pop()
        inner: Any = None
        if isinstance(part, Tensor):
            pass
        elif isinstance(part, Mapping):
            inner = part.values()
        elif isinstance(part, (list, tuple)):
            inner = part[:_MOST_PARTS]
        elif is_dataclass(part) and not isinstance(part, type):
            inner = [getattr(part, field.name) for field in fields(part)]
        elif hasattr(part, "__dict__") and not callable(part):
            inner = vars(part).values()
        if inner is None or not left:
            found += 1
            yield part
        else:
            todo.extend((each, left - 1) for each in inner)


def _mark(part: Any) -> tuple[Mark, int | None]:
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_nested or part.device.type == "meta":
            return (id(part), part._version), id(part)
        place = part.untyped_storage().data_ptr()
        if part.device.type != "cpu" or not part.is_contiguous():
            return (place, part._version), place
        return (place, part._version, *_samples(part.data_ptr(), part.nbytes)), place
    array = getattr(part, "__array_interface__", None)  # NumPy, without importing it
    if array is not None and part.nbytes:
        place = array["data"][0]
        return (place, *(_samples(place, part.nbytes) if array.get("strides") is None else ())), place
    return (id(part),), None


def _samples(address: int, num_bytes: int) -> Iterator[bytes]:
    """Some bytes of a contiguous piece of host memory, evenly spread, read in place: a copy would cost more."""
    if num_bytes <= _CHUNKS * _CHUNK_BYTES:
        yield ctypes.string_at(address, num_bytes)
        return
    step = (num_bytes - _CHUNK_BYTES) // (_CHUNKS - 1)
    for chunk in range(_CHUNKS):
        yield ctypes.string_at(address + chunk * step, _CHUNK_BYTES)
