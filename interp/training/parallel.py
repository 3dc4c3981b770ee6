"""Several training runs side by side, each in a process of its own.

Small models leave cores idle: two runs on one thread each finish sooner than one after the other
on two.
"""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from interp.config import RunConfig

SECONDS_BETWEEN_LINES = 15.0


def train_all(
    jobs: Mapping[Path, RunConfig],
    *,
    workers: int,
    command: str,
    say: Callable[[str], None],
) -> None:
    """Train every run into its folder, `workers` at a time, taking up those that were begun.

    `say` is told every so often how far the runs are.

    Raises: whatever a run raises; the others are then stopped before they begin.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_end_with_parent, initargs=(os.getpid(),)
    ) as pool:
        futures: dict[Future[None], Path] = {
            pool.submit(_train, config, folder, command): folder for folder, config in jobs.items()
        }
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, SECONDS_BETWEEN_LINES, FIRST_COMPLETED)
                for future in done:
                    future.result()
                    say(f"{futures[future].name}: done; {_latest(futures[future])}")
                if not done:
                    for folder in sorted(futures[future] for future in pending):
                        if latest := _latest(folder):
                            say(f"{folder.name}: {latest}")
        except BaseException:
            # They may each have minutes to go; --resume takes up what they wrote. The pool offers
            # no way to end a running job, and forgets its processes once it is shut down.
            running = list(pool._processes.values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.kill()
            raise


def _train(config: RunConfig, folder: Path, command: str) -> None:
    from interp.training.loop import train

    train(config, folder, resume=True, command=command)


def _end_with_parent(parent: int) -> None:
    # A killed parent would leave its workers writing into folders that a resumed run takes up.
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _latest(folder: Path) -> str | None:
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue  # a line that is being written
        return f"step {found['step']}  loss {found['loss']:.3f}  icl {found['icl_score']:+.3f}"
    return None
