"""Run a function on N gloo ranks: `run_ranks(function, 2, *args)` gives what each rank returned, in rank order.

The function is named by module and attribute and imported anew in each process (spawned, so torch's threads are safe).
An exception in any rank fails the call with that rank's traceback.
"""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAIN = """
import importlib.util, pickle, sys
job, result, path, name = sys.argv[1:5]
sys.path.insert(0, {root!r})
spec = importlib.util.spec_from_file_location("rank_function_module", path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
args = pickle.load(open(job, "rb"))
out = getattr(module, name)(*args)
pickle.dump(out, open(result, "wb"))
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 300, **env: str) -> list[Any]:
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "args.pkl")
        job.write_bytes(pickle.dumps(args))
        port = free_port()
        ranks = []
        for rank in range(size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
            }
            command = [sys.executable, "-c", _MAIN.format(root=str(root)), str(job), f"{folder}/{rank}.pkl"]
            command += [function.__code__.co_filename, function.__name__]
            log = open(f"{folder}/{rank}.log", "wb")  # noqa: SIM115
            ranks.append((subprocess.Popen(command, env=environment | env, stdout=log, stderr=log), log))
        failed = []
        for rank, (process, log) in enumerate(ranks):
            try:
                status: Any = process.wait(timeout=5 if failed else timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                status = "killed after the time-out"
            log.close()
            if status != 0:
                text = Path(folder, f"{rank}.log").read_text(errors="replace")
                failed.append(f"--- rank {rank}: {status}\n{text[-6000:]}")
        assert not failed, "\n".join(failed)
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(size)]
