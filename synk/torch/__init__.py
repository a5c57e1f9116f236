"""Training loops of PyTorch on all workers: a model and its optimizer on every rank, kept alike.

Loaded when ``synk.torch`` is first used; nothing of synk imports torch by itself.
"""

from synk.torch._data_parallel import DataParallel
from synk.torch._rank import mean
from synk.torch._replicate import Replicated, StepFunction, replicate

__all__ = ["DataParallel", "Replicated", "StepFunction", "mean", "replicate"]
