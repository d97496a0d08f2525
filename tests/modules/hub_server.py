"""A hub on loopback for huggingface_hub's own client: repositories, a store of large files behind
redirects, gates, and faults."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

# tokens: with access, without, without any right to read
MEMBER, VISITOR, LIMITED = (
    "hf_member",
    "hf_visitor",
    "hf_limited",
)


@dataclass
class Repository:
    """Files by path for each commit, commits by revision; ``gated`` as the hub's API says it:
    False, "auto" or "manual"."""

    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str]
    gated: str | bool = False
    card: dict[str, str] = field(default_factory=lambda: {"license": "apache-2.0"})


class Hub:
    """Serves ``repositories`` by name at `endpoint`. A context manager.

    ``breaks``: how often the connection breaks in the middle of a large file, by the file's name.
    ``wrong``: names of large files that are served with another content of the same size.
    ``requests``: all that were made, (method, path, Range or ""). ``sent_bytes``: of bodies, by
    path.
    """

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.sent_bytes = Counter[str]()
        self.breaks, self.wrong, self.requests = (
            Counter[str](),
            set[str](),
            list[tuple[str, str, str]](),
        )
        self._servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), self._handler(answer))
            for answer in (self._hub, self._store)
        ]
        self.endpoint, self.store = (
            f"http://127.0.0.1:{server.server_port}" for server in self._servers
        )

    def __enter__(self) -> Hub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _handler(self, answer: Any) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.requests.append((self.command, path, self.headers.get("Range", "")))
                status, headers, body, length = answer(path, self.headers)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body[:length])
                    hub.sent_bytes[path] += length
                    self.close_connection = length < len(body)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _hub(self, path: str, headers: Any) -> tuple[int, dict[str, str], bytes, int]:
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        api = path.startswith("/api/models/")
        owner, name, *rest = path.removeprefix("/api/models/").strip("/").split("/")
        repository = self.repositories.get(f"{owner}/{name}")
        if repository is None:
            return _refused(
                404 if token else 401,
                "RepoNotFound",
                "Repository not found" if token else "Invalid username or password.",
            )
        if token == LIMITED:
            return _refused(
                403,
                "",
                "Please enable access to public gated repositories in your fine-grained token "
                "settings",
            )
        if rest == ["auth-check"]:
            return _closed(repository, token) or _json({})
        resource, revision, *steps = rest or ["revision", "main"]
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            return _refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[commit]
        if api and resource == "revision":
            siblings = [
                {"rfilename": file, "size": len(content), **_lfs("sha256", content)}
                for file, content in files.items()
            ]
            return _json(
                {
                    "id": name,
                    "sha": commit,
                    "gated": repository.gated,
                    "cardData": repository.card,
                    "siblings": siblings,
                }
            )
        if api:
            return _json(
                [
                    {"type": "file", "path": f, "size": len(c), "oid": _git(c), **_lfs("oid", c)}
                    for f, c in files.items()
                ]
            )
        if refusal := _closed(repository, token):
            return refusal
        content, file = files.get("/".join(steps)), steps[-1]
        if content is None:
            return _refused(404, "EntryNotFound", "Entry not found")
        if not file.endswith((".safetensors", ".gguf")):
            return (
                200,
                {"ETag": f'"{_git(content)}"', "X-Repo-Commit": commit},
                content,
                len(content),
            )
        linked = {
            "X-Linked-Etag": f'"{_sha256(content)}"',
            "X-Linked-Size": str(len(content)),
            "X-Repo-Commit": commit,
        }
        return (
            302,
            {**linked, "Location": f"{self.store}/{owner}/{name}/{commit}/{'/'.join(steps)}"},
            b"",
            0,
        )

    def _store(self, path: str, headers: Any) -> tuple[int, dict[str, str], bytes, int]:
        assert "Authorization" not in headers, "a token stays at the hub"
        owner, name, commit, *steps = path.strip("/").split("/")
        content = self.repositories[f"{owner}/{name}"].commits[commit]["/".join(steps)]
        if steps[-1] in self.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        begin, _, last = (headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(begin), min(int(last or len(content)) + 1, len(content))
        body, length = content[start:end], end - start
        if self.breaks[steps[-1]] > 0:
            self.breaks[steps[-1]] -= 1
            length //= 2
        if "Range" not in headers:
            return 200, {}, body, length
        return (
            206,
            {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"},
            body,
            length,
        )


def connect(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points huggingface_hub's client to ``hub``, without a token, with its cache in ``cache``."""
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache.with_name("token")))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def _closed(repository: Repository, token: str) -> tuple[int, dict[str, str], bytes, int] | None:
    if not repository.gated or token == MEMBER:
        return None
    return _refused(403 if token else 401, "GatedRepo", "Access to this model is restricted.")


def _refused(status: int, code: str, message: str) -> tuple[int, dict[str, str], bytes, int]:
    return status, {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}, b"", 0


def _json(data: Any) -> tuple[int, dict[str, str], bytes, int]:
    body = json.dumps(data).encode()
    return 200, {"Content-Type": "application/json"}, body, len(body)


def _lfs(name: str, content: bytes) -> dict[str, Any]:
    return (
        {"lfs": {name: _sha256(content), "size": len(content), "pointerSize": 134}}
        if len(content) > 100_000
        else {}
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git(content: bytes) -> str:
    """The name that git gives a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
