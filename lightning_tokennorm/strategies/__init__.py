"""Lightning's strategies, with one weight per supervised token."""

from lightning_tokennorm.strategies.ddp import TokenNormDDP
from lightning_tokennorm.strategies.fsdp import TokenNormFSDP
from lightning_tokennorm.strategies.model_parallel import TokenNormModelParallel

__all__ = ["TokenNormDDP", "TokenNormFSDP", "TokenNormModelParallel"]
