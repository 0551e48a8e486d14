"""Learning rate schedules."""

import math


def lr_cosine_schedule(it: int, max_lr: float, min_lr: float, warmup_iters: int, cosine_iters: int) -> float:
    """Return the learning rate at iteration ``it``: linear warm-up to ``max_lr`` at ``warmup_iters``, half a cosine to
    ``min_lr`` at ``cosine_iters``, then constant.

    CS336 assignment 1, section 4.4 (after Touvron et al. 2023).
    """
    if it < warmup_iters:
        return max_lr * it / warmup_iters
    if it >= cosine_iters:
        return min_lr
    progress = (it - warmup_iters) / (cosine_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (max_lr - min_lr)


def lr_wsd_schedule(it: int, max_lr: float, min_lr: float, warmup_iters: int, decay_iters: int, iters: int) -> float:
    """Return the learning rate at iteration ``it``: linear warm-up to ``max_lr`` at ``warmup_iters``, constant, then
    linear decay to ``min_lr`` over the last ``decay_iters`` of ``iters``.

    Hu et al. 2024 (MiniCPM's warm-up–stable–decay); Hägele et al. 2024 (linear decay).
    """
    lr = max_lr * it / warmup_iters if it < warmup_iters else max_lr
    if it <= iters - decay_iters or decay_iters == 0:
        return lr
    return min(lr, min_lr + max(0, iters - it) / decay_iters * (max_lr - min_lr))
