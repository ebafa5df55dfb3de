"""Loads a model and its tokenizer for a command; whatever is wrong with them ends in one line that names the remedy."""

from __future__ import annotations

import logging as python_logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hotset.cli.interrupts import Leaving
from hotset.cli.output import note
from hotset.errors import HotsetError, ModelError, PolicyError

_DTYPES = ("auto", "bfloat16", "float16", "float32")
_SCOPES = ("layer", "pool")
_ENGINES = ("auto", "host", "device")
_MOST_LETTERS = 300


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
        yield loaded
    finally:
        try:
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
    _check_config(place)
    leaving.check()
    tokenizer = load_tokenizer(place)
    leaving.check()
    loaded = Loaded(_load_model(place, wanted), tokenizer, wanted)
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
        return str(path)
    if path.exists():
        raise ModelError(f"{model} is a file: give the folder of a transformers checkpoint")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelError(f"there is no folder {model}: give a folder with a model, or a hub id such as org/name")
    return model


def load_tokenizer(place: str) -> Any:
    """The tokenizer of a model, or an error if it has none."""
    from transformers import AutoTokenizer

    quieten()
    with plainly(place, "the tokenizer", "check tokenizer.json and tokenizer_config.json, or download them again"):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
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


def one_line(error: BaseException) -> str:
    """The first line of what a library said."""
    lines = str(error).strip().splitlines() or [""]
    first = lines[0].strip()
    text = first if " " in first else f"{type(error).__name__} {first}".strip()
    return text[:_MOST_LETTERS].rstrip(" .:")


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
    """Refuse a profile that cannot be read, before a model is."""
    from hotset.profile import Profile
    from hotset.profile.folder import locate

    if wanted.profile is not None:
        Profile.load(locate(wanted.profile))
    elif wanted.learn is not None and locate(wanted.learn).exists():
        Profile.load(locate(wanted.learn))
    elif wanted.pin is not None:
        raise HotsetError("--pin needs to know which experts are hot: name a --profile")


def _check_config(place: str) -> None:
    _need_transformers()
    from transformers import AutoConfig

    quieten()
    with plainly(place, "the config", "check config.json, or download it again"):
        AutoConfig.from_pretrained(place, trust_remote_code=False)


def _load_model(place: str, wanted: Wanted) -> Any:
    from hotset.models.load import load

    with plainly(place, "the model", "check that config.json and all .safetensors files are there and whole"):
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
            trust_remote_code=False,
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


@contextmanager
def plainly(place: str, what: str, remedy: str) -> Iterator[None]:
    """Turn what the libraries raise while loading into one line; their errors have no class in common."""
    try:
        if not Path(place).is_dir():
            _need_hub(place)
        yield
    except (HotsetError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(_explain(place, what, remedy, error)) from error


def _explain(place: str, what: str, remedy: str, error: Exception) -> str:
    text = str(error)
    if "connect" in text and not Path(place).is_dir():
        return _unreachable(place)
    if "trust_remote_code" in text:
        return f"{place} needs code of its own, which hotset does not run: use a model that transformers supports"
    if "does not recognize this architecture" in text:
        return f"the installed transformers does not know the architecture of {place}: pip install -U transformers"
    if "ignore_mismatched_sizes" in text:
        return f"the weights in {place} do not fit its config.json: they belong to different models"
    return f"cannot load {what} of {place}: {one_line(error)}; {remedy}"


def _need_hub(model: str) -> None:
    """Say at once that there is no network, where the hub's client would try for half a minute."""
    from huggingface_hub import constants, try_to_load_from_cache

    proxied = any(name in os.environ for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if proxied or isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        raise ModelError(_unreachable(model)) from None


def _unreachable(model: str) -> str:
    remedy = f"download it first (hf download {model}), or give a path"
    return f"{model} is no folder here, and the hub cannot be reached: {remedy}"
