"""Precision for FSDP that leaves a module in the types it has: Lightning's own casts all to one, of 32 bits at most."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from typing_extensions import override


class KeepTypes(FSDPPrecision):
    """Computes and reduces in the types of the parameters, so that what is in float64 stays exact to 1e-12."""

    def __init__(self) -> None:
        super().__init__("32-true")

    @property
    @override
    def mixed_precision_config(self) -> None:  # type: ignore[override]
        return None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        return data

    @override
    def convert_output(self, data: Any) -> Any:
        return data

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()
