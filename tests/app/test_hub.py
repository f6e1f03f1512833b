"""app.hub: directories stay as they are, everything else is asked of the hub in another process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from app.errors import ConfigError
from app.hub import resolve_checkpoint

COMMIT = "c0ffee" * 6 + "abcd"
REMOTE = {"config.json": b"{}", "model.safetensors": b"weights", "modeling.py": b"pass", "weights.bin": b"no"}


class Hub(BaseHTTPRequestHandler):
    """One repository, org/model, as huggingface_hub asks for it."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Silent."""

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        files = [{"rfilename": name} for name in REMOTE]
        content: bytes | None = None
        if path.startswith("/api/models/org/model/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in REMOTE.items()
            ]
            content = json.dumps(entries).encode()
        elif path.startswith("/api/models/org/model"):
            content = json.dumps({"id": "org/model", "sha": COMMIT, "siblings": files}).encode()
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            content = REMOTE.get(path.rpartition("/")[2])
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("ETag", f'"{hashlib.sha1(content or b"").hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body and content is not None:
            self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub is a server of this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("hub")
def test_only_safe_files_are_fetched_and_code_on_request_alone(tmp_path: Path) -> None:
    plain = resolve_checkpoint("org/model", "", str(tmp_path))
    assert {path.name for path in Path(plain).iterdir()} == {"config.json", "model.safetensors"}
    again = resolve_checkpoint("org/model", "", str(tmp_path), with_code=True)
    assert again == plain
    assert {path.name for path in Path(again).iterdir()} == {
        "config.json",
        "model.safetensors",
        "modeling.py",
    }


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(tmp_path), "", "") == str(tmp_path)


@pytest.mark.parametrize("text", ["/no/such/directory", "./nothing", "~/nothing", "a/b/c"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(text: str) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        resolve_checkpoint(text, "", "")


def test_a_snapshot_that_is_in_the_download_directory_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "models--org--model"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert resolve_checkpoint("org/model", "", str(tmp_path)) == str(snapshot)
    with pytest.raises(ConfigError, match="could not be had from the hub"):
        resolve_checkpoint("org/other", "", str(tmp_path))
