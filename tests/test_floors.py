"""The house's floors: imports run down only, one door for each heavy dependency, no torch where a login node waits."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lower numbers may not import higher ones; rooms on one floor may not import each other.
FLOORS = {
    "pretrain.errors": 0,
    "pretrain.untrusted": 0,
    "pretrain.presets": 0,
    "pretrain.config_tables": 1,
    "pretrain.config_deepspeed": 1,
    "pretrain.config": 2,
    "pretrain.config_file": 3,
    "pretrain.dist": 3,
    "pretrain.model": 4,
    "pretrain.metrics": 4,
    "pretrain.data": 4,
    "pretrain.parallel": 5,
    "pretrain.train": 6,
    "pretrain.plan": 6,
    "pretrain.scaling": 6,
    "pretrain.doctor": 6,
    "pretrain.cli_model": 7,
    "pretrain.cli_doctor": 7,
    "pretrain.cli": 8,
    "pretrain.__main__": 9,
}
# Outside the floors: who may import these packages at all.
GUESTS = {
    "data_prep": {"pretrain.data", "pretrain.train", "pretrain.cli_model", "pretrain.cli"},
    "launch": set(),
}
LAUNCH_MAY_IMPORT = {"pretrain.config", "pretrain.config_file", "pretrain.errors", "pretrain.presets"}
DOORS = {
    "deepspeed": {"pretrain/parallel/zero.py"},
    "wandb": {"pretrain/metrics/sinks.py"},
    "datasets": {"data_prep/sources.py"},
    "tensorboard": {"pretrain/metrics/sinks.py"},
}
NO_TORCH = [
    "launch.cli",
    "pretrain.cli",
    "pretrain.config",
    "pretrain.config_file",
    "pretrain.metrics.flops",
    "pretrain.metrics.hardware",
    "pretrain.plan.cli",
    "pretrain.scaling.fit",
    "pretrain.train.checkpoint_folder",
    "data_prep.cli",
]


def sources() -> list[Path]:
    return sorted(p for package in ("pretrain", "data_prep", "launch") for p in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, indented imports too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str | None:
    """pretrain.model.llama.Llama -> pretrain.model."""
    parts = name.split(".")
    for length in (2, 1):
        if ".".join(parts[:length]) in FLOORS:
            return ".".join(parts[:length])
    return None


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_room_of_pretrain_has_a_floor() -> None:
    rooms = {module(p) for p in (ROOT / "pretrain").glob("*.py")} - {"pretrain.__init__"}
    rooms |= {f"pretrain.{p.name}" for p in (ROOT / "pretrain").iterdir() if (p / "__init__.py").exists()}
    assert rooms <= set(FLOORS), rooms - set(FLOORS)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_down_only(path: Path) -> None:
    here = module(path)
    mine = room(here)
    for name in imports(path):
        if name.startswith("pretrain") and mine is not None:
            other = room(name)
            if other is not None and other != mine:
                assert FLOORS[other] < FLOORS[mine], f"{here} imports {name}, which is not below it"
        if here.startswith("data_prep"):
            # One exception: `pretrain-data inspect --step` shows what the trainer's order makes of a config.
            inspects = here in ("data_prep.cli", "data_prep.inspect") and name.startswith("pretrain.")
            assert inspects or not name.startswith(("pretrain", "launch")), f"{here} imports {name}"
        if here.startswith("launch") and name.startswith("pretrain"):
            assert any(name == ok or name.startswith(ok + ".") for ok in LAUNCH_MAY_IMPORT), f"{here} imports {name}"
        top = name.split(".")[0]
        if top in GUESTS and not here.startswith(top):
            assert mine in GUESTS[top], f"{here} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_dependencies_have_one_door(path: Path) -> None:
    for name in imports(path):
        doors = DOORS.get(name.split(".")[0])
        assert doors is None or str(path.relative_to(ROOT)) in doors, f"{path} imports {name}"


def test_training_prepares_no_data() -> None:
    """G37: so no rank ever waits in a collective for one that tokenizes, packs or trains a tokenizer."""
    allowed = {"shard", "rows", "errors", "tokenizer", "tokenizer_json"}
    for path in (ROOT / "pretrain").rglob("*.py"):
        used = {name.split(".")[1] for name in imports(path) if name.startswith("data_prep.")}
        assert used <= allowed, f"{path} imports data_prep.{'.'.join(used - allowed)}"


def test_a_login_node_answers_without_loading_torch() -> None:
    code = f"import sys\nfor m in {NO_TORCH!r}:\n    __import__(m)\n    assert 'torch' not in sys.modules, m"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
