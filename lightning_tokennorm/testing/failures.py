"""From a fit that failed, or had nothing to train on, to what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_tokennorm.counting import SupervisedTokens, TokenCounter
from lightning_tokennorm.testing.hosts import Host
from lightning_tokennorm.testing.module import listed
from lightning_tokennorm.testing.watch import Facts


def cause_of_failure(text: str, facts: Facts | None, host: Host) -> str | None:
    """What most likely made a fit fail, in a sentence; ``None`` where the traceback has to say it.

    Args:
        text: What the ranks said, with their tracebacks.
        facts: What the module was like in one process; ``None`` where it failed there already.
        host: The strategy.
    """
    if "datamodule" in text and "'NoneType' object has no attribute" in text:
        return (
            "the module reads `self.trainer.datamodule`, and there is none here: batches come from `samples`. Give the"
            " module what it reads there as an argument in `make_module`."
        )
    if not host.has_mesh and "'NoneType' object" in text and ("in configure_model" in text or "device_mesh" in text):
        return (
            "the module reads `self.device_mesh`, which only strategies of the model-parallel family make. Pass"
            " `strategy='tokennorm_model_parallel'`."
        )
    if host.has_mesh and "override the `configure_model()` hook" in text:
        return (
            f"`{host.plain}` and `{host.ours}` leave it to the module to split itself, and this one has no"
            " `configure_model`. Apply `fully_shard` there, or pass a strategy that needs none (`tokennorm_fsdp`)."
        )
    if host.has_mesh and "mixed torch.Tensor and DTensor" in text:
        return (
            "a parameter is used while it is in shards: gathered is what `fully_shard` was applied to, while its own"
            " forward runs. Apply it to the modules that `training_step` calls, not to the LightningModule around them."
        )
    if host.is_fsdp and "flatten tensors with uniform" in text:
        return (
            "FSDP flattens the parameters of a unit into one, and these are not alike in type, or in whether they are"
            " trained. In training Lightning casts all to one type; do so in `make_module`, or wrap them apart"
            " (`auto_wrap_policy`)."
        )
    if facts is not None and facts.unused and "ran a part of the model, and not all" in text:
        return (
            f"{listed(facts.unused)} got no gradient in any update, and a micro-batch without tokens has no way to"
            " where they are. Use them in the loss, freeze or remove them, or shard them together with what is used."
        )
    # the strategy's words, torch's, and those that Lightning puts in their place
    words = (
        "DDP still waits for parameters",
        "finished reduction in the prior iteration",
        "were not used in producing the loss",
    )
    waits = any(each in text for each in words)
    if facts is None or not waits:
        return None
    if facts.frozen_late:
        return (
            f"`configure_optimizers` freezes {listed(facts.frozen_late)}. DDP has wrapped the module by then and waits"
            " for their gradients. Freeze them in `__init__`, `setup` or `configure_model`."
        )
    which = (
        f"{listed(facts.unused)} got no gradient in any update"
        if facts.unused
        else "some parameter gets no gradient in some micro-batch"
    )
    return (
        f"{which}, and DDP waits for one of every trainable parameter. Use them in the loss, freeze or remove them, or"
        " pass a strategy with `find_unused_parameters=True`, here and to your Trainer:"
        " `strategy=lambda: TokenNormDDP(find_unused_parameters=True)`."
    )


def describe_missing_tokens(counter: TokenCounter, batches: Sequence[Any], host: Host) -> str:
    """Say that no sample has a supervised token, and why that may be.

    Args:
        counter: The strategy's counter.
        batches: One batch per sample.
        host: The strategy.
    """
    text = (
        f"None of the {len(batches)} samples has a supervised token as {_name_of(counter)} counts them, so there is no"
        " update to look at. "
    )
    if not isinstance(counter, SupervisedTokens):
        return text + "Pass samples with tokens to train on, or a strategy whose `count_tokens` fits them."
    live = sum(int((counter.find_labels(batch) != counter.ignore_index).sum()) for batch in batches)
    if not live:
        return text + f"All their labels are {counter.ignore_index}. Pass samples with live labels."
    return text + (
        f"They have {live} live labels, but none after the shift: a model that shifts its labels never predicts the"
        " first of a row. If yours does not shift them, pass"
        f" `strategy=lambda: {host.ours}(count_tokens=SupervisedTokens(shift=0))`; else pass longer samples."
    )


def _name_of(counter: TokenCounter) -> str:
    # a function's repr has its address
    name = getattr(counter, "__qualname__", None)
    return f"`{name or repr(counter)}`"
