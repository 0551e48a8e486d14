"""Training: the loop, its config, resuming and tracking. ``python -m lm.train JOB.json`` runs a job."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
