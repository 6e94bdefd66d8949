"""Lightning's strategies, with one weight per supervised token."""

from lightning_tokennorm.strategies.ddp import TokenNormDDP

__all__ = ["TokenNormDDP"]
