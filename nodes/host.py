"""What the pack asks of ComfyUI, but for memory that both share, which is in `comfy_memory`.

Asks at call time, never at import, so that every host flag (`--cpu`, `--gpu-only`, `--preview-method`, ...) counts and
models folders set later are seen. Works with ComfyUI 0.3.64 and later; what only newer ones have is looked up by name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_core.session import Progress

from .comfy_memory import ComfyMemory
from .patcher import WarmCopies
from .progress import NodeObserver, describe_progress

if TYPE_CHECKING:
    from .routes import Route
    from .state import PackState

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.1
KINDS_OF_OURS = ("ipadapter",)  # ComfyUI has no such folders by itself; packs that add them use this name
LARGEST_REQUEST_BYTES = 64 << 10


class ComfyHost:
    """ComfyUI, as the pack sees it."""

    def __init__(self) -> None:
        self.memory = ComfyMemory()

    def model_roots(self) -> Sequence[Path]:
        import folder_paths

        try:
            return tuple(Path(path) for path in folder_paths.get_folder_paths("diffusers"))
        except KeyError:
            return (Path(folder_paths.models_dir) / "diffusers",)

    def folders(self, kind: str) -> Sequence[Path]:
        import folder_paths

        if kind == "input":
            return (Path(folder_paths.get_input_directory()),)
        if kind == "output":
            return (Path(folder_paths.get_output_directory()),)
        try:
            return tuple(Path(path) for path in folder_paths.get_folder_paths(kind))
        except KeyError:  # a kind that no pack has added
            return (Path(folder_paths.models_dir) / kind,) if kind in KINDS_OF_OURS else ()

    def tokenizer_folders(self) -> Sequence[Path]:
        import comfy.model_management

        return (Path(comfy.model_management.__file__).parent,)

    def devices(self) -> Sequence[str]:
        import comfy.model_management as mm

        every = mm.get_all_torch_devices() if hasattr(mm, "get_all_torch_devices") else []
        return tuple(str(device) for device in (mm.get_torch_device(), *every))

    def auto_device(self) -> str:
        import comfy.model_management as mm

        return str(mm.get_torch_device())

    def auto_budgets(self) -> Mapping[str, str]:
        """With --novram nothing stays on the device beyond its use."""
        import comfy.model_management as mm

        states = getattr(mm, "VRAMState", None)
        return {"resident_memory": "0"} if states is not None and mm.vram_state == states.NO_VRAM else {}

    def image_placement(self) -> dict[str, Any]:
        import comfy.model_management as mm
        import torch

        dtype = mm.intermediate_dtype() if hasattr(mm, "intermediate_dtype") else torch.float32
        return {"device": mm.intermediate_device(), "dtype": dtype}

    def video(self, image: Any, frame_rate: float, audio: Any) -> Any:
        from comfy_api.latest import InputImpl, Types

        rate = Fraction(frame_rate).limit_denominator(1001)
        return InputImpl.VideoFromComponents(Types.VideoComponents(images=image, frame_rate=rate, audio=audio))

    def nothing(self, why: str) -> Any:
        from comfy_execution.graph_utils import ExecutionBlocker

        return ExecutionBlocker(why)

    def observer(self, node_id: str | None = None) -> NodeObserver:
        return ComfyObserver(node_id or running_node_id(), self.memory)

    def offer(self, warm: WarmCopies) -> None:
        self.memory.offer(warm)

    def run_id(self) -> str:
        from comfy_execution.utils import get_executing_context

        context = get_executing_context()
        return "" if context is None else str(context.prompt_id)

    def is_interrupt(self, error: BaseException) -> bool:
        import comfy.model_management as mm

        return isinstance(error, mm.InterruptProcessingException | KeyboardInterrupt)

    def send(self, event: str, data: dict[str, Any]) -> None:
        server = running_server()
        if server is not None:
            server.send_sync(event, data)

    def free_between_prompts(self) -> None:
        server = running_server()
        if server is not None:
            server.prompt_queue.set_flag("unload_models", True)

    def serve(self, routes: Sequence[Route], state: PackState) -> None:
        """Adds the pack's routes to ComfyUI's server, which keeps other sites from them. Only before it starts."""
        server = running_server()
        for route in routes if server is not None else ():
            server.routes.route(route.method, route.path)(partial(respond, route, state))

    def release_cache(self) -> None:
        import comfy.model_management as mm

        mm.soft_empty_cache()

    def make_room(self) -> None:
        if self.memory.unload_others():
            log.info("A phase ran out of memory: ComfyUI's own models were unloaded for the next try.")


class ComfyObserver(NodeObserver):
    """Shows a node's progress bar, preview and status line, and stops at ComfyUI's interrupt.

    The bar counts loaded bytes until the first step, then steps, so that it never jumps back between the two.
    """

    def __init__(self, node_id: str | None, memory: ComfyMemory) -> None:
        self.node_id, self._memory = node_id, memory
        self._bar: Any = None
        self._bar_unit = ""
        self._last_status_s = 0.0
        self.wants_preview = previews_wanted()

    def progress(self, event: Progress) -> None:
        self.check_interrupt()
        if time.monotonic() - self._last_status_s >= STATUS_INTERVAL_S or event.done >= event.total:
            self.status(describe_progress(event))
        if event.total <= 0 or (event.unit == "bytes" and self._bar_unit not in ("", "bytes")):
            return
        if event.unit != self._bar_unit:
            import comfy.utils

            self._bar, self._bar_unit = comfy.utils.ProgressBar(event.total, node_id=self.node_id), event.unit
        preview = None if event.preview is None else ("JPEG", event.preview, preview_pixels())
        self._bar.update_absolute(event.done, event.total, preview)

    def check_interrupt(self) -> None:
        import comfy.model_management as mm

        mm.throw_exception_if_processing_interrupted()

    def make_room(self) -> bool:
        held = self._memory.unload_others()
        if held:
            log.info("A phase ran out of memory: ComfyUI's own models were unloaded.")
        return held

    def status(self, text: str) -> None:
        self._last_status_s = time.monotonic()
        server = running_server() if self.node_id is not None else None
        if server is not None and hasattr(server, "send_progress_text"):
            server.send_progress_text(text, self.node_id)


def running_server() -> Any:
    """ComfyUI's web server, None where nodes run without one."""
    from server import PromptServer

    return getattr(PromptServer, "instance", None)


async def respond(route: Route, state: PackState, request: Any) -> Any:
    """A web response of the route, made on another thread than the server's. A POST must say that it is JSON: no form
    of another site can."""
    from aiohttp import web

    from .routes import Answer, answer

    if route.method == "GET":
        data: Any = dict(request.query)
    elif request.content_type != "application/json" or (request.content_length or 0) > LARGEST_REQUEST_BYTES:
        return web.json_response({"error": f"{route.path} takes a small JSON object."}, status=415)
    else:
        try:
            data = await request.json()
        except ValueError:
            data = None
    made: Answer = await asyncio.to_thread(answer, route, state, data)
    return web.json_response(made.body, status=made.status)


def previews_wanted() -> bool:
    """Whether the person wants pictures of the unfinished latents, as set for the running prompt."""
    from comfy.cli_args import LatentPreviewMethod, args

    return args.preview_method != LatentPreviewMethod.NoPreviews


def preview_pixels() -> int:
    """The longest side of a preview."""
    from comfy.cli_args import args

    return getattr(args, "preview_size", 512)


def running_node_id() -> str | None:
    """The id of the node that runs now. (A hidden id input would make equal nodes miss each other's cached results.)"""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return None if context is None else context.node_id
