"""Questions to a saved law: the loss of a planned run, the best split of a budget, the cheapest run to a loss.

Two intervals are told apart. `law_interval` holds the law's own loss, uncertain because the points are few; `interval`
holds what a run would measure, so it has the scatter of the fitted runs too, is widened by the factor by which the law
missed the largest runs when they were left out, and holds what rival forms say. Both at 90 %.
"""

from typing import Any

import numpy as np

from pretrain.errors import ConfigError
from pretrain.scaling.fit import interval
from pretrain.scaling.holdout import run_draws
from pretrain.scaling.huber import Array
from pretrain.scaling.laws import Laws
from pretrain.scaling.saved import SavedFit


def predict_run(fit: SavedFit, params: float, tokens: float, *, unique: float | None = None) -> dict[str, Any]:
    """Loss of a run with its intervals, and what more tokens or parameters would be worth there."""
    _positive(fit, params=params, tokens=tokens)
    if unique is not None and not fit.form.repetition:
        raise ConfigError(f"--unique-tokens has no effect on form {fit.form.name!r}; fit with --form repetition")
    _on_the_line(fit, params, tokens)
    flops = fit.flops_factor * params * tokens
    return (
        {"params": params, "tokens": tokens, "flops": flops}
        | predicted_loss(fit, params, tokens, unique)
        | {
            "marginal": marginal(fit.law, params, tokens, unique),
            "times_largest_flops": flops / fit.content["range"]["flops"][1],
        }
    )


def predict_budget(
    fit: SavedFit, flops: float, *, inference_tokens: float = 0.0, unique: float | None = None
) -> dict[str, Any]:
    """The best run for `flops` of training, or of training and inference together, with intervals for its size."""
    _positive(fit, flops=flops)
    if not (fit.form.uses_params and fit.form.uses_tokens):
        raise ConfigError(
            f"form {fit.form.name!r} has one term only, so it cannot split a budget; fit --form chinchilla"
        )
    ask = {"factor": fit.flops_factor, "inference_tokens": inference_tokens, "unique": unique}
    best, drawn = fit.law.optimum(flops, **ask), fit.replicates.optimum(flops, **ask)  # type: ignore[arg-type]
    params, tokens = float(best.params[0]), float(best.tokens[0])
    training = fit.flops_factor * params * tokens
    out = {
        "flops": flops,
        "params": params,
        "params_interval": interval(drawn.params),
        "tokens": tokens,
        "tokens_interval": interval(drawn.tokens),
        "tokens_per_param": tokens / params,
        **predicted_loss(fit, params, tokens, unique),
        "marginal": marginal(fit.law, params, tokens, unique),
        "times_largest_flops": training / fit.content["range"]["flops"][1],
    }
    if inference_tokens:
        plain, _ = fit.law.cheapest(float(best.loss[0]), factor=fit.flops_factor)
        alone = float((plain.params * (fit.flops_factor * plain.tokens + 2.0 * inference_tokens))[0])
        out |= {
            "training_flops": training,
            "inference_flops": 2.0 * params * inference_tokens,
            "inference_tokens": inference_tokens,
            "compute_optimal_params": float(plain.params[0]),  # the size of equal loss if inference were free
            "saving": 1.0 - flops / alone,  # of total FLOPs, against that size
        }
    return out


def predict_target(fit: SavedFit, loss: float, *, inference_tokens: float = 0.0) -> dict[str, Any]:
    """The cheapest run to reach a loss, training and expected inference counted."""
    if not (fit.form.uses_params and fit.form.uses_tokens) or fit.form.repetition:
        raise ConfigError(f"form {fit.form.name!r} cannot answer --loss; fit --form chinchilla or overtrained")
    floor = float(np.exp(fit.law.column("log_E")[0]))
    if loss <= floor:
        raise ConfigError(f"--loss {loss:g} is not above the law's E={floor:.4f}: no run reaches it")
    best, cost = fit.law.cheapest(loss, factor=fit.flops_factor, inference_tokens=inference_tokens)
    drawn, costs = fit.replicates.cheapest(loss, factor=fit.flops_factor, inference_tokens=inference_tokens)
    params, tokens = float(best.params[0]), float(best.tokens[0])
    return {
        "loss": loss,
        "flops": float(cost[0]),
        "flops_interval": interval(costs),
        "params": params,
        "params_interval": interval(drawn.params),
        "tokens": tokens,
        "tokens_interval": interval(drawn.tokens),
        "tokens_per_param": tokens / params,
        "training_flops": fit.flops_factor * params * tokens,
        "inference_flops": 2.0 * params * inference_tokens,
        "marginal": marginal(fit.law, params, tokens, None),
    }


def marginal(law: Laws, params: float, tokens: float, unique: float | None = None) -> dict[str, float]:
    """What a tenth more tokens, twice the tokens and twice the parameters would change the loss by."""
    unique_now = None if unique is None else min(unique, tokens)
    here = law.loss(params, tokens, unique_now)[0]
    more_tokens, twice_tokens = (float(law.loss(params, more * tokens, unique)[0] - here) for more in (1.1, 2))
    twice_params = float(law.loss(2 * params, tokens, unique_now)[0] - here)
    return {
        "loss_of_tenth_more_tokens": more_tokens,
        "loss_of_doubling_tokens": twice_tokens,
        "loss_of_doubling_params": twice_params,
        # Above 1 the next FLOP is better spent on tokens, below 1 on parameters.
        "tokens_over_params": twice_tokens / twice_params if twice_params else float("inf"),
    }


def predicted_loss(fit: SavedFit, params: float, tokens: float, unique: float | None) -> dict[str, Any]:
    """The law's loss with both intervals. Rivals are other forms that the largest runs do not tell from this one:
    `interval` reaches as far beyond their predictions as beyond the law's own."""
    if fit.form.repetition and unique is None:
        unique = tokens
    loss = float(fit.law.loss(params, tokens, unique)[0])
    if not len(fit.replicates.rows):
        return {"loss": loss, "interval": None, "law_interval": None}
    asked: tuple[Array, Array] = np.array([params]), np.array([tokens])
    fresh = None if unique is None else np.array([unique])
    runs = run_draws(
        fit.replicates, fit.residuals, len(fit.form.free), *asked, fresh, at=np.array([loss]), widen=fit.widen
    )
    low, high = interval(runs[:, 0]) or (np.nan, np.nan)
    apart = fit.rivals.loss(params, tokens, unique) / loss
    return {
        "loss": loss,
        "interval": (float(low * min([1.0, *apart])), float(high * max([1.0, *apart]))),
        "law_interval": interval(fit.replicates.loss(*asked, fresh)[:, 0]),
    }


def _on_the_line(fit: SavedFit, params: float, tokens: float) -> None:
    """A form with one term holds along the line of its runs: one length, one ratio of tokens to params, or one size."""
    if fit.form.uses_params and fit.form.uses_tokens:
        return
    asked = {"params": params, "tokens": tokens, "tokens_per_param": tokens / params}
    fixed = "params" if fit.form.uses_tokens else min(("tokens", "tokens_per_param"), key=lambda key: _spread(fit, key))
    low, high = fit.content["range"][fixed]
    if not low / 1.25 <= asked[fixed] <= high * 1.25:
        raise ConfigError(
            f"form {fit.form.name!r} was fitted at {fixed} from {low:.3g} to {high:.3g} and says nothing about "
            f"{asked[fixed]:.3g}; keep to that line, or fit --form chinchilla on runs off it"
        )


def _spread(fit: SavedFit, key: str) -> float:
    low, high = fit.content["range"][key]
    return float(high / low)


def _positive(fit: SavedFit, **values: float) -> None:
    for name, value in values.items():
        if not np.isfinite(value) or value <= 0:
            raise ConfigError(f"--{name} {value:g} is no positive number")
