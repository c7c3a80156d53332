"""The program of one fresh process: ``python -m offload_core.bench._worker TASK JOB``; one JSON line on stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from .job import Job


def main() -> None:
    task, job = sys.argv[1], Job.from_json(sys.argv[2])
    answer_to = os.fdopen(os.dup(1), "w")  # peers print; the answer goes where only we write
    os.dup2(2, 1)
    from .._console import quiet_libraries

    quiet_libraries(debug=False)
    with answer_to:
        json.dump(_answer(task, job), answer_to)


def _answer(task: str, job: Job) -> dict[str, Any]:
    from .ways import CannotRunError

    try:
        return {"status": "ok", **_run(task, job)}
    except CannotRunError as error:
        return {"status": "skipped", "reason": str(error)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line}"}


def _run(task: str, job: Job) -> dict[str, Any]:
    if task == "way":
        from .measure import measure_way

        return measure_way(job)
    if task == "floor":
        from .floor import measure_floor

        return measure_floor(job)
    if task == "micro":
        from .micro import measure_micro

        return measure_micro(job)
    if task == "link":
        from .accelerator import measure_link

        return measure_link(job)
    if task == "seed":
        from .seed_measure import measure_seed

        return measure_seed(job)
    if task == "swap":
        from .swap_cost import measure_swap

        return measure_swap(job)
    raise ValueError(task)


if __name__ == "__main__":
    main()
