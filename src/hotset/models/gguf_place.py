"""Where a GGUF model is: a file, a folder or a repository of the hub with `:file.gguf`, and all shards of it."""

from __future__ import annotations

from pathlib import Path

from hotset.errors import ModelError
from hotset.store.gguf import shard_names

SUFFIX = ".gguf"


def is_gguf(place: str) -> bool:
    """Whether a place names a GGUF file."""
    return place.endswith(SUFFIX)


def repository_of(place: str) -> tuple[str, str] | None:
    """The repository of the hub and the file in it that a place names; None for files of this machine."""
    repository, colon, name = place.rpartition(":")
    return (repository, name) if is_gguf(place) and colon and not Path(place).exists() else None


def local_file(place: str) -> Path:
    """The first shard of a model on this machine, after all of them were brought from the hub if need be."""
    found = repository_of(place)
    if found is None:
        return Path(place)
    from huggingface_hub import hf_hub_download

    repository, name = found
    folder, _, last = name.rpartition("/")
    names = [f"{folder}/{each}" if folder else each for each in shard_names(last)]
    files = [hf_hub_download(repository, each) for each in names]
    return Path(files[0])


def located(model: str) -> str | None:
    """The place of a model that is named by its GGUF file; None if it is named otherwise, and refused if not there."""
    if not is_gguf(model):
        return None
    path = Path(model).expanduser()
    if path.is_file():
        return str(path)
    left, colon, name = model.rpartition(":")
    folder = Path(left).expanduser()
    if colon and folder.is_dir():
        if not (folder / name).is_file():
            raise ModelError(f"there is no {name} in {left}: {_listed(folder)}")
        return str(folder / name)
    if not colon or left.count("/") != 1 or left.startswith((".", "~", "/")):
        raise ModelError(f"there is no file {model}: give a GGUF file, or one of the hub as org/name:file.gguf")
    return model


def only_file(folder: Path) -> str:
    """The GGUF model of a folder that has no other; several, or none, are refused."""
    files = _models(folder)
    if len(files) != 1:
        which = f"one of them: {_listed(folder)}" if files else "a GGUF file"
        raise ModelError(f"{folder} has no config.json: give the folder of a transformers checkpoint, or {which}")
    return str(files[0])


def _models(folder: Path) -> list[Path]:
    """GGUF files that are the first or the only one of a model; what belongs to vision is no model."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    firsts = [file for file in files if shard_names(file.name)[0] == file.name]
    return [file for file in firsts if not file.name.startswith("mmproj")]


def _listed(folder: Path) -> str:
    names = [file.name for file in _models(folder)][:5]
    return f"it has {', '.join(names)}" if names else "it has no GGUF file"
