"""Every option of a live model, declared once: `RunOptions`.

`hotset.load`, `hotset.attach`, the command line, `hotset.toml` and the table in the documents are derived from it.
"""

from __future__ import annotations

from hotset.options.declare import OptionError, Place, declared, option
from hotset.options.files import CONFIG_NAME, read_options
from hotset.options.keywords import make, takes_options
from hotset.options.run import MESSAGES, RunOptions

__all__ = [
    "CONFIG_NAME",
    "MESSAGES",
    "OptionError",
    "Place",
    "RunOptions",
    "declared",
    "make",
    "option",
    "read_options",
    "takes_options",
]
