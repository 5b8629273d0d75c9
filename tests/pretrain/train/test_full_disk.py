"""A run on a file system that is too small, real where this machine lets a test mount one of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from small import make_dataset, small_config

from pretrain.config_file import dump_config

ROOT = Path(__file__).resolve().parents[3]
# The mount is seen by these processes only and goes with them.
SCRIPT = """
mount -t tmpfs -o size="$1" none "$2" || exit 77
"$3" -m pretrain train "$4"; echo "status of the first start: $?"
"$3" -m pretrain checkpoint verify "$2"; echo "status of verify: $?"
ls "$2/checkpoints"
"""


def train_on(size: str, folder: Path) -> str:
    data, run = make_dataset(folder / "data"), folder / "run"
    run.mkdir()
    cfg = small_config(
        run,
        data,
        model__d_model=128,
        model__d_ff=512,
        train__steps=6,
        checkpoint__every=2,
        checkpoint__keep=1,
        checkpoint__async=False,
    )
    (folder / "c.toml").write_text(dump_config(cfg))
    arguments = [size, str(run), sys.executable, str(folder / "c.toml")]
    command = ["unshare", "--map-root-user", "--mount", "bash", "-c", SCRIPT, "bash", *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
        )
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode == 77 or "unshare failed" in done.stdout:
        pytest.skip(f"no mount of its own here: {done.stdout.strip()[-200:]}")
    return done.stdout


@pytest.mark.slow
def test_a_second_save_without_room_leaves_the_first_whole_and_names_path_and_bytes(tmp_path: Path) -> None:
    """G30: one checkpoint of 6 MB fits into 12 MB, a second beside it does not."""
    output = train_on("12m", tmp_path)
    assert "status of the first start: 1" in output, output
    message = re.search(r"(\S+/run/checkpoints): a checkpoint needs ([\d,]+) bytes and ([\d,]+) are free", output)
    assert message is not None, output
    needed, free = (int(number.replace(",", "")) for number in message.groups()[1:])
    assert 4_000_000 < free < needed < 12_000_000, output
    assert "status of verify: 0" in output, output
    assert output.splitlines()[-1] == "step-00000002", output


@pytest.mark.slow
def test_a_run_whose_first_checkpoint_cannot_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    """G30."""
    output = train_on("3m", tmp_path)
    assert "status of the first start: 2" in output, output
    assert re.search(r"/run/checkpoints: a checkpoint needs [\d,]+ bytes and [\d,]+ are free", output), output
    assert "step 1/" not in output
