"""Lightning callbacks: what people look at."""

from lightning_tokennorm.callbacks.token_mean import TokenMeanMetric

__all__ = ["TokenMeanMetric"]
