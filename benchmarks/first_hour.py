"""The first hour in four roles, as recorded terminals: what is typed, what is seen, and how long one waits.

Each command runs at a terminal of its own (a pty of 100 columns and 30 rows), with as many of OpenMP's threads as
`--omp-threads` says (1, since others may use the cores, too), in a scratch folder with no compiled code, no profiles
and no models but a copy of the reference model whose authors want its tokens drawn. Lines are typed when a prompt
shows. `waited_s` is from the start to the first line of the answer, or of anything; `whole_s` to the end. What begins
with "$" is a command of the shell.

python benchmarks/first_hour.py --name after [--tree CHECKOUT --name before] [--role researcher]
    [--omp-threads 1]      Linux
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from hotset import reference

from common import ROOT, publish

ASK = 'run --memory 25% --max-new-tokens 24 -p "La stampante non risponde. Prima di chiamare"'
PASTE = b"\x1b[200~def f(x):\r    return x\r\rprint(f(1))\x1b[201~\n"
STOP = b"SIGTERM"  # sent once there is some text, and not typed
ROLES: dict[str, list[tuple[str, list[bytes]]]] = {
    "llama.cpp user": [
        ("doctor", []),
        ('run --memory 25 --max-new-tokens 24 -p "La stampante non risponde"', [b"%\n"]),
        (ASK, []),
        (ASK, []),
        (f"{ASK} --top-k 20 --min-p 0.05 --seed 1", []),
        ("chat --memory 25% --max-new-tokens 12", [PASTE, b"half a questi", b"\x03", b"/reset\n", b"/bye\n", b"\x04"]),
    ],
    "transformers power user": [
        ('run ./drawn --memory 25% --max-new-tokens 16 -p "Il mare"', []),
        ('run ./drawn --memory 25% --max-new-tokens 16 -p "Il mare" --greedy --system "Rispondi in breve."', []),
        ("models", []),
        ("doctor drawn", []),
        ('run drawn --memory 25% --max-new-tokens 8 -p "Il mare"', []),
    ],
    "researcher": [
        ("simulate reference:it -p lru -p blend -b 25", [b"%\n"]),
        ("trace record --prompts reference:it --limit 2 --max-new-tokens 8 --memory 25% -o it.safetensors", []),
        ("simulate reference:it -p ./mru.py -p lru -b 25%", []),
        ("simulate reference:it -b 25%", []),
        ("$ head -3 routes.csv", []),
        ("trace import routes.csv -o routes.safetensors", []),
        ("$ head -3 routes.jsonl", []),
        ("trace import routes.jsonl -o lines.safetensors", []),
        ("trace import interleaved.jsonl -o interleaved.safetensors", []),
        ("forecast it.safetensors -f previous --csv recall.csv", []),
        ("$ head -3 recall.csv", []),
        ("analyze it.safetensors -o report.html", []),
    ],
    "operator": [
        ('run --process-memory 1GiB --max-new-tokens 8 -q --log-file log.jsonl --log-json -p "Ciao"', []),
        ("$ head -2 log.jsonl", []),
        ('run --process-memory 1GiB --max-new-tokens 8 -p "Ciao"', []),
        ('run --process-memory 200MiB --max-new-tokens 8 -p "Ciao"', []),
        ('run --process-memory 2 --max-new-tokens 8 -p "Ciao"', [b"b\n"]),
        ('run ./drawn --greedy --memory 25% --max-new-tokens 2000 --learn mine -p "Il mare"', [STOP]),
        ("simulate reference:it -p lru -b 25% -q --csv rows.csv --log-file log.txt", []),
        ("$ cat log.txt", []),
        ("models", []),
        ("compile", []),
    ],
}
ENOUGH_LETTERS = 300
PROMPTS = re.compile(r"(\A|\n)[^\n]*(> |: )\Z")
CANCEL_TIMEOUT_S = 900.0
PRESS_AGAIN_S = 10.0
POLICY = ROOT / "docs" / "guide" / "own-policy.md"
COLUMNS, ROWS = 100, 30
ROUTES = "request,token,layer,expert\n" + "".join(
    f"{request},{token},{layer},{(3 * token + layer + rank) % 8}\n"
    for request in range(2) for token in range(12) for layer in range(4) for rank in range(2)
)  # fmt: skip
LINES = [
    {"request": request, "step": step, "layer": layer, "experts": [(3 * step + layer + rank) % 8 for rank in range(2)]}
    for request in range(2) for step in range(12) for layer in range(4)
]  # fmt: skip
"""The steps of each request are numbered from 0, as a log of one request after the other has them."""


def play(words: str, typed: list[bytes], tree: Path, folder: Path, omp_threads: int) -> dict[str, Any]:
    """One command at a terminal."""
    began_s = time.perf_counter()
    child, screen = pty.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.chdir(folder)
        os.environ.update(
            TERM="xterm", COLUMNS=str(COLUMNS), LINES=str(ROWS), PYTHONPATH=str(tree / "src"),
            OMP_NUM_THREADS=str(omp_threads),
            NUMBA_CACHE_DIR=str(folder / "compiled"), XDG_DATA_HOME=str(folder / "data"), HF_HOME=str(folder / "hf"),
            TMPDIR=str(folder / "tmp"),
        )  # fmt: skip
        line = [sys.executable, "-W", "ignore", "-m", "hotset", *shlex.split(words)]
        if words.startswith("$ "):
            line = ["/bin/sh", "-c", words[2:]]
        os.execv(line[0], line)  # noqa: S606
    text, waited_s, left, interrupted_s = "", None, list(typed), 0.0
    while time.perf_counter() - began_s < CANCEL_TIMEOUT_S:
        if select.select([screen], [], [], 1.5)[0]:
            try:
                data = os.read(screen, 1 << 16)
            except OSError:
                break
            text += data.decode(errors="replace")
            interrupted_s = 0.0
            waited_s = waited_s or time.perf_counter() - began_s
            if left and left[0] == STOP and len(seen(text)) > ENOUGH_LETTERS:
                os.kill(child, signal.SIGTERM)
                left.pop()
        elif left and (PROMPTS.search(seen(text)) or (left[0] == b"\x03" and seen(text).endswith("questi"))):
            interrupted_s = time.perf_counter() if left[0] == b"\x03" else 0.0
            os.write(screen, _as_sent(left.pop(0), text))
        elif interrupted_s and time.perf_counter() > interrupted_s + PRESS_AGAIN_S:
            os.write(screen, b"\x03")  # readline overlooks a signal between two reads: a person presses again
            interrupted_s = time.perf_counter()
    os.close(screen)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    whole_s = time.perf_counter() - began_s
    return {
        "typed": words[2:] if words.startswith("$ ") else f"hotset {words}",
        "seen": seen(text).replace(str(folder), "."), "exit_code": code,
        "waited_s": round(waited_s or whole_s, 1), "whole_s": round(whole_s, 1),
    }  # fmt: skip


def _as_sent(typed: bytes, text: str) -> bytes:
    """What a terminal sends: pasted text is marked only where the program has asked for that."""
    asked = text.rfind("\x1b[?2004h") > text.rfind("\x1b[?2004l")
    return typed if asked else re.sub(rb"\x1b\[20[01]~", b"", typed)


def seen(text: str) -> str:
    """The screen without what only steers it; of lines that were drawn again, the last."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))


def json_lines(rows: list[dict[str, Any]]) -> str:
    """Rows as a file of JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Play all roles, print the terminals, and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--name", default="after")
    parser.add_argument("--role", choices=list(ROLES), action="append", help="repeat it; none: all of them")
    parser.add_argument("--omp-threads", type=int, default=1, help="threads of OpenMP, as OMP_NUM_THREADS")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="hotset-hour-") as scratch:
        folder = Path(scratch)
        (folder / "tmp").mkdir()
        shutil.copytree(reference.path(), folder / "drawn")
        config = folder / "drawn" / "generation_config.json"
        drawn = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
        config.write_text(json.dumps(json.loads(config.read_text()) | drawn))
        (folder / "mru.py").write_text(POLICY.read_text().partition("```python\n")[2].partition("```")[0])
        (folder / "routes.csv").write_text(ROUTES)
        (folder / "routes.jsonl").write_text(json_lines(LINES))
        (folder / "interleaved.jsonl").write_text(json_lines(sorted(LINES, key=lambda row: row["step"])))
        for role, commands in ((role, ROLES[role]) for role in options.role or ROLES):
            for words, typed in commands:
                found.setdefault(role, []).append(
                    play(words, typed, options.tree.resolve(), folder, options.omp_threads)
                )
                shown = found[role][-1]
                print(f"## {role} $ {shown['typed']}\n{shown['seen']}\n({shown['waited_s']} s, {shown['whole_s']} s)")
    terminal = {"columns": COLUMNS, "rows": ROWS, "omp_threads": options.omp_threads}
    publish(f"first_hour_{options.name}", {"terminal": terminal, "roles": found})


if __name__ == "__main__":
    main()
