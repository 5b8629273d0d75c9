"""The learning rate as a pure function of the update's number. Update 1 is the first; no torch, no state."""

import math

from pretrain.config import Config


def lr_at(update: int, cfg: Config) -> float:
    """Rate of optimizer update `update` (1 .. steps).

    Warm-up is linear: update 1 has peak / warmup_steps, update warmup_steps the peak. What follows ends at
    peak x min_lr_ratio on the last update: cosine and linear fall from the end of warm-up on, wsd (warm-up, stable,
    decay; arXiv:2404.06395) falls linearly over the last decay_steps, constant does not fall.
    """
    sched, peak, steps = cfg.schedule, cfg.optimizer.lr, cfg.steps
    if update <= sched.warmup_steps:
        return peak * update / sched.warmup_steps
    if sched.name == "constant":
        return peak
    begin = steps - (sched.decay_steps or 0) if sched.name == "wsd" else sched.warmup_steps
    # Without warm-up the first update has the peak itself, so the fall starts after it.
    begin = max(begin, 1) if sched.name != "wsd" else begin
    if update <= begin:
        return peak
    done = min(1.0, (update - begin) / max(1, steps - begin))
    left = 0.5 * (1 + math.cos(math.pi * done)) if sched.name == "cosine" else 1 - done
    return peak * (sched.min_lr_ratio + (1 - sched.min_lr_ratio) * left)
