"""How threads wait on a busy machine, and that a quiet one and the user's own choice are left alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hotset.cli import busy


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in busy._WAITING:
        monkeypatch.delenv(name, raising=False)


def load(monkeypatch: pytest.MonkeyPatch, of_each_core: float) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (of_each_core * (os.cpu_count() or 1), 0.0, 0.0))


@pytest.mark.usefixtures("environment")
def test_threads_sleep_where_the_machine_is_busy_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, 1.0)
    busy.wait_without_spinning_if_busy()
    assert "OMP_WAIT_POLICY" not in os.environ
    load(monkeypatch, 1.5)
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    busy.wait_without_spinning_if_busy()
    assert "OMP_WAIT_POLICY" not in os.environ
    monkeypatch.delenv("GOMP_SPINCOUNT")
    busy.wait_without_spinning_if_busy()
    assert os.environ.pop("OMP_WAIT_POLICY") == "passive"


def test_it_is_done_before_torch_is_imported() -> None:
    code = "\n".join(
        [
            "import os, sys",
            "from hotset.cli import app, busy",
            "busy.is_busy = lambda: True",
            "assert 'torch' not in sys.modules",
            "app.run_and_report = lambda work: print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY']) or 0",
            "app.main()",
        ]
    )
    known = {key: value for key, value in os.environ.items() if key not in busy._WAITING}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=known)
    assert done.stdout.strip() == "False passive", done.stderr
