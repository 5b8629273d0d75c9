"""Ranks for tests: processes that begin with torch, DeepSpeed and the trainer imported, which takes most of a start.

They are forked by a server that has imported those and does nothing else (multiprocessing's forkserver), so each is a
process of its own, to be killed and waited for, whose threads are its own too.

`run_ranks(function, 2, *args)` gives what each of two gloo ranks returned, in rank order.
"""

import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Rank:
    """Calls `function(*args)` in a process with these environment variables, its output at the end of `log`.

    The function is imported there by its file and name, so a test's own file may hold it; its result ends the process
    as `sys.exit` would. Like a subprocess.Popen to who waits for it or ends it.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["deepspeed", "pretrain.train.run", "pretrain.parallel.zero"])
        os.environ["DS_ACCELERATOR"] = "cpu"  # which DeepSpeed asks for when the server imports it
        place = (function.__code__.co_filename, function.__name__)
        self._process = context.Process(target=_begin, args=(place, args, env, str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} is still there after {timeout:g} s")
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin(place: tuple[str, str], args: tuple[Any, ...], env: dict[str, str], log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    import torch

    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.exit(_function(*place)(*args))


def _function(path: str, name: str) -> Callable[..., Any]:
    spec: Any = importlib.util.spec_from_file_location("rank_function_module", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_ranks(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], logs: list[Path], **env: str
) -> list[Rank]:
    """`size` gloo ranks that find each other on this host."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    common = os.environ | meeting | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | env
    return [
        Rank(function, args, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, log)
        for rank, log in enumerate(logs)
    ]


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 300, **env: str) -> list[Any]:
    """A failure in any rank fails the call with that rank's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        place = (function.__code__.co_filename, function.__name__)
        logs = [Path(folder, f"{rank}.log") for rank in range(size)]
        ranks = start_ranks(_keep_result, size, (place, args, folder), logs, **env)
        failed = []
        for rank, process in enumerate(ranks):
            try:
                status: Any = process.wait(timeout=5 if failed else timeout)
            except TimeoutError:
                process.kill()
                status = "killed after the time-out"
            if status != 0:
                failed.append(f"--- rank {rank}: {status}\n{logs[rank].read_text(errors='replace')[-6000:]}")
        assert not failed, "\n".join(failed)
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(size)]


def _keep_result(place: tuple[str, str], args: tuple[Any, ...], folder: str) -> None:
    result = _function(*place)(*args)
    Path(folder, f"{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(result))
