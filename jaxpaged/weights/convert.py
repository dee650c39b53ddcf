"""Conversion of a Hugging Face folder or GGUF file into an orbax checkpoint with everything else beside it.

DST/weights/                orbax checkpoint
DST/config.json, generation_config.json, tokenizer files, chat template
DST/jaxpaged.json           the marker, written last: without it the folder is no model
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.config import format_size
from jaxpaged.errors import ConvertError, ModelLoadError
from jaxpaged.weights.files import MARKER, PARTIAL, WEIGHTS, ModelFiles, resolve
from jaxpaged.weights.loader import (
    abstract_model,
    load_config,
    load_generation_config,
    load_tokenizer,
    open_reader,
    read_hf_config,
)
from jaxpaged.weights.marker import Marker
from jaxpaged.weights.names import check_tensors, parameters
from jaxpaged.weights.reader import TensorReader, dtype_of, stored_shapes

if TYPE_CHECKING:
    from jaxpaged.weights.checkpoint import LazyTensor

_TOKENIZER_FILES = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
# Room for the small files and for orbax's own: shape tables, index nodes.
_MARGIN_BYTES = 64 << 20


def convert(
    src: str | Path | ModelFiles,
    dst: str | Path,
    *,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Write the model `src` as a converted folder `dst`, one tensor at a time.

    Everything goes into a folder beside `dst` first, which takes the name `dst` when it is complete.

    Args:
        src: a Hugging Face folder, a GGUF file, a hub name or a catalog name.
        dtype: of the written weights; "auto" keeps the stored one, for quantized weights bfloat16.
        overwrite: replace a converted folder `dst`. Anything else that is there is never removed.
        progress: show a progress bar on stderr.

    Returns:
        The absolute path of `dst`.

    Raises:
        ModelLoadError: `src` is missing, damaged, not supported or does not fit its config.
        ConvertError: `dst` exists, its disk is too small, or writing failed.
    """
    dst = Path(dst).expanduser().resolve()
    _check_destination(dst, overwrite)
    files = resolve(src)
    if files.kind == "converted":
        raise ModelLoadError(f"{files.path} is converted already; convert from the original model")
    config = load_config(files)
    name = config.dtype if dtype == "auto" else dtype_of(dtype).name
    shapes = {key: variable.shape for key, variable in parameters(abstract_model(config, name)).items()}
    reader = open_reader(files)
    check_tensors(shapes, stored_shapes(reader), source=files.path)
    marker = Marker(dtype=name, parameters=shapes)
    with _finished_folder(dst, sum(map(prod, shapes.values())) * dtype_of(name).itemsize) as folder:
        _write_companions(files, folder, name)
        with _progress_bar(len(shapes), dst.name, shown=progress) as advance:
            from jaxpaged.weights.checkpoint import save

            save(folder / WEIGHTS, _lazy_tensors(reader, marker, advance))
        (folder / MARKER).write_text(marker.to_json())
    return dst


def _check_destination(dst: Path, overwrite: bool) -> None:
    for leftover in sorted(dst.parent.glob(f"{dst.name}{PARTIAL}*")):
        print(f"note: {leftover} is what an interrupted conversion left; remove it to free its space", file=sys.stderr)
    if dst.is_dir() and not any(dst.iterdir()):
        return
    if dst.exists():
        if not overwrite:
            raise ConvertError(f"{dst} exists; choose another destination, or overwrite it (--overwrite)")
        if not (dst / MARKER).is_file():
            raise ConvertError(f"{dst} is not a converted model, so it is not overwritten; choose another destination")


def _lazy_tensors(reader: TensorReader, marker: Marker, advance: Callable[[], None]) -> dict[str, LazyTensor]:
    from jaxpaged.weights.checkpoint import LazyTensor

    dtype = dtype_of(marker.dtype)

    def lazy(name: str, shape: tuple[int, ...]) -> LazyTensor:
        def read() -> Any:
            advance()
            return reader.read(name, dtype)

        return LazyTensor(shape, dtype, read)

    return {name: lazy(name, shape) for name, shape in marker.parameters.items()}


def _write_companions(files: ModelFiles, folder: Path, dtype: str) -> None:
    """Config, generation config and tokenizer; the tokenizer is loaded to see that it fits the model."""
    config = {key: value for key, value in read_hf_config(files).items() if key != "torch_dtype"}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))
    if files.kind == "gguf":
        load_tokenizer(files).save_pretrained(str(folder))
        generation = asdict(load_generation_config(files))
        generation["eos_token_id"] = list(generation.pop("eos_token_ids"))
        known = {key: value for key, value in generation.items() if value not in (None, [])}
        (folder / "generation_config.json").write_text(json.dumps(known, indent=2))
        return
    load_generation_config(files)
    found = [path for pattern in _TOKENIZER_FILES for path in files.path.glob(pattern)]
    if found:
        load_tokenizer(files)
    for path in (*found, files.path / "generation_config.json"):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if not found:
        print(f"note: {files.path} has no tokenizer, so the converted model has none either", file=sys.stderr)


@contextmanager
def _finished_folder(dst: Path, weight_bytes: int) -> Iterator[Path]:
    """A new folder beside `dst` that takes its place if the block succeeds, and goes away if it does not."""
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(dst.parent).free
        if free < weight_bytes + _MARGIN_BYTES:
            raise ConvertError(
                f"{dst.parent} has {format_size(free)} free, but the model takes "
                f"{format_size(weight_bytes + _MARGIN_BYTES)}; free some space or choose another disk"
            )
        folder = dst.with_name(f"{dst.name}{PARTIAL}{secrets.token_hex(4)}")
        folder.mkdir()
    except OSError as error:
        raise ConvertError(f"cannot write to {dst.parent}: {error}") from error
    try:
        yield folder
        _sync(folder)
        _take_place(folder, dst)
    except (ModelLoadError, ConvertError):
        raise
    except Exception as error:  # tensorstore reports a full disk as ValueError, others as OSError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConvertError(f"writing {dst} failed, and nothing was kept: {reason[:300]}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _take_place(folder: Path, dst: Path) -> None:
    """Rename `folder` to `dst`. An old `dst` is moved aside first and removed only when the new one is there."""
    old = folder.with_name(f"{folder.name}-replaced")
    if dst.exists():
        dst.rename(old)
    try:
        folder.rename(dst)
    except OSError:
        if old.exists():
            old.rename(dst)
        raise
    _sync_path(dst.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Have everything in `folder` on the disk itself before what follows is written."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync_path(Path(parent, name))
        _sync_path(Path(parent))


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _progress_bar(total: int, title: str, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Gives a function to call for each tensor."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tensors"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
