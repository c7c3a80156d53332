"""Seconds of a denoising step: what a plan with this machine's rates foretells, and what a streamed run takes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..session import SilentObserver
from .foresight_cases import ROOMY_BYTES, SETTINGS, Case, Foretold, Poll, Size
from .process import OtherLoad

if TYPE_CHECKING:
    from ..plan import Rates

STEPS = 6
MID_SIZE = "flux, 300 MB"
# What a run taught may give a better figure: called after the run with what was foretold and the budget.
SecondPrediction = Callable[[Foretold, int], float]


@dataclass(frozen=True)
class StepRow:
    """Steps of one streamed run. predicted_s: of a step, before anything ran. second_s: foretold after this run, if
    corrections are learnt from runs. measured_s: the median of all steps but the first. others_cpus: CPUs that other
    processes kept busy meanwhile. status: "ok" or "failed"."""

    family: str
    size: str
    budget_bytes: int = 0
    weight_bytes: int = 0
    streamed_bytes: int = 0
    predicted_s: float | None = None
    second_s: float | None = None
    measured_s: float | None = None
    steps_s: tuple[float, ...] = ()
    others_cpus: float | None = None
    status: str = "ok"
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured to predicted."""
        return _ratio(self.measured_s, self.predicted_s)

    @property
    def second_ratio(self) -> float | None:
        """Measured to what was foretold after the run."""
        return _ratio(self.measured_s, self.second_s)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "second_ratio": self.second_ratio}


def step_row(
    case: Case, name: str, foretold: Foretold, rates: Rates, poll: Poll, again: SecondPrediction | None = None
) -> StepRow:
    """A row called `name`. Denoises in a budget of the activations and half of the weights of a denoiser, or the
    smallest that works. Raises what the phases raise."""
    from ..phases import denoise, encode, load
    from ..session import Session

    roomy = foretold.plan(ROOMY_BYTES, rates).phases[1]
    half = max(component.weight_bytes for component in roomy.components) // 2  # of one expert, where there are two
    budget = max(roomy.activation_peak_bytes + half, roomy.smallest_budget_bytes)
    plan = foretold.plan(budget, rates)
    planned, clock = plan.phases[1], _Clock(poll)
    handle = load(case.folder, device="cpu", dtype="float32", settings=replace(SETTINGS, device_memory=ROOMY_BYTES))
    embeds = encode(handle, **case.call)
    handle = replace(handle, settings=replace(SETTINGS, device_memory=budget))
    others = OtherLoad()
    denoise(handle, embeds, session=Session(clock), plan=plan)
    steps = clock.steps_s()
    return StepRow(
        name,
        str(case.size),
        budget,
        planned.weight_bytes,
        planned.streamed_bytes,
        planned.step_s,
        again(foretold, budget) if again is not None else None,
        statistics.median(steps),
        tuple(steps),
        others.cpus(),
    )


class _Clock(SilentObserver):
    """An observer that notes when each step was done."""

    def __init__(self, poll: Poll) -> None:
        self.check_interrupt = poll  # type: ignore[method-assign]
        self._ends: dict[int, float] = {}

    def progress(self, event: Any) -> None:
        if event.stage == "step":
            self._ends.setdefault(event.done, time.perf_counter())

    def steps_s(self) -> list[float]:
        """Seconds of every step after the first one, which also loads what stays."""
        ends = [self._ends[done] for done in sorted(self._ends) if done > 0]
        return [end - start for start, end in itertools.pairwise(ends)]


def timed_case(case: Case) -> Case:
    """The case with enough steps for a median."""
    return replace(case, more=(*case.more, ("num_inference_steps", STEPS)))


def mid_size_case(home: Path) -> Case:
    """FLUX.1 with a transformer of 77 million weights in float32: its steps compute instead of going through
    operators."""
    import torch
    from diffusers import FluxTransformer2DModel

    from ..tiny_models import FAMILIES

    folder = home / "flux-300mb"
    if not folder.is_dir():
        pipeline = FAMILIES["flux"].build()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = dict(pipeline.transformer.config)
            sizes = {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 12, "attention_head_dim": 64}
            config |= sizes | {"axes_dims_rope": (8, 28, 28)}
            pipeline.register_modules(transformer=FluxTransformer2DModel.from_config(config))
        pipeline.save_pretrained(folder)
    return Case("flux", Size(192, 256), folder)


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None
