"""Where the `hotset` command begins: the commands take a moment to import, and Ctrl-C may come within it."""

from __future__ import annotations

import signal


def main() -> None:
    """Import the commands, in which time Ctrl-C ends the process without a word, and run them."""
    as_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # it may be ignored, as by scripts
    if as_usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hotset.cli.app import main as run

    if as_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
