"""`BatchTokens`: what the strategy says of the micro-batch in hand goes before the counter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_tokennorm.callbacks.batch_tokens import BatchTokens

LOSS = {"loss": torch.zeros(())}


def trainer(automatic: bool = True, **strategy: Any) -> Any:
    module = SimpleNamespace(automatic_optimization=automatic)
    return SimpleNamespace(strategy=SimpleNamespace(**strategy), lightning_module=module)


def started(trainer: Any, given: Any) -> BatchTokens:
    tokens = BatchTokens(given, "Test")
    tokens.start(trainer, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    return tokens


def counted(trainer: Any, batch: Any = "batch", after: Any = None, outputs: Any = LOSS, given: Any = len) -> Any:
    tokens = started(trainer, given)
    tokens.before_step(trainer, batch)
    return tokens.after_step(trainer, outputs, batch if after is None else after)


def test_what_the_strategy_says() -> None:
    assert counted(trainer()) == 5
    assert counted(trainer(count_tokens=lambda batch: 7), given=None) == 7
    assert counted(trainer(count_tokens=len, micro_batch_tokens=3), given=None) == 3
    assert counted(trainer(count_tokens=len, micro_batch_tokens=3)) == 5  # another counter was asked for
    assert counted(trainer(micro_batch_tokens=None)) == 5
    for nothing in ("micro_batch_is_padded", "is_copy"):
        assert counted(trainer(**{nothing: True})) == 0
        assert counted(trainer(**{nothing: False})) == 5


def test_a_batch_that_its_step_changes_or_left_out() -> None:
    assert counted(trainer(), after="another one") == 11  # a step that fetches batches itself
    assert counted(trainer(), outputs=None) == 0
    assert counted(trainer(), outputs={}) == 0
    assert counted(trainer(automatic=False), outputs=None) == 5  # manual steps need not return anything
    batch = {"n": torch.tensor(4)}
    tokens = started(trainer(), lambda batch: batch["n"])
    tokens.before_step(trainer(), batch)
    batch["n"].zero_()
    assert tokens.after_step(trainer(), LOSS, batch) == 4


def test_an_error_waits_for_the_step() -> None:
    def fail(batch: Any) -> int:
        return batch["n"]  # type: ignore[no-any-return]

    assert counted(trainer(), {}, outputs=None, given=fail) == 0
    with pytest.raises(KeyError, match="n"):
        counted(trainer(), {}, given=fail)
    batch: dict[str, int] = {}
    tokens = started(trainer(), fail)
    tokens.before_step(trainer(), batch)
    batch["n"] = 6  # the step has put it there
    assert tokens.after_step(trainer(), LOSS, batch) == 6
