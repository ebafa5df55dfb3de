"""A model that runs through hotset, with its tokenizer; whatever is wrong with either is one line with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.errors import HotsetError, ModelError
from hotset.generation.errors import LOADING, translate_errors
from hotset.generation.known_models import find, missing
from hotset.generation.process_memory import within_process_memory
from hotset.generation.templates import worker
from hotset.models.gguf_place import is_gguf, located, only_file
from hotset.options import RunOptions
from hotset.reading import odd_file

if TYPE_CHECKING:
    from hotset.engine.build import KernelFactory
    from hotset.models.handle import Handle
    from hotset.models.recording import Recording


@dataclass(frozen=True)
class TextModel:
    """A model and its tokenizer; a `with` block closes it."""

    model: Any
    tokenizer: Any
    options: RunOptions
    place: str = "."  # the folder or the hub id
    notes: tuple[str, ...] = ()  # what a person should know of how it was loaded, in one line each

    @classmethod
    def load(
        cls,
        options: RunOptions,
        check: Callable[[], object] = lambda: None,
        kernels: KernelFactory | None = None,
    ) -> TextModel:
        """Load what the options name, in the order in which faults are cheapest to find.

        `check` is called between the parts of this, and may raise to end it; given kernels compute all experts.
        """
        need_transformers()
        from transformers import AutoConfig

        from hotset.models.learning import read_profile
        from hotset.models.load import load_model
        from hotset.models.plausible import refuse_absurd_config

        profile = read_profile(options)
        place = locate(options.model)
        with translate_errors(place, "load the config", "check config.json, or download it again"):
            if not is_gguf(place):
                refuse_absurd_config(place)
                AutoConfig.from_pretrained(place, trust_remote_code=options.trust_remote_code)
        check()
        tokenizer = load_tokenizer(place, options.trust_remote_code)
        if getattr(tokenizer, "chat_template", None):
            worker().start()
        check()
        with translate_errors(place, "load the model", LOADING):
            options, notes = within_process_memory(options, place)
            loaded = cls(load_model(place, options, profile, kernels), tokenizer, options, place, tuple(notes))
        check()
        return loaded

    def __enter__(self) -> TextModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End hotset's part in the model, and save what was learnt."""
        self.handle.close()

    @property
    def handle(self) -> Handle:
        """What can be asked of, and told, the cache of the model."""
        found: Handle = self.model.hotset
        return found

    @property
    def has_template(self) -> bool:
        """Whether it has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def context_tokens(self) -> int | None:
        """The model's context, where its config states it."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def max_new_tokens_for(self, prompt_tokens: int, asked: int) -> int:
        """How many new tokens fit behind a prompt; a prompt that fills the context is an error."""
        limit = self.context_tokens
        if limit is None:
            return asked
        if prompt_tokens >= limit:
            raise HotsetError(
                f"the prompt has {prompt_tokens:,} tokens and the model's context is {limit:,}: shorten the prompt"
            )
        return min(asked, limit - prompt_tokens)

    def trace(self, lookahead: int = 0) -> Recording:
        """Record what is routed inside a block, under the name of the model in the options."""
        return self.handle.trace(meta={"model": self.options.name}, lookahead=lookahead)

    def stats(self) -> dict[str, Any]:
        """What the cache did since the last reset."""
        return self.handle.stats()


def locate(model: str | Path | None) -> str:
    """The folder or hub id to load from; a path that leads nowhere is refused here."""
    if model is None:
        from hotset.reference import path as reference_path

        return str(reference_path())
    if (file := located(str(model))) is not None:
        return file
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            return only_file(path)
        if (odd := odd_file(path)) is not None:
            raise ModelError(f"{odd} is a pipe or a device, not a file: remove it from the model's folder")
        return str(path)
    if path.exists():
        raise ModelError(f"{model} is a file: give the folder of a transformers checkpoint, or a GGUF file")
    if path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") != 1:
        if (known := find(str(model))) is not None:
            return known
        raise ModelError(missing(str(model)))
    return str(model)


def load_tokenizer(place: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model, or an error if it has none."""
    from transformers import AutoTokenizer

    from hotset.models.gguf_checkpoint import GgufCheckpoint

    remedy = "check tokenizer.json and tokenizer_config.json, or download them again"
    with translate_errors(place, "load the tokenizer", remedy):
        gguf = GgufCheckpoint.open(place)
        if gguf is not None:
            return gguf.tokenizer()
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without one
        raise ModelError(f"{place} has no tokenizer: copy tokenizer.json and tokenizer_config.json beside the weights")
    return tokenizer


def need_transformers() -> None:
    """Refuse to run models without the libraries for it."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise HotsetError(
            f"running a model needs torch and transformers ({error}): pip install 'hotset[models]'"
        ) from None
