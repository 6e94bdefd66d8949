"""The contestants: each fits the same `Job` and tells a `Probe` when a window starts and when its gradient is complete.

All but Lightning's own strategies promise the same law: every supervised token of an update weighs the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from benchmarking.hugging_face import fit_hugging_face
from benchmarking.lightning_fit import CausalLM, fit_lightning
from benchmarking.loop_by_hand import fit_by_hand
from benchmarking.measuring import Probe
from benchmarking.sharding import BLOCKS, PlainFSDP, ShardedCausalLM, in_ddp, in_fsdp, in_fsdp2, over_all_ranks
from benchmarking.workload import Job
from lightning_tokennorm import SupervisedTokens, TokenNormDDP, TokenNormFSDP, TokenNormModelParallel

PLAIN = "DDPStrategy"
TOKENNORM = "TokenNormDDP"
SIGTERM_KEPT = "TokenNormDDP, Lightning's SIGTERM broadcast kept"
BY_HAND = "torch DDP by hand"
HUGGING_FACE = "Hugging Face Trainer"

PLAIN_FSDP = "FSDPStrategy"
TOKENNORM_FSDP = "TokenNormFSDP"
FSDP_BY_HAND = "torch FSDP by hand"

PLAIN_FSDP2 = "ModelParallelStrategy"
TOKENNORM_FSDP2 = "TokenNormModelParallel"
FSDP2_BY_HAND = "fully_shard by hand"

ONCE = ", one reduction"
"""Ends the names of those that reduce gradients once per update, where the host does after each micro-batch."""


@dataclass(frozen=True)
class Contestant:
    """A name and a way to fit a job."""

    name: str
    fit: Callable[[Job, Probe], None]
    plain: str = PLAIN
    """The Lightning strategy that it is compared with."""
    loop: str = BY_HAND
    """The loop by hand that it is compared with."""


def contestants() -> list[Contestant]:
    """All that can be measured under DDP with what is installed."""
    plain, ours, by_hand = ddp_contestants()
    kept = partial(fit_lightning, partial(with_lightnings_sigterm, _counting(TokenNormDDP)), CausalLM)
    found = [plain, ours, Contestant(SIGTERM_KEPT, kept), by_hand]
    if find_spec("transformers") and find_spec("accelerate"):
        found.append(Contestant(HUGGING_FACE, fit_hugging_face))
    return found


def named(*names: str) -> list[Contestant]:
    """Those of the contestants under DDP, in this order."""
    by_name = {contestant.name: contestant for contestant in contestants()}
    return [by_name[name] for name in names]


def host_contestants() -> dict[str, list[Contestant]]:
    """By host: Lightning's strategy, this package's and the loop by hand; for shards also with one reduction."""
    return {"DDP": ddp_contestants(), "FSDP": fsdp_contestants(), "FSDP2": fsdp2_contestants()}


def ddp_contestants() -> list[Contestant]:
    """Gradients are reduced once per update by all of them."""
    return [
        Contestant(PLAIN, partial(fit_lightning, DDPStrategy, CausalLM)),
        Contestant(TOKENNORM, partial(fit_lightning, _counting(TokenNormDDP), CausalLM)),
        Contestant(BY_HAND, partial(fit_by_hand, in_ddp)),
    ]


def fsdp_contestants() -> list[Contestant]:
    """The model in FSDP's units: a block each, and the rest."""
    ours = _counting(TokenNormFSDP, auto_wrap_policy=BLOCKS)
    once = _counting(TokenNormFSDP, auto_wrap_policy=BLOCKS, sync_each_micro_batch=False)
    against, against_once = (PLAIN_FSDP, FSDP_BY_HAND), (PLAIN_FSDP, FSDP_BY_HAND + ONCE)
    return [
        Contestant(PLAIN_FSDP, partial(fit_lightning, partial(PlainFSDP, auto_wrap_policy=BLOCKS), CausalLM), *against),
        Contestant(TOKENNORM_FSDP, partial(fit_lightning, ours, CausalLM), *against),
        Contestant(FSDP_BY_HAND, partial(fit_by_hand, in_fsdp), *against),
        Contestant(TOKENNORM_FSDP + ONCE, partial(fit_lightning, once, CausalLM), *against_once),
        Contestant(FSDP_BY_HAND + ONCE, partial(fit_by_hand, partial(in_fsdp, once=True)), *against_once),
    ]


def fsdp2_contestants() -> list[Contestant]:
    """`fully_shard` on each block, and on the rest."""
    plain = partial(over_all_ranks, ModelParallelStrategy)
    ours = partial(over_all_ranks, _counting(TokenNormModelParallel))
    once = partial(over_all_ranks, _counting(TokenNormModelParallel, sync_each_micro_batch=False))
    against, against_once = (PLAIN_FSDP2, FSDP2_BY_HAND), (PLAIN_FSDP2, FSDP2_BY_HAND + ONCE)
    return [
        Contestant(PLAIN_FSDP2, partial(fit_lightning, plain, ShardedCausalLM), *against),
        Contestant(TOKENNORM_FSDP2, partial(fit_lightning, ours, ShardedCausalLM), *against),
        Contestant(FSDP2_BY_HAND, partial(fit_by_hand, in_fsdp2), *against),
        Contestant(TOKENNORM_FSDP2 + ONCE, partial(fit_lightning, once, ShardedCausalLM), *against_once),
        Contestant(FSDP2_BY_HAND + ONCE, partial(fit_by_hand, partial(in_fsdp2, once=True)), *against_once),
    ]


def _counting(strategy: Callable[..., object], **options: object) -> partial[object]:
    """The workload's labels line up with its ids already."""
    return partial(strategy, count_tokens=SupervisedTokens(shift=0), **options)


def with_lightnings_sigterm(make_strategy: Callable[[], TokenNormDDP]) -> TokenNormDDP:
    """A strategy that leaves Lightning's broadcast before every micro-batch as it is."""
    strategy = make_strategy()
    strategy.agree_on_sigterm = False
    return strategy
