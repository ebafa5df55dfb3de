"""Questions that replays answer: one study per file, found by the file's name.

A module of this package that defines `STUDY` is a study; nothing else has to be edited to add one.
"""

from __future__ import annotations

from importlib import import_module

from hotset.errors import HotsetError
from hotset.policies.base import modules_in
from hotset.sim.studies._result import Chart, Column, Plan, Study, StudyResult, carry_out

__all__ = ["Chart", "Column", "Plan", "Study", "StudyResult", "carry_out", "find", "names"]


def names() -> list[str]:
    """All studies, by name, without importing them."""
    return modules_in(__path__)


def find(name: str) -> Study:
    """The study of this name."""
    if name not in names():
        raise HotsetError(f'no study is called "{name}"; there are {", ".join(names())}')
    study: Study = import_module(f"{__name__}.{name}").STUDY
    return study
