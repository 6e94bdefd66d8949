"""What a module is like: the bits of its parameters, and the layers for which no split can be alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def build(make_module: Callable[[], pl.LightningModule]) -> pl.LightningModule:
    """Build the module from a fixed seed."""
    torch.manual_seed(0)
    return make_module()


def switch_dropout_off(module: nn.Module) -> int:
    """Switch dropout off; returns how many layers had some."""
    layers = 0
    for layer in module.modules():
        found = isinstance(layer, _DropoutNd) and layer.p > 0
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
        # attention layers, here and in transformers, keep a bare number
        for name, value in list(vars(layer).items()):
            if "drop" in name and isinstance(value, float) and value > 0:
                setattr(layer, name, 0.0)
                found = True
        layers += found
    return layers


def batch_dependent_layers(module: nn.Module) -> list[str]:
    """Layers that mix the samples of a batch while training, by name and type: no split leaves them alike."""
    return [
        f"{name} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.training
    ]


def digest_of(tensors: Iterable[Tensor]) -> str:
    """A digest of the bits of tensors, wherever and however they lie in memory."""
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def as_real(tensor: Tensor) -> Tensor:
    """In float64; complex numbers as pairs."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def listed(names: Sequence[str]) -> str:
    """The first few names, for a text."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more
