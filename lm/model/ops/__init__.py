"""Fused and device-specific forms of the model's operations. The plain references are in :mod:`lm.model.functional`."""
