"""One translation of what libraries raise: work with a model ends well, or in one line that names the remedy.

Their errors have no class in common, and a model's files can provoke any of them, in hotset's own code, too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from hotset.errors import HotsetError, ModelError, StopAsked
from hotset.text import one_line

DEBUG = "HOTSET_DEBUG"
"""The environment variable that makes errors show where they come from."""

LOADING = "check that config.json and all .safetensors files are there and whole"
RUNNING = "check its config.json, generation_config.json, tokenizer and chat template"
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA out of memory")
_PASS = (HotsetError, StopAsked, MemoryError)


@contextmanager
def translate_errors(
    place: str, what: str, remedy: str, passing: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Turn what goes wrong with a model in a block into one line: what cannot be done, why, and the remedy."""
    try:
        if not Path(place).exists():
            _need_hub(place)
        yield
    except _PASS:
        raise
    except passing:
        raise
    except Exception as error:
        raise _translated(place, what, remedy, error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # how Rust's libraries, such as tokenizers, fail
            raise
        raise _translated(place, what, remedy, error) from error


def _translated(place: str, what: str, remedy: str, error: BaseException) -> Exception:
    if any(words in str(error) for words in _OUT_OF_MEMORY):
        return MemoryError(one_line(error))
    return ModelError(_explain(place, what, remedy, error))


def _explain(place: str, what: str, remedy: str, error: BaseException) -> str:
    text = str(error)
    if "connect" in text and not Path(place).exists():
        return _unreachable(place)
    if "trust_remote_code" in text:
        from hotset.models.own_code import needs_own_code

        return needs_own_code(place)
    if "does not recognize this architecture" in text:
        return f"the installed transformers does not know the architecture of {place}: pip install -U transformers"
    if "ignore_mismatched_sizes" in text:
        return f"the weights in {place} do not fit its config.json: they belong to different models"
    return f"cannot {what} of {place}: {one_line(error)}; {remedy} ({DEBUG}=1 shows more)"


def _need_hub(model: str) -> None:
    """Say at once that there is no network, where the hub's client would try for half a minute."""
    from huggingface_hub import constants, try_to_load_from_cache

    from hotset.models.gguf_place import repository_of

    repository, name = repository_of(model) or (model, "config.json")
    proxied = any(name in os.environ for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if proxied or isinstance(try_to_load_from_cache(repository, name), str):
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        raise ModelError(_unreachable(model)) from None


def _unreachable(model: str) -> str:
    from hotset.models.gguf_place import repository_of

    words = " ".join(repository_of(model) or (model,))
    remedy = f"download it first (hf download {words}), or give a path"
    return f"{model} is no folder here, and the hub cannot be reached: {remedy}"
