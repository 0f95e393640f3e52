"""Reads a folder of class folders, as torchvision's ImageFolder has it. Each source can be pickled.

Classes and files have torchvision's order: the classes are numbered by the names of their folders.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loader.errors import EncodingError, LoaderError, WriterError
from loader.tools.row_sources import value_converter

FILES_OF_SOURCE = 1000  # files that one worker reads, so that sources are not as many as images
COLUMNS = {"image": "bytes", "class": "int", "name": "str"}
# Those of torchvision's ImageFolder.
ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

log = logging.getLogger("loader")


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Some images of a folder. names: their paths below it. classes: the number of the class of each."""

    path: str
    columns: Mapping[str, str]
    names: tuple[str, ...] = field(repr=False)
    classes: tuple[int, ...] = field(repr=False)

    @property
    def files(self) -> list[str]:
        """The paths of the images, one for each sample."""
        return [os.path.join(self.path, name) for name in self.names]

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples: image, class and name. Raises LoaderError, naming the file, if one cannot be read."""
        converts = {name: value_converter(encoding) for name, encoding in self.columns.items()}
        for path, name, number in zip(self.files, self.names, self.classes, strict=True):
            row: dict[str, Any] = {"class": number, "name": name}
            if "image" in converts:
                row["image"] = _content(path)
            try:
                yield {column: convert(row[column]) for column, convert in converts.items()}
            except (EncodingError, TypeError, ValueError) as problem:
                raise LoaderError(f"{path}: {problem}; choose another encoding with --columns") from None


def image_sources(folders: Sequence[str], columns: Mapping[str, str]) -> list[ImageFiles]:
    """Return the sources of one folder of class folders; files that are no images are left out, which is logged.

    columns: some of COLUMNS, with an encoding each. Raises LoaderError for several folders, for other columns, for a
    folder without classes, and for a class without images.
    """
    if len(folders) > 1:
        raise WriterError(f"{', '.join(folders)}: give one folder, whose folders are the classes")
    odd = [name for name in columns if name not in COLUMNS]
    if odd:
        raise WriterError(f"--columns {', '.join(odd)}: an image folder has the columns {', '.join(COLUMNS)}")
    if columns.get("image", "bytes") not in ("bytes", "jpeg", "png"):
        raise WriterError(f"--columns image:{columns['image']}: choose bytes, jpeg or png")
    folder = os.path.abspath(folders[0])
    names, classes = _images(folder)
    return [
        ImageFiles(folder, columns, tuple(names[start:stop]), tuple(classes[start:stop]))
        for start, stop in ((at, at + FILES_OF_SOURCE) for at in range(0, len(names), FILES_OF_SOURCE))
    ]


def _images(folder: str) -> tuple[list[str], list[int]]:
    """Return the images below a folder, relative to it, and the class of each."""
    labels = _class_names(folder)
    names: list[str] = []
    classes: list[int] = []
    others: list[str] = [name for name in _listed(folder) if name not in labels]
    for number, label in enumerate(labels):
        before = len(names)
        for path in _files_below(os.path.join(folder, label)):
            if path.lower().endswith(ENDINGS):
                names.append(os.path.relpath(path, folder))
            else:
                others.append(os.path.relpath(path, folder))
        if len(names) == before:
            raise LoaderError(f"{os.path.join(folder, label)} has no image, so it is no class: remove it")
        classes += [number] * (len(names) - before)
    if others:
        log.warning("left out files that are no images of a class: files=%d first=%s", len(others), others[0])
    return names, classes


def _class_names(folder: str) -> list[str]:
    labels = [name for name in _listed(folder) if os.path.isdir(os.path.join(folder, name))]
    if not labels:
        raise LoaderError(f"{folder} has no class folders: name the folder whose folders are the classes")
    return labels


def _listed(folder: str) -> Sequence[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as problem:
        raise _unreadable(problem, folder) from None


def _files_below(folder: str) -> Iterator[str]:
    def fail(problem: OSError) -> None:
        raise _unreadable(problem, folder)

    # Links to class folders are followed, as torchvision does. `sorted` over all, as its order is the sample order.
    for place, _, files in sorted(os.walk(folder, onerror=fail, followlinks=True)):
        yield from (os.path.join(place, name) for name in sorted(files))


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as problem:
        raise _unreadable(problem, path) from None


def _unreadable(problem: OSError, path: str) -> LoaderError:
    return LoaderError(
        f"{problem.filename or path} cannot be read: {problem.strerror}: check its path and its mode"
    )
