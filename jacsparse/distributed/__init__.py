"""Work over several processes, on torch.distributed."""

from .ranks import Incoming, Like, RankError, Ranks

__all__ = ["Incoming", "Like", "RankError", "Ranks"]
