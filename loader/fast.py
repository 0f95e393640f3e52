"""The fast path without worker processes: threads read, decode and collate batches in the sampler's order."""

from loader.torch.collate import collate
from loader.torch.loader import Loader

__all__ = ["Loader", "collate"]
