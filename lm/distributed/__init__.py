"""Training in several processes: process group; data, tensor and pipeline parallelism; start of the processes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
