"""Several jobs in one open phase, each as if it were the only one: the weights are loaded once."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from ..errors import InputError
from ._cold import make_cold

if TYPE_CHECKING:
    from ._scope import Phase

T = TypeVar("T")


def each_job(phase: Phase, jobs: Sequence[T]) -> Iterator[T]:
    """One job after another for a phase whose pipeline was just built and has not run.

    A call of a pipeline leaves traces in it: timesteps in its scheduler, a VAE that was cast before it was asked to
    decode (SDXL in float16), a random state that moved. Before each job but the first they are as they were.
    """
    phase.jobs = len(jobs)
    scheduler = copy.deepcopy(getattr(phase.pipeline, "scheduler", None)) if len(jobs) > 1 else None
    random, dtypes = torch.get_rng_state(), _dtypes(phase)
    for number, job in enumerate(jobs):
        phase.job = number
        if number:
            torch.set_rng_state(random)
            if scheduler is not None:
                phase.pipeline.scheduler = copy.deepcopy(scheduler)
            _recast_stand_ins(phase, dtypes)
        phase.poll(0)  # where all answers are known, nothing else asks whether to stop
        yield job
    phase.notes = list(dict.fromkeys(phase.notes))  # several may have said the same


def need_jobs(jobs: Sequence[T]) -> Sequence[T]:
    """`jobs`, or an InputError if there is none."""
    if not jobs:
        raise InputError("There is nothing to do: the list of jobs is empty.")
    return jobs


def _dtypes(phase: Phase) -> dict[str, torch.dtype | None]:
    """Of the first parameter of each component."""
    first = {name: next(component.module.parameters(), None) for name, component in phase.components.items()}
    return {name: None if parameter is None else parameter.dtype for name, parameter in first.items()}


def _recast_stand_ins(phase: Phase, dtypes: dict[str, torch.dtype | None]) -> None:
    """Gives components that aren't loaded the dtypes back that they had before a pipeline cast them."""
    for name, now in _dtypes(phase).items():
        component = phase.components[name]
        if not component.loaded and now != dtypes[name]:
            make_cold(component.module, name, phase.device, component.dtype, buffers=False)
