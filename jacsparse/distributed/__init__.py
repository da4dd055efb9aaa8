"""Work over several processes, on torch.distributed."""

from .ranks import Incoming, RankError, Ranks

__all__ = ["Incoming", "RankError", "Ranks"]
