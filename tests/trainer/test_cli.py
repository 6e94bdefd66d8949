"""Through LightningCLI: by name, and by class path with options of ours and of DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_tokennorm import SupervisedTokens, TokenMeanMetric, TokenNormDDP

CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy:
    class_path: lightning_tokennorm.TokenNormDDP
    init_args:
      loss_reduction: sum
      on_empty: error
      count_tokens: {counter}
      start_method: spawn
    dict_kwargs:
      find_unused_parameters: true
  callbacks:
    - class_path: lightning_tokennorm.TokenMeanMetric
      init_args:
        perplexity: true
"""


def parse(arguments: list[str]) -> Any:
    return LightningCLI(BoringModel, run=False, seed_everything_default=False, args=arguments).trainer


@pytest.mark.parametrize(
    ("counter", "expected"),
    [
        ("{class_path: lightning_tokennorm.SupervisedTokens, init_args: {shift: 0}}", SupervisedTokens(shift=0)),
        ("{class_path: lightning_tokennorm.SupervisedTokens, init_args: {shift: auto}}", SupervisedTokens()),
        ("{class_path: lightning_tokennorm.SupervisedTokens}", SupervisedTokens()),
        ("builtins.len", len),
    ],
    ids=["shift", "auto", "default", "function"],
)
def test_class_path_in_a_file(counter: str, expected: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(counter=counter))
    trainer = parse(["--config", str(path)])
    strategy = trainer.strategy
    assert type(strategy) is TokenNormDDP
    assert (strategy.loss_reduction, strategy.count_tokens) == ("sum", expected)
    assert (strategy._start_method, strategy._ddp_kwargs["find_unused_parameters"]) == ("spawn", True)
    assert any(isinstance(callback, TokenMeanMetric) and callback.perplexity for callback in trainer.callbacks)


def test_name_on_the_command_line() -> None:
    arguments = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    assert type(parse([*arguments, "--trainer.strategy=tokennorm_ddp"]).strategy) is TokenNormDDP
