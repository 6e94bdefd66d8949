"""Every supervised token of an update weighs the same, over all ranks and micro-batches, in PyTorch Lightning.

Importing the package registers the strategy names ``tokennorm_ddp``, ``tokennorm_ddp_spawn``, ``tokennorm_ddp_fork``,
``tokennorm_ddp_notebook``, ``tokennorm_fsdp``, ``tokennorm_fsdp_cpu_offload`` and
``tokennorm_model_parallel``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_tokennorm import _compat
from lightning_tokennorm.callbacks import (
    TokenBudget,
    TokenMeanMetric,
    TokenThroughput,
    TokenWeightMonitor,
    UpdateLedger,
)
from lightning_tokennorm.counting import SupervisedTokens
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.heads import Heads
from lightning_tokennorm.loops import TokenWindow, token_windows
from lightning_tokennorm.metric import TokenMean
from lightning_tokennorm.strategies import TokenNormDDP, TokenNormFSDP, TokenNormModelParallel
from lightning_tokennorm.weights import token_weight_report
from lightning_tokennorm.window import UpdateRecord

__all__ = [
    "Heads",
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
]
__version__ = "0.1.0"

TokenNormDDP.register_strategies(StrategyRegistry)
TokenNormFSDP.register_strategies(StrategyRegistry)
TokenNormModelParallel.register_strategies(StrategyRegistry)
_compat.warn_of_other_namespace(frames=1)
