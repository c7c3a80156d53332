"""What one weight access costs, and a step of a tiny model in each way, timed in turns in one process."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .job import Job
from .model import ModelSpec, make_model, step_inputs, weight_bytes
from .ways import WAYS, Ready, load

ACCESSES = 5000
ROUNDS = 9
STEPS_A_ROUND = 3
TOKENS = (64, 32)
#: About 2.6 hundred tensors, none of them over 1 MiB.
TINY = ModelSpec(
    "flux",
    {
        "num_layers": 4,
        "num_single_layers": 8,
        "num_attention_heads": 2,
        "attention_head_dim": 128,
        "joint_attention_dim": 256,
        "pooled_projection_dim": 256,
        "in_channels": 64,
        "guidance_embeds": True,
    },
)


def measure_micro(job: Job) -> dict[str, Any]:
    """Microseconds of one access by kind, and seconds and ratios of a tiny model's step by way. `folder`: a place
    where the tiny model may be kept. What can't run has its reason in `reasons`."""
    folder = make_model(TINY, Path(job.folder))
    job = dataclasses.replace(job, family="flux", folder=str(folder))
    reasons: dict[str, str] = {}
    access = {"plain": _plain_us(), "pass_through": _pass_through_us()}
    try:
        access |= _our_access_us(job)
    except Exception as error:
        reasons["access"] = f"{type(error).__name__}: {error}"
    seconds = _tiny_steps(job, reasons)
    resident = seconds.get("resident")
    ratios = {way: value / resident for way, value in seconds.items() if resident}
    return {"access_us": access, "tiny_step_s": seconds, "tiny_ratio": ratios, "reasons": reasons}


# --------------------------------------------------------------------------------------------- one access


def _access_us(weight: Any) -> float:
    """Microseconds of the cheapest operator on `weight`, the best of a few runs."""
    import torch

    best = float("inf")
    with torch.no_grad():
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(ACCESSES // 5):
                torch.ops.aten.t(weight)
            best = min(best, (time.perf_counter() - started) / (ACCESSES // 5))
    return best * 1e6


def _plain_us() -> float:
    import torch

    return _access_us(torch.nn.Parameter(torch.zeros(64, 64), requires_grad=False))


def _pass_through_us() -> float:
    """The least a wrapper subclass can do: put the tensor in its place and call the operator."""
    import torch

    class PassThrough(torch.Tensor):
        tensor: Any

        @staticmethod
        def __new__(cls: Any, tensor: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)
            made.tensor = tensor
            return made

        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            args = tuple(arg.tensor if type(arg) is PassThrough else arg for arg in args)
            return func(*args, **(kwargs or {}))

    return _access_us(PassThrough(torch.zeros(64, 64)))


def _our_access_us(job: Job) -> dict[str, float]:
    """A resident weight, and a streamed one that is hot in the ring, of the tiny model with half its weights out."""
    import torch

    ready = _ours(job, weight_bytes(Path(job.folder)) // 2, resident_below=0)
    try:
        inputs = step_inputs("flux", ready.module.config, "cpu", *TOKENS)
        with torch.no_grad():
            for _ in range(2):
                ready.module(**inputs)
        kinds: dict[str, list[float]] = {"ours_resident_hit": [], "ours_ring_hit": []}
        for name, weight in ready.module.named_parameters():
            kind = kinds["ours_resident_hit" if name in ready.keep.plan.resident else "ours_ring_hit"]
            if weight.dim() == 2 and len(kind) < 8:
                torch.ops.aten.t(weight)  # brings it in
                kind.append(_access_us(weight))
    finally:
        if ready.release is not None:
            ready.release()
    return {kind: statistics.median(values) for kind, values in kinds.items() if values}


# ------------------------------------------------------------------------------------------- a tiny step


def _ours(job: Job, budget: int, **settings: Any) -> Ready:
    from ..settings import OffloadSettings
    from ..streaming import enable_offload

    module = load(job)
    chosen = OffloadSettings(execution_device="cpu", device_memory=budget, host_memory="auto", **settings)
    result = enable_offload(module, settings=chosen, component="transformer")
    return Ready(result.module, result, release=result.release)


def _tiny_steps(job: Job, reasons: dict[str, str]) -> dict[str, float]:
    """Median seconds of a step by way. The ways take turns, so that a busy moment meets all of them."""
    import torch

    size = weight_bytes(Path(job.folder))
    ways: dict[str, Callable[[], Ready]] = {
        "resident": lambda: WAYS["resident"].prepare(job)(load(job)),
        "group_leaf": lambda: WAYS["group_leaf"].prepare(job)(load(job)),
        "accelerate_cpu": lambda: WAYS["accelerate_cpu"].prepare(job)(load(job)),
        "ours_rule_off_half_streamed": lambda: _ours(job, size // 2, resident_below=0),
        "ours_rule_on": lambda: _ours(job, 2 * size),
    }
    ready: dict[str, Ready] = {}
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        job = dataclasses.replace(job, scratch=scratch)
        for way, set_up in ways.items():
            try:
                ready[way] = set_up()
            except Exception as error:
                reasons[way] = f"{type(error).__name__}: {error}"
        inputs = step_inputs("flux", ready["resident"].module.config, "cpu", *TOKENS)
        seconds: dict[str, list[float]] = {way: [] for way in ready}
        for turn in range(ROUNDS + 1):
            for way, one in ready.items():
                started = time.perf_counter()
                for _ in range(STEPS_A_ROUND):
                    one.module(**inputs)
                if turn:  # the first turn learns and warms up
                    seconds[way].append((time.perf_counter() - started) / STEPS_A_ROUND)
    for one in ready.values():
        if one.release is not None:
            one.release()
    return {way: statistics.median(values) for way, values in seconds.items()}
