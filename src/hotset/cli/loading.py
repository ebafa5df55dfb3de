"""Loads a model and its tokenizer for a command; whatever is wrong with them ends in one line that names the remedy."""

from __future__ import annotations

import logging as python_logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.cli.faults import LOADING, RUNNING, translate_errors
from hotset.cli.interrupts import Leaving, saving
from hotset.cli.output import note
from hotset.cli.streams import libraries_silent
from hotset.cli.templates import worker
from hotset.errors import HotsetError, ModelError
from hotset.options import RunOptions
from hotset.reading import odd_file

if TYPE_CHECKING:
    from hotset.profile import Profile


@dataclass(frozen=True)
class Loaded:
    """A model that runs through hotset, and its tokenizer."""

    model: Any
    tokenizer: Any
    options: RunOptions
    place: str = "."  # the folder or the hub id

    def trace(self, guesses: int = 0) -> Any:
        """Record what is routed inside a block, under the name that a person knows the model by."""
        return self.model.hotset.trace(meta={"model": self.options.name}, guesses=guesses)

    def stats(self) -> dict[str, Any]:
        """What the cache did since the last reset."""
        found: dict[str, Any] = self.model.hotset.stats()
        return found


@contextmanager
def loaded_model(options: RunOptions) -> Iterator[Loaded]:
    """A model for the length of a block."""
    with Leaving() as leaving:
        loaded = _load(options, leaving)
    handle = loaded.model.hotset
    told = _tell(handle.notes)
    try:
        with translate_errors(loaded.place, "run the model", RUNNING):
            yield loaded
    finally:
        try:
            with saving():  # what was learnt
                handle.close()
        finally:
            _tell(handle.notes[told:])


def _tell(remarks: list[str]) -> int:
    """Say what the model's handle had to remark; returns how much that was."""
    for remark in remarks:
        note(remark)
    return len(remarks)


def _load(options: RunOptions, leaving: Leaving) -> Loaded:
    """Everything in the order in which its faults are cheapest to find."""
    _need_transformers()
    from hotset.models.learning import read_profile

    profile = read_profile(options)
    place = locate(options.model)
    _check_config(place, options.trust_remote_code)
    leaving.check()
    tokenizer = load_tokenizer(place, options.trust_remote_code)
    if getattr(tokenizer, "chat_template", None):
        worker().start()
    leaving.check()
    loaded = Loaded(_load_model(place, options, profile), tokenizer, options, place)
    leaving.check()
    return loaded


def locate(model: str | Path | None) -> str:
    """The folder or hub id to load from; a path that leads nowhere is refused here."""
    if model is None:
        from hotset.reference import path as reference_path

        return str(reference_path())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{model} has no config.json: give the folder of a transformers checkpoint")
        if (odd := odd_file(path)) is not None:
            raise ModelError(f"{odd} is a pipe or a device, not a file: remove it from the model's folder")
        return str(path)
    if path.exists():
        raise ModelError(f"{model} is a file: give the folder of a transformers checkpoint")
    if path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") != 1:
        raise ModelError(f"there is no folder {model}: give a folder with a model, or a hub id such as org/name")
    return str(model)


def load_tokenizer(place: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model, or an error if it has none."""
    from transformers import AutoTokenizer

    quieten()
    remedy = "check tokenizer.json and tokenizer_config.json, or download them again"
    with translate_errors(place, "load the tokenizer", remedy), libraries_silent():
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without one
        raise ModelError(f"{place} has no tokenizer: copy tokenizer.json and tokenizer_config.json beside the weights")
    return tokenizer


def quieten() -> None:
    """Keep the libraries' warnings to themselves, and their progress bars where nobody watches."""
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    python_logging.getLogger("hotset").setLevel(python_logging.ERROR)  # its remarks are printed as notes
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        disable_progress_bars()


def _check_config(place: str, trust_remote_code: bool) -> None:
    from transformers import AutoConfig

    quieten()
    with translate_errors(place, "load the config", "check config.json, or download it again"):
        AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)


def _load_model(place: str, options: RunOptions, profile: Profile | None) -> Any:
    from hotset.models.load import load_model

    with translate_errors(place, "load the model", LOADING):
        return load_model(place, options, profile)


def _need_transformers() -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise HotsetError(
            f"running a model needs torch and transformers ({error}): pip install 'hotset[models]'"
        ) from None
