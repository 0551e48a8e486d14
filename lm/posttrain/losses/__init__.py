"""Losses and advantages of post-training, as functions of tensors."""
