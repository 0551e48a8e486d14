"""Inference: batched generation with a KV cache, sampling, and completion of texts and chats."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
