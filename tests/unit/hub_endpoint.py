"""A local stand-in for the Hugging Face Hub: it serves the files of revisions of a few models, and fails on request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = {"main": "a" * 40, "old": "b" * 40}


@dataclass
class Hub:
    """The state of the hub.

    files: the files of each (model, commit). gated: models that require a token. cut: file -> number of its bytes that
    are sent, once. moved: URL that file requests are redirected to, as to a content delivery network.
    """

    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    moved: str | None = None
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def add(self, model: str, files: dict[str, bytes], revision: str = "main") -> None:
        self.files[model, COMMIT[revision]] = files

    def fetched(self) -> list[str]:
        """The files that were requested, in order."""
        asked = [path.partition("/resolve/")[2] for method, path, _ in self.seen if method == "GET"]
        return [path.partition("/")[2] for path in asked if path]

    def tokens(self) -> list[str | None]:
        return [headers.get("authorization") for _, _, headers in self.seen]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.seen.append((self.command, path, {key.lower(): value for key, value in self.headers.items()}))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or resolve
        if found is None:
            return self.refuse(404, "EntryNotFound")
        model = found[1]
        if not any(name == model for name, _ in self.hub.files):
            return self.refuse(401, "RepoNotFound")
        if model in self.hub.gated and self.headers.get("authorization") is None and resolve is not None:
            return self.refuse(401, "GatedRepo")
        revision = (api[3] if api else resolve[2]) or "main"  # type: ignore[index]
        commit = COMMIT.get(revision, revision)
        files = self.hub.files.get((model, commit))
        if files is None:
            return self.refuse(404, "RevisionNotFound")
        if api is not None and api[2] == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self.answer(json.dumps(entries).encode(), {"Content-Type": "application/json"})
        if api is not None:
            siblings = [{"rfilename": name} for name in files]
            data = {"id": model, "modelId": model, "sha": commit, "siblings": siblings, "tags": [], "private": False}
            return self.answer(json.dumps(data).encode(), {"Content-Type": "application/json"})
        return self.file(path, files.get(resolve[3]), resolve[3], commit)  # type: ignore[index]

    def file(self, path: str, data: bytes | None, name: str, commit: str) -> None:
        if data is None:
            return self.refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if self.hub.moved is not None:
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": headers["ETag"]}
            headers["Location"] = self.hub.moved + path
            return self.answer(b"", headers, 302)
        begin = int(re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", "bytes=0-"))[1])  # type: ignore[index]
        rest = data[begin:]
        headers["Content-Length"] = str(len(rest))
        status = 206 if begin else 200
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        sent = self.hub.cut.pop(name, None) if self.command == "GET" else None
        self.answer(rest if sent is None else rest[:sent], headers, status)
        if sent is not None:
            self.close_connection = True

    def refuse(self, status: int, code: str) -> None:
        self.answer(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status)

    def answer(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving(hub: Hub, host: str = "127.0.0.1") -> Iterator[Hub]:
    """Serve the hub at hub.url."""
    server = ThreadingHTTPServer((host, 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
