"""Reads tar files of samples, as WebDataset has them. Each source can be pickled for other processes.

The members of a sample stand side by side. The name up to the first dot of its last part is the sample's, the rest is
the column. A tar that is cut short or damaged is an error: Python's tarfile takes most damage for the end.
"""

import io
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, Self

from loader.errors import EncodingError, LoaderError, cause_text
from loader.tools.row_sources import Convert, open_unpacked, text_converter

SAMPLES_LOOKED_AT = 100  # samples that determine the columns; they may be images
PIECE_BYTES = 1 << 18  # bytes of a tar read at a time
DETECTED = {"txt": "str", "cls": "int", "json": "json"}

# Sample, column, name of the member, what returns its bytes; None for a member of no wanted column, which is left out.
Member = tuple[str, str, str, Callable[[], bytes] | None]


@dataclass(frozen=True, slots=True)
class TarRows:
    """The samples of one tar file: plain, `.gz`, `.tgz` or `.zst`.

    columns: name -> encoding. all_names: a member of no column is an error; else it is left out.
    """

    path: str
    columns: Mapping[str, str]
    all_names: bool = False

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples. Raises LoaderError, naming tar and member, for what is damaged or fits no column."""
        converts = {name: text_converter(name, encoding) for name, encoding in self.columns.items()}
        members = _members(self.path, None if self.all_names else self.columns.keys())
        for sample, group in groupby(members, key=itemgetter(0)):
            found: dict[str, Any] = {}
            for _, column, name, read in group:
                if read is None:
                    continue
                where = f"{self.path}, member {name}"
                if column in found:
                    raise LoaderError(
                        f"{where}: the sample {sample} has {column} twice: leave one of them out"
                    )
                if column not in converts:
                    raise LoaderError(
                        f"{where}: {column} is no column by the first samples of the first tar: name the columns that "
                        f"all samples have with --columns, and other members are left out"
                    )
                found[column] = _converted(converts[column], read(), f"{where}: {column}")
            missing = converts.keys() - found.keys()
            if missing:
                raise LoaderError(
                    f"{self.path}, sample {sample}: {', '.join(sorted(missing))} is missing: name the columns that all "
                    f"samples have with --columns, and put a sample's members side by side (tar --sort=name)"
                )
            yield {name: found[name] for name in self.columns}


def tar_columns(paths: Sequence[str]) -> dict[str, str]:
    """Return the columns by the first samples of the first tar. Raises LoaderError if they differ in their members."""
    path = paths[0]
    groups = groupby(_members(path, None), key=itemgetter(0))
    samples: list[list[str]] = []
    for _, group in islice(groups, SAMPLES_LOOKED_AT):
        samples.append([])
        for _, column, _, read in group:
            if read is not None:
                read()  # a member that is cut or damaged is named as such, not as the one before the next header
            samples[-1].append(column)
    if not samples:
        raise LoaderError(f"{path} has no sample to determine the columns from: name them with --columns")
    columns = dict.fromkeys(chain.from_iterable(samples))
    for name in columns:
        if not all(name in sample for sample in samples):
            raise LoaderError(
                f"{path}: {name} is missing in some samples: name the columns that all samples have with --columns, "
                f"and put a sample's members side by side (tar --sort=name)"
            )
    return {name: DETECTED.get(name, "bytes") for name in columns}


def _members(path: str, wanted: Collection[str] | None) -> Iterator[Member]:
    """Yield the members with an extension. Raises LoaderError for damage, and for links and odd names that are wanted.

    wanted: the columns whose members are read; None: all.
    """
    with _opened(path) as tar:
        while (info := tar.step()) is not None:
            sample, column = _split(info.name)
            if info.isdir():
                continue
            if wanted is not None and column not in wanted:
                if column:  # its sample may lack the wanted ones
                    yield sample, column, "", None
                continue
            if not info.isreg():
                raise LoaderError(
                    f"{path}, member {_shown(info.name)} is a link or no file: make the tar with "
                    f"`tar --dereference --hard-dereference`"
                )
            if not column:
                raise LoaderError(
                    f"{path}, member {_shown(info.name)} has no extension, which would name its column: name the "
                    f"columns with --columns, and other members are left out"
                )
            yield sample, column, _shown(info.name), partial(tar.content, info)


def _split(name: str) -> tuple[str, str]:
    """Return sample and column of a member's name; the column is "" without an extension."""
    folder, slash, base = name.rpartition("/")
    stem, _, column = base.partition(".")
    return f"{folder}{slash}{stem}", column.lower() if stem else ""


def _shown(name: str) -> str:
    """Return a name that can be printed: tarfile makes surrogates of bytes that are not UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


class _StrictInfo(tarfile.TarInfo):
    """A header. Where tarfile takes a damaged or missing one for the end of the tar, it is an error."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise tarfile.ReadError("it has no end mark") from None
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as problem:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"the next header is damaged: {problem}") from None


class _Tar:
    """A tar that is read from front to back. Every error names it and the member where it happened."""

    def __init__(self, path: str, file: io.BufferedIOBase) -> None:
        self._path = path
        self._where = "before its first member"
        with self._named():
            self._tar = tarfile.open(  # noqa: SIM115 -- it holds no more than `file`, which `_opened` closes
                fileobj=file, mode="r|", tarinfo=_StrictInfo, bufsize=PIECE_BYTES
            )

    def step(self) -> tarfile.TarInfo | None:
        """Return the next member, or None at the end of a whole tar."""
        with self._named():
            info = self._tar.next()
            self._tar.members = []  # type: ignore[attr-defined]  # else it keeps all headers
            if info is None:
                self._check_end()
                return None
        self._where = f"after the member {_shown(info.name)}"
        return info

    def content(self, info: tarfile.TarInfo) -> bytes:
        """Return the bytes of the member that `step` returned last."""
        self._where = f"member {_shown(info.name)}"
        with self._named():
            file = self._tar.extractfile(info)
            found = io.BytesIO()  # gives its bytes away without a copy, as joined pieces would be
            while file is not None and (piece := file.read(PIECE_BYTES)):
                found.write(piece)
            data = found.getvalue()
            if len(data) != info.size:
                raise tarfile.ReadError(f"{len(data)} of its {info.size} bytes are there")
        self._where = f"after the member {_shown(info.name)}"
        return data

    def _check_end(self) -> None:
        while piece := self._tar.fileobj.read(PIECE_BYTES):
            if piece.count(0) != len(piece):
                raise tarfile.ReadError(
                    "there is more behind its end mark, as in tars that were joined with cat"
                )

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as problem:
            raise LoaderError(
                f"{self._path}, {self._where}: {cause_text(problem)}; it is damaged, cut short, or not what its name "
                f"says: fetch it or make it again"
            ) from problem


@contextmanager
def _opened(path: str) -> Iterator[_Tar]:
    try:
        file = open_unpacked(path)
    except OSError as problem:
        raise LoaderError(f"{path} cannot be read: {problem.strerror}") from problem
    with file:
        yield _Tar(path, file)


def _converted(convert: Convert, data: bytes, where: str) -> Any:
    try:
        return convert(data)
    except (EncodingError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as problem:
        raise LoaderError(
            f"{where}: {cause_text(problem)}; mend it, or choose another encoding with --columns (bytes keeps any)"
        ) from None
