"""Training data: token shards and the batches drawn from them; dialogs, their template and their packing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
