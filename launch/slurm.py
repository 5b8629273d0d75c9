"""From a config and a cluster file to a SLURM job: the batch script, a snapshot to run it from, the submission.

`render_sbatch` is pure: text in, text out. `prepare` lays code, resolved config and script into RUN/jobs/NNN, so that a
job that comes back days later runs what was submitted; `submit` hands it to sbatch.
"""

import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli_w

from launch import free, health, ledger, slurm_commands
from launch.cluster import Cluster
from pretrain.config import Config
from pretrain.config_file import dump_config
from pretrain.errors import ConfigError

Launcher = Literal["torchrun", "srun"]
_PACKAGES = ("pretrain", "data_prep", "launch")


class Place(NamedTuple):
    """Where a job's files are; absolute."""

    run: Path  # the run's own folder
    job: Path  # code/, config.toml, cluster.toml and train.sbatch of this submission
    chdir: Path  # what the config's relative paths start from


class Shape(NamedTuple):
    """How a job is started."""

    nodes: int
    launcher: Launcher = "torchrun"
    train_options: Sequence[str] = ()  # for pretrain train, as they are


class Array(NamedTuple):
    """A sweep: task i trains in the job folder on line i + 1 of `points`."""

    points: Path
    name: str
    tasks: Sequence[int]
    at_once: int  # tasks that run at the same time


def render_sbatch(cfg: Config, cluster: Cluster, place: Place, shape: Shape, *, array: Array | None = None) -> str:
    """The batch script. ConfigError where nodes x ranks a node are no world that the config can use."""
    nodes, launcher = shape.nodes, shape.launcher
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes}: at least one node is needed")
    node, slurm = cluster.node, cluster.slurm
    cfg.layout(nodes * node.processes)
    if launcher == "srun" and cluster.retry.torchrun_restarts:
        raise ConfigError(
            f"retry.torchrun_restarts={cluster.retry.torchrun_restarts} has no effect with --launcher srun; "
            "set it to 0 or use --launcher torchrun"
        )
    tasks = 1 if launcher == "torchrun" else node.processes
    values = {
        "TITLE": cfg.run.name if array is None else f"sweep {array.name}",
        "SCRIPT": quote(place.job / "train.sbatch"),
        "SBATCH": "\n".join(f"#SBATCH {line}" for line in _options(cfg, cluster, place, nodes, tasks, array)),
        "SIGNAL_SECONDS": str(slurm.signal_seconds),
        "PICK": _pick(place, array),
        "ENVIRONMENT": "\n".join(environment(cluster)),
        "CPUS_PER_TASK": str(node.cpus // tasks),
        "TASKS": str(nodes * tasks),
        "TASKS_PER_NODE": str(tasks),
        "NODES": str(nodes),
        "PROCESSES": str(node.processes),
        "PORT_BASE": str(cluster.network.port_base),
        "HEALTH": _gate(cluster, nodes),
        "SRUN": "".join(f" {shlex.quote(option)}" for option in cluster.software.container),
        "PYTHON": cluster.software.python,
        "BATCH_PYTHON": cluster.software.host_python if cluster.software.container else cluster.software.python,
        "LAUNCHER": launcher,
        "MAX_RESTARTS": str(cluster.retry.torchrun_restarts),
        "CRASHES": str(cluster.retry.crashes),
        "NODE_FAILURES": str(cluster.retry.node_failures),
        "REQUEUE": slurm.requeue,
        "TRAIN_OPTIONS": "".join(f" {quote(word)}" for word in shape.train_options),
        "EXCLUDE": quote(",".join(slurm.exclude)),
    }
    return fill(Path(__file__).with_name("train.sbatch").read_text(encoding="utf-8"), values)


def fill(template: str, values: dict[str, str]) -> str:
    """Put each value where its @NAME@ stands."""
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template


def header(cluster: Cluster) -> list[str]:
    """What every job of this site asks for."""
    slurm = cluster.slurm
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    lines = [f"--{name}={value}" for name, value in named.items() if value]
    return [*lines, *([f"--exclude={','.join(slurm.exclude)}"] if slurm.exclude else []), *slurm.extra]


def _options(cfg: Config, cluster: Cluster, place: Place, nodes: int, tasks: int, array: Array | None) -> list[str]:
    node, slurm = cluster.node, cluster.slurm
    lines = [f"--job-name={cfg.run.name if array is None else array.name}"]
    lines += [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={node.cpus // tasks}"]
    if node.gpus:
        asked = {"gpus-per-node": f"--gpus-per-node={node.gpus}", "gres": f"--gres=gpu:{node.gpus}", "none": None}
        lines += [option for option in [asked[node.gpu_option]] if option is not None]
    lines += [f"--mem={node.memory}"] if node.memory else []
    lines += ["--exclusive"] if node.exclusive else []
    lines += [f"--time={slurm.time}", f"--signal=B:USR1@{slurm.signal_seconds}"]
    lines += ["--requeue", "--open-mode=append", f"--chdir={place.chdir}"]
    if array is None:
        lines.append(f"--output={place.run}/logs/slurm-%j.out")
    else:
        lines.append(f"--output={place.job}/slurm-%A_%a.out")
        lines.append(f"--array={','.join(map(str, array.tasks))}%{array.at_once}")
    return lines + header(cluster)


def _pick(place: Place, array: Array | None) -> str:
    if array is None:
        return f"run={quote(place.run)}\njob={quote(place.job)}"
    line = f'job=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {quote(array.points)})  # the job folder of one point a line'
    log = 'mkdir -p "$run/logs" && exec >>"$run/logs/slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out" 2>&1'
    return f"{line}\nrun=${{job%/jobs/*}}\n{log}"


def environment(cluster: Cluster) -> list[str]:
    """Shell lines that every job of this site begins with."""
    exports = dict(cluster.environment)
    if cluster.network.interface:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            exports.setdefault(name, cluster.network.interface)
    lines = [f"export {name}={quote(value)}" for name, value in sorted(exports.items())]
    return [*cluster.software.activate, *lines] or ["# the cluster file has neither software.activate nor environment"]


def _gate(cluster: Cluster, nodes: int) -> str:
    if not cluster.health.enabled:
        return "status=0  # no health gate: health.enabled = false in the cluster file"
    node, software = cluster.node, cluster.software
    srun = ["srun", "--kill-on-bad-exit=0", f"--nodes={nodes}", f"--ntasks={nodes * node.processes}"]
    srun += [f"--ntasks-per-node={node.processes}"]
    srun += [f"--cpus-per-task={node.cpus // node.processes}", *map(shlex.quote, software.container)]
    task = ["-m launch.node --launcher srun --nodes", str(nodes), "--ranks-per-node", str(node.processes)]
    task += ['--head "$head" --port $((port + 1)) --attempt "$attempt/health" --']
    doctor = health.doctor_command(cluster, '"$run"', '"$attempt/health"')
    return (
        "# Every rank looks at its device, all reduce together; a bad node is named and left out of the next start.\n"
        f"step {' '.join(srun)} \\\n  {software.python} {' '.join(task)} \\\n  {' '.join(doctor)}\n"
        '[ "$status" -eq 0 ] || echo "the health gate has failed: no training on these nodes"'
    )


def quote(value: object) -> str:
    return shlex.quote(str(value))


def prepare(cfg: Config, cluster: Cluster, shape: Shape, *, chdir: Path, say: Callable[[str], None]) -> Place:
    """Refuse a run that something is at work on; else snapshot everything into a new RUN/jobs/NNN."""
    run = (chdir / cfg.run.dir).resolve()
    free.require_free(run, cfg.run.name, say)
    place = Place(run, next_folder(run), chdir.resolve())
    text = render_sbatch(cfg, cluster, place, shape)
    snapshot_code(place.job)
    write_settings(place, cfg, cluster)
    (place.job / "train.sbatch").write_text(text, encoding="utf-8")
    say(f"snapshot | {place.job} (code, config.toml, cluster.toml, train.sbatch)")
    return place


def next_folder(run: Path) -> Path:
    """RUN/jobs/NNN of the next submission."""
    taken = [int(path.name) for path in (run / "jobs").glob("[0-9][0-9][0-9]")]
    return run / "jobs" / f"{max(taken, default=-1) + 1:03d}"


def snapshot_code(job: Path) -> None:
    source = Path(__file__).resolve().parents[1]
    ignored = shutil.ignore_patterns("__pycache__")
    for package in _PACKAGES:
        shutil.copytree(source / package, job / "code" / package, ignore=ignored)


def write_settings(place: Place, cfg: Config, cluster: Cluster) -> None:
    """The resolved config and cluster of a submission."""
    place.job.mkdir(parents=True, exist_ok=True)
    (place.run / "logs").mkdir(exist_ok=True)
    (place.job / "config.toml").write_text(dump_config(cfg), encoding="utf-8")
    (place.job / "cluster.toml").write_text(tomli_w.dumps(plain(cluster)), encoding="utf-8")


def plain(cluster: Cluster) -> dict[str, Any]:
    return cluster.model_dump(exclude_none=True)


def submit(place: Place, cluster: Cluster, say: Callable[[str], None]) -> str:
    """Hand the prepared job to sbatch; its id."""
    script = place.job / "train.sbatch"
    job = hand_over(script, chdir=place.chdir, made=[place.job])
    ledger.add(place.run, "submit", job=job, folder=str(place.job), after=None, exclude=list(cluster.slurm.exclude))
    say(f"job      | {job}")
    say(f"run      | {place.run}")
    say(f"follow   | tail -F {place.run}/logs/slurm-{job}.out")
    say(f"         | pretrain-launch status {place.run}   (stop it: pretrain-launch stop {place.run})")
    return job


def hand_over(script: Path, *, chdir: Path, made: Sequence[Path], options: Sequence[str] = ()) -> str:
    """The id that sbatch gives; where it refuses, the folders `made` for the job are removed again."""
    try:
        return slurm_commands.submit(script, chdir=chdir, options=options)
    except slurm_commands.SlurmError as e:
        for folder in made:
            shutil.rmtree(folder)
        raise ConfigError(f"{e}; what a job asks for is in [slurm] and [node] of the cluster file") from None
