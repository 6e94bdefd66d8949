"""Prove on your own module that an update does not depend on how its tokens are split.

def test_every_token_weighs_the_same():
report = assert_partition_invariant(make_module, samples, collate_fn=collate)
print(report)
"""

from lightning_tokennorm.testing.partition import assert_partition_invariant
from lightning_tokennorm.testing.ranks import RankError, run_ranks
from lightning_tokennorm.testing.report import PartitionReport, SplitResult

__all__ = ["PartitionReport", "RankError", "SplitResult", "assert_partition_invariant", "run_ranks"]
