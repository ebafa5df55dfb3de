"""The first run on a machine: what it compiles, with a bar and before the answer; `hotset compile` does it ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hotset.cli.live import flag_of
from hotset.cli.log import log_step
from hotset.cli.output import JsonFlag, emit, progress_bar
from hotset.options import RunOptions
from hotset.options.run import AUTO, DEFAULT_POLICY

if TYPE_CHECKING:
    from hotset.ahead import Part

ONCE = "compiling for this machine, once"
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")


def compile_cli(
    policy: Annotated[str, flag_of(RunOptions, "policy", grouped=False)] = DEFAULT_POLICY,
    prefetch: Annotated[str, flag_of(RunOptions, "prefetch", grouped=False)] = AUTO,
    as_json: JsonFlag = False,
) -> None:
    """Compile for this machine now, and not at the first run: in an image, or as the user who owns the folder.

    Example: hotset compile
    """
    options = RunOptions(policy=policy, prefetch=prefetch)
    began_s = time.perf_counter()
    count = compile_first(options)
    document = {"compiled": count, "seconds": time.perf_counter() - began_s}
    line = f"compiled in {document['seconds']:.0f} s" if count else "all is compiled already"
    emit(document, as_json, line)


def compile_first(options: RunOptions, meanwhile: Callable[[], object] = lambda: None) -> int:
    """Compile what the cache of such a model needs, if it is not on disk; returns how many parts that were.

    `meanwhile` is done at the same time, or at once.
    """
    from hotset.ahead import compile_parts, is_compiled, parts_of

    parts: list[Part] = parts_of(options.policy_spec, options.prefetch)
    if is_compiled(parts):
        meanwhile()
        return 0
    began_s = time.perf_counter()
    log_step(ONCE)
    with progress_bar(ONCE, len(parts)) as advance:
        for _ in compile_parts(parts, meanwhile):
            advance()
    log_step("compiled", parts=len(parts), seconds=round(time.perf_counter() - began_s, 3))
    return len(parts)


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
