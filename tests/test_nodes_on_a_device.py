"""Nodes on an accelerator (a pretend one): whatever way a node ends, the device's bytes are back where they were."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from vgpu.runner import run_on_vgpu


def success_error_and_cancel() -> dict[str, Any]:
    import json

    import torch

    import vgpu
    from offload_core.errors import InsufficientMemoryError
    from phase_offload_nodes.graph_runner import GraphRunner
    from phase_offload_nodes.local_host import GraphInterrupted, LocalHost

    device = vgpu.install()
    graph = Path(__file__).parents[1] / "example_workflows" / "api" / "text_to_image.json"
    prompt = json.loads(graph.read_text())
    for node in prompt.values():
        if "steps" in node["inputs"]:
            node["inputs"]["steps"] = 3
    bytes_at: list[list[int]] = []

    class Host(LocalHost):
        checks, stop_at = 0, 0

        def check_interrupt(self) -> None:
            self.checks += 1
            if self.checks == self.stop_at:
                self.interrupt()
            super().check_interrupt()

    def run(host: Host) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            try:
                return GraphRunner(host, output_dir=Path(folder), cache="none").run(prompt)
            finally:
                bytes_at.append([device.current(), torch.vgpu.memory_reserved(), device.pinned_bytes()])

    run(Host())  # its traces are kept, and later runs check as often as each other
    pictures = len(run(host := Host()).images)
    total, peak, kept = host.checks, device.peak(), []
    for stop_at in (1, total // 3, total // 2, total - 1):
        stopping = Host()
        stopping.stop_at = stop_at
        try:
            run(stopping)
        except GraphInterrupted as error:
            kept.append(error)
    stopped = len(kept)
    for share in (0.1, 0.6):
        device.set_cap(int(peak * share))
        try:
            run(Host())
        except InsufficientMemoryError as error:
            kept.append(error)
        device.set_cap(None)
    return {
        "pictures": pictures,
        "peak": peak,
        "bytes": bytes_at,
        "stopped": stopped,
        "sentences": [str(error) for error in kept[stopped:]],
    }


def test_a_graph_gives_the_device_back_after_success_error_and_cancel() -> None:
    result = run_on_vgpu(success_error_and_cancel)
    assert result["pictures"] == 1
    assert result["peak"] > 1_000_000
    assert result["stopped"] == 4
    assert result["bytes"] == [[0, 0, 0]] * 8
    assert len(result["sentences"]) == 2
    assert all("memory" in sentence and "vgpu:0" in sentence for sentence in result["sentences"])
