"""`hotset.load`: an ordinary transformers model whose experts come and go under a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotset.cache.learning import PRIOR_TOKENS
from hotset.errors import ModelError
from hotset.models.account import CONTEXT_TOKENS, bound_library_caches
from hotset.models.budget import AUTO
from hotset.models.choose import Chooser, Settings
from hotset.models.connect import connect, watch
from hotset.models.lean import LeanLoad, lean_loading
from hotset.models.learning import LEARN_EVERY_S, Learning, begin_or_close
from hotset.models.own_code import refusing_own_code
from hotset.models.packed import check_if_packed
from hotset.models.plausible import refuse_absurd_sizes
from hotset.models.quantised import dequantising
from hotset.reading import odd_file
from hotset.shape import Budget


def load(
    model: str,
    *,
    memory: str | Budget = AUTO,
    policy: str = "blend",
    device: str = AUTO,
    host_memory: str | Budget = AUTO,
    host_policy: str = "blend",
    scope: str = "layer",
    staging: int | None = None,
    threads: int = 0,
    profile: str | None = None,
    learn: str | None = None,
    learn_every_s: float = LEARN_EVERY_S,
    prior_tokens: int = PRIOR_TOKENS,
    allow_foreign: bool = False,
    pin: str | None = None,
    warm_pin: int | str = 0,
    prefetch: str = AUTO,
    engine: str = AUTO,
    context: int = CONTEXT_TOKENS,
    force: bool = False,
    auto_class: Any = None,
    **options: Any,
) -> Any:
    """Load a model so that only a budget's worth of its experts is in memory; returns the transformers model.

    `model` is a folder or a hub id; `memory` is a size ("8GiB"), a share of the experts ("25%"), a number of slots or
    "auto". `profile` names what to start warm from, `learn` what to write down what is learnt in, `pin` a share of the
    slots to keep for the hottest. Room is left for `context` tokens of all sequences together; a budget that memory
    does not hold is refused unless `force` is true. `options` go to `from_pretrained`; with `output_loading_info=True`
    it is a pair of the model and what the library says of its weights. A model's own code runs with
    `trust_remote_code=True` only.
    """
    from transformers import AutoModelForCausalLM

    learning = Learning(
        profile=profile,
        learn=learn,
        learn_every_s=learn_every_s,
        prior_tokens=prior_tokens,
        allow_foreign=allow_foreign,
        pin=pin,
        warm_pin=warm_pin,
    )
    settings = Settings(
        memory, host_memory, policy, host_policy, device, scope, staging, threads, learning, prefetch, engine, context,
        force,
    )  # fmt: skip
    known = learning.read()
    if (odd := odd_file(Path(model))) is not None:
        raise ModelError(f"{odd} is a pipe or a device, not a file: remove it from the model's folder")
    bound_library_caches()
    chooser = Chooser(settings)
    lean = LeanLoad(keep=chooser)
    refuse_absurd_sizes(str(model))
    options = {"dtype": "auto", "trust_remote_code": False} | options  # the library's default is to ask
    with refusing_own_code(str(model)):
        extra, notes = dequantising(str(model), options)
    checked = check_if_packed(Path(model))
    with refusing_own_code(str(model)), lean_loading(lean):
        chosen = auto_class or AutoModelForCausalLM
        found: Any = chosen.from_pretrained(str(model), **(extra | options))
    loaded = found[0] if isinstance(found, tuple) else found
    if lean.sites is None or lean.catalog is None or chooser.plan is None:
        raise ModelError(f"{model} was not loaded from safetensors files: save it once with save_pretrained")
    if checked is None:  # it may be a pack in the hub's cache
        check_if_packed(lean.folder)
    loaded.to(settings.torch_device())
    if lean.kept:
        handle = watch(loaded, lean.sites, chooser.plan, settings)
    else:
        handle = connect(loaded, lean.sites, lean.catalog, chooser.plan, settings)
        handle.shells = lean.shells
    handle.remark(*notes, *chooser.notes)
    begin_or_close(handle, learning, known)
    return found
