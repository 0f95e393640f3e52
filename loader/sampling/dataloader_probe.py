"""Detects which DataLoader asks a sampler for an iterator, by the calling stack frame: torch offers no other way."""

from types import FrameType

from loader.errors import OrderError


def refuse_resharding(caller: FrameType) -> None:
    """Raise OrderError if the caller is accelerate's BatchSamplerShard, which would shard the batches a second time."""
    # accelerate gives each rank every n-th batch without asking the sampler. The batches that it drops are this rank's.
    # Match by code name: reading the frame's variables would keep all of them alive.
    if caller.f_code.co_qualname.startswith("BatchSamplerShard."):
        raise OrderError(
            "accelerate's prepare would deal out to the ranks, once more, batches that are one rank's already: most "
            "samples would never be read; leave the DataLoader out of prepare, or give it loader.fast.Loader"
        )


def read_ahead(caller: FrameType) -> int:
    """Return how many batches a DataLoader requests before it delivers the first; 0 for other callers."""
    # torch has no API for it. Its iterator (torch 2.13, and that of torchdata 0.11) requests this many batches for its
    # workers first, then one more with each batch that it delivers. Reading a frame's variables keeps them alive, so
    # read those of torch's own short-lived frames only.
    if not caller.f_globals.get("__name__", "").startswith(("torch.utils.data.", "torchdata.")):
        return 0
    loader = caller.f_locals.get("self")
    workers, each = (getattr(loader, name, None) for name in ("_num_workers", "_prefetch_factor"))
    return workers * each if isinstance(workers, int) and isinstance(each, int) else 0
