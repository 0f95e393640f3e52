"""The fast path: a loader whose threads read, decode and collate batches in sampler order."""

from loader.torch.collate import collate
from loader.torch.loader import Loader

__all__ = ["Loader", "collate"]
