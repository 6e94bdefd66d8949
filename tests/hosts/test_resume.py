"""A run that goes on from a checkpoint written inside an epoch is, bit by bit, the one that was not interrupted.

Each checkpoint of a whole run is gone on from: written after a window, inside of one, after the epoch's last batch, and
where one rank's data has ended and another's has not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_tokennorm import TokenNormFSDP, TokenNormModelParallel
from lightning_tokennorm.testing.precision import KeepTypes
from tests.helpers import law
from tests.helpers.launch import run_ranks
from tests.helpers.law import Case, Module
from tests.hosts.test_fsdp import BLOCKS, HAND, ONCE
from tests.hosts.test_model_parallel import Sharded

CASES = {
    "stream": Case((5, 5), stream=True, loss=HAND, epochs=2),
    "sized": Case((5, 5), stateful=True, loss=HAND, epochs=2),
    "uneven streams": Case((5, 2), empty=((0, 1),), stream=True, loss=HAND, epochs=2),
    "uneven, sized": Case((2, 5), empty=((0, 1),), stateful=True, loss=HAND, epochs=2),
}
AFTER = {2: 1, 3: 1, 4: 2}
"""After which batches of the first epoch checkpoints are written, and how many updates are in them: K is 3."""


class Saves(Callback):
    """Writes checkpoints, and goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx in AFTER:
            trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


class Momentum:
    """An optimizer with a state, which a checkpoint has to bring back."""

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class FSDPModule(Momentum, Module):
    pass


class ShardedModule(Momentum, Sharded):
    pass


def fit_fsdp(rank: int, case: Case, kind: str, **options: Any) -> list[Tensor]:
    strategy = TokenNormFSDP(state_dict_type=kind, **BLOCKS, **(ONCE if case.stateful else {}))
    return law.fit(rank, 2, case, strategy, FSDPModule(case.loss, lr=law.LR), plugins=[KeepTypes()], **options)


def fit_model_parallel(rank: int, case: Case, kind: str, **options: Any) -> list[Tensor]:
    strategy = TokenNormModelParallel(
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=kind == "sharded",
        **(ONCE if case.stateful else {}),
    )
    return law.fit(rank, 2, case, strategy, ShardedModule(case), **options)


HOSTS = {"fsdp": fit_fsdp, "model parallel": fit_model_parallel}


KINDS = {"full": tuple(CASES), "sharded": ("stream", "uneven, sized")}


def resume(rank: int, world_size: int, host: str, kind: str, folder: Path) -> dict[str, dict[int, list[bool]]]:
    """For each case and checkpoint: whether it is a folder, and whether each update after it is the same."""
    found: dict[str, dict[int, list[bool]]] = {}
    for name in KINDS[kind]:
        case = CASES[name]
        path = folder / name
        # what the parameters moved by, which momentum makes depend on all updates before
        whole = HOSTS[host](rank, case, kind, callbacks=[Saves(path)])
        assert len(whole) == 4
        found[name] = {}
        for batch_idx, updates in AFTER.items():
            written = path / f"{batch_idx}.ckpt"
            rest = HOSTS[host](rank, case, kind, ckpt_path=written)
            same = [a.equal(b) for a, b in zip(whole[updates:], rest, strict=True)]
            found[name][batch_idx] = [written.is_dir(), *same]
    return found


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_bitwise(host: str, kind: str, tmp_path: Path) -> None:
    for found in run_ranks(resume, 2, host, kind, tmp_path, timeout_s=240):
        for name in KINDS[kind]:
            for batch_idx, updates in AFTER.items():
                assert found[name][batch_idx] == [kind == "sharded", *[True] * (4 - updates)], (name, batch_idx)
