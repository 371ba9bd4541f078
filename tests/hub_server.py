"""A stand-in for the Hub: serves local folders as model repositories over HTTP.

Answers what `huggingface_hub` asks (model and tree listings, HEAD and ranged GET of files,
redirects to another address as the Hub's CDN does) and records every request with the bytes it
sent. With a folder to store in it takes uploads too: who is logged in, new repositories, the check
of a card, large files over LFS, and commits. Use:

    with HubServer() as hub:
        hub.add("owner/name", folder)
        hub.run("-m", "gqaconvert", "inspect", "owner/name", cache=tmp_path)
        assert hub.bytes_sent < 1_000_000
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

from hub_server_uploads import UploadAnswers


@dataclass
class Repo:
    """One repository: a folder under one commit, with the branches that point to it."""

    folder: Path
    gated: bool
    branches: tuple[str, ...]
    private: bool = False
    commits: list[str] = field(default_factory=list)

    @property
    def commit(self) -> str:
        """A commit id that changes when any file does."""
        listing = [(name, _listed(path)["blobId"]) for name, path in self.files().items()]
        return hashlib.sha1(json.dumps(listing).encode()).hexdigest()

    def files(self) -> dict[str, Path]:
        """All files by their path in the repository."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path for path in paths}


@dataclass(frozen=True)
class Request:
    """What was asked, how it was answered, and how many bytes of body went out."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    status: int
    bytes_sent: int


@dataclass
class HubServer:
    """A Hub on a local port.

    Attributes:
        token: a token that opens gated repositories.
        ignore_ranges: answer ranged requests with the whole file, as some mirrors do.
        redirect_weights: send requests for weights to a CDN address first, as the Hub does.
        fail_with: answer everything with this status.
        fail_at: answer what has this in its address with the status given.
        storage: folder for what is uploaded; without one nothing can be.
        account: who is logged in with the token.
        organisations: that the account belongs to.
        role: of the token, "write", "read" or "fineGrained".
        card_faults: what the check of a card finds wrong.
        large: ends of names of files that go over LFS, not in the commit.
    """

    token: str = "hf_stand_in_token"
    storage: Path | None = None
    account: str = "somebody"
    organisations: tuple[str, ...] = ()
    role: str = "write"
    card_faults: tuple[str, ...] = ()
    large: tuple[str, ...] = (".safetensors",)
    fail_at: dict[str, int] = field(default_factory=dict)
    ignore_ranges: bool = False
    redirect_weights: bool = False
    fail_with: int | None = None
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> "HubServer":
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Go down, as a network does; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(
        self,
        repo_id: str,
        folder: Path,
        *,
        gated: bool = False,
        private: bool = False,
        branches: tuple[str, ...] = ("main",),
    ) -> Repo:
        """Serve a folder as a repository."""
        self.repos[repo_id] = Repo(folder, gated, branches, private)
        return self.repos[repo_id]

    @property
    def url(self) -> str:
        """The address for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def bytes_sent(self) -> int:
        """Bytes of all bodies sent so far."""
        return sum(request.bytes_sent for request in self.requests)

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """Environment in which a process takes this server for the Hub and `cache` for HF_HOME."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("HF_")
        }
        return {
            **inherited,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
            **more,
        }

    def run(self, *arguments: str, cache: Path, **more: str) -> "subprocess.CompletedProcess[str]":
        """Run Python with these arguments in that environment."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment(cache, **more),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


class _Handler(UploadAnswers, BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self._received())

    def do_PUT(self) -> None:
        self._answer(self._received())

    def _received(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent; `HubServer.requests` is the log."""

    def _answer(self, received: bytes = b"") -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        told = [status for part, status in self.hub.fail_at.items() if part in self.path]
        if self.hub.fail_with or told:
            status = self.hub.fail_with or told[0]
            self._fail(status, "Unavailable", "the stand-in is told to fail")
        elif self.hub.storage and self.takes_upload(parts, received):
            return
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            body = json.loads(received) if received else None
            self._answer_api("/".join(parts[2:4]), parts[4:], body)
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        elif parts[0] == "cdn" and len(parts) >= 4:
            self._send_file(self.hub.repos["/".join(parts[1:3])], "/".join(parts[3:]))
        else:
            self._fail(404, "NotFound", "no such address")

    def _answer_api(self, repo_id: str, rest: list[str], body: dict[str, object] | None) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        repo = self._find(repo_id, revision)
        if repo is None:
            return
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": name, **_listed(path)} for name, path in repo.files().items()]
            answer: object = {
                "id": repo_id,
                "modelId": repo_id,
                "sha": repo.commit,
                "private": repo.private,
                "gated": "manual" if repo.gated else False,
                "tags": [],
                "siblings": siblings,
            }
        else:
            wanted = body.get("paths") if rest[0] == "paths-info" and body else None
            answer = [
                {"type": "file", "path": name, "oid": _listed(path)["blobId"], **_listed(path)}
                for name, path in repo.files().items()
                if not isinstance(wanted, list) or name in wanted
            ]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _is_logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _answer_file(self, repo_id: str, revision: str, name: str) -> None:
        repo = self._find(repo_id, revision)
        if repo is None:
            return
        opened = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repo.gated and not opened:
            self._fail(401, "GatedRepo", f"Access to model {repo_id} is restricted.")
        elif name not in repo.files():
            self._fail(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": repo.commit})
        elif self.hub.redirect_weights and name.endswith((".safetensors", ".bin")):
            path = repo.files()[name]
            elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
            headers = {
                "Location": f"{elsewhere}/cdn/{repo_id}/{name}",
                "X-Repo-Commit": repo.commit,
                "X-Linked-Size": str(path.stat().st_size),
                "X-Linked-Etag": f'"{_etag(path)}"',
            }
            self._send(302, b"", headers)
        else:
            self._send_file(repo, name)

    def _send_file(self, repo: Repo, name: str) -> None:
        path = repo.files()[name]
        size = path.stat().st_size
        headers = {
            "ETag": f'"{_etag(path)}"',
            "X-Repo-Commit": repo.commit,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        asked = self.headers.get("Range")
        if asked is None or self.hub.ignore_ranges:
            self._send(200, path, headers, range(size))
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last) + 1 if last else size, size)
        if begin >= size:
            self._send(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._send(206, path, headers, range(begin, end))

    def _find(self, repo_id: str, revision: str) -> Repo | None:
        repo = self.hub.repos.get(repo_id)
        if repo is not None and repo.private and not self._is_logged_in():
            repo = None
        if repo is None:
            # As the Hub does for strangers, who shall not learn which names exist.
            self._fail(401, "RepoNotFound", "Invalid username or password.")
        elif revision not in (*repo.branches, repo.commit):
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repo

    def _send_body(self, body: bytes | Path, part: range) -> int:
        sent = 0
        try:
            for piece in _pieces(body, part):
                sent += self.wfile.write(piece)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        return sent

    def _fail(
        self, status: int, code: str, message: str, more: dict[str, str] | None = None
    ) -> None:
        body = json.dumps({"error": message}).encode()
        self._send(status, body, {"X-Error-Code": code, "X-Error-Message": message, **(more or {})})

    def _send(
        self,
        status: int,
        body: bytes | Path,
        headers: dict[str, str],
        part: range | None = None,
    ) -> None:
        part = range(len(body)) if isinstance(body, bytes) else part or range(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        sent = 0 if self.command == "HEAD" else self._send_body(body, part)
        self.hub.requests.append(
            Request(
                self.command,
                self.path,
                self.headers.get("Range"),
                self.headers.get("Authorization"),
                status,
                sent,
            )
        )


def _pieces(body: bytes | Path, part: range) -> Iterator[bytes]:
    """Cut a body up, so that a client that has read enough and hangs up is noticed."""
    if isinstance(body, bytes):
        yield body
        return
    with body.open("rb") as stream:
        for begin in range(part.start, part.stop, 65536):
            stream.seek(begin)
            yield stream.read(min(65536, part.stop - begin))


def _etag(path: Path) -> str:
    """Identify a version of a file; contents are not hashed, they may be sparse terabytes."""
    state = path.stat()
    return hashlib.sha256(f"{path} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()


def _listed(path: Path) -> dict[str, object]:
    return {"size": path.stat().st_size, "blobId": _etag(path)[:40]}
