"""The first run on a machine: what it compiles, with a bar and before the answer; `hotset compile` does it ahead."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli.live import flag_of, with_messages
from hotset.cli.output import JsonFlag, emit, note, progress_bar
from hotset.options import RunOptions
from hotset.options.run import AUTO, DEFAULT_POLICY, DENSE

if TYPE_CHECKING:
    from hotset.ahead import Part

ONCE = "compiling for this machine, once"
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")


@with_messages
def compile_cli(
    policy: Annotated[str, flag_of(RunOptions, "policy", grouped=False)] = DEFAULT_POLICY,
    prefetch: Annotated[str, flag_of(RunOptions, "prefetch", grouped=False)] = AUTO,
    everything: Annotated[
        bool, typer.Option("--all", help="For every policy and forecast, live and in replays: takes minutes.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compile for this machine now, and not at the first run: in an image, or as the user who owns the folder.

    That is what a live cache needs, and replays of lru, lfu, blend, nextuse and the optimum.

    Example: hotset compile
    """
    from hotset.ahead import all_parts, parts_of, usual_parts

    options = RunOptions(policy=policy, prefetch=prefetch)
    parts = parts_of(options.policy_on(_likely_device(options)), options.prefetch, warm=True)
    more = all_parts() if everything else usual_parts()
    began_s = time.perf_counter()
    count = compile_missing([*parts, *(part for part in more if part not in parts)])
    document = {"compiled": count, "seconds": time.perf_counter() - began_s}
    line = f"compiled in {document['seconds']:.0f} s" if count else "all is compiled already"
    emit(document, as_json, line)


def compile_missing(parts: Iterable[Part], meanwhile: Callable[[], object] = lambda: None) -> int:
    """Compile those of these parts that are not on disk, and say so; returns how many that were.

    `meanwhile` is done at the same time, or at once.
    """
    from hotset.ahead import compile_parts, missing

    if not (needed := missing(parts)):
        meanwhile()
        return 0
    if not sys.stderr.isatty():
        say_compiling()
    with progress_bar(ONCE, len(needed), elapsed=True) as advance:
        for _ in compile_parts(needed, meanwhile):
            advance()
    return len(needed)


def compile_first(options: RunOptions, meanwhile: Callable[[], object] = lambda: None) -> int:
    """Compile what the cache of such a model needs, as far as that is known before it is loaded."""
    from hotset.ahead import parts_of

    policy = options.policy_on(_likely_device(options))
    parts = parts_of(policy, options.prefetch, warm=starts_warm(options)) if needs_cache(options) else []
    return compile_missing([*parts, *_products(options)], meanwhile)


def starts_warm(options: RunOptions) -> bool:
    """Whether a profile is there to begin with."""
    from hotset.profile.folder import locate

    learnt = options.learn is not None and locate(str(options.learn)).exists()
    return options.profile is not None or learnt


def _likely_device(options: RunOptions) -> str:
    """Where the model will run, as far as that is known without torch; what is missing then is compiled later."""
    if options.device != AUTO:
        return options.device.partition(":")[0]
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def say_compiling() -> None:
    """Say in a line, where no bar shows it, that there is something to wait for."""
    from hotset.compiling import can_be_kept

    if can_be_kept():  # if not, it is not once, and another line says why
        note(ONCE)


def _products(options: RunOptions) -> list[Part]:
    """The products with packed experts, if this is a packed model that runs on a CPU."""
    from hotset.ahead import parts_of_products
    from hotset.errors import StoreError
    from hotset.generation.text_model import locate, need_transformers

    if options.model is None or options.experts == DENSE or options.dtype != AUTO:
        return []
    place = Path(locate(options.model))
    try:
        parts = parts_of_products(place)
    except StoreError:  # loading says what is wrong with it
        return []
    if not parts:
        return []
    need_transformers()
    from hotset.models.device import torch_device

    return parts if torch_device(options.device).type == "cpu" else []


def needs_cache(options: RunOptions) -> bool:
    """Whether experts will surely not all fit, as far as that is known before a model is loaded."""
    from hotset.engine.memory import available_memory_bytes
    from hotset.shape import Budget

    if options.process_memory is not None:
        return True
    if options.memory != AUTO:
        budget = options.memory if isinstance(options.memory, Budget) else Budget.parse(options.memory)
        return budget.fraction is None or budget.fraction < 1
    place = Path(options.model or "").expanduser()
    if options.model is None or not place.is_dir():
        return False
    size = sum(file.stat().st_size for pattern in _WEIGHTS for file in place.glob(pattern))
    return 2 * size > available_memory_bytes()
