"""The folder of a run: what is on disk survives an interruption at any moment.

    DIR/run.json            what is run: spec, versions of the protocol; its absence means a folder that is no run
    DIR/plans/ARM.json      each arm's plan from the launcher
    DIR/machine.json        the machine and the libraries
    DIR/samples/007-ARM/    one boot: logs, bench.json, answers.json, and sample.json, which is written last
    DIR/verdict.json, report.md, report.html, record.yaml
    DIR/finished.json       written last of all: from then on nothing in DIR is changed

Every file that is read back is replaced as a whole. ``sample.json`` carries the digests of the files beside it, so
that a sample whose files were cut off is found, set aside and measured again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ab_runs.schedule import Slot
from ab_runs.spec import SpecError

FORMAT = 1


class StoreError(SpecError):
    """A run folder that cannot be used as asked. The message says which and what to do."""


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` as a whole, on disk before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file. Keys keep their order: the first arm of a spec is its base."""
    write_text(path, json.dumps(content, indent=1, default=str) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises StoreError that names the file where it is cut off or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise StoreError(f"{path}: is cut off or no JSON ({error})") from error


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Store:
    """One run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath(*parts)

    def sample_folder(self, slot: Slot) -> Path:
        return self.path("samples", slot.folder)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against a second runner. Raises StoreError where one has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path(".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise StoreError(
                    f"{self.folder}: another run works in this folder; wait for it or name another"
                ) from error
            yield

    def begin(self, spec: dict[str, Any]) -> bool:
        """Start a run here, or take up the one that stopped. True where it is taken up.

        Raises StoreError where the folder holds a finished run, another spec's run, or something that is no run.
        """
        if self.path("finished.json").exists():
            raise StoreError(
                f"{self.folder}: this run is finished and is never overwritten. Choose another folder (--out), "
                f"or read it with: python -m ab_runs judge {self.folder}"
            )
        file = self.path("run.json")
        spec = json.loads(json.dumps(spec, default=str))
        if not file.exists():
            others = [p.name for p in self.folder.iterdir() if p.name != ".lock"] if self.folder.exists() else []
            if others:
                raise StoreError(
                    f"{self.folder}: holds files but no run ({', '.join(sorted(others)[:3])}); choose another"
                )
            write_json(file, {"format": FORMAT, "spec": spec})
            return False
        before = self.run()["spec"]
        if before != spec:
            changed = sorted(key for key in before.keys() | spec.keys() if before.get(key) != spec.get(key))
            raise StoreError(
                f"{self.folder}: holds a run of another spec (different: {', '.join(changed)}). "
                "Take the old spec to resume it, or choose another folder (--out)"
            )
        return True

    def run(self) -> dict[str, Any]:
        """``run.json``. Raises StoreError where the folder holds no run of this format."""
        if not self.path("run.json").exists():
            raise StoreError(f"{self.folder}: holds no run (no run.json)")
        content = read_json(self.path("run.json"))
        if not isinstance(content, dict) or content.get("format") != FORMAT or "spec" not in content:
            raise StoreError(f"{self.folder}/run.json: is no run of format {FORMAT}")
        return content

    def sample(self, slot: Slot) -> dict[str, Any] | None:
        """The finished sample of a slot, or None where it is missing, cut off, or a file of it was."""
        folder = self.sample_folder(slot)
        try:
            content = read_json(folder / "sample.json")
        except StoreError:
            return None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            return None
        for name, expected in content.get("files", {}).items():
            file = folder / name
            if not file.exists() or digest(file) != expected:
                return None
        return content

    def finish_sample(self, slot: Slot, content: dict[str, Any], files: list[str]) -> None:
        """Write ``sample.json`` with the digests of ``files`` (names in the sample's folder): the sample is done."""
        folder = self.sample_folder(slot)
        digests = {name: digest(folder / name) for name in files if (folder / name).exists()}
        write_json(folder / "sample.json", {**content, "format": FORMAT, "files": digests})

    def set_aside(self, slot: Slot) -> Path | None:
        """Move what an interrupted sample left out of the way; nothing is deleted. The new place, or None."""
        folder = self.sample_folder(slot)
        if not folder.exists():
            return None
        number = 1
        while (target := folder.with_name(f"{folder.name}.cut-{number}")).exists():
            number += 1
        folder.rename(target)
        return target

    def finish(self, content: dict[str, Any]) -> None:
        write_json(self.path("finished.json"), content)

    @property
    def finished(self) -> bool:
        return self.path("finished.json").exists()
