"""Every supervised token of an update weighs the same, over all ranks and micro-batches, in PyTorch Lightning.

Importing the package registers the strategy names ``tokennorm_ddp``, ``tokennorm_ddp_spawn``, ``tokennorm_ddp_fork``
and ``tokennorm_ddp_notebook``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_tokennorm import _compat
from lightning_tokennorm.callbacks import TokenMeanMetric
from lightning_tokennorm.counting import SupervisedTokens
from lightning_tokennorm.errors import TokenNormError
from lightning_tokennorm.loops import TokenWindow, token_windows
from lightning_tokennorm.metric import TokenMean
from lightning_tokennorm.strategies import TokenNormDDP
from lightning_tokennorm.window import UpdateRecord

__all__ = [
    "SupervisedTokens",
    "TokenMean",
    "TokenMeanMetric",
    "TokenNormDDP",
    "TokenNormError",
    "TokenWindow",
    "UpdateRecord",
    "token_windows",
]
__version__ = "0.1.0"

TokenNormDDP.register_strategies(StrategyRegistry)
_compat.warn_of_other_namespace()
