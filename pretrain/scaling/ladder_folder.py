"""Writes a ladder's folder and says what it will cost.

`pretrain-launch sweep` runs it as arrays on SLURM, run_here.sh in it one run after the other on this machine.
"""

import json
from pathlib import Path

from pretrain.config_file import dump_config
from pretrain.errors import ConfigError
from pretrain.scaling.ladder import Point
from pretrain.scaling.table import write_table

_SCRIPT = """#!/bin/sh
# All runs of this ladder on this machine, one after the other: run_here.sh [processes a run]. Start it again after an
# interruption: runs resume, and finished ones end at once. It stops at the first run that does not finish.
set -eu
folder=$(dirname "$0")
for config in \\
{configs}
do
  echo "== $config"
  pretrain-launch local "$folder/$config" --nproc "${{1:-1}}"
done
"""


def write_folder(found: list[Point], out: str | Path) -> None:
    """table.csv, table.json, run_here.sh and NAME.toml for every point. A folder with other configs is refused."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    ours = {point.row["config"] for point in found}
    strangers = sorted(path.name for path in folder.glob("*.toml") if path.name not in ours)
    if strangers:
        raise ConfigError(
            f"--out {folder} holds {len(strangers)} configs that are no points of this ladder ({strangers[0]}); "
            f"choose another folder or remove them"
        )
    rows = [point.row for point in found]
    for point in found:
        (folder / point.row["config"]).write_text(dump_config(point.config), encoding="utf-8")
    write_table(folder / "table.csv", rows)
    script = folder / "run_here.sh"
    script.write_text(_SCRIPT.format(configs=" \\\n".join(f"  {row['config']}" for row in rows)), encoding="utf-8")
    script.chmod(0o755)
    (folder / "table.json").write_text(json.dumps({"points": rows}, indent=1) + "\n", encoding="utf-8")


def cost(found: list[Point]) -> str:
    """The points in lines, with their sum."""
    lines = [
        f"{'run':<40}{'params':>10}{'layers':>8}{'width':>7}{'tokens':>10}{'tok/par':>9}{'steps':>8}{'batch':>9}{'lr':>10}{'FLOPs':>10}"
    ]
    for point in found:
        row = point.row
        lines.append(
            f"{row['name']:<40}{row['params']:>10.4g}{row['n_layers']:>8}{row['d_model']:>7}{row['tokens']:>10.3g}"
            f"{row['tokens_per_param']:>9.3g}{row['steps']:>8}{row['batch_tokens']:>9.3g}{row['lr']:>10.3g}{row['flops']:>10.3g}"
            + (f"   after {row['after']}" if row["after"] else "")
        )
    flops = sum(point.row["flops"] for point in found)
    lines.append(f"{len(found)} runs, {flops:.4g} FLOPs ({found[0].row['flops_convention']} attention)")
    if found[0].row["gpu_hours"] is not None:
        lines[-1] += f", {sum(point.row['gpu_hours'] for point in found):.3g} device hours"
    return "\n".join(lines)
