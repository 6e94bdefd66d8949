"""The private names of Lightning that `_compat` relies on: when one moves, this fails by its name."""

from __future__ import annotations

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loops import fetchers, fit_loop
from lightning.pytorch.utilities import CombinedLoader

from lightning_tokennorm import TokenMean, TokenNormDDP, TokenNormFSDP, _compat


def test_private_names() -> None:
    trainer = Trainer(accelerator="cpu", logger=False)
    for owner, name in (
        (fetchers, "_DataFetcher"),
        (fetchers._DataFetcher(), "_start_profiler"),
        (fit_loop, "_select_data_fetcher"),
        (trainer.fit_loop, "setup_data"),
        (CombinedLoader([]), "_state_dicts"),
        (trainer.fit_loop.epoch_loop.automatic_optimization, "output_result_cls"),
        (trainer.fit_loop.epoch_loop, "_batches_that_stepped"),
        (trainer, "log_every_n_steps"),
        (TokenMean(), "_forward_cache"),
        (TokenNormDDP(), "_timeout"),
        (TokenNormFSDP(), "_timeout"),
        (TokenNormFSDP(), "_state_dict_type"),
    ):
        assert hasattr(owner, name), f"{owner!r} has no {name}"


def test_a_name_that_moved_is_said() -> None:
    with pytest.raises(ImportError, match=r"needs `Trainer\._gone`, which lightning .* does not have"):
        _compat._private(Trainer(accelerator="cpu", logger=False), "_gone")
