"""Seconds of a denoising step: what a plan with this machine's rates foretells, and what a streamed run takes."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..session import SilentObserver
from .foresight_cases import ROOMY_BYTES, SETTINGS, Case, Foretold, Poll, Size
from .process import OtherLoad

if TYPE_CHECKING:
    from ..plan import Correction, PhasePlan, Rates
    from ..report import PhaseReport

STEPS = 6
MID_SIZE = "flux, 300 MB"


@dataclass(frozen=True)
class StepRow:
    """Steps of one streamed run. predicted_s: of a step, by the rates alone. second_s: with what a run of another size
    taught. measured_s: the median of all steps but the first. others_cpus: CPUs that other
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
        """Measured to what was foretold with what another run taught."""
        return _ratio(self.measured_s, self.second_s)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "second_ratio": self.second_ratio}


def step_row(
    case: Case, name: str, foretold: Foretold, rates: Rates, poll: Poll, taught: Correction | None = None
) -> StepRow:
    """A row called `name`. Denoises in a budget of the activations and half of the weights of a denoiser, or the
    smallest that works. taught: what a run of another size said. Raises what the phases raise."""
    budget = _budget(foretold, rates)
    clock = _Clock(poll)
    others = OtherLoad()
    planned, _ = _denoised(case, foretold, budget, rates, clock)
    steps = clock.steps_s()
    return StepRow(
        name,
        str(case.size),
        budget,
        planned.weight_bytes,
        planned.streamed_bytes,
        planned.step_s,
        foretold.plan(budget, rates, taught).phases[1].step_s if taught is not None else None,
        statistics.median(steps),
        tuple(steps),
        others.cpus(),
    )


def lesson_of(case: Case, foretold: Foretold, rates: Rates, poll: Poll) -> Correction | None:
    """What a run of the case teaches."""
    from ..learnt import lesson
    from ..plan import Correction

    planned, report = _denoised(case, foretold, _budget(foretold, rates), rates, _Clock(poll))
    return lesson(planned, Correction(), report)


def _budget(foretold: Foretold, rates: Rates) -> int:
    roomy = foretold.plan(ROOMY_BYTES, rates).phases[1]
    half = max(component.weight_bytes for component in roomy.components) // 2  # of one expert, where there are two
    return max(roomy.activation_peak_bytes + half, roomy.smallest_budget_bytes)


def _denoised(
    case: Case, foretold: Foretold, budget: int, rates: Rates, clock: _Clock
) -> tuple[PhasePlan, PhaseReport]:
    from ..phases import denoise, encode, load
    from ..session import Session

    plan, session = foretold.plan(budget, rates), Session(clock)
    handle = load(case.folder, device="cpu", dtype="float32", settings=replace(SETTINGS, device_memory=ROOMY_BYTES))
    embeds = encode(handle, **case.call)
    handle = replace(handle, settings=replace(SETTINGS, device_memory=budget))
    denoise(handle, embeds, session=session, plan=plan)
    return plan.phases[1], session.report.phases[-1]


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


def mid_size_cases(home: Path) -> tuple[Case, Case]:
    """Two sizes of FLUX.1 with a transformer of 77 million weights in float32, whose steps are mostly products."""
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
    return Case("flux", Size(192, 192), folder), Case("flux", Size(192, 256), folder)


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None
