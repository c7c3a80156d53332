"""The replay is the reference for the engine: what it says is read in each pass is what the engine reads."""

from __future__ import annotations

import copy

import pytest
import torch

from offload_core.phases._cold import make_cold
from offload_core.simulate import Hardware, Load, simulate
from offload_core.streaming import part_sizes
from offload_core.trace import Tracer
from streaming_models import BY_NAME, offload

PASSES = 4


@pytest.mark.parametrize("name", ["flux", "wan", "t5"])
@pytest.mark.parametrize("budget", [0.4, 0.7])
def test_every_pass_of_the_engine_streams_what_the_replay_of_its_plan_says(name: str, budget: float) -> None:
    """Weights that are used once a pass: others may still lie in the engine's ring when they are used again."""
    made = BY_NAME[name]
    cold = copy.deepcopy(made.build()).eval()
    make_cold(cold, "transformer", torch.device("cpu"), None, buffers=False)
    tracer = Tracer()
    with tracer, torch.no_grad():
        trace = tracer.trace("transformer", lambda: made.calls[0](cold), (), {})
    tracer.forget()

    result = offload(made.build().requires_grad_(False), budget, by_readers=False)
    try:
        plan, scope = result.plan, result._managed.scope
        names = [weight.name.removeprefix("transformer.") for weight in trace.weights]
        sizes = {size.name: size.nbytes for part in part_sizes(cold) for size in part.sizes if not size.lookup_only}
        loads = [Load(tuple(names[place] for place in each.weights), 1.0) for each in trace.stretches]
        often = [use for load in loads for use in load.weights]
        assert all(often.count(use) == 1 for use in often)
        timeline = simulate(
            loads, sizes, resident=plan.resident, ring_bytes=plan.ring_bytes, hardware=Hardware(1e6), passes=PASSES
        )
        streamed = []
        with torch.no_grad():
            for _ in range(PASSES):
                before = scope.cache.counts.streamed_bytes
                made.calls[0](result.module)
                scope.engine.drain()
                streamed.append(scope.cache.counts.streamed_bytes - before)
        print(
            streamed,
            plan.streamed_bytes,
            plan.ring_bytes,
            timeline.read_bytes,
            sum(sizes[n] for n in often if n in sizes and n not in plan.resident),
            len(often),
            len(sizes),
            [n for n in sizes if n not in often][:5],
            sum(sizes.values()),
            plan.resident_bytes + plan.streamed_bytes,
        )
        kept = sum(sizes[each] for each in plan.resident if each in often)
        assert streamed == [(timeline.read_bytes - kept) // PASSES] * PASSES == [plan.streamed_bytes] * PASSES
        assert timeline.peak_bytes <= scope.ledger.peak("device") <= timeline.peak_bytes + plan.ring_bytes
    finally:
        result.release()
