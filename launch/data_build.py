"""`pretrain-launch data`: `pretrain-data build` as an array of tasks, then one job that merges what they made."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from launch import slurm, slurm_commands
from launch.cluster import Cluster
from pretrain.errors import ConfigError


def launch(
    build: Sequence[str], cluster: Cluster, *, tasks: int, chdir: Path, dry_run: bool, say: Callable[[str], None]
) -> int:
    """`build` is what follows `pretrain-data build`."""
    if tasks < 1:
        raise ConfigError(f"--tasks {tasks}: at least one task is needed")
    for own in ("--task", "--num-tasks"):
        if any(word.split("=")[0] == own for word in build):
            raise ConfigError(f"{own} is set by the launcher for each task; leave it out")
    out = (chdir / _out(build)).resolve()
    texts = [
        render(build, cluster, out, chdir.resolve(), tasks=tasks),
        render(["merge"], cluster, out, chdir.resolve()),
    ]
    if dry_run:
        say("\n".join(texts))
        return 0
    jobs = jobs_folder(out)
    jobs.mkdir(parents=True, exist_ok=True)
    submitted = jobs / "submitted"
    earlier = submitted.read_text(encoding="utf-8").split() if submitted.exists() else []
    if live := [job for job in earlier if slurm_commands.alive(job)]:
        raise ConfigError(f"--out {out} is being built by job {live[0]}; wait for it, or scancel {' '.join(live)}")
    scripts = [jobs / "build.sbatch", jobs / "merge.sbatch"]
    for script, text in zip(scripts, texts, strict=True):
        script.write_text(text, encoding="utf-8")
    first = slurm_commands.submit(scripts[0], chdir=chdir)
    options = [f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes"]
    second = slurm_commands.submit(scripts[1], chdir=chdir, options=options)
    submitted.write_text(f"{first} {second}\n", encoding="utf-8")
    say(f"job {first}: {tasks} tasks; job {second}: merge, when all are done")
    say(f"follow {jobs}/slurm-{first}_*.out; tasks that fail are run again by the same command, done ones are kept")
    return 0


def render(build: Sequence[str], cluster: Cluster, out: Path, chdir: Path, *, tasks: int | None = None) -> str:
    """The batch script of the array, or, without `tasks`, of the merge."""
    options = [f"--job-name=data-{out.name}", "--nodes=1", "--ntasks=1"]
    options += [f"--cpus-per-task={cluster.node.cpus if tasks is not None else 1}", f"--time={cluster.slurm.time}"]
    options += ["--requeue", "--open-mode=append", f"--chdir={chdir}"]
    if tasks is not None:
        options += [f"--array=0-{tasks - 1}", f"--output={jobs_folder(out)}/slurm-%A_%a.out"]
        words = ["build", *build, "--num-tasks", str(tasks)]
        tail = ' --task "$SLURM_ARRAY_TASK_ID"'
    else:
        options.append(f"--output={jobs_folder(out)}/slurm-%j.out")
        words, tail = ["merge", str(out)], ""
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in [*options, *slurm.header(cluster)])]
    lines += slurm.environment(cluster)
    srun = shlex.join(["srun", "--ntasks=1", f"--cpus-per-task={cluster.node.cpus}", *cluster.software.container])
    srun = f"{srun} " if tasks is not None or cluster.software.container else ""
    return "\n".join([*lines, f"{srun}{cluster.software.python} -m data_prep {shlex.join(words)}{tail}", ""])


def jobs_folder(out: Path) -> Path:
    """Scripts and logs lie beside the dataset: a build starts in an empty folder."""
    return out.with_name(f"{out.name}.jobs")


def _out(build: Sequence[str]) -> str:
    for index, word in enumerate(build):
        if word == "--out" and index + 1 < len(build):
            return build[index + 1]
        if word.startswith("--out="):
            return word[6:]
    raise ConfigError("--out DIR is missing among the arguments of pretrain-data build")
