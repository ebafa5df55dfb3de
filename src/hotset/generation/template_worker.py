"""Renders chat templates in a process of its own: they are programs from a model's folder, and may ask for anything.

`python -m hotset.generation.template_worker [CPU_S]` answers every line of stdin, a JSON document, with one on
stdout.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from typing import Any

MAX_LETTERS = 64 * 1024**2
_MORE_MEMORY_BYTES = 1024**3
CPU_S = 10


def main() -> None:
    """Answer until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches all processes of a terminal, and is for another
    from transformers.utils.chat_template_utils import render_jinja_template

    cpu_s = int(sys.argv[1]) if sys.argv[1:] else CPU_S
    _limit_memory()
    for line in sys.stdin.buffer:
        _limit_time(cpu_s)
        sys.stdout.write(json.dumps(_answer(render_jinja_template, json.loads(line))) + "\n")
        sys.stdout.flush()


def _answer(render: Any, asked: dict[str, Any]) -> dict[str, str]:
    """The text of a conversation, or why there is none."""
    try:
        texts, _ = render(
            conversations=[asked["messages"]],
            chat_template=asked["template"],
            add_generation_prompt=True,
            **asked["special_tokens"],
        )
    except MemoryError:
        return {"error": f"it asks for more than {_MORE_MEMORY_BYTES // 1024**3} GiB of memory"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    if len(texts[0]) > MAX_LETTERS:
        return {"error": f"it makes a text of {len(texts[0]):,} letters"}
    return {"text": texts[0]}


def _limit_memory() -> None:
    """No more memory than now and a little: what asks for more fails, and is told."""
    with suppress(ImportError, OSError, ValueError):  # systems without such limits
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + _MORE_MEMORY_BYTES, hard))


def _limit_time(cpu_s: int) -> None:
    """So many seconds of work for the next answer; then the system ends this process."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + cpu_s, hard))


if __name__ == "__main__":
    main()
