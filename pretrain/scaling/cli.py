"""The `pretrain scale` commands: parse, call, print. Everything heavy is imported by the command that needs it."""

import argparse
import json
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Adds `scale` and its commands; each parsed namespace has `run`, which takes it and returns the exit status."""
    scale = subparsers.add_parser("scale", help="design, fit and ask scaling laws")
    commands = scale.add_subparsers(dest="scale_command", required=True)
    _add_runs(commands)
    _add_fit(commands)
    _add_predict(commands)
    plot = commands.add_parser("plot", help="pictures and one page of a fit")
    plot.add_argument("fit", help="FIT.json of pretrain scale fit --out")
    plot.add_argument("table", help="the table that it was fitted on")
    plot.add_argument("--out", required=True, help="folder for PNG, SVG and index.html")
    plot.set_defaults(run=_plot)
    _add_hyper(commands)


def _add_runs(commands: Any) -> None:
    ladder = commands.add_parser("ladder", help="a folder of configs for a family of runs, and what they cost")
    ladder.add_argument("ladder", metavar="LADDER.toml")
    ladder.add_argument("--out", required=True, metavar="DIR", help="for table.csv, table.json and one config a run")
    ladder.set_defaults(run=_ladder)
    collect = commands.add_parser("collect", help="a table from run folders")
    collect.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or a ladder's folder for all of its runs")
    collect.add_argument("--out", required=True, metavar="TABLE", help=".csv, .parquet or .jsonl")
    collect.add_argument("--flops", choices=("causal", "full"), default="causal", help="convention of attention FLOPs")
    collect.add_argument("--intermediate", action="store_true", help="also a row for every validation before the last")
    collect.add_argument("--smooth", type=int, default=1, metavar="K", help="average the last K validations")
    collect.add_argument("--unfinished", action="store_true", help="take runs that have not finished")
    collect.add_argument("--anomalous", action="store_true", help="take runs that met an anomaly")
    collect.set_defaults(run=_collect)


def _add_hyper(commands: Any) -> None:
    hyper = commands.add_parser("hyper", help="best learning rate or batch by size from sweeps; the critical batch")
    hyper.add_argument("table")
    hyper.add_argument("--over", required=True, metavar="COL", help="lr, batch_tokens, or grad_noise_scale")
    hyper.add_argument("--by", required=True, metavar="COL", help="what it grows with: params, tokens, flops or loss")
    hyper.add_argument("--loss", metavar="COL", help="column of losses; needed unless --over is grad_noise_scale")
    hyper.add_argument("--where", metavar="EXPR")
    hyper.add_argument("--at", type=float, metavar="X", help="also the rule's value at this size")
    hyper.add_argument("--json", action="store_true")
    hyper.set_defaults(run=_hyper)


def _add_fit(commands: Any) -> None:
    fit = commands.add_parser("fit", help="a law with intervals from a table of runs")
    fit.add_argument("table", help="CSV, JSON lines or parquet with one row a run")
    fit.add_argument(
        "--params", required=True, metavar="COL", help='column of parameters, or arithmetic such as "N * 1e6"'
    )
    fit.add_argument(
        "--tokens",
        required=True,
        metavar="COL",
        help='column of tokens trained on, repeats included, or "flops / (6 * N)"',
    )
    fit.add_argument("--loss", required=True, metavar="COL", help='column of final losses, or "log(perplexity)"')
    fit.add_argument("--unique", metavar="COL", help="column of different tokens, for runs that repeat data")
    fit.add_argument("--flops", metavar="COL", help="column of training FLOPs, to find IsoFLOP budgets")
    fit.add_argument(
        "--group", metavar="COL", help="rows with one value here come from one run and are resampled together"
    )
    fit.add_argument("--where", metavar="EXPR", help='rows to use, such as "loss < 4 and not largest(loss, 5)"')
    fit.add_argument("--form", default="chinchilla", help="chinchilla, overtrained, repetition, params, tokens or auto")
    fit.add_argument("--params-unit", type=float, metavar="X", help="params are counted in X, such as 1e6")
    fit.add_argument("--tokens-unit", type=float, metavar="X", help="tokens are counted in X, such as 1e9")
    fit.add_argument("--flops-factor", type=float, default=6.0, metavar="K", help="FLOPs = K x params x tokens (6)")
    fit.add_argument("--bootstrap", type=int, default=1000, metavar="N", help="replicates behind the intervals (1000)")
    fit.add_argument("--seed", type=int, default=0, help="of the replicates; the law itself does not depend on it")
    fit.add_argument("--out", metavar="FIT.json", help="write everything here, for predict and plot")
    fit.add_argument("--json", action="store_true", help="print the JSON instead of words, without replicates")
    fit.set_defaults(run=_fit)


def _add_predict(commands: Any) -> None:
    predict = commands.add_parser("predict", help="loss of a planned run, or the best run for a budget or loss")
    predict.add_argument("fit", help="FIT.json of pretrain scale fit --out")
    predict.add_argument("--params", type=float, metavar="N")
    predict.add_argument("--tokens", type=float, metavar="D")
    predict.add_argument(
        "--flops", type=float, metavar="C", help="training FLOPs, inference included where it is given"
    )
    predict.add_argument("--loss", type=float, metavar="L", help="the cheapest run that reaches this loss")
    predict.add_argument(
        "--inference-tokens", type=float, default=0.0, metavar="T", help="tokens served in the model's life"
    )
    predict.add_argument(
        "--unique-tokens", type=float, metavar="U", help="different tokens there are (repetition form)"
    )
    predict.add_argument("--table", metavar="TABLE", help="measured runs to hold the law against")
    predict.add_argument(
        "--where", metavar="EXPR", help="rows of --table to predict; default: those that the fit's --where left out"
    )
    predict.add_argument("--json", action="store_true")
    predict.set_defaults(run=_predict)


def _ladder(args: argparse.Namespace) -> int:
    from pathlib import Path

    from pretrain.scaling.ladder import points, read_ladder
    from pretrain.scaling.ladder_folder import cost, write_folder

    found = points(read_ladder(args.ladder), Path(args.out))
    write_folder(found, args.out)
    print(cost(found))
    print(f"written to {args.out}; run them with: pretrain-launch sweep {args.out}, or here: {args.out}/run_here.sh")
    return 0


def _collect(args: argparse.Namespace) -> int:
    from pretrain.errors import ConfigError
    from pretrain.scaling.collect import Wanted, collect
    from pretrain.scaling.table import write_table

    if args.smooth < 1:
        raise ConfigError(f"--smooth {args.smooth} averages nothing; say 1 or more")
    wanted = Wanted(args.flops, args.intermediate, args.smooth, unfinished=args.unfinished, anomalous=args.anomalous)
    rows = collect(args.runs, wanted)
    write_table(args.out, rows)
    print(f"{len(rows)} rows of {len({row['run'] for row in rows})} runs written to {args.out}")
    return 0


def _hyper(args: argparse.Namespace) -> int:
    from pretrain.errors import ConfigError
    from pretrain.scaling.columns import where
    from pretrain.scaling.hyper import critical_batch, rule_at, sweep
    from pretrain.scaling.report import hyper_report
    from pretrain.scaling.table import read_table

    table = read_table(args.table)
    if args.over == "grad_noise_scale":
        chosen = table if args.where is None else table.take(where(table, args.where))
        answer = critical_batch(chosen, by=args.by)
    elif args.loss is None:
        raise ConfigError(f"--over {args.over} needs --loss COL, whose minimum is sought")
    else:
        answer = sweep(table, over=args.over, by=args.by, loss=args.loss, expression=args.where)
    if args.at is not None:
        if answer["rule"] is None:
            raise ConfigError(f"--at {args.at:g}: one value of {args.by!r} gives no rule; sweep at two or more")
        answer["at"], answer["value"] = args.at, rule_at(answer["rule"], args.at)
    print(json.dumps(answer) if args.json else hyper_report(answer))
    return 0


def _fit(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from pretrain.errors import ConfigError
    from pretrain.scaling.report import fit_report
    from pretrain.scaling.saved import write_fit
    from pretrain.scaling.study import Question, study
    from pretrain.scaling.table import read_table

    if args.bootstrap < 0 or 0 < args.bootstrap < 20:
        raise ConfigError(f"--bootstrap {args.bootstrap} is too few for an interval; take 200 or more, or 0 for none")
    units = {"params": args.params_unit, "tokens": args.tokens_unit}
    asked = {one.name: getattr(args, one.name) for one in fields(Question) if hasattr(args, one.name)}
    ask = Question(**asked, units={role: unit for role, unit in units.items() if unit is not None})
    content = study(read_table(args.table), ask)
    if args.out:
        write_fit(args.out, content)
    if args.json:
        print(json.dumps({key: value for key, value in content.items() if key not in ("replicates", "residuals")}))
    else:
        print(fit_report(content) + (f"\nwritten to {args.out}" if args.out else ""))
    return 0


def _predict(args: argparse.Namespace) -> int:
    from pretrain.errors import ConfigError
    from pretrain.scaling.compare import compare
    from pretrain.scaling.predict import predict_budget, predict_run, predict_target
    from pretrain.scaling.report import comparison_report, prediction_report
    from pretrain.scaling.saved import read_fit
    from pretrain.scaling.table import read_table

    run = args.params is not None and args.tokens is not None
    others = [value for value in (args.flops, args.loss, args.table) if value is not None]
    if run + len(others) != 1 or (args.params is None) != (args.tokens is None):
        raise ConfigError(
            "say one of: --params N --tokens D (a run), --flops C (a budget), --loss L (a target), --table TABLE (runs)"
        )
    if args.where is not None and args.table is None:
        raise ConfigError(f"--where {args.where!r} has no effect without --table")
    fit = read_fit(args.fit)
    if args.table is not None:
        compared = compare(fit, read_table(args.table), args.where)
        print(json.dumps(compared) if args.json else comparison_report(compared))
        return 0
    if run:
        if args.inference_tokens:
            raise ConfigError("--inference-tokens has no effect beside --params and --tokens; use --flops or --loss")
        answer = predict_run(fit, args.params, args.tokens, unique=args.unique_tokens)
    elif args.flops is not None:
        answer = predict_budget(fit, args.flops, inference_tokens=args.inference_tokens, unique=args.unique_tokens)
    else:
        answer = predict_target(fit, args.loss, inference_tokens=args.inference_tokens)
    print(json.dumps(answer) if args.json else prediction_report(answer, fit.content["formula"]))
    return 0


def _plot(args: argparse.Namespace) -> int:
    from pretrain.scaling.plot import plot_fit
    from pretrain.scaling.saved import read_fit
    from pretrain.scaling.table import read_table

    for path in plot_fit(read_fit(args.fit), read_table(args.table), args.out):
        print(path)
    return 0
