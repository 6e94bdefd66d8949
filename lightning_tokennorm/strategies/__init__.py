"""Lightning's strategies, with one weight per supervised token."""

from lightning_tokennorm.strategies.ddp import TokenNormDDP
from lightning_tokennorm.strategies.fsdp import TokenNormFSDP

__all__ = ["TokenNormDDP", "TokenNormFSDP"]
