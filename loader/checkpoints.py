"""Finds the checkpoint that a run resumes from."""

import errno
import logging
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from loader.base.paths import check_is_local, mount_advice, natural_key
from loader.errors import LoaderError

log = logging.getLogger(__name__)

_NUMBERED = re.compile(
    r"(?:checkpoint[-_]|(?:global_?)?step[-_=]?)(\d+)(?:\.pt)?|ep\d+-ba(\d+)(?:-rank0\.pt)?|.*step=(\d+).*\.ckpt"
)
_NOT_NUMBERED = re.compile(r"latest-rank0\.pt|.*\.ckpt")
# What programs put around the name of a file or folder that is not finished.
_TEMPORARY = re.compile(r"^(?:\.|tmp[-_.])+|(?:\.(?:tmp|part|partial|incomplete)(?:[-_.]\w*|\d*)|~)$")
_TRAINER, _DCP, _LIGHTNING = "trainer_state.json", ".metadata", "meta.pt"
# Files that are empty when they are complete.
_EMPTY_MARKER = re.compile(r"_SUCCESS|.*\.done")
_OF_RSYNC = re.compile(r"\..+\.\w{6}")  # .model.safetensors.Ab12Cd
_ZIP_START = b"PK\x03\x04"
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """What may be a checkpoint, by its name. step: -1 if the name has none."""

    step: int
    path: Path


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the newest whole checkpoint in a directory; None if there is none.

    It looks at the entries of the directory itself, on a mount or a local disk:

    - `checkpoint-N` of Hugging Face's Trainer: whole with `trainer_state.json`.
    - A step folder of torch.distributed.checkpoint (DCP), also Composer's `epE-baN`: whole with `.metadata`.
    - `*.ckpt` of Lightning: a file, or a folder that is whole with `meta.pt`.
    - Composer's `epE-baN-rank0.pt`, and the link `latest-rank0.pt`.
    - Plain `step-N`, `step_N`, `step=N`, `global_stepN` and `checkpoint_N`, folders or files, also with `.pt`. What
      DeepSpeed wrote is whole once the file `latest` beside it names it, or a later one.

    A checkpoint without a marker is whole if it has no temporary name, is not empty, has no empty or temporary file
    in it, and if it is a file of `torch.save`, has its end. A plain folder that another node still uploads can look
    whole: save one file, or with DCP. Each checkpoint that is skipped is logged with the reason, at level info.

    Newest is the highest step (Lightning's `step=N`, Composer's `baN`). A checkpoint without a step in its name, such
    as `last.ckpt`, counts if its time is later: that of the file; for a folder, that of its marker or newest file. In a
    run of several ranks let rank 0 choose, and broadcast the path.
    Raises LoaderError if the directory or a checkpoint cannot be read, as when the bucket does not answer, and
    ArgumentError for a URL. A directory that does not exist has no checkpoint.
    """
    check_is_local(directory)
    try:
        found = _candidates(Path(directory))
        numbered = _newest_whole([each for each in found if each.step >= 0])
        other = _newest_whole([each for each in found if each.step < 0])
        newest = max(numbered, other, key=_modified_ns) if numbered and other else numbered or other
    except OSError as problem:
        advice = mount_advice(problem, directory) or "Check the path and its permissions."
        raise LoaderError(
            f"{problem.filename or directory} cannot be read: {problem.strerror}. {advice}"
        ) from problem
    if newest is None:
        log.info("no whole checkpoint directory=%s candidates=%d", directory, len(found))
        return None
    return newest.path


def _candidates(directory: Path) -> list[_Candidate]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        path, final = directory / name, _TEMPORARY.sub("", name)
        match = _NUMBERED.fullmatch(final)
        if not match and not _NOT_NUMBERED.fullmatch(final):
            continue
        if name != final:
            _skip(path, "its name is temporary")
            continue
        step = int(next(filter(None, match.groups()))) if match else -1
        found.append(_Candidate(step, path))
    return found


def _newest_whole(candidates: list[_Candidate]) -> _Candidate | None:
    for each in _newest_first(candidates):
        try:
            problem = _folder_problem(each.path) if each.path.is_dir() else _file_problem(each.path)
        except OSError as error:
            _skip_if_gone(each.path, error)
            continue
        if not problem:
            return each
        _skip(each.path, problem)
    return None


def _newest_first(candidates: list[_Candidate]) -> Iterator[_Candidate]:
    for _, group in groupby(sorted(candidates, reverse=True), key=lambda each: each.step):
        same_step = list(group)
        if len(same_step) > 1:
            same_step.sort(key=_modified_ns, reverse=True)
        yield from same_step


def _modified_ns(candidate: _Candidate) -> int:
    """Return when a checkpoint was written, since 1970; -1 if it is gone.

    A folder's own time does not tell: on a mount it is when this node last saw a name in it change.
    """
    path = candidate.path
    try:
        if not path.is_dir():
            return path.stat().st_mtime_ns
        for marker in (_LIGHTNING, _DCP, _TRAINER):
            if (path / marker).exists():
                return (path / marker).stat().st_mtime_ns
        files = (Path(place, name) for place, _, names in os.walk(path, onerror=_raise) for name in names)
        return max((file.stat().st_mtime_ns for file in files), default=-1)
    except OSError as problem:
        if problem.errno not in _GONE:
            raise
        return -1


def _skip_if_gone(path: Path, problem: OSError) -> None:
    if problem.errno not in _GONE:
        raise problem
    _skip(path, "a link without its target" if path.is_symlink() else "it was removed just now")


def _skip(path: Path, reason: str) -> None:
    log.info("skipped checkpoint=%s reason=%s", path, reason)


def _file_problem(path: Path) -> str:
    with open(path, "rb") as file:
        start = file.read(len(_ZIP_START))
        if not start:
            return "it is empty"
        return "its end is missing" if start == _ZIP_START and not zipfile.is_zipfile(file) else ""


def _folder_problem(folder: Path) -> str:
    """Return why a folder is no whole checkpoint; "" if it is one."""
    names = set(os.listdir(folder))
    marker = next((each for each in (_TRAINER, _DCP) if each in names), "")
    if marker == _DCP and folder.suffix == ".ckpt":
        marker = _LIGHTNING
    if not marker and folder.name.startswith("checkpoint-"):
        marker = _TRAINER
    if marker and marker not in names:
        return f"no {marker}"
    if marker:
        return "" if (folder / marker).stat().st_size else f"{marker} is empty"
    is_empty = True
    for place, _, files in os.walk(folder, onerror=_raise):
        if problem := _place_problem(Path(place), files):
            return problem
        is_empty = is_empty and not files
    return "it is empty" if is_empty else ""


def _place_problem(place: Path, files: list[str]) -> str:
    """Return why the files of one folder of a checkpoint are not whole; "" if they are."""
    if _DCP not in files and any(name.endswith(".distcp") for name in files):
        return f"no {_DCP}"
    if any(name.endswith("_model_states.pt") for name in files) and not _is_named(place):
        return "the file `latest` does not name it yet"
    for name in files:
        if _EMPTY_MARKER.fullmatch(name):
            continue
        if _OF_RSYNC.fullmatch(name) or _TEMPORARY.search(name.removeprefix(".")):
            return f"{name} has a temporary name"
        if not name.startswith(".") and not (place / name).stat().st_size:
            return f"{name} is empty"
    return ""


def _is_named(folder: Path) -> bool:
    """Return whether DeepSpeed's `latest` names a folder, or one of a later step; a damaged one names none."""
    latest = folder.parent / "latest"
    if not latest.exists():
        return False
    name = latest.read_text("utf-8", errors="replace").strip()
    return "\ufffd" not in name and natural_key(name) >= natural_key(folder.name)


def _raise(problem: OSError) -> None:
    raise problem
