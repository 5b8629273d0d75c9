from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import tiny_run
from tests.slurm import lab as slurm_lab


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make_data(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_lab.Lab]:
    reason = slurm_lab.missing()
    if reason:
        pytest.skip(reason)
    lab = slurm_lab.Lab(tmp_path_factory.mktemp("lab"))
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
