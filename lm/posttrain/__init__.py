"""Post-training: supervised fine-tuning, preferences (DPO) and policy gradients (GRPO and its variants)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
