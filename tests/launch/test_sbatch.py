"""The batch scripts: golden texts for the shipped cluster files, and the script run under false SLURM commands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch import node, slurm
from launch.cli import main
from launch.cluster import Cluster, load_cluster, seconds_of
from pretrain.config import Config
from pretrain.config_file import load_config
from pretrain.errors import ConfigError
from tests.launch.tiny_run import ROOT, write_config

SITES = sorted((ROOT / "configs" / "cluster").glob("*.toml"))
PLACE = slurm.Place(Path("/shared/runs/one"), Path("/shared/runs/one/jobs/000"), Path("/home/me/project"))


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return load_config(write_config(tmp_path / "c.toml", Path("/shared/runs/one"), tmp_path, steps=10, rows=64))


def site(text: str, tmp_path: Path) -> Cluster:
    path = tmp_path / "site.toml"
    path.write_text(text)
    return load_cluster(path)


CPU = 'name = "x"\n[slurm]\ntime = "01:00:00"\n[node]\ngpus = 0\nranks = 2\ncpus = 4\n'


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.stem)
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_script_of_each_shipped_cluster_file_is_as_written_down(cfg, path, launcher):
    """After a wanted change: PRETRAIN_WRITE_GOLDEN=1 pytest tests/launch/test_sbatch.py, and read the difference."""
    text = slurm.render_sbatch(cfg, load_cluster(path), PLACE, slurm.Shape(2, launcher))
    golden = Path(__file__).with_name("golden") / f"{path.stem}.{launcher}.sbatch"
    if os.environ.get("PRETRAIN_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert not re.search("@[A-Z_]+@", text)


def test_a_world_that_the_config_cannot_use_is_refused_with_the_numbers(cfg):
    with pytest.raises(ConfigError, match=r"global_batch_size=64 is no multiple of 48"):
        slurm.render_sbatch(cfg, load_cluster(ROOT / "configs/cluster/h100_pyxis.toml"), PLACE, slurm.Shape(3))
    with pytest.raises(ConfigError, match="--nodes 0"):
        slurm.render_sbatch(cfg, load_cluster(ROOT / "configs/cluster/cpu.toml"), PLACE, slurm.Shape(0))


def test_restarts_by_torchrun_are_refused_where_there_is_no_torchrun(cfg, tmp_path):
    cluster = site(CPU + "[retry]\ntorchrun_restarts = 2\n", tmp_path)
    assert "--max-restarts 2" in slurm.render_sbatch(cfg, cluster, PLACE, slurm.Shape(1))
    with pytest.raises(ConfigError, match=r"retry.torchrun_restarts=2 has no effect with --launcher srun"):
        slurm.render_sbatch(cfg, cluster, PLACE, slurm.Shape(1, "srun"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("partitionn", '[slurm]\npartitionn = "x"'), "slurm.partitionn='x': unknown key; did you mean partition?"),
        (("time", '[slurm]\ntime = "soon"'), "slurm.time='soon': 'soon' is no time"),
        (("lead", '[slurm]\ntime = "00:05:00"\nsignal_seconds = 290'), "signal_seconds=290 leaves less than a minute"),
        (("extra", '[slurm]\ntime = "1:0:0"\nextra = ["rm"]'), "'rm' is no sbatch option"),
        (("cpus", "[node]\ngpus = 8\ncpus = 4"), "cpus=4 is less than one for each of 8 ranks"),
        (("ranks", "[node]\ngpus = 8\nranks = 2\ncpus = 16"), "ranks=2 beside gpus=8"),
        (("none", "[node]\ngpus = 0\ncpus = 4"), "gpus=0 needs ranks"),
        (("environment", '[environment]\n"A B" = "1"'), "'A B' is no name of an environment variable"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_cluster_file_that_cannot_work_names_key_value_and_mend(tmp_path, change, message):
    with pytest.raises(ConfigError) as error:
        site('name = "x"\n' + change[1] + "\n", tmp_path)
    assert message in str(error.value)


def test_a_missing_cluster_file_and_a_missing_option_end_with_status_2(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PRETRAIN_CLUSTER", raising=False)
    config = write_config(tmp_path / "c.toml", tmp_path / "run", tmp_path, steps=10)
    assert main(["slurm", str(config), "--nodes", "1", "--cluster", str(tmp_path / "none.toml")]) == 2
    assert "no such cluster file; docs/slurm.md" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["slurm", str(config), "--nodes", "1"])
    assert "--cluster" in capsys.readouterr().err


def test_times_are_read_as_slurm_reads_them():
    times = {"90": 5400, "2:30": 150, "01:00:00": 3600, "1-0": 86400, "1-02:03": 93780, "2-00:00:01": 172801}
    assert {time: seconds_of(time) for time in times} == times


def fake_slurm(folder: Path) -> dict[str, str]:
    """An srun that prints its arguments and threads, and nothing else of SLURM: no scontrol, scancel or squeue.

    Where it should look at a folder, all nodes but those in BLIND see it.
    """
    folder.mkdir()
    (folder / "srun").write_text(
        '#!/bin/bash\n[[ "$*" = *" bash -c "* ]] && echo "$BLIND" && exit\n'
        'printf "srun: %s\\n" "$*" "cpus=$SRUN_CPUS_PER_TASK"\n'
    )
    (folder / "srun").chmod(0o755)
    for command in ("bash", "sed", "mkdir", "touch"):
        found = next(Path(p) / command for p in ("/bin", "/usr/bin") if (Path(p) / command).exists())
        (folder / command).symlink_to(found)
    (folder / "python").symlink_to(sys.executable)
    return {"PATH": str(folder), "SLURM_JOB_ID": "77", "SLURM_LAUNCH_NODE_IPADDR": "login1"}


@pytest.mark.parametrize(
    ("nodes", "head"),
    [
        ("gpu[003,010]", "gpu003"),
        ("gpu[003-004]", "gpu003"),
        ("a1,b[1-3]", "a1"),
        ("rack[2-3]n[07-09]", "rack2n07"),
        ("x-1,x-2", "x-1"),
    ],
)
def test_the_first_node_is_found_without_scontrol_and_cpus_reach_srun(cfg, tmp_path, nodes, head):  # G43, G45
    place = slurm.Place(tmp_path / "run", tmp_path / "run" / "jobs" / "000", tmp_path)
    slurm.snapshot_code(place.job)
    script = tmp_path / "train.sbatch"
    cluster = site(CPU.replace("cpus = 4", "cpus = 10") + "[health]\nenabled = false\n", tmp_path)
    shape = slurm.Shape(2, "torchrun", ["--allow-change", "optimizer.lr"])
    script.write_text(slurm.render_sbatch(cfg, cluster, place, shape))
    env = fake_slurm(tmp_path / "bin") | {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert f"--head {head} --port 2" in done.stdout, done.stdout + done.stderr
    assert "--cpus-per-task=10" in done.stdout
    assert "cpus=10" in done.stdout
    assert "--nodes 2 --ranks-per-node 2" in done.stdout
    assert "crash at step -1" in done.stdout  # nothing was trained and no outcome written
    assert "scontrol is not on this machine's PATH" in done.stderr
    assert done.returncode == 1
    assert f"pretrain train {place.job}/config.toml --allow-change optimizer.lr" in done.stdout

    done = subprocess.run(["bash", str(script)], env=env | {"BLIND": "gpu010"}, capture_output=True, text=True)
    assert f"error: {place.job} is not there on gpu010 - run.dir must lie on a file system" in done.stderr
    assert done.returncode == 2

    env["SLURM_JOB_NUM_NODES"] = "3"
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert "made for 2 nodes x 2 ranks, but SLURM gave 3 nodes" in done.stderr
    assert done.returncode == 2


def test_the_first_node_is_slurms_whatever_scontrol_says_and_none_is_made_up(cfg, tmp_path):
    """G43: a false scontrol changes nothing; without a list of nodes the job ends before any rank starts."""
    place = slurm.Place(tmp_path / "run", tmp_path / "run" / "jobs" / "000", tmp_path)
    slurm.snapshot_code(place.job)
    script = tmp_path / "train.sbatch"
    cluster = site(CPU + "[health]\nenabled = false\n", tmp_path)
    script.write_text(slurm.render_sbatch(cfg, cluster, place, slurm.Shape(2, "torchrun", [])))
    env = fake_slurm(tmp_path / "bin") | {"SLURM_JOB_NUM_NODES": "2"}
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/bash\necho localhost\n")
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    nodes = {"SLURM_JOB_NODELIST": "gpu[003,010]"}
    done = subprocess.run(["bash", str(script)], env=env | nodes, capture_output=True, text=True, timeout=60)
    assert "--head gpu003 --port 2" in done.stdout, done.stdout + done.stderr
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert "SLURM_JOB_NODELIST: is not set: start this with sbatch" in done.stderr
    assert "srun:" not in done.stdout
    assert done.returncode != 0


def check(**changes: str) -> str | None:
    words = (
        "--launcher torchrun --nodes 2 --ranks-per-node 2 --head gpu003 --port 0 --attempt x -- pretrain train c.toml"
    )
    env = {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    for name, value in changes.items():
        words = words.replace("--head gpu003", f"--head {value}") if name == "head" else words
        words = words.replace("torchrun", value) if name == "launcher" else words
    env |= {name: value for name, value in changes.items() if name.startswith("SLURM")}
    return node.check(node.parse(words.split()), env)


def test_a_task_refuses_a_world_that_is_not_the_jobs_and_a_head_that_is_everyones_own_name():  # G43
    assert check() is None
    assert "srun started 1 tasks on 1 nodes" in str(check(SLURM_NNODES="1", SLURM_NTASKS="1"))
    assert "srun started 2 tasks on 2 nodes, but the job is of 2 nodes x 2 tasks" in str(check(launcher="srun"))
    for name in ("localhost", "127.0.0.1", "localhost.localdomain"):
        assert "which every node takes for itself" in str(check(head=name))
