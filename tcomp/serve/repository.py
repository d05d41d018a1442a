"""The models of a server: a folder that is looked at again and again, from which versions are loaded, replaced and dropped.

    models/NAME.tcomp                  version 1 of a model
    models/NAME/3/anything.tcomp       version 3; requests that name no version get the highest
    models/NAME/serving.json           how it is served (`tcomp.serve.options.ModelOptions`); may be left out

A file is replaced by renaming another over it (all writers of tcomp do). Requests go to the old model until the new one is loaded and
tried, and the old one answers those that it has. A new file that cannot be loaded is logged, and the old model stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tcomp.errors import InputError, TcompError
from tcomp.serve.metrics import Metrics
from tcomp.serve.options import CONFIGURATION, ModelOptions, ServerOptions, read_model_options
from tcomp.serve.refusals import Refusal, as_refusal
from tcomp.serve.served import Loaded, ServedModel

_log = logging.getLogger("tcomp.serve")
_VERSION = re.compile(r"[1-9]\d{0,17}")
_CLOSE_SECONDS = 600.0  # that requests of a model that was replaced may still take

Key = tuple[str, str]  # name and version
Stamp = tuple[tuple[int, int, int, int] | None, ...]  # of the files that a model is made of: device, inode, size and time of change


@dataclass(frozen=True, slots=True)
class Found:
    """An artifact in the folder. `stamp` is another one when it or its configuration was replaced."""

    artifact: Path
    configuration: Path | None
    stamp: Stamp


def _stamp(path: Path | None) -> tuple[int, int, int, int] | None:
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def scan(root: Path) -> dict[Key, Found]:
    """All models in a folder, or the one that is a file. Raises InputError if it cannot be read."""

    def found(artifact: Path, configuration: Path | None) -> Found:
        return Found(artifact, configuration, (_stamp(artifact), _stamp(configuration)))

    if root.is_file():
        return {(root.stem, "1"): found(root, None)}
    models: dict[Key, Found] = {}
    try:
        entries = sorted(root.iterdir())
    except OSError as problem:
        raise InputError("cannot read the folder of models", where=str(root), why=problem.strerror or str(problem)) from None
    for entry in entries:
        if entry.name.startswith("."):  # what is being written; ..data of Kubernetes
            continue
        if entry.suffix == ".tcomp" and entry.is_file():
            models[entry.stem, "1"] = found(entry, None)
            continue
        with suppress(OSError):  # it may have gone in the meantime
            for folder in entry.iterdir() if entry.is_dir() else ():
                artifacts = sorted(f for f in folder.iterdir() if f.suffix == ".tcomp") if folder.is_dir() else []
                if _VERSION.fullmatch(folder.name) and artifacts:
                    models[entry.name, folder.name] = found(artifacts[0], entry / CONFIGURATION)
    return models


class Repository:
    """The models that are served. Its methods belong to the event loop of the server."""

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        self._root, self._options, self._metrics = options.models, options, metrics
        self._serving: dict[Key, ServedModel] = {}
        self._stamps: dict[Key, Stamp] = {}  # of what was tried last, whether or not it could be loaded
        self._failures: dict[Key, str] = {}
        self._missing: set[Key] = set()  # of the first look at the folder, what could not be loaded yet
        self._looked = False
        self._unloaded: set[str] = set()
        self._changing = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def models(self) -> list[ServedModel]:
        """All versions that are served, by name and version."""
        return [self._serving[key] for key in sorted(self._serving, key=lambda k: (k[0], int(k[1])))]

    @property
    def ready(self) -> bool:
        """Whether all is served that was there at the start. What comes later and cannot be loaded is logged, and keeps nobody out."""
        return not self._missing

    def find(self, name: str, version: str = "") -> ServedModel:
        """A version of a model, the highest if none is named. Raises Refusal: it is unknown, or not ready."""
        versions = [v for n, v in self._serving if n == name]
        if version in versions or (versions and not version):
            return self._serving[name, version or max(versions, key=int)]
        what = f"model {name[:80]!r}{f' version {version[:20]}' * bool(version)}"
        if failed := [why for (n, v), why in self._failures.items() if n == name and version in ("", v)]:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"{what} could not be loaded", why=failed[0])
        if name in self._unloaded:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"{what} is unloaded")
        raise Refusal(HTTPStatus.NOT_FOUND, f"there is no {what}", hint="POST /v2/repository/index lists all models")

    def index(self, only_ready: bool = False) -> list[dict[str, str]]:
        """Name, version, state and reason of all models."""
        rows = [{"name": m.name, "version": m.version, "state": "READY", "reason": ""} for m in self.models]
        if not only_ready:
            states = {key: why for key, why in self._failures.items() if key not in self._serving}
            rows += [{"name": n, "version": v, "state": "UNAVAILABLE", "reason": why} for (n, v), why in sorted(states.items())]
            rows += [{"name": name, "version": "", "state": "UNAVAILABLE", "reason": "unloaded"} for name in sorted(self._unloaded)]
        return rows

    async def refresh(self) -> None:
        """Serve what is in the folder now. What cannot be loaded is logged. Raises InputError if the folder cannot be read."""
        async with self._changing:
            found = await asyncio.to_thread(scan, self._root)
            for key in [key for key in self._stamps if key not in found]:
                self._drop(key)
            for key, what in found.items():
                if key[0] not in self._unloaded and what.stamp != self._stamps.get(key):
                    await self._replace(key, what)
            if not self._looked:
                self._looked, self._missing = True, set(self._failures)

    async def look(self) -> None:
        """As `refresh`; a folder that cannot be read is logged."""
        try:
            await self.refresh()
        except InputError as problem:
            _log.error("the folder of models cannot be read", extra={"why": str(problem)})

    async def load(self, name: str) -> None:
        """Load all versions of a model anew. Raises Refusal if there is none, or one could not be loaded."""
        async with self._changing:
            found = {key: what for key, what in (await asyncio.to_thread(scan, self._root)).items() if key[0] == name}
            if not found:
                raise Refusal(HTTPStatus.NOT_FOUND, f"there is no model {name[:80]!r} in the folder")
            self._unloaded.discard(name)
            for key in [key for key in self._stamps if key[0] == name and key not in found]:
                self._drop(key)
            for key, what in found.items():
                await self._replace(key, what)
            if failed := [self._failures[key] for key in found if key in self._failures]:
                raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, f"model {name!r} could not be loaded", why=failed[0])

    async def unload(self, name: str) -> None:
        """Serve a model no more, until it is loaded again. Raises Refusal if it is not there."""
        async with self._changing:
            keys = [key for key in self._stamps if key[0] == name]
            if not keys:
                raise Refusal(HTTPStatus.NOT_FOUND, f"there is no model {name[:80]!r}")
            self._unloaded.add(name)
            for key in keys:
                self._drop(key)

    async def close(self) -> None:
        """Answer what waits, and end all models."""
        async with self._changing:
            for key in list(self._serving):
                self._drop(key)
        await asyncio.gather(*self._retiring)

    async def _replace(self, key: Key, found: Found) -> None:
        self._stamps[key] = found.stamp
        name, version = key
        fields: dict[str, Any] = {"model": name, "version": version}
        try:
            loaded = await asyncio.to_thread(self._load, found)
        except TcompError as problem:
            self._failures[key] = as_refusal(problem).message
            self._metrics.loads.labels(name, "failed").inc()
            _log.error("a model could not be loaded", extra=fields | {"why": str(problem)})
            return
        self._failures.pop(key, None)
        self._missing.discard(key)
        self._metrics.loads.labels(name, "loaded").inc()
        before = self._serving.get(key)
        slow = None if self._options.slow_ms is None else self._options.slow_ms / 1e3
        self._serving[key] = ServedModel(name, version, loaded, self._metrics, slow)
        _log.info("loaded a model", extra=fields | loaded.batching)
        if before is not None:
            self._retire(before, forget=False)

    def _load(self, found: Found) -> Loaded:
        options: ModelOptions = self._options.model
        if found.configuration is not None:
            options = read_model_options(found.configuration, options)
        return Loaded(found.artifact, options, self._options.trusted)

    def _drop(self, key: Key) -> None:
        self._stamps.pop(key, None)
        self._failures.pop(key, None)
        self._missing.discard(key)
        if (model := self._serving.pop(key, None)) is not None:
            _log.info("dropped a model", extra={"model": key[0], "version": key[1]})
            self._retire(model, forget=True)

    def _retire(self, model: ServedModel, forget: bool) -> None:
        """Close a model when nobody uses it any more."""

        async def closing() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    while model.users:
                        await asyncio.sleep(0.01)
            await model.close()
            model.metrics.end(series=forget and (model.name, model.version) not in self._serving)

        task = asyncio.create_task(closing())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


@asynccontextmanager
async def every(seconds: float, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """`work` is done every so many seconds while the block runs; never, if they are 0."""

    async def working() -> None:
        while True:
            await asyncio.sleep(seconds)
            await work()

    task = asyncio.create_task(working()) if seconds else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
