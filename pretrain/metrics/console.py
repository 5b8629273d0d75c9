"""The line a person reads: one aligned line a window in a file, a bar that moves on a terminal.

Takes the records that `sinks` hands on; formats and prints, computes nothing but the time left.
"""

import shutil
import sys
from typing import Any, TextIO

_BAR_WIDTH = 20
STRAGGLES = 1.2  # times the others' median from which on the slowest rank is named


def format_line(record: dict[str, Any], total_steps: int) -> str:
    """A training record: `step  1200/50000 | loss 2.4310 | gnorm 0.41 | lr 2.9e-04 | …`."""
    step = record["step"]
    parts = [
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {_number(record.get('loss'), '7.4f')}",
        f"gnorm {_number(record.get('grad_norm'), '5.2f')}",
        f"lr {_number(record.get('lr'), '.1e')}",
        f"tok/s/gpu {_number(record.get('tokens_per_second_per_gpu'), '7,.0f')}",
        f"data {_percent(record.get('data_wait_fraction'), 4)}",
        f"mem {_number(record.get('peak_gib'), '5.1f')} GiB",
    ]
    if record.get("mfu_causal") is not None:
        parts.insert(5, f"mfu {_percent(record['mfu_causal'], 5)}")
    if (record.get("slowest_over_median") or 0.0) > STRAGGLES:
        parts.append(f"rank {record['slowest_rank']} takes {record['slowest_over_median']:.2f} x the others")
    left = (total_steps - step) * (record.get("step_seconds") or 0.0)
    parts.append(f"eta {duration(left)}")
    return " | ".join(parts)


def format_validation(record: dict[str, Any], total_steps: int) -> str:
    step = record["step"]
    parts = [
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        f"val_loss {_number(record.get('val_loss'), '.4f')}",
    ]
    if record.get("val_bits_per_byte") is not None:
        parts.append(f"bits/byte {record['val_bits_per_byte']:.4f}")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """`3d 4h`, `5h 12m`, `8m 03s` or `42s`: the two largest units."""
    if not 0 <= seconds < 1e9:
        return "-"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    if minutes:
        return f"{minutes}m {whole % 60:02d}s"
    return f"{whole}s"


class Console:
    """Prints to `stream`; draws a bar in place only where that is a terminal."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._total_steps = total_steps
        self._terminal = self._stream.isatty()
        self._bar_shown = False

    def write(self, record: dict[str, Any]) -> None:
        if "val_loss" in record:
            self.say(format_validation(record, self._total_steps))
            return
        line = format_line(record, self._total_steps)
        if not self._terminal:
            self.say(line)
            return
        share = min(1.0, record["step"] / max(1, self._total_steps))
        filled = round(share * _BAR_WIDTH)
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
        width = shutil.get_terminal_size((120, 24)).columns
        self._print("\r\x1b[K" + f"{bar} {line}"[: width - 1])
        self._bar_shown = True

    def say(self, text: str) -> None:
        """One line that stays, above the bar where there is one."""
        self._print(("\r\x1b[K" if self._bar_shown else "") + text + "\n")
        self._bar_shown = False

    def close(self) -> None:
        if self._bar_shown:
            self._print("\n")
            self._bar_shown = False

    def _print(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # a closed pipe or a lost terminal must not end a run; metrics.jsonl has the line


def _number(value: float | None, form: str) -> str:
    width = int("0" + form.split(".")[0].strip(","))
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"


def _percent(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{100 * value:{width}.1f}%"
