"""A real ComfyUI server for tests, and a small client that submits a graph and follows it to its end.

The server runs from a checkout, on the CPU, on 127.0.0.1, with a base directory of its own, so that nothing of the
checkout or of the person's models and settings is touched.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import websocket
from PIL import Image

PACK_FOLDER = "phase-offload"
START_LIMIT_SECONDS = 300
RUN_LIMIT_SECONDS = 600
# glibc hands freed blocks of this size and more back at once, so that the process's memory is what it has allocated.
MEMORY_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
END_MESSAGES = ("execution_success", "execution_error", "execution_interrupted")

Graph = dict[str, dict[str, Any]]
Message = dict[str, Any]


@dataclass(frozen=True)
class Checkout:
    """A ComfyUI checkout and the Python that has its requirements."""

    directory: Path
    python: str

    @property
    def version(self) -> str:
        text = (self.directory / "comfyui_version.py").read_text()
        found = re.search(r'__version__ = "(.+)"', text)
        return found.group(1) if found else self.directory.name

    @property
    def version_numbers(self) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", self.version)))

    def has_flag(self, flag: str) -> bool:
        return f'"{flag}"' in (self.directory / "comfy" / "cli_args.py").read_text()


def checkouts_from_environment() -> list[Checkout]:
    """The checkouts that COMFYUI_DIR names, with the Pythons of COMFYUI_PYTHON. Empty if the first is unset."""
    directories = [Path(part) for part in os.environ.get("COMFYUI_DIR", "").split(os.pathsep) if part]
    pythons = [part for part in os.environ.get("COMFYUI_PYTHON", "").split(os.pathsep) if part]
    pythons = pythons or [sys.executable] * len(directories)
    if len(pythons) != len(directories):
        raise ValueError(f"COMFYUI_PYTHON names {len(pythons)} Pythons for {len(directories)} folders in COMFYUI_DIR.")
    return [Checkout(directory, python) for directory, python in zip(directories, pythons, strict=True)]


@dataclass
class Run:
    """What one submitted graph did. node ids are those of the graph."""

    prompt_id: str
    messages: list[Message] = field(default_factory=list)
    previews: list[tuple[str | None, Image.Image]] = field(default_factory=list)  # node id (if told), picture
    texts: list[tuple[str, str]] = field(default_factory=list)  # node id, status line
    history: dict[str, Any] = field(default_factory=dict)
    pictures: list[Image.Image] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """One of END_MESSAGES."""
        return next(message["type"] for message in self.messages if message["type"] in END_MESSAGES)

    @property
    def error(self) -> dict[str, Any]:
        """The data of execution_error."""
        return next(message["data"] for message in self.messages if message["type"] == "execution_error")

    @property
    def ran(self) -> list[str]:
        """The nodes that ran, in order; cached ones are not among them."""
        nodes = [message["data"]["node"] for message in self.messages if message["type"] == "executing"]
        return list(dict.fromkeys(node for node in nodes if node is not None))

    def progress_of(self, node: str) -> list[tuple[float, float]]:
        """(value, max) of every progress message of a node."""
        return [
            (message["data"]["value"], message["data"]["max"])
            for message in self.messages
            if message["type"] == "progress" and message["data"].get("node") == node
        ]


class GraphRefusedError(Exception):
    """The server refused a graph at submission. details: its answer, with node_errors."""

    def __init__(self, details: dict[str, Any]) -> None:
        super().__init__(json.dumps(details))
        self.details = details


class Server:
    """A running ComfyUI server."""

    def __init__(self, checkout: Checkout, process: psutil.Popen, url: str, base: Path, log: Path) -> None:
        self.checkout = checkout
        self.process = process
        self.url = url
        self.base = base
        self._log = log

    @property
    def log(self) -> str:
        """Everything the server printed so far."""
        return self._log.read_text(errors="replace")

    @property
    def diffusers_folder(self) -> Path:
        return self.base / "models" / "diffusers"

    def memory_bytes(self) -> int:
        """Memory of the process, mapped files included."""
        return self.process.memory_info().rss

    def get(self, path: str, **query: str) -> Any:
        """The JSON at a path."""
        return json.loads(self.read(path, **query))

    def read(self, path: str, **query: str) -> bytes:
        """The bytes at a path."""
        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}" if query else f"{self.url}{path}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.read()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a JSON body; None if the answer is empty. Raises GraphRefusedError for status 400."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            raise GraphRefusedError(json.loads(error.read())) from None
        return json.loads(text) if text else None

    def interrupt(self) -> None:
        self.post("/interrupt", {})

    def free(self, *, unload_models: bool = False, free_memory: bool = False) -> None:
        """Asks for memory back. The server does so after the prompt that it runs at that moment, if any."""
        self.post("/free", {"unload_models": unload_models, "free_memory": free_memory})

    def run(
        self,
        graph: Graph,
        *,
        on_message: Callable[[Message], None] | None = None,
        extra_data: dict[str, Any] | None = None,
    ) -> Run:
        """Submits a graph in API format and follows it to its end. Raises GraphRefusedError if it is not accepted.

        on_message: called with each message of this run as it arrives, for a test that acts in the middle of one.
        """
        client_id = str(uuid.uuid4())
        events = websocket.create_connection(
            f"{self.url.replace('http', 'ws', 1)}/ws?clientId={client_id}", timeout=RUN_LIMIT_SECONDS
        )
        try:
            events.send(json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}}))
            body = {"prompt": graph, "client_id": client_id, "extra_data": extra_data or {}}
            run = Run(self.post("/prompt", body)["prompt_id"])
            self._follow(events, run, on_message)
        finally:
            events.close()
        run.history = self.get(f"/history/{run.prompt_id}")[run.prompt_id]
        run.pictures = [self._picture(entry) for entry in _saved_pictures(run.history)]
        return run

    def _follow(self, events: websocket.WebSocket, run: Run, on_message: Callable[[Message], None] | None) -> None:
        for frame in iter(events.recv, None):
            if isinstance(frame, bytes):
                _read_binary(frame, run)
                continue
            message = json.loads(frame)
            if message.get("data", {}).get("prompt_id") != run.prompt_id:
                continue
            run.messages.append(message)
            if on_message is not None:
                on_message(message)
            if message["type"] == "executing" and message["data"]["node"] is None:
                return

    def _picture(self, entry: dict[str, str]) -> Image.Image:
        place = {key: entry[key] for key in ("filename", "subfolder", "type")}
        return Image.open(io.BytesIO(self.read("/view", **place)))


@contextmanager
def running_server(checkout: Checkout, pack: Path, base: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server with the pack linked in, ready to take graphs. It ends with the block.

    base: an empty folder for its models, settings and pictures. Raises RuntimeError with the log if it doesn't start.
    """
    _lay_out(base, pack)
    port = _free_port()
    command = [checkout.python, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port)]
    command += ["--base-directory", str(base), "--disable-auto-launch", "--disable-api-nodes"]
    command += ["--database-url", "sqlite:///:memory:", *flags]
    log = base / "server.log"
    with log.open("wb") as output:
        process = psutil.Popen(
            command,
            cwd=checkout.directory,
            env=os.environ | MEMORY_SETTINGS,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(checkout, process, f"http://127.0.0.1:{port}", base, log)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        _end(process)


def _lay_out(base: Path, pack: Path) -> None:
    for folder in ("custom_nodes", "models/diffusers", "input", "output", "user/default"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    (base / "custom_nodes" / PACK_FOLDER).symlink_to(pack, target_is_directory=True)
    settings = {"Comfy.TutorialCompleted": True}  # else the templates dialog covers the page
    (base / "user" / "default" / "comfy.settings.json").write_text(json.dumps(settings))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            server.get("/system_stats")
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"ComfyUI {server.checkout.version} didn't start:\n{server.log}")


def _end(process: psutil.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=15)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait()


def _saved_pictures(history: dict[str, Any]) -> list[dict[str, str]]:
    return [entry for output in history["outputs"].values() for entry in output.get("images", [])]


def _read_binary(frame: bytes, run: Run) -> None:
    """Adds a binary frame to the run. Its first 4 bytes are its kind: 1 and 4 are previews, 3 is a status line."""
    kind, length = struct.unpack(">II", frame[:8])
    if kind == 1:  # then 4 bytes picture format, picture
        run.previews.append((None, Image.open(io.BytesIO(frame[8:]))))
    elif kind == 3:  # then id length, id, text
        run.texts.append((frame[8 : 8 + length].decode(), frame[8 + length :].decode()))
    elif kind == 4:  # then metadata length, metadata, picture
        metadata = json.loads(frame[8 : 8 + length])
        if metadata.get("prompt_id") in (None, run.prompt_id):
            run.previews.append((metadata.get("node_id"), Image.open(io.BytesIO(frame[8 + length :]))))
