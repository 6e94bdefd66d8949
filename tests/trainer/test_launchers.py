"""What a user starts: the strategy by name and by object, each way of starting processes, in a script of his own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_tokennorm import TokenNormDDP
from tests.helpers.script import LAST_RESORT_S, run_script

SCRIPT = """
import json, sys
import torch
from lightning_tokennorm import TokenMeanMetric, TokenNormDDP
from tests.helpers.scalar_rig import R1, ScalarModule, make_batch, make_trainer


class Loader:
    # asked for its rank when it is read: with `spawn` and `fork` it is made before there are ranks
    def __iter__(self):
        import torch.distributed as dist

        return (make_batch(*micro_batch) for micro_batch in R1[dist.get_rank()])


class Writes(ScalarModule):
    def on_train_end(self):
        with open(f"{sys.argv[2]}/rank{self.global_rank}.json", "w") as file:
            json.dump(self.gradients, file)


if __name__ == "__main__":
    strategy = eval(sys.argv[1])
    trainer = make_trainer(2, strategy=strategy, accumulate_grad_batches=3, callbacks=[TokenMeanMetric()])
    trainer.fit(Writes(), Loader())
    if trainer.is_global_zero:
        print("logged", trainer.callback_metrics["train_loss_per_token"].item())
"""


@pytest.mark.parametrize(
    "strategy",
    [
        "'tokennorm_ddp_spawn'",
        "'tokennorm_ddp_fork'",
        # by its name `tokennorm_ddp` it starts processes in the same way
        "TokenNormDDP(process_group_backend='gloo', find_unused_parameters=True)",
    ],
)
@pytest.mark.timeout(LAST_RESORT_S)
def test_two_processes_of_a_users_script(strategy: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT, strategy, str(tmp_path))
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)] == [[1.75], [1.75]]
    assert "logged 1.75" in done.stdout
    info = "TokenNormDDP: every supervised token weighs the same over W=2 ranks and K=3 micro-batches per update"
    assert (done.stdout + done.stderr).count(info) == 1  # rank zero only


@pytest.mark.parametrize(
    ("name", "start_method"),
    [
        ("tokennorm_ddp", "popen"),
        ("tokennorm_ddp_spawn", "spawn"),
        ("tokennorm_ddp_fork", "fork"),
        ("tokennorm_ddp_notebook", "fork"),
    ],
)
def test_names(name: str, start_method: str) -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy
    assert type(strategy) is TokenNormDDP
    assert strategy._start_method == start_method


def test_inherited_names_are_left_alone() -> None:
    before = dict(StrategyRegistry)
    TokenNormDDP.register_strategies(StrategyRegistry)  # a second time
    assert dict(StrategyRegistry) == before
    assert type(Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False).strategy) is DDPStrategy


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"count_tokens": 3}, TypeError, "expected a callable"),
        ({"loss_reduction": "none"}, ValueError, "got 'none'; expected 'mean' or 'sum'"),
        ({"counting": "later"}, ValueError, "expected 'lookahead'"),
        ({"on_empty": None}, ValueError, "expected 'skip' or 'error'"),
        ({"uneven": "drop"}, ValueError, "expected 'pad' or 'error'"),
        ({"audit": "yes"}, ValueError, "expected False or True"),
        ({"ddp_hook_reduces": "max"}, ValueError, "expected None or 'mean' or 'sum'"),
        ({"ddp_hook_reduces": "sum"}, ValueError, "without a `ddp_comm_hook`"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        TokenNormDDP(**options)  # type: ignore[arg-type]


def test_ddp_options_pass_through() -> None:
    strategy = TokenNormDDP(find_unused_parameters=True, bucket_cap_mb=7)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "bucket_cap_mb": 7}
