"""A stand-in for the engine's phases, for tests of the nodes and the graph runner: same shapes, no model, no weights.

`install(monkeypatch)` puts it in the place of `offload_core`'s functions and returns the list its calls are noted in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import offload_core
from offload_core.errors import InputError, TraceError
from offload_core.report import PhaseReport
from offload_core.session import Progress, Session
from offload_core.settings import OffloadSettings

POLLS_PER_PHASE = 3


@dataclass(frozen=True)
class Handle:
    model: str
    device: str
    dtype: str
    guidance_name: str | None = "guidance_scale"
    images_name: str | None = "num_images_per_prompt"
    settings: OffloadSettings = field(default_factory=OffloadSettings)
    files: Any = None
    only_sound: bool = False
    seconds_name: str | None = None


@dataclass(frozen=True)
class Embeds:
    prompt: str
    negative_prompt: str | None


@dataclass(frozen=True)
class Latents:
    exact: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)
    frame_rate: float | None = None
    sound: Any = None
    only_sound: bool = False

    @property
    def samples(self) -> torch.Tensor:
        return self.exact * 2

    def is_stale(self, samples: torch.Tensor) -> bool:
        return not torch.equal(samples, self.samples)

    def with_samples(self, samples: torch.Tensor) -> Latents:
        return Latents(samples / 2, self.options)


@dataclass(frozen=True)
class Purged:
    def sentence(self) -> str:
        return "Freed 1 MiB."


@dataclass
class Engine:
    """calls: names and arguments in order. fails: phase -> what it raises. Every phase polls three times."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    fails: dict[str, BaseException] = field(default_factory=dict)

    @property
    def phases(self) -> list[str]:
        return [name for name, _ in self.calls]

    def load(
        self,
        model: Any,
        *,
        device: str = "auto",
        dtype: str = "auto",
        settings: OffloadSettings | None = None,
        weight_storage: str = "as stored",
    ) -> Handle:
        settings = settings or OffloadSettings()
        self._note("load", model=str(model), device=device, dtype=dtype, settings=settings)
        return Handle(Path(str(model)).name, device, dtype, settings=settings)

    def foresee(self, *_: Any, **__: Any) -> None:
        raise TraceError("there is no model")

    def encode(
        self, handle: Handle, prompt: str, negative_prompt: str | None = None, *, session: Session, plan: Any = None
    ) -> Embeds:
        self._phase("encode", session, prompt=prompt, negative_prompt=negative_prompt)
        return Embeds(prompt, negative_prompt)

    def encode_many(
        self, handle: Handle, jobs: list[dict[str, Any]], *, session: Session, plan: Any = None
    ) -> list[Embeds]:
        self._phase("encode_many", session, jobs=jobs)
        return [Embeds(job["prompt"], job["negative_prompt"]) for job in jobs]

    def denoise(
        self, handle: Handle, embeds: Embeds, *, seed: int, session: Session, plan: Any = None, **options: Any
    ) -> Latents:
        self._phase("denoise", session, seed=seed, **options)
        noise = torch.rand(options.get("num_images_per_prompt", 1), 4, 4, 6, generator=_generator(seed))
        return Latents(noise, options)

    def decode(
        self, handle: Handle, latents: Latents, output_type: str, *, tiling: str, session: Session, plan: Any = None
    ) -> Any:
        self._phase("decode", session, tiling=tiling, latents=latents, output_type=output_type)
        if not isinstance(latents, Latents):
            raise InputError("not latents")
        return latents.exact[:, :3].repeat_interleave(8, -1).repeat_interleave(8, -2).movedim(1, -1).numpy()

    def latents_from_samples(self, handle: Handle, samples: torch.Tensor) -> Latents:
        self._note("latents_from_samples")
        return Latents(samples / 2)

    def purge(self, device: str = "auto", session: Any = None) -> Purged:
        self._note("purge", device=device)
        return Purged()

    def _note(self, name: str, **arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name in self.fails:
            raise self.fails[name]

    def _phase(self, name: str, session: Session, **arguments: Any) -> None:
        weights = torch.zeros(1000)  # a local that must not outlive an error
        session.enter(name)
        try:
            for done in range(1, POLLS_PER_PHASE + 1):
                session.observer.check_interrupt()
                session.observer.progress(Progress(name, "step", done, POLLS_PER_PHASE, "steps"))
            self._note(name, **arguments)
        finally:
            session.leave()
        session.report.phases.append(PhaseReport(name, 1.0, 0.5, weights.nbytes, 0, 0, 0, 0))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def install(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Puts a new fake engine in the place of the real one for the rest of the test."""
    engine = Engine()
    for name in ("load", "encode", "encode_many", "denoise", "decode", "latents_from_samples", "purge"):
        monkeypatch.setitem(vars(offload_core), name, getattr(engine, name))  # without importing the real one
    for name in ("foresee_job", "foresee_encode", "foresee_denoise", "foresee_decode"):
        monkeypatch.setitem(vars(offload_core), name, engine.foresee)
    return engine


def model_folder(root: Path, name: str) -> Path:
    """A folder that the model list takes for a model. There is nothing in it."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    return folder
