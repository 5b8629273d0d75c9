"""What an optimizer remembers, under the names of the parameters: the part of a checkpoint that engines share."""

import torch
from torch import nn


def moments(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the per-parameter tensors that this optimizer keeps."""
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    return ("exp_avg", "exp_avg_sq")


def optimizer_state(optimizer: torch.optim.Optimizer, names: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The live moments by canonical name, made (zero) where no update has made them yet, and the update count.

    Every parameter has taken every update, so one count, `optim.step`, stands for all; torch keeps one a parameter.
    """
    out: dict[str, torch.Tensor] = {}
    steps: list[torch.Tensor] = []
    for name, param in names.items():
        state = optimizer.state[param]
        for key in moments(optimizer):
            if state.get(key) is None:
                state[key] = torch.zeros_like(param, requires_grad=False)
            out[f"optim.{key}.{name}"] = state[key]
        if "exp_avg" in moments(optimizer):
            steps.append(state.setdefault("step", torch.zeros((), dtype=torch.float32, device=param.device)))
    if steps:
        out["optim.step"] = steps[0].clone()
    return out


def set_update_count(optimizer: torch.optim.Optimizer, count: float) -> None:
    """Give every parameter's state the update count read from a checkpoint."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(count)
