"""Adds up what the loop did and closes it into one line a window: loss, throughput, MFU, waits and memory.

Losses stay on the device until a window closes; there, one all-reduce and one copy to the host are all the
communication and synchronisation that measuring costs. Time in validation and saves is measured apart and
is no part of the throughput. The lines go to `sinks`; what a FLOP is, `flops` says.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pretrain.metrics.flops import ModelSizes, Recompute, flops_per_token, recomputed_flops_per_token

GIB = 2**30
Pause = Literal["eval", "save"]


class Meter:
    """One per rank; only rank 0's lines are written, but every rank must close every window.

    `all_reduce` sums a float64 vector over all ranks, in place; every rank counts what it has, so a loss that
    several ranks hold (tensor parallel) cancels against its targets. `peak_flops` is FLOP/s per device or
    None, where every MFU is null, as HFU is where `recompute` is None: not known. `tokens` and `targets` are what the
    run had trained on before this start.
    """

    def __init__(
        self,
        model: ModelSizes,
        *,
        seq_len: int,
        every: int,
        last_step: int,
        rank: int = 0,
        world_size: int = 1,
        all_reduce: Callable[[Tensor], Any] | None = None,
        device: torch.device | str = "cpu",
        peak_flops: float | None = None,
        recompute: Recompute | None = "none",
        recompute_every: int = 1,
        attempt: int = 0,
        tokens: int = 0,
        targets: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        own_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        if world_size > 1 and all_reduce is None:
            raise ValueError(f"world_size={world_size} needs an all_reduce")
        self.tokens = tokens
        self.targets = targets
        self.every = every
        self.last_step = last_step
        self._rank, self._world_size, self._all_reduce = rank, world_size, all_reduce
        self._device = torch.device(device)
        self._peak_flops, self._attempt, self._clock, self._own_clock = peak_flops, attempt, clock, own_clock
        self._flops_full = flops_per_token(model, seq_len, causal=False)
        self._flops_causal = flops_per_token(model, seq_len, causal=True)
        # Kernels skip the masked half, so what the hardware did is counted by the causal convention.
        self._flops_hardware: int | None = None
        if recompute is not None:
            again = recomputed_flops_per_token(model, seq_len, recompute, causal=True, every=recompute_every)
            self._flops_hardware = self._flops_causal + again
        self._start_window()

    def add(self, loss_sum: Tensor, num_targets: Tensor | int, z_loss_sum: Tensor | None = None) -> None:
        """One micro-batch of this rank: sums over its targets, on the device; nothing is synchronised."""
        self._sums[0] += loss_sum.detach()
        self._sums[1] += num_targets
        if z_loss_sum is not None:
            self._sums[2] += z_loss_sum.detach()
            self._z_loss = True

    def step_done(self, *, tokens: int, targets: int, data_wait: float) -> None:
        """One optimizer step: `tokens` (no padding) and `targets` over all ranks, `data_wait` in seconds."""
        self.steps_in_window += 1
        self._window_tokens += tokens
        self._data_wait += data_wait
        self.tokens += tokens
        self.targets += targets

    def due(self, done: int) -> bool:
        """Whether a window closes after step `done`: at every multiple of `every`, and at the last step."""
        return done % self.every == 0 or done == self.last_step

    @contextmanager
    def pause(self, kind: Pause) -> Iterator[None]:
        """Keeps what runs inside out of the window's time; it is reported as eval_seconds or save_seconds.

        Waits for the device on entry and exit, so that queued training is not billed to the pause.
        """
        self._synchronize()
        start = self._clock()
        try:
            yield
        finally:
            self._synchronize()
            seconds = self._clock() - start
            self._paused[kind] += seconds

    def close_window(self, done: int, lr: float, grad_norm: Tensor | float, epoch: float) -> dict[str, Any]:
        """The line of the steps since the last one, and a fresh window. Collective: all ranks call it.

        `tflops_per_gpu` counts by the full convention, `hfu` by the causal one plus what was recomputed.
        """
        ranks = self._gather()
        # Read after the copy to the host above: by now the device has finished the window's steps.
        seconds = self._clock() - self._window_start - sum(self._paused.values())
        rate = self._window_tokens / seconds if seconds > 0 else math.nan
        per_gpu = rate / self._world_size
        steps = max(1, self.steps_in_window)
        line: dict[str, Any] = {
            "step": done,
            "attempt": self._attempt,
            "tokens": self.tokens,
            "targets": self.targets,
            "loss": ranks.loss_sum / ranks.targets if ranks.targets else None,
            "grad_norm": float(grad_norm),
            "lr": lr,
            "step_seconds": seconds / steps,
            "tokens_per_second": rate,
            "tokens_per_second_per_gpu": per_gpu,
            "tflops_per_gpu": per_gpu * self._flops_full / 1e12,
            "mfu_causal": self._share_of_peak(per_gpu * self._flops_causal),
            "mfu_full": self._share_of_peak(per_gpu * self._flops_full),
            "hfu": None if self._flops_hardware is None else self._share_of_peak(per_gpu * self._flops_hardware),
            "data_wait_fraction": ranks.data_wait / seconds if seconds > 0 else math.nan,
            "peak_gib": ranks.peak_bytes / GIB,
            "epoch": epoch,
            "eval_seconds": self._paused["eval"],
            "save_seconds": self._paused["save"],
            **straggler([seconds / steps for seconds in ranks.own]),
        }
        if self._z_loss:
            line["z_loss"] = ranks.z_loss_sum / ranks.targets if ranks.targets else None
        self._start_window()
        return line

    def go_back(self, *, tokens: int, targets: int) -> None:
        """To the counts of an older step, with an empty window."""
        self.tokens, self.targets = tokens, targets
        self._start_window()

    def restart_clock(self) -> None:
        """Begins the window's time now, keeping its sums: call when set-up is over and training begins."""
        self._window_start = self._clock()
        self._paused = {"eval": 0.0, "save": 0.0}

    def _start_window(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._device)  # loss, targets, z-loss
        self._z_loss = False
        self.steps_in_window = 0
        self._window_tokens = 0
        self._data_wait = 0.0
        self._own_start = self._own_clock()
        self.restart_clock()

    def _gather(self) -> "_Ranks":
        # A slot a rank beside the sums turns one summing all-reduce into a maximum as well.
        slots = torch.zeros(3, self._world_size, dtype=torch.float64)
        slots[0, self._rank] = self._data_wait
        slots[1, self._rank] = self._peak_bytes()
        slots[2, self._rank] = self._own_seconds()
        vector = torch.cat([self._sums, slots.flatten().to(self._device)])
        if self._all_reduce is not None:
            self._all_reduce(vector)
        loss_sum, targets, z_loss_sum, *_ = vector.tolist()
        waits, peaks, own = vector[3:].reshape(3, -1).tolist()
        return _Ranks(loss_sum, targets, z_loss_sum, max(waits), max(peaks), own)

    def _own_seconds(self) -> float:
        """What this rank did itself in the window, which waiting for the others in collectives is not.

        On a CPU its thread's processor time and its waits for data. On CUDA the waits, and a matrix product that is the
        same everywhere, since from outside a kernel that waits for other ranks looks like one that computes.
        """
        if self._device.type != "cuda":
            return self._data_wait + self._own_clock() - self._own_start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        x = torch.ones(4096, 4096, dtype=torch.bfloat16, device=self._device)
        begin.record()
        torch.mm(x, x)
        end.record()
        end.synchronize()
        return self._data_wait + self.steps_in_window * begin.elapsed_time(end) / 1000

    def _peak_bytes(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_reserved(self._device))
        return float(_resident_peak_bytes())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _share_of_peak(self, flops: float) -> float | None:
        return None if self._peak_flops is None else flops / self._peak_flops


class _Ranks(NamedTuple):
    """What a window's all-reduce brought back: sums over ranks, and the slowest and fullest rank."""

    loss_sum: float
    targets: float
    z_loss_sum: float
    data_wait: float
    peak_bytes: float
    own: list[float]  # seconds


def straggler(own_seconds: list[float]) -> dict[str, Any]:
    """Each rank's own seconds a step, and the rank that has most of them, beside the median of the others."""
    if len(own_seconds) == 1:
        return {}
    slowest = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    others = statistics.median(own_seconds[:slowest] + own_seconds[slowest + 1 :])
    return {
        "rank_seconds": [float(f"{seconds:.4g}") for seconds in own_seconds],
        "slowest_rank": slowest,
        "slowest_over_median": own_seconds[slowest] / others if others > 0 else None,
    }


def _resident_peak_bytes() -> int:
    """This process's most resident memory so far: the number that stands in for a GPU's on a CPU."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's peak is inherited from the process that started this one
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
