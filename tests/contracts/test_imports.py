"""Data runs one way, and so do imports: a module may import only what stands before it in the design."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_tokennorm"

ALLOWED: dict[str, set[str]] = {
    # the law
    "errors": set(),
    "hf_models": {"torch"},
    "counting": {"torch", "hf_models"},
    "gradients": {"torch"},
    "grad_scaler": {"torch"},
    "window": {"torch", "counting"},
    "counters": {"torch", "counting"},
    "heads": {"torch", "counters", "counting"},
    "head_losses": {"torch", "counting", "errors", "heads", "window"},
    # the ranks and the window
    "reduction": {"torch"},
    "exchange": {"torch", "counting", "errors", "window"},
    "fingerprint": {"torch"},
    "agreement": {"counting", "errors", "exchange", "fingerprint", "heads", "window"},
    "accounting": {"torch", "agreement", "counting", "errors", "exchange", "head_losses", "window"},
    "_compat": {"lightning", "packaging", "torchmetrics"},
    "reuse": {"torch"},
    "lookahead": {"_compat", "errors", "reuse"},
    "syncing": {"torch", "errors", "gradients", "reduction"},
    # Lightning's strategies
    "strategies/options": {"counting", "heads", "window"},
    "strategies/comm_hooks": {"torch"},
    "strategies/reducer": {"torch", "errors", "gradients"},
    "strategies/refusals": {"torch", "lightning", "_compat", "errors", "strategies"},
    "strategies/steps": {"torch", "lightning", "_compat", "gradients"},
    "strategies/signals": {"lightning", "_compat"},
    "strategies/failures": {"errors", "exchange"},
    "strategies/checkpoints": {"_compat", "counting", "errors", "exchange", "lookahead"},
    "strategies/manual": {"torch", "lightning", "accounting", "counting", "errors", "window"},
    "strategies/feed": {"lightning", "_compat", "accounting", "errors", "exchange", "lookahead", "strategies"},
    "strategies/window_view": {
        *("lightning", "_compat", "accounting", "counting", "errors", "grad_scaler", "strategies", "window"),
    },
    "strategies/lifecycle": {
        *("torch", "lightning", "typing_extensions"),
        *("_compat", "accounting", "counting", "errors", "exchange", "grad_scaler", "reduction", "strategies"),
        "window",
    },
    "strategies/base": {
        *("torch", "lightning", "typing_extensions"),
        *("_compat", "accounting", "errors", "grad_scaler", "gradients", "strategies", "window"),
    },
    "strategies/ddp": {
        *("torch", "lightning", "typing_extensions"),
        *("_compat", "counting", "reduction", "strategies", "window"),
    },
    "strategies/sharded": {
        *("torch", "lightning", "typing_extensions"),
        *("errors", "gradients", "strategies"),
    },
    "strategies/fsdp_units": {"torch", "lightning", "errors", "gradients"},
    "strategies/fsdp_on_cpu": {"torch", "lightning", "typing_extensions", "_compat"},
    "strategies/fsdp": {
        *("torch", "lightning", "typing_extensions"),
        *("counting", "reduction", "strategies", "window"),
    },
    "strategies/fsdp2_modules": {"torch", "lightning", "errors", "gradients"},
    "strategies/clipping": {"torch"},
    "strategies/model_parallel": {
        *("torch", "lightning", "typing_extensions"),
        *("counting", "reduction", "strategies", "window"),
    },
    "strategies/__init__": {"strategies"},
    # loops by hand
    "loops": {
        *("torch", "_compat", "accounting", "counting", "errors", "exchange", "gradients", "lookahead", "reduction"),
        *("strategies", "syncing", "window"),
    },
    # what people look at
    "metric": {"torch", "torchmetrics", "counting"},
    "callbacks/bars": {"lightning"},
    "callbacks/batch_sums": {"torch", "counting", "heads", "window"},
    "callbacks/stage_means": {"torch", "torchmetrics", "counting", "heads", "metric"},
    "callbacks/monitors": {"lightning", "_compat"},
    "callbacks/batch_tokens": {"torch", "lightning", "counting"},
    "callbacks/per_update": {
        *("torch", "torchmetrics", "lightning", "typing_extensions"),
        *("_compat", "callbacks", "counting"),
    },
    "callbacks/gradient_distance": {"torch", "lightning", "counting"},
    "callbacks/weight_monitor": {
        *("torch", "torchmetrics", "lightning", "typing_extensions"),
        *("_compat", "callbacks", "counting"),
    },
    "callbacks/throughput": {"torch", "torchmetrics", "lightning", "typing_extensions", "callbacks", "counting"},
    "callbacks/budget": {"torch", "torchmetrics", "lightning", "typing_extensions", "callbacks", "counting"},
    "callbacks/token_mean": {
        *("torch", "torchmetrics", "lightning", "typing_extensions"),
        *("_compat", "callbacks", "counting", "metric", "window"),
        "heads",
    },
    "callbacks/update_ledger": {"torch", "lightning", "typing_extensions", "_compat", "window"},
    "callbacks/__init__": {"callbacks"},
    # books and reports
    "pictures": {"matplotlib"},
    "ledger": {"pictures"},
    "weights": {"counting", "errors", "pictures", "window"},
    "__init__": {
        *("lightning", "_compat", "callbacks", "counters", "counting", "errors", "heads", "loops", "metric"),
        *("strategies", "weights", "window"),
    },
    # what users prove with: stands on top of everything, and nothing stands on it
    "testing/ranks": {"torch"},
    "testing/splits": set(),
    "testing/module": {"torch", "lightning"},
    "testing/shards": {"torch", "lightning"},
    "testing/hosts": {"torch", "lightning", "_compat", "strategies", "testing"},
    "testing/precision": {"torch", "lightning", "typing_extensions"},
    "testing/plain_sgd": {"torch", "lightning"},
    "testing/watch": {"torch", "lightning", "testing"},
    "testing/compare": {"torch", "testing"},
    "testing/causes": {"torch", "counting", "testing"},
    "testing/failures": {"counting", "testing"},
    "testing/report": {"counting"},
    "testing/fits": {"torch", "lightning", "counting", "testing"},
    "testing/preconditions": {"counting", "testing"},
    "testing/partition": {"torch", "lightning", "counting", "testing"},
    "testing/__init__": {"testing"},
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imports_of(path: Path) -> set[str]:
    """Third-party packages, and modules of this package by their own name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == PACKAGE.name else [module]
        for name in names:
            parts = name.split(".")
            found.add(parts[1] if parts[0] == PACKAGE.name else parts[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    import sys

    own_and_third_party = {name for name in imports_of(path) if name not in sys.stdlib_module_names}
    assert own_and_third_party <= ALLOWED[name_of(path)]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_private_names_of_lightning_go_through_compat(path: Path) -> None:
    private = re.compile(r"\b(fit_loop|epoch_loop|trainer|strategy|fetcher|plugin|pl_module|lightning_module)\._[a-z]")
    if path.stem != "_compat":
        assert not private.findall(path.read_text())
