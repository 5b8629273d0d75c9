import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import tiny_run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make_data(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture
def launcher() -> Iterator[tiny_run.Launcher]:
    """Starts `pretrain-launch` processes, and ends those that a failing test leaves behind."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str | Path) -> subprocess.Popen[str]:
        started.append(tiny_run.launch(*args))
        return started[-1]

    yield start
    for process in started:
        tiny_run.end(process)
