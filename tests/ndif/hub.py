"""A stand-in for the hub on loopback: a folder ORG/NAME is the repository `ORG/NAME`."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from safetensors import safe_open

REVISION = "0" * 40


class Hub:
    """Serves `root` until `close()`; `url` goes into HF_ENDPOINT.

    Args:
        root: holds ORG/NAME folders, each as `save_pretrained` leaves it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(root))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def count_parameters(folder: Path) -> int:
    """How many numbers the weights hold, as the hub says it: the controller plans memory with it."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def _handler(root: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            path = self.path.split("?")[0]
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
                self._json(found[1], self._info)
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.*", path):
                self._json(found[1], self._tree)
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                self._file(root / found[1], found[2])
            else:
                self._missing("EntryNotFound")

        do_HEAD = do_GET

        def _json(self, name, make):
            folder = root / name
            if not folder.is_dir():
                return self._missing("RepoNotFound")
            return self._send(json.dumps(make(name, folder)).encode(), {"Content-Type": "application/json"})

        def _info(self, name, folder):
            count = count_parameters(folder)
            return {
                "_id": "0",
                "id": name,
                "modelId": name,
                "sha": REVISION,
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "pipeline_tag": "text-generation",
                "library_name": "transformers",
                "siblings": [{"rfilename": path.name} for path in folder.iterdir()],
                "safetensors": {"parameters": {"F32": count}, "total": count},
            }

        def _tree(self, name, folder):
            return [
                {"type": "file", "path": path.name, "oid": REVISION, "size": path.stat().st_size} for path in folder.iterdir()
            ]

        def _file(self, folder, name):
            path = folder / name
            if not folder.is_dir() or not path.is_file():
                return self._missing("EntryNotFound" if folder.is_dir() else "RepoNotFound")
            body = path.read_bytes()
            return self._send(body, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": REVISION})

        def _missing(self, code):
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, body, headers):
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler
