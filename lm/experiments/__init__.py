"""Experiments: the points of a sweep, search with pruning, results of trainings, scaling laws, and the gate."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
