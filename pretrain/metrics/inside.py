"""What a logged step looks like inside: gradient norms and activation sizes by block, and the gradient noise scale.

On request, and only in the steps whose window closes; all else passes through untouched. Every rank adds what it holds,
on the device; the sums over ranks are made once, when the line is written.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.metrics.noise_scale import NoiseScale


class Inside:
    """`layers`: norms and sizes by block; `noise_scale`: the first micro-batch's gradient beside the step's.

    `all_reduce` sums a float64 vector over all ranks, in place.
    """

    def __init__(
        self,
        *,
        layers: bool = False,
        noise_scale: bool = False,
        device: torch.device | None = None,
        all_reduce: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self._layers = layers
        self._noise = NoiseScale() if noise_scale else None
        self._device, self._all_reduce = device, all_reduce
        self._now = False
        self._sums: dict[tuple[str, str], Tensor] = {}  # by what is summed, and where

    @contextmanager
    def watching(self, model: nn.Module, *, now: bool) -> Iterator[None]:
        """Around the forwards and backwards of a step, which is looked at only `now`."""
        self._now = now and (self._layers or self._noise is not None)
        if self._now:
            self._sums = {}
        watched = enumerate(model.get_submodule("layers").children() if self._now and self._layers else ())
        hooks = [block.register_forward_hook(self._look_at(f"layers.{index}")) for index, block in watched]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def looks_at(self, index: int, *, last: bool) -> bool:
        """Whether the gradients after micro-batch `index` are wanted."""
        return self._now and (last or (index == 0 and self._noise is not None))

    def add_gradients(self, squares: dict[str, Tensor], targets: Tensor, in_step: int, *, last: bool) -> None:
        """`squares`: this rank's shares of the squared gradient norms by parameter; `targets`: its targets in the
        micro-batch; `in_step`: those of the whole step, by which its loss, and so the gradient, was divided."""
        if not last:
            self._add("small", "", torch.stack(list(squares.values())).sum())
            self._add("targets", "", targets)
            return
        self._in_step = in_step
        for name, square in squares.items():
            parts = name.split(".")
            self._add("grad", ".".join(parts[:2]) if parts[0] == "layers" else parts[0], square)

    def close(self) -> dict[str, float | None]:
        """The numbers of the step that was watched for its line in the log. Collective: all ranks call it."""
        if not self._sums:
            return {}
        vector = torch.stack(list(self._sums.values()))
        if self._all_reduce is not None:
            self._all_reduce(vector)
        sums = dict(zip(self._sums, vector.tolist(), strict=True))
        self._sums = {}
        line: dict[str, float | None] = {}
        for (what, where), total in sums.items() if self._layers else ():
            if what == "grad":
                line[f"grad_norm/{where}"] = total**0.5
            elif what == "activation":
                line[f"activation_rms/{where}"] = (total / sums["values", where]) ** 0.5
        if self._noise is not None:
            targets, whole = sums["targets", ""], sum(total for (what, _), total in sums.items() if what == "grad")
            small = sums["small", ""] * (self._in_step / targets) ** 2 if targets else 0.0  # as of a mean over itself
            line["grad_noise_scale"] = self._noise.update(small, targets, whole, self._in_step)
        return line

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what later lines depend on."""
        return {} if self._noise is None else {"noise_scale": self._noise.state()}

    def load(self, state: dict[str, Any]) -> None:
        """What `state` gave; averages that it lacks begin anew."""
        if self._noise is not None and "noise_scale" in state:
            self._noise.load(state["noise_scale"])

    def _look_at(self, where: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def look(module: nn.Module, args: Any, out: Tensor) -> None:
            wide = torch.promote_types(out.dtype, torch.float32)
            self._add("activation", where, torch.linalg.vector_norm(out.detach(), dtype=wide).square())
            self._add("values", where, torch.tensor(out.numel()))

        return look

    def _add(self, what: str, where: str, value: Tensor) -> None:
        value = value.detach().to(self._device, torch.float64)
        before = self._sums.get((what, where))
        self._sums[what, where] = value if before is None else before + value
