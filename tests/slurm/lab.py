"""A real SLURM of several nodes on this one machine, for as long as a test session needs it.

munge, slurmctld and one slurmd a node, all on loopback. Each node lives in UTS, mount and pid namespaces of its own, so
that it has its own host name and a kill of its first process is a power failure. Needs root and Debian's packages
slurmctld, slurmd, slurm-client and munge. Stops what it started and nothing else.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")

_CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits for its old credential to expire: 120 s by default
AuthInfo=socket={lab}/munge.socket,cred_expire=5
StateSaveLocation={lab}/state
SlurmctldPidFile={lab}/run/slurmctld.pid
SlurmctldLogFile={lab}/log/slurmctld.log
SlurmdSpoolDir={lab}/spool/%n
SlurmdPidFile={lab}/run/slurmd.%n.pid
SlurmdLogFile={lab}/log/slurmd.%n.log
ProctrackType={tracking}
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=3,sched_min_interval=0,bf_interval=3
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=20
SlurmdTimeout=12
SlurmctldTimeout=10
MessageTimeout=20
MinJobAge=3600
ReturnToService=2
UnkillableStepTimeout=60
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=5 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""

_BOOT = 'hostname "$1"; mount --bind "$2" /etc/hosts; slurmd -N "$1"; while :; do sleep 1; done'


def missing() -> str | None:
    """Why the lab cannot run here, or None."""
    absent = [command for command in COMMANDS if shutil.which(command) is None]
    if absent:
        packages = "slurmctld slurmd slurm-client munge"
        return f"{', '.join(absent)} not installed (apt-get install --no-install-recommends {packages})"
    if os.geteuid() != 0:
        return "the SLURM lab makes namespaces and runs slurmd, which needs root"
    tried = subprocess.run(
        ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true"], capture_output=True
    )
    return None if tried.returncode == 0 else f"unshare is not allowed here: {tried.stderr.decode().strip()}"


class Lab:
    """`nodes` nodes called node1 … of `cpus` pretended CPUs each."""

    def __init__(self, folder: Path, nodes: int = 3, cpus: int = 4) -> None:
        self.folder = folder
        self.names = [f"node{i}" for i in range(1, nodes + 1)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._made_cgroup = False
        for name in ("state", "run", "log", *(f"spool/{node}" for node in self.names)):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._configure(cpus)

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = [f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file")]
        self._daemon(
            "munged", "--foreground", "--force", *munge, f"--key-file={key}", f"--seed-file={self.folder}/seed"
        )
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munge's socket")
        self._daemon("slurmctld", "-D")
        for node in self.names:
            self.boot(node)
        self._wait(lambda: len(self.idle()) == len(self.names), "idle nodes")

    def stop(self) -> None:
        for node in list(self._nodes):
            self.crash(node)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        if self._made_cgroup:
            self._wait(_remove_cgroups, "end of the killed tasks")

    def boot(self, node: str) -> None:
        hosts = self.folder / "run" / f"hosts.{node}"
        # its own name is 127.0.0.1, what slurmd binds and srun calls from; the others are other loopback addresses
        lines = [f"127.0.0.{1 if name == node else 10 + i} {name}" for i, name in enumerate(self.names, 1)]
        hosts.write_text(Path("/etc/hosts").read_text() + "\n".join(lines) + "\n")
        unshare = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._nodes[node] = self._popen(node, *unshare, "bash", "-c", _BOOT, "node", node, str(hosts))

    def crash(self, node: str) -> None:
        """Power failure: slurmd, its steps and every task are gone at once."""
        process = self._nodes.pop(node)
        process.kill()
        process.wait()

    def idle(self) -> set[str]:
        said = self.call("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N", check=False)
        return set(said.split())

    def call(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        said = self.call("scontrol", "show", "job", job)
        return next(word.partition("=")[2] for word in said.split() if word.startswith(f"{name}="))

    def _configure(self, cpus: int) -> None:
        ports = _free_ports(len(self.names) + 1)
        nodes = [
            f"NodeName={node} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN"
            for node, port in zip(self.names, ports[1:], strict=True)
        ]
        values = {"host": socket.gethostname().split(".")[0], "port": ports[0], "lab": self.folder}
        conf = _CONF.format(**values, nodes="\n".join(nodes), tracking=self._tracking())
        (self.folder / "slurm.conf").write_text(conf)

    def _tracking(self) -> str:
        """cgroup, as on a real cluster, where its first version is mounted: linuxproc signals tasks' children too."""
        freezer = Path("/sys/fs/cgroup/freezer")
        try:
            (freezer / "slurm").mkdir(exist_ok=True)
        except OSError:
            return "proctrack/linuxproc"
        if not (freezer / "slurm" / "freezer.state").exists():
            return "proctrack/linuxproc"
        self._made_cgroup = True
        lines = ["CgroupPlugin=cgroup/v1", "CgroupMountpoint=/sys/fs/cgroup", "CgroupAutomount=no"]
        lines += [f"Constrain{what}=no" for what in ("Cores", "RAMSpace", "Devices")]
        (self.folder / "cgroup.conf").write_text("\n".join(lines) + "\n")
        return "proctrack/cgroup"

    def _daemon(self, *command: str) -> None:
        self._daemons.append(self._popen(command[0], *command))

    def _popen(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            return subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self, condition, what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"no {what} after {seconds} s; logs are in {self.folder / 'log'}"
            time.sleep(0.05)


def _remove_cgroups() -> bool:
    """Remove what slurmd made; False while a killed task still leaves."""
    try:
        for root in Path("/sys/fs/cgroup/freezer").glob("slurm*"):
            for folder, _, _ in os.walk(root, topdown=False):
                os.rmdir(folder)
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    holders = [socket.socket() for _ in range(count)]
    try:
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        return [int(holder.getsockname()[1]) for holder in holders]
    finally:
        for holder in holders:
            holder.close()


def ranks_of(job: str) -> dict[str, list[int]]:
    """node -> pids of the ranks of a job, seen from outside the nodes."""
    found: dict[str, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            raw = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        env = dict(item.partition(b"=")[::2] for item in raw)
        rank = (
            b"pretrain\0train" in command and b"launch.node" not in command and b"torch.distributed.run" not in command
        )
        if rank and env.get(b"SLURM_JOB_ID") == job.encode():
            found.setdefault(env[b"SLURMD_NODENAME"].decode(), []).append(int(entry.name))
    return found


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
