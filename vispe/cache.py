"""Many results in one HDF5 file, kept through anything that may stop the run that makes them.

An entry has a name (any file name survives), numpy arrays, plain attributes and a ``sha256``: the fingerprint of what
it was made from. The file says in its attribute ``made`` (JSON) how all of them were made. It takes on its new content
in one step, when everything is there; it has one writer at a time and any number of readers.

While it is being made, ``<name>.part`` is a folder of small files, each whole or absent, of one or a few entries; a run
that was stopped, even killed, goes on from them. HDF5 itself promises nothing about a file whose writer was killed.
Several processes, on several machines with one disk, may fill that folder together: each writes files of its own, and
the first of them puts the whole together once all are done.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import quote, unquote_to_bytes

import h5py
import numpy as np

from vispe.files import atomic

SHARDS = "[!.]*.h5"  # not what `atomic` had begun when a run was killed
MOST, LONG = 3, 40  # differences that are told, and letters of a value that is told


@dataclass(frozen=True, eq=False)
class Entry:
    """One result: its arrays and attributes, without the fingerprint."""

    arrays: dict[str, np.ndarray]
    attributes: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Team:
    """The processes that fill a file together: this one's ``rank`` of ``size``, and how it waits for the others."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], object] = lambda: None

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """This process's own run of consecutive ``items``; together the shares are all of them, once."""
        return items[self.rank * len(items) // self.size : (self.rank + 1) * len(items) // self.size]


class CacheWriter:
    """Collects entries for ``path``; see the head of this file.

    A file that is there already and was ``made`` alike is extended; another is refused (``ValueError``, ``otherwise``
    says what to do), never replaced. After an interruption what was done stays for the next writer that makes it alike;
    after an error it is removed, unless ``keep``. An entry is on the disk once ``batch`` of them wait, or ``seconds``
    have passed since the last were written: no more than that is ever lost.

    ``names``: what must be there when the block ends, in this order, ahead of everything else that is there, or with
    ``exact`` instead of it; None: whatever was added.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        made: Mapping[str, Any],
        *,
        names: Sequence[str] | None = None,
        exact: bool = False,
        keep: bool = False,
        batch: int = 1,
        seconds: float = 0.0,
        team: Team = Team(),
        otherwise: str = "give --out another name",
    ) -> None:
        self.otherwise = otherwise
        self.path, self.made = Path(path), json.dumps(made, sort_keys=True)
        self.names, self.exact, self.keep, self.batch, self.seconds, self.team = (
            names,
            exact,
            keep,
            batch,
            seconds,
            team,
        )
        if self.path.is_dir():
            raise ValueError(f"cannot write {str(self.path)!r}: it is a folder; name a file, such as features.h5 in it")
        if not self.path.parent.is_dir():
            raise ValueError(f"cannot write {str(self.path)!r}: there is no folder {str(self.path.parent)!r}")
        self.part = self.path.with_name(self.path.name + ".part")
        self.hashes = self._extended() if self.path.exists() else {}
        self.finished = dict(self.hashes)
        self.waiting: dict[str, tuple[Entry, str]] = {}
        self.written = time.monotonic()

    def _extended(self) -> dict[str, str]:
        """The fingerprint of each entry in the file that is there."""
        with closing(CacheReader(self.path)) as old:
            if json.dumps(old.made, sort_keys=True) != self.made:
                told = difference(old.made, json.loads(self.made))
                raise ValueError(f"will not replace {str(self.path)!r}: it was made with {told}; {self.otherwise}")
            return old.hashes()

    def __enter__(self) -> Self:
        if self.team.rank == 0:
            self.lock = self._opened()
        self.team.wait()
        for shard in self._shards():
            try:
                with h5py.File(shard, "r") as file:
                    found = {key: group.attrs["sha256"] for key, group in file.items()}
            except (OSError, KeyError):  # half of something: its entries are made again
                with suppress(FileNotFoundError):
                    shard.unlink()
            else:
                self.hashes.update(found)
        return self

    def _shards(self) -> list[Path]:
        """The small files, oldest first: their names begin with the time."""
        return sorted(self.part.glob(SHARDS), key=lambda path: path.name)

    def _opened(self) -> IO[str]:
        """The folder, emptied of what was made otherwise, and its lock, which ends with this process however it ends:
        two runs would empty each other's folder."""
        if self.part.exists() and not self.part.is_dir():
            self.part.unlink()
        self.part.mkdir(exist_ok=True)
        lock = (self.part / "lock").open("w")
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not a POSIX system
            pass
        except OSError as error:
            lock.close()
            raise ValueError(f"another run is writing {str(self.path)!r}; wait for it or name another file") from error
        made = self.part / "made.json"
        if not (made.is_file() and made.read_text(encoding="utf-8") == self.made):
            for old in self.part.glob("*.h5"):
                old.unlink()
        with atomic(made) as path:
            path.write_text(self.made, encoding="utf-8")
        return lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lead = self.team.rank == 0
        try:
            if kind is None or self.keep:
                self._flush()
            if kind is None:
                self.team.wait()
                if lead:
                    self._assemble()
                self.team.wait()
            useless = kind is not None and issubclass(kind, Exception) and not (self.keep and self._shards())
            if lead and (kind is None or useless):
                shutil.rmtree(self.part)
        finally:
            if lead:
                self.lock.close()

    def __len__(self) -> int:
        return len(self.hashes)

    def has(self, name: str, sha256: str) -> bool:
        """Whether ``name`` is there already, made from what has this fingerprint."""
        return self.hashes.get(as_key(name)) == sha256

    def add(self, name: str, arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any], sha256: str) -> None:
        """Store an entry; with ``batch=1`` it is safe from the moment this returns."""
        key = as_key(name)
        self.waiting[key] = (Entry(dict(arrays), dict(attributes)), sha256)
        self.hashes[key] = sha256
        if len(self.waiting) >= self.batch or time.monotonic() - self.written >= self.seconds:
            self._flush()

    def _flush(self) -> None:
        if self.waiting:
            shard = self.part / f"{time.time_ns():020d}-{self.team.rank}-{secrets.token_hex(4)}.h5"
            with atomic(shard) as path, h5py.File(path, "w", libver="latest", track_order=True) as file:
                for key, (entry, sha256) in self.waiting.items():
                    group = file.create_group(key)
                    for name, array in entry.arrays.items():
                        group.create_dataset(name, data=array, **_checked(array))
                    for name, value in entry.attributes.items():
                        group.attrs[name] = value
                    group.attrs["sha256"] = sha256  # the last: a group without it is not whole
        self.waiting, self.written = {}, time.monotonic()

    def _assemble(self) -> None:
        """The new file: each entry from the newest place that has it, in the order asked for, or as it was made."""
        places: dict[str, Path] = {}
        if self.finished:
            places = dict.fromkeys(self.finished, self.path)
        for shard in self._shards():
            with h5py.File(shard, "r") as file:
                places.update(dict.fromkeys(file, shard))
        keys = [as_key(name) for name in self.names or ()]
        if lost := [key for key in keys if key not in places]:
            raise ValueError(
                f"{str(self.path)!r} is not complete: {len(lost)} of {len(keys)} entries are missing, the first is "
                f"{as_name(lost[0])!r}; run it again"
            )
        keys = keys if self.exact else list(dict.fromkeys([*keys, *places]))
        if self.path.exists() and keys == list(self.finished) and all(places[key] == self.path for key in keys):
            return  # nothing is new
        with atomic(self.path) as path, h5py.File(path, "w", libver="latest", track_order=True) as file:
            file.attrs["made"] = self.made
            for place, run in _runs(keys, places):
                with h5py.File(place, "r") as source:
                    for key in run:
                        source.copy(key, file)


def _checked(array: np.ndarray) -> dict[str, Any]:
    """HDF5's own checksum, for arrays that have anything in them: a damaged one is an error when it is read."""
    return {"fletcher32": True, "chunks": array.shape} if array.size else {}


def _runs(keys: Iterable[str], places: Mapping[str, Path]) -> Iterator[tuple[Path, list[str]]]:
    """Neighbours that lie in the same file, together."""
    run: list[str] = []
    for key in keys:
        if run and places[run[0]] != places[key]:
            yield places[run[0]], run
            run = []
        run.append(key)
    if run:
        yield places[run[0]], run


class CacheReader:
    """A finished file: ``made``, ``names()`` in their order, ``read(name)``. Close it, or use it in a ``with``.

    ``ValueError`` when the file is damaged or none of ours, ``OSError`` when it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if not os.path.exists(path):
            raise FileNotFoundError(2, "No such file", self.path)
        try:
            self.file = h5py.File(path, "r")
            self.made: dict[str, Any] = json.loads(self.file.attrs["made"])
        except PermissionError:
            raise PermissionError(13, "Permission denied", self.path) from None
        except (OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{self.path!r} is damaged, or not a file that vispe made") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()

    def __len__(self) -> int:
        return len(self.file)

    def __contains__(self, name: str) -> bool:
        return as_key(name) in self.file

    def names(self) -> list[str]:
        """The entries' names, in the order they were asked for."""
        with self._readable():
            return [as_name(key) for key in self.file]

    def hashes(self) -> dict[str, str]:
        """Key -> fingerprint."""
        with self._readable():
            return {key: group.attrs["sha256"] for key, group in self.file.items()}

    def sha256(self, name: str) -> str:
        """The fingerprint of what ``name`` was made from; ``KeyError`` when it is not there."""
        with self._readable():
            return str(self._group(name).attrs["sha256"])

    def read(self, name: str, arrays: Sequence[str] | None = None) -> Entry:
        """The entry, or only some of its arrays; ``KeyError`` when there is none of that name."""
        group = self._group(name)
        with self._readable():
            wanted = group if arrays is None else [array for array in arrays if array in group]
            attributes = {key: value for key, value in group.attrs.items() if key != "sha256"}
            return Entry({array: group[array][()] for array in wanted}, attributes)

    def _group(self, name: str) -> Any:
        with self._readable():
            found = self.file[as_key(name)] if name in self else None
        if found is None:
            raise KeyError(f"{self.path!r} has no entry {name!r}")
        return found

    def _readable(self) -> Any:
        return _Damage(self.path)


class _Damage:
    """Turns HDF5's complaints about the bytes into a sentence."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and issubclass(kind, (OSError, LookupError, RuntimeError, AttributeError, TypeError)):
            raise ValueError(f"{self.path!r} is damaged: remove it and run it again") from error


def as_key(name: str) -> str:
    """A name as a key of HDF5: percent-encoded, so that any bytes of a file name survive."""
    key = quote(os.fsencode(name), safe="")
    return "%2E" if key == "." else key  # HDF5's name of the group itself


def as_name(key: str) -> str:
    """The name of a key."""
    return os.fsdecode(unquote_to_bytes(key))


def difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What two ways of making differ in, in a few words: ``"resize 480, not 1024"``, ``"other weights"``."""
    odd = [k for k in {**was, **now} if was.get(k) != now.get(k)]
    if "weights" in odd:  # then a network's shape and its labels differ for the same reason
        odd = [k for k in odd if k != "categories" and not k.startswith("spec.")]
    told = [_differing(k, was.get(k), now.get(k)) for k in odd]
    return ", ".join(told[:MOST]) + (f" and {len(told) - MOST} more" if len(told) > MOST else "")


def _differing(name: str, one: object, other: object) -> str:
    if max(len(repr(one)), len(repr(other))) > LONG:  # hashes, tables
        return f"other {name}"
    return f"{name} {one!r}, not {other!r}"
