"""The words in which `pretrain scale fit` and `predict` answer a person; the JSON of study.py and predict.py in."""

from typing import Any

from pretrain.scaling.holdout import Score, choose


def fit_report(content: dict[str, Any]) -> str:
    ranges = content["range"]
    lines = [
        f"L = {content['formula']}   ({content['form']}; {content['source']})",
        f"{content['points_used']} points, {content['points_dropped']} dropped | {ranges['sizes']} sizes, params "
        f"{_span(ranges['params'])} | tokens {_span(ranges['tokens'])} | FLOPs {_span(ranges['flops'])}",
    ]
    for name in ("E", "A", "B", "alpha", "beta", "RD", "RN"):
        if content[name] is not None:
            lines.append(f"  {name:<6}{content[name]['value']:>12.5g}   {_interval(content[name]['interval'])}")
    if content["optimal_exponent"] is not None:
        own, other = content["optimal_exponent"], content["optimal_exponent_tokens"]
        lines.append(
            f"  best N ~ C^{own['value']:.3f} {_interval(own['interval'])}, "
            f"best D ~ C^{other['value']:.3f} {_interval(other['interval'])}"
        )
    noise = content["noise"]
    seeds = "no repeated seeds in the table"
    if noise["between_seeds"] is not None:
        seeds = f"{noise['between_seeds']:.3%} between seeds ({noise['between_seeds_freedom']} degrees of freedom)"
    lines.append(f"noise: {noise['about_law']:.3%} about the law, {seeds}")
    for point in content["outliers"]:
        lines.append(
            f"outlier: line {point['line']}: {point['params']:.4g} params, {point['tokens']:.4g} tokens, loss "
            f"{point['loss']:.4f} against {point['predicted']:.4f} ({point['deviations']:+.0f} robust deviations)"
        )
    lines += _largest_out(content["leave_largest_out"])
    if len(content["forms"]) > 1:
        scores = [Score(**score) for score in content["forms"]]
        table = ", ".join(f"{score.form} {score.rms:.3%} ({score.free} parameters)" for score in scores)
        lines.append(f"forms by rms error on the largest runs: {table}; chosen by that: {choose(scores).form}")
    if content["rivals"]:
        lines.append(f"prediction intervals also hold what {', '.join(one['form'] for one in content['rivals'])} says")
    if content["isoflop"] is not None and content["isoflop"]["exponent"] is not None:
        found = content["isoflop"]
        exponent = found["exponent"]
        lines.append(
            f"IsoFLOP parabolas at {len(found['budgets'])} budgets: best N ~ C^{exponent['value']:.3f} "
            f"{_interval(exponent['interval'])}"
        )
    run = content["next_run"]
    lines.append(
        f"next run: {run['params']:.3g} params on {run['tokens']:.3g} tokens {run['reason']} "
        f"(standard deviation x {run['narrower']:.2f})"
    )
    lines += [f"warning: {warning}" for warning in content["warnings"]]
    return "\n".join(lines)


def prediction_report(answer: dict[str, Any], law: str) -> str:
    lines = [f"{law}"]
    for key, label in (("params", "params"), ("tokens", "tokens"), ("flops", "FLOPs"), ("loss", "loss")):
        span = answer.get(f"{key}_interval") if key != "loss" else answer.get("interval")
        value = f"{answer[key]:.4f}" if key == "loss" else f"{answer[key]:.4g}"
        lines.append(f"  {label:<8}{value:>12}   {_interval(span) if span else ''}".rstrip())
    if answer.get("law_interval"):
        lines.append(f"  the law alone, without the scatter of single runs: {_interval(answer['law_interval'])}")
    if "training_flops" in answer:
        lines.append(f"  training {answer['training_flops']:.3g} + inference {answer['inference_flops']:.3g} FLOPs")
    if "saving" in answer:
        lines.append(
            f"  {answer['saving']:.1%} fewer FLOPs in all than the compute-optimal size of the same loss "
            f"({answer['compute_optimal_params']:.3g} params)"
        )
    gain = answer["marginal"]
    lines.append(
        f"  a tenth more tokens: {gain['loss_of_tenth_more_tokens']:+.4f}, twice the tokens: "
        f"{gain['loss_of_doubling_tokens']:+.4f}, twice the parameters: {gain['loss_of_doubling_params']:+.4f}"
    )
    if answer.get("times_largest_flops", 0) > 1:
        lines.append(f"  {answer['times_largest_flops']:.3g} times the compute of the largest run of the fit")
    return "\n".join(lines)


def comparison_report(answer: dict[str, Any]) -> str:
    lines = [f"{'line':>6}{'params':>11}{'tokens':>11}{'measured':>10}{'predicted':>11}{'error':>9}   90 % interval"]
    for run in answer["runs"]:
        outside = "" if run["inside"] in (True, None) else "  outside"
        lines.append(
            f"{run['line']:>6}{run['params']:>11.4g}{run['tokens']:>11.4g}{run['measured']:>10.4f}"
            f"{run['predicted']:>11.4f}{run['error']:>+9.2%}   {_interval(run['interval'])}{outside}"
        )
    summary = (
        f"{len(answer['runs'])} runs up to {answer['times_largest_flops']:.3g} times the largest fitted compute: "
        f"error {answer['mean_error']:+.2%} on average, {answer['median_absolute_error']:.2%} median, "
        f"{answer['rms_error']:.2%} rms"
    )
    inside = answer["inside_interval"]
    return "\n".join([*lines, summary + ("" if inside is None else f"; {inside:.0%} inside their 90 % intervals")])


def hyper_report(answer: dict[str, Any]) -> str:
    by, over = answer["by"], answer["over"]
    lines = [
        f"{by} {one[by]:.4g}: best {over} {one['best']:.4g} {_interval(one['interval'])} at loss {one['loss']:.4f}"
        + (f" (left out: {one['note']})" if one["note"] else "")
        for one in answer.get("minima", [])
    ]
    rule = answer["rule"]
    if rule is not None:
        span = _interval(rule["interval"])
        lines.append(f"{over} = {rule['scale']:.4g} x {by}^{rule['exponent']:.4f}   exponent {span}")
    if "value" in answer:
        lines.append(f"at {by} {answer['at']:.4g}: {over} {answer['value']:.4g}")
    return "\n".join(lines)


def _largest_out(check: dict[str, Any]) -> list[str]:
    if not check["splits"]:
        return ["largest left out: the smaller runs alone cannot identify the law"]
    lines = []
    for one in check["splits"]:
        lines.append(
            f"largest left out: fitted on the {one['fitted']} smallest, the {one['predicted']} largest missed by "
            f"{one['mean_error']:+.2%} on average, {one['rms_error']:.2%} rms, {one['worst_error']:+.2%} at worst; "
            f"{one['inside_interval']:.0%} inside their 90 % intervals"
        )
    if check["widening"] > 1:
        lines.append(f"prediction intervals are therefore widened by {check['widening']:.2f}")
    return lines


def _interval(span: list[float] | tuple[float, float] | None) -> str:
    return "[no interval]" if span is None else f"[{span[0]:.5g}, {span[1]:.5g}]"


def _span(edges: list[float]) -> str:
    return f"{edges[0]:.3g} to {edges[1]:.3g}"
