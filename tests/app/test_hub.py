"""app.hub: directories stay as they are, everything else is asked of the hub in another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import ConfigError
from app.hub import resolve_checkpoint


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
