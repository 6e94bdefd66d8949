"""The public names, their arguments and defaults: users and their configurations are written against them."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from importlib.resources import files

import pytest

import lightning_tokennorm as package


def parameters(function: object) -> dict[str, object]:
    empty = inspect.Parameter.empty
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return {name: None if p.default is empty else p.default for name, p in signature.parameters.items()}


def test_names() -> None:
    assert set(package.__all__) == {
        "Heads",
        "BatchCount",
        "PerMicroBatch",
        "SupervisedSamples",
        "WeightedTokens",
        "SupervisedTokens",
        "TokenBudget",
        "TokenMean",
        "TokenMeanMetric",
        "TokenNormDDP",
        "TokenNormError",
        "TokenNormFSDP",
        "TokenNormModelParallel",
        "TokenThroughput",
        "TokenWeightMonitor",
        "TokenWindow",
        "UpdateLedger",
        "UpdateRecord",
        "token_weight_report",
        "token_windows",
    }


def test_signatures() -> None:
    assert parameters(package.TokenNormDDP) == {
        "count_tokens": None,
        "loss_reduction": "mean",
        "counting": "lookahead",
        "on_empty": "skip",
        "uneven": "pad",
        "audit": False,
        "head_weights": None,
        "accumulate_grad_batches": None,
        "ddp_hook_reduces": None,
        "ddp_kwargs": None,
    }
    own = {
        "count_tokens": None,
        "loss_reduction": "mean",
        "counting": "lookahead",
        "on_empty": "skip",
        "uneven": "pad",
        "audit": False,
        "head_weights": None,
        "accumulate_grad_batches": None,
        "sync_each_micro_batch": True,
    }
    assert parameters(package.TokenNormFSDP) == {**own, "fsdp_kwargs": None}
    assert parameters(package.TokenNormModelParallel) == {
        **own,
        "data_parallel_size": "auto",
        "tensor_parallel_size": "auto",
        "tokens_over": None,
        "kwargs": None,
    }
    assert parameters(package.token_windows) == {
        "loader": None,
        "accumulate": None,
        "model": None,
        "group": None,
        "divided_by": 1,
        "count_tokens": None,
        "loss_reduction": "mean",
        "on_empty": "skip",
        "uneven": "pad",
    }
    assert parameters(package.token_weight_report) == {
        "loader": None,
        "accumulate": None,
        "world_size": 1,
        "count_tokens": None,
        "windows": None,
    }
    assert list(parameters(package.TokenWindow.backward)) == ["self", "loss", "backward"]
    assert parameters(package.SupervisedTokens) == {"labels": "labels", "ignore_index": -100, "shift": "auto"}
    assert parameters(package.SupervisedSamples) == parameters(package.SupervisedTokens)
    assert parameters(package.WeightedTokens) == {**parameters(package.SupervisedTokens), "weights": "loss_weights"}
    assert parameters(package.BatchCount) == {"key": "num_tokens"}
    assert parameters(package.PerMicroBatch) == {}
    assert parameters(package.TokenMeanMetric) == {
        "name": "loss_per_token",
        "count_tokens": None,
        "loss_reduction": None,
        "perplexity": False,
    }
    assert parameters(package.TokenWeightMonitor) == {"count_tokens": None, "gradient_windows": 0}
    assert parameters(package.TokenThroughput) == {"count_tokens": None, "count_all_tokens": None}
    assert parameters(package.UpdateLedger) == {"path": None}
    assert parameters(package.TokenBudget) == {"max_tokens": None, "count_tokens": None}
    assert list(parameters(package.TokenMean.update)) == ["self", "loss_sum", "num_tokens"]
    assert [field.name for field in dataclasses.fields(package.UpdateRecord)] == [
        "index",
        "num_tokens",
        "micro_batches",
        "world_size",
        "tokens_min",
        "tokens_max",
        "loss_sum",
        "applied",
        "skipped_because",
        "padded_micro_batches",
        "heads",
    ]
    assert issubclass(package.TokenNormError, RuntimeError)


def test_records_cannot_be_changed() -> None:
    record = package.UpdateRecord(0, 1, 1, 1, 1, 1, None, True, None)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.index = 1  # type: ignore[misc]


def test_typed() -> None:
    assert files(package).joinpath("py.typed").is_file()


def test_import_registers_names_and_says_nothing() -> None:
    code = (
        "import lightning.pytorch as pl, logging; before = list(logging.getLogger('lightning_tokennorm').handlers);"
        "import lightning_tokennorm; assert logging.getLogger('lightning_tokennorm').handlers == before;"
        "from lightning.pytorch.strategies import StrategyRegistry; assert 'tokennorm_ddp' in StrategyRegistry;"
        "assert 'tokennorm_fsdp' in StrategyRegistry; assert 'tokennorm_fsdp_cpu_offload' in StrategyRegistry"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
