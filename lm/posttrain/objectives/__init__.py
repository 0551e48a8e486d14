"""Objectives of post-training: the data, the loss and the evaluation of a method, for the trainer."""
