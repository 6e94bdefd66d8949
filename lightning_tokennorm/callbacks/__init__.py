"""Lightning callbacks: what people look at."""

from lightning_tokennorm.callbacks.budget import TokenBudget
from lightning_tokennorm.callbacks.throughput import TokenThroughput
from lightning_tokennorm.callbacks.token_mean import TokenMeanMetric
from lightning_tokennorm.callbacks.update_ledger import UpdateLedger
from lightning_tokennorm.callbacks.weight_monitor import TokenWeightMonitor

__all__ = ["TokenBudget", "TokenMeanMetric", "TokenThroughput", "TokenWeightMonitor", "UpdateLedger"]
