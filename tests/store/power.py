"""A disk that loses power: what was not synced may be gone, piece by piece, and each name by itself.

The model, harsher than a journaling file system:
- a file keeps the bytes of its last successful `sync_data`; of each 512-byte piece written since, any or none may be there,
  and its length may be any that it had since;
- a name in a directory is as of the last `sync_dir` of that directory, or as any later change of that name left it, independent
  of other names: after an unsynced rename there may be both names, or none;
- bytes whose sync failed are as good as never written: a later sync that succeeds does not bring them back.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.store_kit import FaultyFiles, crash
from support.sqlite_of import sqlite_of

from slotstream.store.samples import SampleStore
from slotstream.wire.hashing import Buffer

SECTOR = 512


@dataclass(eq=False)
class _Node:
    """A file: its durable bytes, and what was done since."""

    durable: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)  # Offset and length of pieces that can not become durable.

    def after_power_loss(self, rng: random.Random) -> bytes:
        data = bytearray(self.durable)
        for at, piece in self.writes:
            for start in range(0, len(piece), SECTOR):
                if rng.random() < 0.5:
                    part = piece[start : start + SECTOR]
                    data[len(data) :] = bytes(max(0, at + start + len(part) - len(data)))
                    data[at + start : at + start + len(part)] = part
        size = rng.choice([len(self.durable), *self.sizes])
        return bytes(data[:size]).ljust(size, b"\0")


class PowerFiles(FaultyFiles):
    """A disk whose durable state is known, with FaultyFiles' faults."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._open: dict[int, _Node] = {}
        self._live: dict[Path, _Node] = {}
        # Each name's durable target, then every one since; None: no such name. A directory is its own target: True.
        self._names: dict[Path, list[_Node | bool | None]] = {}
        for path in root.rglob("*"):  # What is there now has survived, and is durable.
            if path.parent == root and path.is_file():
                continue  # The lock and the catalogue, which this disk does not see.
            if path.is_file():
                self._live[path] = _Node(path.read_bytes())
            self._names[path] = [self._live.get(path, True)]

    def _named(self, path: Path, target: _Node | bool | None) -> None:
        self._names.setdefault(path, [None]).append(target)

    def make_dir(self, path: Path) -> None:
        existed = path.exists()
        super().make_dir(path)
        if not existed:
            self._named(path, True)

    def create(self, path: Path) -> int:
        fd = super().create(path)
        node = self._live[path] = self._open[fd] = _Node()
        self._named(path, node)
        return fd

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        super().close(fd)

    def preallocate(self, fd: int, nbytes: int) -> bool:
        done = super().preallocate(fd, nbytes)
        self._open[fd].sizes.append(self.size(fd))
        return done

    def pwrite(self, fd: int, data: Buffer, at: int) -> None:
        super().pwrite(fd, data, at)
        self._open[fd].writes.append((at, bytes(data)))
        self._open[fd].sizes.append(self.size(fd))

    def truncate(self, fd: int, nbytes: int) -> None:
        super().truncate(fd, nbytes)
        self._open[fd].sizes.append(nbytes)

    def sync_data(self, fd: int) -> None:
        node = self._open[fd]
        try:
            super().sync_data(fd)
        except OSError:
            node.lost += [(at, len(piece)) for at, piece in node.writes]
            node.writes.clear()
            raise
        data = bytearray(os.pread(fd, self.size(fd), 0))
        for at, length in node.lost:
            data[at : at + length] = bytes(length)
        node.durable = bytes(data)
        node.writes.clear()
        node.sizes.clear()

    def sync_dir(self, path: Path) -> None:
        super().sync_dir(path)
        for name, history in self._names.items():
            if name.parent == path:
                del history[:-1]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        node = self._live.pop(source)
        self._live[target] = node
        self._named(target, node)
        self._named(source, None)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if self._live.pop(path, None) is not None:
            self._named(path, None)

    def lose_power(self, target: Path, rng: random.Random) -> None:
        """Writes into `target` one of the trees that may be there when the power is back."""
        target.mkdir()
        for path in sorted(self._names, key=lambda p: len(p.parts)):
            chosen = rng.choice(self._names[path])
            after = target / path.relative_to(self._root)
            if chosen is True and after.parent.is_dir():
                after.mkdir()
            elif isinstance(chosen, _Node) and after.parent.is_dir():
                after.write_bytes(chosen.after_power_loss(rng))


def cut_log(source: Path, target: Path, synced: int, rng: random.Random) -> None:
    """Copies a catalogue as a power cut leaves it: its log whole up to `synced` bytes, and beyond that any part of it."""
    for name in ("catalog.sqlite", "catalog.sqlite-wal"):
        if not (source / name).exists():
            continue
        data = bytearray((source / name).read_bytes())
        if name.endswith("-wal") and len(data) > synced:
            for start in range(synced, len(data), SECTOR):
                if rng.random() < 0.3:
                    data[start : start + SECTOR] = bytes(len(data[start : start + SECTOR]))
            del data[rng.randint(synced, len(data)) :]
        (target / name).write_bytes(data)
    if (source / "catalog.sqlite.seal").exists():  # Synced whenever it is written.
        (target / "catalog.sqlite.seal").write_bytes((source / "catalog.sqlite.seal").read_bytes())


class Plugged:
    """A store on a disk that can lose power, and what is known of its catalogue's log."""

    def __init__(self, directory: Path, files: PowerFiles | None = None) -> None:
        """`files`: the disk of the process before this one, where only that one ended."""
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.files = files or PowerFiles(directory)
        self._log = directory / "catalog.sqlite-wal"
        self.synced = self._log_bytes()
        self.store = SampleStore.open(directory, files=self.files)
        if sqlite_of(self.store).was_shut_down_cleanly:
            self.synced = self._log_bytes()  # The mark was taken away durably.
        write = sqlite_of(self.store)._write_batch

        def written(batch: Any) -> bool:
            done = write(batch)
            if done and any(entry[2] for entry in batch) and all(entry[1].exception() is None for entry in batch):
                self.synced = self._log_bytes()
            return done

        sqlite_of(self.store)._write_batch = written  # type: ignore[method-assign]

    def _log_bytes(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def cut(self, target: Path, rng: random.Random, catalogue: str) -> None:
        """`target` becomes what the disk would hold now; the catalogue is kept, loses the end of its log, or is lost."""
        assert self._log_bytes() < 1000 * 4096, "a checkpoint began the log anew: `synced` would mean nothing"
        self.files.lose_power(target, rng)
        if catalogue != "lost":
            cut_log(self.directory, target, self._log_bytes() if catalogue == "kept" else self.synced, rng)

    def lose_power(self, target: Path, rng: random.Random, catalogue: str) -> None:
        """`cut`, and the end of the process."""
        self.cut(target, rng, catalogue)
        self.files.faults = {}
        self.files.crashed = False
        crash(self.store)
