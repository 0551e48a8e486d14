"""Sizes of buckets, the tensors that ranks send together: :mod:`lm.distributed` fills them, and
:mod:`lm.model.training_memory` predicts their memory."""

MAX_BUCKET_BYTES = 25 << 20
_MIN_BUCKET_BYTES = 1 << 20
_MIN_BUCKETS = 4  # so that most gradients are sent during the backward pass, also those of a small model


def gradient_bucket_bytes(total_bytes: int) -> int:
    """Return the size of a full bucket, for gradients of ``total_bytes`` in total."""
    return min(MAX_BUCKET_BYTES, max(_MIN_BUCKET_BYTES, total_bytes // _MIN_BUCKETS))
