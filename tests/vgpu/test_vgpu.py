"""The pretend accelerator does what the other tests take for granted."""

from __future__ import annotations

import contextlib
import re

import pytest

from vgpu.runner import run_on_vgpu


def a_linear_layer_on_both() -> dict[str, object]:
    import torch

    import vgpu

    ext = vgpu.install()
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 32), torch.randn(8, 64)
    before = ext.current()
    with torch.no_grad():
        expected = layer(x)
        result = layer.to("vgpu")(x.to("vgpu"))
    equal = torch.equal(result.cpu(), expected)
    device, accelerator = str(result.device), str(torch.accelerator.current_accelerator())
    del layer, result
    return {"equal": equal, "device": device, "accelerator": accelerator, "left": ext.current() - before}


def test_results_equal_the_cpu_and_memory_comes_back():
    answer = run_on_vgpu(a_linear_layer_on_both)
    assert answer == {"equal": True, "device": "vgpu:0", "accelerator": "vgpu", "left": 0}


def allocate_under_a_cap(cap: int, count: int) -> str:
    import torch

    import vgpu

    vgpu.install().set_cap(cap)
    try:
        torch.empty(count, dtype=torch.uint8, device="vgpu")
    except torch.OutOfMemoryError as error:
        return type(error).__name__
    return "fits"


def test_the_cap_is_exact():
    assert run_on_vgpu(allocate_under_a_cap, 4096, 4096) == "fits"
    assert run_on_vgpu(allocate_under_a_cap, 4095, 4096) == "OutOfMemoryError"


def add_across_devices() -> str:
    import torch

    try:
        torch.ones(2, device="vgpu") + torch.ones(2)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_operands_on_two_devices_are_refused_as_cuda_refuses_them():
    assert "Expected all tensors to be on the same device" in run_on_vgpu(add_across_devices)


def read_a_late_copy_without_waiting() -> list[bool]:
    import torch

    import vgpu

    vgpu.install().set_lazy(True)
    source, target = torch.ones(16).pin_memory(), torch.zeros(16, device="vgpu")
    stream = torch.Stream(device="vgpu")
    with stream:
        target.copy_(source, non_blocking=True)
    early = bool(target.cpu().isnan().all())
    torch.accelerator.current_stream().wait_stream(stream)
    return [early, torch.equal(target.cpu(), source)]


def test_a_missing_wait_shows():
    assert run_on_vgpu(read_a_late_copy_without_waiting) == [True, True]


def in_turn(function: str, *calls: list[object]) -> list[object]:
    """Several calls in one process, each with no race on record."""
    import vgpu

    results = []
    for call in calls:
        vgpu.set_race_check(False)
        results.append(globals()[function](*call))
    return results


def double_buffer(check: bool, copy_waits: bool, compute_waits: bool) -> dict[str, object]:
    """Eight weights pass through two slots: the copy stream fills one while the other one is read."""
    import torch

    import vgpu

    ext = vgpu.install()
    ext.set_lazy(True)
    vgpu.set_race_check(check)
    torch.manual_seed(0)
    weights = [torch.randn(16, 16).pin_memory() for _ in range(8)]
    start = torch.randn(4, 16)
    expected = start
    for weight in weights:
        expected = torch.nn.functional.linear(expected, weight)

    x, slots = start.to("vgpu"), [torch.empty(16, 16, device="vgpu") for _ in range(2)]
    compute, copies = torch.accelerator.current_stream(), torch.Stream(device="vgpu")
    copies.wait_stream(compute)
    read: list[torch.Event | None] = [None, None]

    def fetch(index: int) -> torch.Event:
        slot = index % 2
        if copy_waits and read[slot] is not None:
            copies.wait_event(read[slot])
        with copies:
            slots[slot].copy_(weights[index], non_blocking=True)
        return copies.record_event()

    ready = [fetch(0), fetch(1)]
    try:
        for index in range(8):
            if compute_waits:
                compute.wait_event(ready[index % 2])
            x = torch.nn.functional.linear(x, slots[index % 2])
            read[index % 2] = compute.record_event()
            if index + 2 < 8:
                ready[index % 2] = fetch(index + 2)
    except RuntimeError as error:
        return {"error": str(error), "same as listed": vgpu.races() == [str(error)]}
    result = x.cpu()
    return {"equal": torch.equal(result, expected), "nan": bool(result.isnan().any()), "races": vgpu.races()}


def test_a_correct_double_buffer_passes_and_one_without_a_wait_does_not():
    passes, late, too_early, too_soon = run_on_vgpu(
        in_turn,
        "double_buffer",
        [True, True, True],
        [False, True, False],
        [True, True, False],
        [True, False, True],
    )
    assert passes == {"equal": True, "nan": False, "races": []}
    assert late == {"equal": False, "nan": True, "races": []}
    for answer in (too_early, too_soon):
        assert answer["same as listed"]
    assert re.match(
        r"vgpu race: aten::(addmm|mm|linear) on stream 0 reads .* after: copy \(host to device\) on stream \d+ writes",
        too_early["error"],
    )
    assert re.match(
        r"vgpu race: copy \(host to device\) on stream \d+ writes .* after: aten::(addmm|mm|linear) on stream 0 reads",
        too_soon["error"],
    )


def reuse_freed_memory(order: str) -> str:
    import torch

    import vgpu

    vgpu.install()
    vgpu.set_race_check(True)
    default, side = torch.accelerator.current_stream(), torch.Stream(device="vgpu")
    old = torch.ones(1000, device="vgpu")
    address = old.data_ptr()
    side.wait_stream(default)
    with side:
        result = old * 2
    if order == "record_stream":
        old.record_stream(side)
    del old
    if order == "event":
        default.wait_event(side.record_event())
    elif order == "synchronize":
        side.synchronize()
    elif order == "another stream":
        other = torch.Stream(device="vgpu")
        with other:
            return "reused" if torch.ones(1000, device="vgpu").data_ptr() == address else "not reused"
    taken = torch.empty(1000, device="vgpu")
    assert taken.data_ptr() == address
    if order == "event after the allocation":
        default.wait_event(side.record_event())
    try:
        taken.fill_(3)
    except RuntimeError as error:
        return str(error)
    del result
    return "passes"


def test_freed_memory_is_reused_only_after_the_other_stream_is_through():
    orders = ["event", "event after the allocation", "synchronize", "record_stream", "another stream", "none"]
    *ordered, elsewhere, unordered = run_on_vgpu(in_turn, "reuse_freed_memory", *[[order] for order in orders])
    assert ordered == ["passes"] * 4
    assert elsewhere == "not reused"
    assert re.match(r"vgpu race: aten::fill_ on stream 0 writes .* after: aten::mul on stream \d+ reads", unordered)


def use_a_new_tensor_on_another_stream(wait: bool) -> list[str]:
    import torch

    import vgpu

    vgpu.install()
    vgpu.set_race_check(True)
    torch.ones(8, device="vgpu")
    target, side = torch.empty(8, device="vgpu"), torch.Stream(device="vgpu")
    if wait:
        side.wait_stream(torch.accelerator.current_stream())
    try:
        with side:
            target.fill_(1)
    except RuntimeError:
        pass
    return vgpu.races()


def test_another_stream_has_to_come_after_the_allocation():
    ordered, (text,) = run_on_vgpu(in_turn, "use_a_new_tensor_on_another_stream", [True], [False])
    assert ordered == []
    assert "allocation on stream 0 takes" in text


def use_parts_on_two_streams() -> list[object]:
    """Halves by rows and by columns are disjoint; a column and a row aren't."""
    import torch

    import vgpu

    vgpu.install()
    vgpu.set_race_check(True)
    whole = torch.zeros(8, 8, device="vgpu")
    side = torch.Stream(device="vgpu")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        whole[:4].add_(1)
    whole[4:].add_(2)
    torch.accelerator.synchronize()
    with side:
        whole[:, :4].mul_(10)
    whole[:, 4:].mul_(100)
    torch.accelerator.synchronize()
    before = len(vgpu.races())
    with side:
        whole[:, 7].add_(1)
    with contextlib.suppress(RuntimeError):
        whole[3].add_(1)
    with side:
        values = whole.cpu()
    return [before, len(vgpu.races()), values[0, 0].item(), values[7, 6].item()]


def test_only_bytes_that_overlap_race():
    assert run_on_vgpu(use_parts_on_two_streams) == [0, 1, 10.0, 200.0]


def answers_that_make_the_host_wait() -> list[str]:
    import torch

    import vgpu

    vgpu.install()
    vgpu.set_race_check(True)
    side, kept = torch.Stream(device="vgpu"), []
    for ask in (
        lambda t: t.sum().item(),
        lambda t: t.cpu(),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: torch.equal(t, t),
        lambda t: side.query(),
        lambda t: side.record_event().query(),
        lambda t: side.record_event().synchronize(),
    ):
        with side:
            tensor = torch.ones(8, device="vgpu")
            ask(tensor)
        tensor.add_(1)
        kept.append(tensor)
    return vgpu.races()


def test_what_the_host_waited_for_is_over_for_all_streams():
    assert run_on_vgpu(answers_that_make_the_host_wait) == []


def a_late_copy_and_its_event() -> dict[str, object]:
    import torch

    import vgpu

    vgpu.install().set_lazy(True)
    vgpu.set_race_check(True)
    source, target = torch.ones(16).pin_memory(), torch.zeros(16, device="vgpu")
    side = torch.Stream(device="vgpu")
    before = side.record_event()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        inside = torch.accelerator.current_stream() == side
        target.copy_(source, non_blocking=True)
    event = side.record_event()
    answer = {"inside": inside, "before": before.query(), "first": event.query()}
    event.synchronize()
    return answer | {"then": event.query(), "stream": side.query(), "equal": torch.equal(target.cpu(), source)}


def test_an_event_behind_a_late_copy_has_not_passed():
    answer = run_on_vgpu(a_late_copy_and_its_event)
    assert answer == {"inside": True, "before": True, "first": False, "then": True, "stream": True, "equal": True}


def free_under_a_late_copy(recorded: bool, cap: int | None, own: bool = False) -> dict[str, object]:
    import torch

    import vgpu

    ext = vgpu.install()
    ext.set_lazy(True)
    ext.set_cap(cap)
    side, result = torch.Stream(device="vgpu"), torch.zeros(16).pin_memory()
    with side if own else contextlib.nullcontext():
        source = torch.full((16,), 5.0, device="vgpu")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        result.copy_(source, non_blocking=True)
    if recorded:
        source.record_stream(side)
    del source
    held = ext.current()
    other = torch.empty(16, device="vgpu")
    side.synchronize()
    return {"value": result[0].item(), "held": held, "left": ext.current() - other.nbytes}


def test_a_late_copy_keeps_freed_memory_of_its_own_stream_or_with_record_stream():
    own, recorded, forgotten, full = run_on_vgpu(
        in_turn, "free_under_a_late_copy", [False, None, True], [True, None], [False, None], [True, 64]
    )
    assert own == {"value": 5.0, "held": 0, "left": 0}
    assert recorded == full == {"value": 5.0, "held": 64, "left": 0}
    assert forgotten["held"] == 0
    assert forgotten["value"] != 5.0


def stream_from_a_reader_thread() -> dict[str, object]:
    """A reader thread stages and copies on its own stream, the main thread computes: a queue each way between them."""
    import queue
    import threading

    import torch

    import vgpu

    vgpu.install().set_lazy(True)
    vgpu.set_race_check(True)
    torch.manual_seed(0)
    files = [torch.randn(32, 32) for _ in range(40)]
    start = torch.randn(4, 32)
    expected = start
    for weight in files:
        expected = torch.tanh(expected @ weight)
    arena = torch.empty(3 * 4096, dtype=torch.uint8, device="vgpu")
    allocated = torch.accelerator.current_stream().record_event()
    free: queue.Queue[tuple[int, torch.Event]] = queue.Queue()
    full: queue.Queue[tuple[int, torch.Event] | BaseException] = queue.Queue()
    for slot in range(3):
        free.put((slot, allocated))

    def storage_of(slot: int) -> torch.UntypedStorage:
        return torch._C._construct_storage_from_data_pointer(
            arena.data_ptr() + slot * 4096, torch.device("vgpu", 0), 4096
        )

    def read_ahead() -> None:
        try:
            stream = torch.Stream(device="vgpu")
            staging = [(torch.empty(32, 32).pin_memory(), torch.Event("vgpu")) for _ in range(2)]
            with stream:
                for index, weight in enumerate(files):
                    slot, released = free.get()
                    buffer, copied = staging[index % 2]
                    copied.synchronize()
                    buffer.copy_(weight)
                    stream.wait_event(released)
                    target = torch.empty(0, device="vgpu").set_(storage_of(slot), 0, (32, 32), (32, 1))
                    target.copy_(buffer, non_blocking=True)
                    copied.record(stream)
                    full.put((slot, stream.record_event()))
        except BaseException as error:
            full.put(error)

    reader = threading.Thread(target=read_ahead)
    reader.start()
    x = start.to("vgpu")
    compute = torch.accelerator.current_stream()
    for _ in files:
        item = full.get(timeout=60)
        if isinstance(item, BaseException):
            raise item
        slot, ready = item
        compute.wait_event(ready)
        weight = torch.empty(0, device="vgpu").set_(storage_of(slot), 0, (32, 32), (32, 1))
        x = torch.tanh(x @ weight)
        free.put((slot, compute.record_event()))
    reader.join()
    main_stream = torch.accelerator.current_stream().stream_id
    return {"equal": torch.equal(x.cpu(), expected), "races": vgpu.races(), "main stream": main_stream}


def test_a_reader_thread_streams_weights_through_an_arena():
    assert run_on_vgpu(stream_from_a_reader_thread) == {"equal": True, "races": [], "main stream": 0}


def point_into_an_arena(what: str) -> object:
    import torch

    import vgpu

    ext = vgpu.install()
    arena = torch.zeros(1024, dtype=torch.uint8, device="vgpu")

    def storage(start: int, count: int) -> torch.UntypedStorage:
        return torch._C._construct_storage_from_data_pointer(arena.data_ptr() + start, torch.device("vgpu", 0), count)

    tensor = torch.empty(0, device="vgpu").set_(storage(256, 64), 0, (16,), (1,))
    tensor.copy_(torch.arange(16.0))
    if what == "values":
        same = torch.equal(arena[256:320].view(torch.float32).cpu(), torch.arange(16.0))
        return [same, (tensor + 1).sum().item(), tensor.cpu().tolist() == list(range(16)), ext.current()]
    try:
        if what == "outside":
            torch.empty(0, device="vgpu").set_(storage(1000, 64), 0, (16,), (1,))
        elif what == "freed":
            del arena
            tensor.add_(1)
        elif what == "replaced":
            vgpu.set_race_check(True)  # freed memory is reused at once
            arena = torch.zeros(1024, dtype=torch.uint8, device="vgpu")
            address = arena.data_ptr()
            tensor.set_(storage(256, 64), 0, (16,), (1,))
            tensor.zero_()
            del arena
            arena = torch.zeros(1024, dtype=torch.uint8, device="vgpu")
            assert arena.data_ptr() == address
            tensor.cpu()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_storage_over_a_pointer_shares_the_bytes_of_its_arena_and_dies_with_it():
    values, outside, freed, replaced = run_on_vgpu(
        in_turn, "point_into_an_arena", ["values"], ["outside"], ["freed"], ["replaced"]
    )
    assert values == [True, 136.0, True, 1024]
    assert "don't lie in live device memory" in outside
    assert "don't lie in live device memory" in freed
    assert "point into an allocation that was freed" in replaced


def run_models_on_one_stream() -> dict[str, object]:
    """Whole pipelines on the default stream, with late copies and the check on."""
    import torch

    import vgpu
    from offload_core.tiny_models import FAMILIES, run_whole

    ext = vgpu.install()
    ext.set_lazy(True)
    vgpu.set_race_check(True)
    answer: dict[str, object] = {}
    for name in ("sd15", "flux"):
        family = FAMILIES[name]
        pipeline = family.build()
        pipeline.set_progress_bar_config(disable=True)
        expected = run_whole(pipeline, seed=1, **family.call)
        answer[name] = torch.equal(run_whole(pipeline.to("vgpu"), seed=1, **family.call).cpu(), expected)
    return answer | {"races": vgpu.races()}


@pytest.mark.slow
def test_models_on_one_stream_have_no_race():
    assert run_on_vgpu(run_models_on_one_stream) == {"sd15": True, "flux": True, "races": []}


def make_each_operation_fail(kind: str) -> dict[str, object]:
    import torch

    import vgpu

    vgpu.install()

    def run() -> torch.Tensor:
        pinned = torch.ones(16).pin_memory()
        pinned = torch.empty(16).pin_memory().copy_(pinned)
        return (pinned.to("vgpu", non_blocking=True) + 1).cpu()

    before = vgpu.operation_counts()[kind]
    run()
    count = vgpu.operation_counts()[kind] - before
    errors = []
    for k in range(1, count + 2):
        vgpu.fail_at(kind, k)
        try:
            run()
        except torch.OutOfMemoryError:
            errors.append("out of memory")
        except RuntimeError as error:
            errors.append("as fail_at asked" in str(error))
        vgpu.fail_at(None, 0)
    return {"count": count, "errors": errors, "after": run()[0].item()}


def test_each_operation_can_be_made_to_fail():
    alloc, copy, pin = run_on_vgpu(in_turn, "make_each_operation_fail", ["alloc"], ["copy"], ["pin"])
    assert alloc == {"count": 2, "errors": ["out of memory"] * 2, "after": 2.0}
    assert copy == {"count": 2, "errors": [True] * 2, "after": 2.0}
    assert pin == {"count": 2, "errors": [True] * 2, "after": 2.0}


def ask_for_memory_figures() -> list[object]:
    import torch

    import vgpu

    vgpu.install().set_cap(1 << 20)
    torch.accelerator.reset_peak_memory_stats()
    tensor = torch.empty(1 << 18, dtype=torch.uint8, device="vgpu")
    torch.empty(1 << 10, dtype=torch.uint8, device="vgpu")
    accelerator = torch.accelerator
    stats = accelerator.memory_stats()
    return [
        *accelerator.get_memory_info(),
        accelerator.memory_allocated() - tensor.nbytes,
        accelerator.max_memory_allocated() - tensor.nbytes,
        stats["allocated_bytes.all.current"] - tensor.nbytes,
        stats["allocation.all.current"],
    ]


def test_the_accelerator_interface_knows_the_memory():
    assert run_on_vgpu(ask_for_memory_figures) == [(1 << 20) - (1 << 18), 1 << 20, 0, 1024, 0, 1]
