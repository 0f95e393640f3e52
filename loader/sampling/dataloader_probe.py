"""Who asks a sampler for an iterator, as far as it must know and nobody tells it: found by the frame that asks."""

from types import FrameType

from loader.errors import OrderError


def refuse_resharding(caller: FrameType) -> None:
    """Raise OrderError if it is accelerate's way to deal out batches to ranks."""
    # accelerate takes every so-maniest batch for each rank, and asks nobody; those that it leaves are this rank's too.
    # Told by its code: to ask for the frame's variables would keep all that is in them.
    if caller.f_code.co_qualname.startswith("BatchSamplerShard."):
        raise OrderError(
            "accelerate's prepare would deal out to the ranks, once more, batches that are one rank's already: most "
            "samples would never be read; leave the DataLoader out of prepare, or give it loader.fast.Loader"
        )


def read_ahead(caller: FrameType) -> int:
    """Return how many batches a DataLoader asks for before it delivers its first one; 0 if it is none."""
    # torch has no other way to tell: its iterator (torch 2.13, and torchdata 0.11's after it) primes its workers with
    # so many batches, then asks for one with each that it delivers. Only of its own short-lived frames are the
    # variables asked for, which would keep all that is in them.
    if not caller.f_globals.get("__name__", "").startswith(("torch.utils.data.", "torchdata.")):
        return 0
    loader = caller.f_locals.get("self")
    workers, each = (getattr(loader, name, None) for name in ("_num_workers", "_prefetch_factor"))
    return workers * each if isinstance(workers, int) and isinstance(each, int) else 0
