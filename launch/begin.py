"""The first thing that a start of a job does: make sure that the run has no other job now, and enter itself.

Prints the stamp of the outcome that an earlier start has left, for `verdict` to tell from this start's own. Standard
library only, as the batch script may run outside the container.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch import ledger, run_folder, slurm_commands


def main(argv: Sequence[str]) -> int:
    run, job, folder = Path(argv[0]), argv[1], argv[2]
    before = os.environ.get("PRETRAIN_AFTER")  # the job that this one replaces, which may be saying its last words
    others = [other for other in ledger.jobs(run) if other not in (job, before)]
    if running := slurm_commands.running(others):
        print(f"error: run {run} has job {running[0]} running already; this one, {job}, leaves it alone",
              file=sys.stderr, flush=True)  # fmt: skip
        return 2
    if before is None and job not in ledger.jobs(run):  # started by hand, with sbatch
        ledger.add(run, "submit", job=job, folder=folder, after=None, exclude=[])
    print(run_folder.stamp_text(run))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
