"""DDP communication hooks of our own. torch looks at a hook's annotations and takes no strings: these have none."""

import torch.distributed as dist


def sum_hook(state, bucket):  # type: ignore[no-untyped-def]
    """Leaves the ranks' sum."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr]


def own_mean_hook(state, bucket):  # type: ignore[no-untyped-def]
    """Leaves the ranks' mean, but nobody can know."""
    return sum_hook(None, bucket).then(lambda future: future.value() / dist.get_world_size())


def count_buckets(counter, bucket):  # type: ignore[no-untyped-def]
    """Leaves the mean, and counts the buckets that are reduced."""
    counter["buckets"] += 1
    return own_mean_hook(None, bucket)
