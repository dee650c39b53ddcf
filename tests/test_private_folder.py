"""Files that only this user can have written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxpaged.private_folder import PrivateFolder


@pytest.fixture
def folder(tmp_path: Path) -> PrivateFolder:
    return PrivateFolder(tmp_path / "a" / "private")


def test_what_was_written_is_read(folder: PrivateFolder) -> None:
    assert folder.read("x") is None
    folder.write("x", b"one")
    folder.write("x", b"two")
    assert folder.read("x") == b"two"
    assert [path.name for path in folder.path.iterdir()] == ["x"], "a temporary file is left"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "x").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("bit", [0o020, 0o002])
def test_what_others_may_write_is_not_read(folder: PrivateFolder, bit: int) -> None:
    folder.write("x", b"one")
    file = folder.path / "x"
    file.chmod(0o600 | bit)
    assert folder.read("x") is None
    file.chmod(0o644)  # others may read it
    assert folder.read("x") == b"one"
    folder.path.chmod(0o700 | bit)
    assert folder.read("x") is None
    folder.write("y", b"two")
    assert not (folder.path / "y").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "x"])
def test_what_another_owns_is_not_read(folder: PrivateFolder, name: str) -> None:
    folder.write("x", b"one")
    os.chown(folder.path / name, 12345, -1)
    assert folder.read("x") is None


def test_a_link_to_another_users_file_is_judged_by_the_file(folder: PrivateFolder, tmp_path: Path) -> None:
    (tmp_path / "open").write_bytes(b"theirs")
    (tmp_path / "open").chmod(0o666)
    folder.write("x", b"one")
    (folder.path / "y").symlink_to(tmp_path / "open")
    assert folder.read("y") is None


def test_a_folder_that_cannot_be_made_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    folder = PrivateFolder(tmp_path / "file" / "inside")
    for name in ("x", "y"):
        folder.write(name, b"one")
        assert folder.read(name) is None
    (record,) = caplog.records
    assert "cannot be kept" in record.getMessage()
