"""The planner against published tables; `benchmarks/planner.py` prints them row by row and refits."""

import importlib.util
import math
import os
import statistics
from pathlib import Path

import pytest

from pretrain.plan.memory import GIB, memory

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def planner():
    spec = importlib.util.spec_from_file_location("planner", ROOT / "benchmarks" / "planner.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["planner"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["planner"]


def test_torchtitan_rows_are_predicted_within_8_percent_in_speed_and_15_in_memory(planner):
    for row in planner.torchtitan_rows():
        assert abs(planner.log_ratio(row)) < math.log(1.08), row.name
        if row.gib:
            assert memory(row.job).peak / GIB == pytest.approx(row.gib, rel=0.15), row.name


def test_megatron_rows_are_predicted_within_15_percent(planner):
    for row in planner.megatron_rows():
        assert abs(planner.log_ratio(row)) < math.log(1.15), row.name


def test_nanotron_rows_are_predicted_within_6_percent_at_the_median(planner):
    shared = Path(os.environ.get("PRETRAIN_SHARED", ROOT.parent / "shared"))
    table = shared / "reference" / "ultrascale_runs_given.csv"
    if not table.exists():
        pytest.skip(f"{table} is not there")
    rows = planner.ultrascale_rows(table)
    inside = [abs(planner.log_ratio(row)) for row in rows if row.group == "nanotron, TP within a node"]
    unseen = [abs(planner.log_ratio(row)) for row in rows if row.group == "nanotron, pipeline in one node"]
    assert len(inside) > 100
    assert statistics.median(inside) < 0.06
    assert statistics.quantiles(inside, n=10)[-1] < 0.15
    assert statistics.median(unseen) < 0.06  # never fitted


def test_the_search_order_of_nanotron_layouts_is_the_published_one(planner):
    """What a search needs is the order: of the runs that had memory to spare (below 68 of 74.5 GiB; fuller ones
    fell to a third in the allocator's retries), the one planned fastest is near the best published."""
    shared = Path(os.environ.get("PRETRAIN_SHARED", ROOT.parent / "shared"))
    table = shared / "reference" / "ultrascale_runs_given.csv"
    if not table.exists():
        pytest.skip(f"{table} is not there")
    rows = planner.ultrascale_rows(table)
    for model in ("1.34B", "8.86B"):
        for gpus in (8, 16, 32):
            same = [row for row in rows if row.name.startswith(model) and row.job.gpus == gpus and row.gib < 68]
            chosen = max(same, key=lambda row: planner.tokens_per_second_per_gpu(row.job))
            best = max(row.tokens_per_second for row in same)
            assert chosen.tokens_per_second > 0.85 * best, (model, gpus, chosen.name)
