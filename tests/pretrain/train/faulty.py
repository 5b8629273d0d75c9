"""`python faulty.py FAULT ARGUMENTS`: `pretrain ARGUMENTS`, made to go wrong on rank 1. Not a test itself.

FAULT: none; forward, loader, save (raise at step 5); hang (never come back from step 5); slow (0.05 s more a step);
slow-save (0.3 s more a file).
"""

import os
import sys
import time
from typing import Any

from pretrain import cli


def main(fault: str, *arguments: str) -> int:
    if fault != "none":
        break_something(fault)
    return cli.main(arguments)


def break_something(fault: str) -> None:
    from pretrain.train import checkpoint, trainer

    rank_1 = os.environ.get("RANK") == "1"
    steps = {"done": 0}
    plain_beat = trainer.Watchdog.beat

    def beat(self: Any, step: int) -> None:
        steps["done"] = step
        if fault == "slow":
            time.sleep(0.05)
        plain_beat(self, step)

    trainer.Watchdog.beat = beat  # type: ignore[method-assign]

    def breaking(plain: Any, at: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if rank_1 and steps["done"] >= at:
                if fault == "hang":
                    time.sleep(3600)
                raise RuntimeError(f"planted fault in {fault} on rank 1")
            return plain(*args, **kwargs)

        return call

    if fault == "prepare":
        from pretrain.train import run

        def fail(self: Any) -> None:
            raise OSError("planted fault in prepare on rank 0")

        run.Setup._copy_tokenizer = fail  # type: ignore[method-assign]
    elif fault == "forward":
        from pretrain.parallel.fsdp import FsdpEngine

        FsdpEngine.forward = breaking(FsdpEngine.forward, 4)  # type: ignore[method-assign]
    elif fault in ("loader", "hang"):
        trainer.Loader.step = breaking(trainer.Loader.step, 4)  # type: ignore[method-assign]
    elif fault == "slow-save":
        plain_write = checkpoint.folder.write_file

        def write(*args: Any) -> Any:
            time.sleep(0.3)
            return plain_write(*args)

        checkpoint.folder.write_file = write
    elif fault == "save":
        checkpoint.folder.write_file = breaking(checkpoint.folder.write_file, 4)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
