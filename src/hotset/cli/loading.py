"""Loads a model and its tokenizer for a command; whatever is wrong with them ends in one line that names the remedy."""

from __future__ import annotations

import logging as python_logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.cli.faults import LOADING, RUNNING, translate_errors
from hotset.cli.interrupts import Leaving, saving
from hotset.cli.output import note
from hotset.cli.streams import libraries_silent
from hotset.cli.templates import worker
from hotset.errors import HotsetError, ModelError, PolicyError
from hotset.reading import odd_file

_DTYPES = ("auto", "bfloat16", "float16", "float32")
_SCOPES = ("layer", "pool")
_ENGINES = ("auto", "host", "device")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The model that a person asked for, and how to run it."""

    model: str | None = None
    memory: str = "auto"
    host_memory: str = "auto"
    policy: str = "blend"
    scope: str = "layer"
    device: str = "auto"
    dtype: str = "auto"
    profile: str | None = None
    learn: str | None = None
    learn_every_minutes: float = 5.0
    prior_tokens: int = 64
    allow_foreign: bool = False
    pin: str | None = None
    warm_pin: str = "off"
    prefetch: str = "auto"
    engine: str = "auto"
    staging: int | None = None
    trust_remote_code: bool = False
    context: int = 4096
    force: bool = False
    observe: bool = False  # count what is routed even where all experts fit

    @property
    def name(self) -> str:
        """What to call the model."""
        return Path(self.model).name if self.model and Path(self.model).is_dir() else self.model or "reference"


@dataclass(frozen=True)
class Loaded:
    """A model that runs through hotset, and its tokenizer."""

    model: Any
    tokenizer: Any
    wanted: Wanted
    place: str = "."  # the folder or the hub id

    def trace(self, guesses: int = 0) -> Any:
        """Record what is routed inside a block, under the name that a person knows the model by."""
        return self.model.hotset.trace(meta={"model": self.wanted.name}, guesses=guesses)

    def stats(self) -> dict[str, Any]:
        """What the cache did since the last reset."""
        found: dict[str, Any] = self.model.hotset.stats()
        return found


@contextmanager
def loaded_model(wanted: Wanted) -> Iterator[Loaded]:
    """A model for the length of a block."""
    with Leaving() as leaving:
        loaded = _load(wanted, leaving)
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


def _load(wanted: Wanted, leaving: Leaving) -> Loaded:
    """Everything in the order in which its faults are cheapest to find."""
    _check(wanted)
    place = locate(wanted.model)
    _check_config(place, wanted.trust_remote_code)
    leaving.check()
    tokenizer = load_tokenizer(place, wanted.trust_remote_code)
    if getattr(tokenizer, "chat_template", None):
        worker().start()
    leaving.check()
    loaded = Loaded(_load_model(place, wanted), tokenizer, wanted, place)
    leaving.check()
    return loaded


def locate(model: str | None) -> str:
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
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelError(f"there is no folder {model}: give a folder with a model, or a hub id such as org/name")
    return model


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


def _check(wanted: Wanted) -> None:
    """Refuse what can be refused before anything is loaded."""
    from hotset.forecasts import parse as parse_forecast
    from hotset.policies import parse
    from hotset.shape import Budget

    for budget in (wanted.memory, wanted.host_memory):
        if budget != "auto":
            Budget.parse(budget)
    if wanted.policy != "auto" and parse(wanted.policy).offline:
        raise PolicyError(f"{wanted.policy} needs to know the future: it is for hotset simulate; use blend here")
    for option, word, choices in (
        ("--scope", wanted.scope, _SCOPES),
        ("--dtype", wanted.dtype, _DTYPES),
        ("--engine", wanted.engine, _ENGINES),
    ):
        if word not in choices:
            raise HotsetError(f'{option} is one of {", ".join(choices)}, not "{word}"')
    if wanted.prefetch not in ("auto", "off"):
        parse_forecast(wanted.prefetch)
    _check_profile(wanted)


def _check_profile(wanted: Wanted) -> None:
    """Refuse a profile that cannot be read or written, before a model is loaded."""
    from hotset.profile import Profile
    from hotset.profile.folder import check_writable, locate

    if wanted.learn is not None:
        check_writable(locate(wanted.learn))
    if wanted.profile is not None:
        Profile.load(locate(wanted.profile))
    elif wanted.learn is not None and locate(wanted.learn).exists():
        Profile.load(locate(wanted.learn))
    elif wanted.pin is not None:
        raise HotsetError("--pin needs to know which experts are hot: name a --profile")


def _check_config(place: str, trust_remote_code: bool) -> None:
    _need_transformers()
    from transformers import AutoConfig

    quieten()
    with translate_errors(place, "load the config", "check config.json, or download it again"):
        AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)


def _load_model(place: str, wanted: Wanted) -> Any:
    from hotset.models.load import load

    with translate_errors(place, "load the model", LOADING):
        model = load(
            place,
            memory=wanted.memory,
            host_memory=wanted.host_memory,
            policy=wanted.policy,
            scope=wanted.scope,
            device=wanted.device,
            dtype=wanted.dtype,
            profile=wanted.profile,
            learn=wanted.learn,
            learn_every_s=60 * wanted.learn_every_minutes,
            prior_tokens=wanted.prior_tokens,
            allow_foreign=wanted.allow_foreign,
            pin=wanted.pin,
            warm_pin=wanted.warm_pin,
            prefetch=wanted.prefetch,
            engine=wanted.engine,
            staging=wanted.staging,
            trust_remote_code=wanted.trust_remote_code,
            context=wanted.context,
            force=wanted.force,
        )
    if wanted.observe:
        model.hotset.observe()
    return model


def _need_transformers() -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise HotsetError(
            f"running a model needs torch and transformers ({error}): pip install 'hotset[models]'"
        ) from None
