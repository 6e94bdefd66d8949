"""What must not go by without a word: windows without tokens, options that nobody takes, another package's Trainer."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_tokennorm import TokenNormDDP, TokenNormError
from tests.helpers.launch import run_ranks
from tests.helpers.scalar_rig import MicroBatch, ScalarModule, make_loader, make_trainer
from tests.helpers.script import LAST_RESORT_S

FULL, EMPTY = (3, 1.0), (0, 0.0)

# ---- windows without tokens


def fit(rank: int, world_size: int, micro_batches: list[MicroBatch], on_empty: str = "skip") -> tuple[Any, ...]:
    """Rank 0 has these; another rank has none with tokens."""
    module = ScalarModule()
    trainer = make_trainer(world_size, strategy=TokenNormDDP(on_empty=on_empty), accumulate_grad_batches=2)
    mine = micro_batches if rank == 0 else [EMPTY] * len(micro_batches)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, make_loader(mine))
        except TokenNormError as raised:
            error = str(raised)
    said = [str(each.message) for each in caught if "supervised token" in str(each.message)]
    return said, error, len(module.gradients), trainer.global_step


FIRST = (
    "At update {}, no rank has a supervised token in any of the 2 micro-batches of the window: it is left out, no"
    " parameter changes."
)


@pytest.mark.parametrize("world_size", [1, 2])
def test_skipped_windows_are_told_at_the_first_and_at_the_end(world_size: int) -> None:
    # windows with tokens: 0 and 3 of 5
    micro_batches = [FULL, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, FULL, EMPTY, EMPTY]
    for rank, (said, error, updates, steps) in enumerate(run_ranks(fit, world_size, micro_batches)):
        assert (error, updates, steps) == ("", 2, 5)
        if rank > 0:
            assert said == []  # rank zero says it once
            continue
        first, last = said
        assert first.startswith(FIRST.format(1))
        assert "look at the labels and at `count_tokens`; `on_empty='error'` raises" in first
        assert last == "3 of 5 windows had no supervised token on any rank. Updates made: 2."


def test_no_word_where_every_window_has_tokens() -> None:
    ((said, error, updates, _),) = run_ranks(fit, 1, [FULL, EMPTY, FULL, FULL])
    assert (said, error, updates) == ([], "", 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_first_fifty_windows_without_tokens_are_an_error_on_all_ranks(world_size: int) -> None:
    for _, error, updates, steps in run_ranks(fit, world_size, [EMPTY] * 120):
        assert (updates, steps) == (0, 49)
        assert error.startswith("None of the first 50 windows has a single supervised token on any rank, so nothing")
        assert "Look at one batch, and at `count_tokens`." in error


@pytest.mark.parametrize("full_at", [98, 99])
def test_one_token_in_the_fiftieth_window_is_enough(full_at: int) -> None:
    micro_batches = [FULL if index == full_at else EMPTY for index in range(120)]
    ((said, error, updates, steps),) = run_ranks(fit, 1, micro_batches)
    assert (error, updates, steps) == ("", 1, 60)
    assert said[-1] == "59 of 60 windows had no supervised token on any rank. Updates made: 1."


def test_fewer_than_fifty_windows_without_tokens_are_told_at_the_end() -> None:
    ((said, error, updates, steps),) = run_ranks(fit, 1, [EMPTY] * 6)
    assert (error, updates, steps) == ("", 0, 3)
    assert said[0].startswith(FIRST.format(0))
    assert said[-1] == "3 of 3 windows had no supervised token on any rank. Updates made: 0."


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_empty_error(world_size: int) -> None:
    for said, error, updates, _ in run_ranks(fit, world_size, [FULL, EMPTY, EMPTY, EMPTY], "error"):
        assert error.startswith("At update 1, the window of 2 micro-batches has no supervised token on any of")
        assert (said, updates) == ([], 1)


# ---- options


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("on_emtpy", "on_empty"),
        ("count_token", "count_tokens"),
        ("find_unused_parameter", "find_unused_parameters"),  # torch's
        ("ddp_comm_hooks", "ddp_comm_hook"),  # Lightning's
        ("bucket_cap", "bucket_cap_mb"),
    ],
)
def test_unknown_option_is_refused_with_the_nearest_known_one(name: str, nearest: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^`TokenNormDDP\({name}=\.\.\.\)` is not an option\. Did you mean `{nearest}`\?$"
    ):
        TokenNormDDP(**{name: 1})


def test_unknown_option_that_is_like_no_other_lists_them_all() -> None:
    with pytest.raises(TypeError, match=r"not an option\. Known are .*count_tokens.*find_unused_parameters.*on_empty"):
        TokenNormDDP(zzz=1)


def test_options_of_lightning_and_torch_all_pass() -> None:
    ours = {"self", "module", "kwargs"}
    options = {
        name: parameter.default
        for function in (DistributedDataParallel.__init__, DDPStrategy.__init__)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ours
    }
    strategy = TokenNormDDP(**options)
    plain = DDPStrategy(**options)
    assert strategy._ddp_kwargs == plain._ddp_kwargs
    assert strategy._timeout == plain._timeout
    assert len(strategy._ddp_kwargs) > 5


class WithOption(TokenNormDDP):
    def __init__(self, *, mine: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mine = mine


class WithOptionThatGoesOn(DDPStrategy):
    """A mixin of a user's between ours and Lightning's."""

    def __init__(self, *, theirs: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.theirs = theirs


class Mixed(TokenNormDDP, WithOptionThatGoesOn):
    pass


def test_options_of_subclasses() -> None:
    assert WithOption(mine=3, on_empty="error", bucket_cap_mb=7).mine == 3
    with pytest.raises(TypeError, match=r"`WithOption\(on_emtpy=\.\.\.\)` is not an option\. Did you mean `on_empty`"):
        WithOption(on_emtpy="error")
    assert Mixed(theirs=4).theirs == 4


def test_names_of_the_registry_take_no_options_and_objects_do() -> None:
    for name in ("tokennorm_ddp", "tokennorm_ddp_spawn"):
        assert isinstance(Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy, TokenNormDDP)


# ---- the other package

SAYS = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {imports}
    {then}
for each in caught:
    if "pytorch_lightning" in str(each.message):
        print(each.message)
        print("AT", each.filename)
"""


def say(imports: str, then: str = "pass") -> str:
    code = SAYS.format(imports=imports, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(LAST_RESORT_S)
@pytest.mark.parametrize(
    ("imports", "then"),
    [
        ("import pytorch_lightning, lightning_tokennorm", "pass"),
        ("import lightning_tokennorm, pytorch_lightning", "lightning_tokennorm.TokenNormDDP()"),
    ],
    ids=["before", "after"],
)
def test_other_namespace(imports: str, then: str) -> None:
    if find_spec("pytorch_lightning") is None:  # not imported here, lest other tests be warned
        pytest.skip("it is not installed")
    said = say(imports, then)
    assert "`pytorch_lightning` is imported beside `lightning`." in said
    assert "use `from lightning.pytorch import Trainer, LightningModule`" in said
    assert said.splitlines()[1] == "AT <string>"  # the user's own line


@pytest.mark.timeout(LAST_RESORT_S)
def test_no_word_without_the_other_namespace() -> None:
    assert say("import lightning_tokennorm", "lightning_tokennorm.TokenNormDDP()") == ""
