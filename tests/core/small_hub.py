"""A stand-in for the Hugging Face hub on loopback: the endpoints with which repositories are made, written and read."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_" + "aB3" * 12


class SmallHub:
    """Repositories of type dataset in memory; `url` goes into HF_ENDPOINT.

    Attributes:
        repos: by "user/name": whether it is private, and files by revision.
        seen: methods and paths of all requests, with what came as token.
        can_write: whether the token may write.
    """

    def __init__(self) -> None:
        self.repos, self.seen, self.stored = {}, [], {}
        self.can_write = True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def make(self, name, private=False):
        self.repos.setdefault(name, {"private": private, "main": {}})

    def commit_of(self, name, revision):
        """The number of a commit: a digest of its files."""
        files = self.repos[name][revision]
        return hashlib.sha1(b"".join(key.encode() + files[key] for key in sorted(files))).hexdigest()

    def revision(self, name, name_or_commit):
        """The branch that a branch or commit names; None for another."""
        branches = [branch for branch in self.repos[name] if branch != "private"]
        return next((branch for branch in branches if name_or_commit in (branch, self.commit_of(name, branch))), None)


def _handler(hub: SmallHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def _serve(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.split("?")[0]
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            hub.seen.append((self.command, path, token))
            if path == "/api/repos/create":
                return self._create(json.loads(body), token)
            if path == "/api/validate-yaml":
                assert json.loads(body)["repoType"] == "dataset"
                return self._answer(200, {"errors": [], "warnings": []})
            if route := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
                hub.stored[route[1]] = body
                return self._answer(200, {})
            if route := re.fullmatch(r"/(?:api/)?datasets/([\w.-]+/[\w.-]+?)(?:\.git)?(/.*)?", path):
                return self._repository(route[1], route[2] or "", token, body)
            return self._answer(404, {}, "EntryNotFound")

        do_GET = do_HEAD = do_POST = do_PUT = _serve

        def _create(self, request, token):
            if token != TOKEN:
                return self._answer(401, {"error": "Invalid username or password."})
            if not hub.can_write:
                return self._answer(403, {"error": "You don't have the rights to create a dataset under this namespace"})
            assert request["type"] == "dataset"
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            exists = name in hub.repos
            hub.make(name, request.get("visibility") == "private" or request.get("private", False))
            url = f"{hub.url}/datasets/{name}"
            return self._answer(409 if exists else 200, {"url": url, "error": "You already created this dataset repo"})

        def _repository(self, name, subpath, token, body):
            if name not in hub.repos or (hub.repos[name]["private"] and token != TOKEN):
                return self._answer(404 if token == TOKEN else 401, {"error": "Repository not found"}, "RepoNotFound")
            if subpath in ("", "/revision/main"):
                names = [{"rfilename": entry} for entry in hub.repos[name]["main"]]
                about = {
                    "id": name,
                    "private": hub.repos[name]["private"],
                    "sha": hub.commit_of(name, "main"),
                    "siblings": names,
                }
                return self._answer(200, {**about, "tags": [], "downloads": 0, "likes": 0})
            kind, _, further = subpath[1:].partition("/")
            if self.command == "POST" and (token != TOKEN or not hub.can_write):
                return self._answer(401 if token != TOKEN else 403, {"error": "You have no write access"})
            if kind == "branch":
                exists = further in hub.repos[name]
                hub.repos[name].setdefault(further, dict(hub.repos[name]["main"]))
                return self._answer(409 if exists else 200, {"error": "Reference already exists"})
            if kind == "preupload":
                modes = {
                    entry["path"]: "lfs" if entry["path"].endswith(".safetensors") else "regular"
                    for entry in json.loads(body)["files"]
                }
                return self._answer(
                    200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
                )
            if kind == "info":
                objects = json.loads(body)["objects"]
                uploads = [{**entry, "actions": {"upload": {"href": f"{hub.url}/lfs/{entry['oid']}"}}} for entry in objects]
                return self._answer(200, {"transfer": "basic", "objects": uploads}, kind="application/vnd.git-lfs+json")
            if kind == "commit":
                return self._commit(name, further, body)
            if kind == "tree":
                return self._answer(
                    200,
                    [{"type": "file", "path": p, "oid": "0" * 40, "size": len(b)} for p, b in hub.repos[name]["main"].items()],
                )
            revision_name, _, file = further.partition("/")
            revision = hub.revision(name, revision_name)
            if kind != "resolve" or revision is None:
                return self._answer(404, {"error": "Revision not found"}, "RevisionNotFound")
            if file not in hub.repos[name][revision]:
                return self._answer(404, {"error": "Entry not found"}, "EntryNotFound")
            return self._send(200, hub.repos[name][revision][file], {"X-Repo-Commit": hub.commit_of(name, revision)})

        def _commit(self, name, revision, body):
            files = hub.repos[name][revision]
            for line in map(json.loads, body.splitlines()):
                entry = line["value"]
                if line["key"] == "file":
                    files[entry["path"]] = base64.b64decode(entry["content"])
                elif line["key"] == "lfsFile":
                    files[entry["path"]] = hub.stored[entry["oid"]]
            number = hub.commit_of(name, revision)
            url = f"{hub.url}/datasets/{name}/commit/{number}"
            return self._answer(200, {"success": True, "commitUrl": url, "commitOid": number})

        def _answer(self, status, content, code="", kind="application/json"):
            code_header = {"X-Error-Code": code} if code else {}
            error = {"X-Error-Message": content["error"]} if status >= 400 and "error" in content else {}
            return self._send(status, json.dumps(content).encode(), {"Content-Type": kind, **code_header, **error})

        def _send(self, status, body, headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler
