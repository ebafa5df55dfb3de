"""Chat templates, rendered by a worker process that has limits: a hostile one costs an error and nothing else."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import Any

from hotset.errors import HotsetError, ModelError
from hotset.generation.template_worker import CPU_S, MAX_LETTERS
from hotset.text import printable

Messages = list[dict[str, str]]

_MAX_BYTES = 12 * MAX_LETTERS  # a letter is at most two escapes of six bytes
_MAX_WHY = 200


class TemplateWorker:
    """The process that renders; it is started when it is wanted, and again after a template has killed it."""

    def __init__(self, cpu_s: int = CPU_S) -> None:
        self._cpu_s = cpu_s  # for one conversation
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def start(self) -> None:
        """Let it get ready in the background."""
        with self._lock:
            self._running()

    def render(self, template: str, messages: Messages, special_tokens: dict[str, Any]) -> str:
        """The text of a conversation up to where the model has to speak."""
        asked = {"template": template, "messages": messages, "special_tokens": special_tokens}
        with self._lock:
            answer = self._ask(json.dumps(asked, default=str).encode() + b"\n")
        if "error" in answer:
            raise ModelError(
                f"the chat template does not work ({printable(answer['error'])[:_MAX_WHY]}): use --no-chat"
            )
        if not answer["text"]:
            raise ModelError("the chat template renders nothing: use --no-chat, or correct chat_template.jinja")
        return str(answer["text"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _ask(self, line: bytes) -> dict[str, str]:
        process = self._running()
        try:
            process.stdin.write(line)  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            answer = process.stdout.readline(_MAX_BYTES)  # type: ignore[union-attr]
            found: dict[str, str] = json.loads(answer)
        except (OSError, ValueError):
            self._stop()
            return {"error": "it takes too long, or more memory than a template may"}
        except BaseException:
            self._stop()  # its answer would be taken for that of the next question
            raise
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = _spawn(self._cpu_s)
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        process.wait()


@cache
def worker() -> TemplateWorker:
    """The worker of this process: templates are small work, and starting it is not."""
    made = TemplateWorker()
    atexit.register(made.close)
    return made


def _spawn(cpu_s: int) -> subprocess.Popen[bytes]:
    """Start with this process's paths for imports, and without the current folder's."""
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        return subprocess.Popen(  # noqa: S603 - this interpreter and our own module
            [sys.executable, "-P", "-m", "hotset.generation.template_worker", str(cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0 if os.name == "posix" else None,  # Ctrl-C at the terminal is not for it
            env={**os.environ, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"},
        )
    except OSError as error:
        raise HotsetError(f"cannot start a process for the chat template ({error.strerror}): use --no-chat") from error
