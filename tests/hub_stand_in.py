"""A stand-in for the Hugging Face Hub: enough of its HTTP for the real client to list and fetch files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" * 6 + "c0ff"


class Hub:
    """models: id -> folder. gated: ids that ask for an account. fetched: bytes sent, by file. cut: files of which only
    so many bytes are sent once."""

    def __init__(self) -> None:
        self.models: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.fetched: dict[str, int] = {}
        self.cut: dict[str, int] = {}
        self.address = ""


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(head=True)

        def do_GET(self) -> None:
            self._answer(head=False)

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, *, head: bool) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._model("/".join(parts[2:4]))
            elif len(parts) > 3 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), "/".join(parts[4:]), head=head)
            else:
                self._send(404, b"")

        def _model(self, model_id: str) -> None:
            if model_id not in hub.models:
                return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            if "/revision/nothing" in self.path:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            root = hub.models[model_id]
            names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
            siblings = [{"rfilename": name, "size": (root / name).stat().st_size} for name in names]
            body = {"id": model_id, "modelId": model_id, "sha": COMMIT, "siblings": siblings}
            return self._send(200, json.dumps(body).encode())

        def _file(self, model_id: str, name: str, *, head: bool) -> None:
            if model_id in hub.gated:
                return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            file = hub.models[model_id] / name
            if not file.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            data = file.read_bytes()
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            start = 0
            if wanted := self.headers.get("Range"):
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            part = data[start:]
            if head:
                return self._send(200, b"", headers | {"Content-Length": str(len(data))})
            stop = hub.cut.pop(name, len(part))
            hub.fetched[name] = hub.fetched.get(name, 0) + min(stop, len(part))
            return self._send(206 if start else 200, part[:stop], headers | {"Content-Length": str(len(part))})

        def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for key, value in {"Connection": "close", "Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
