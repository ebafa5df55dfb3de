"""Keeping what was learnt: a profile is written again and again while a model runs, each time whole or not at all."""

from __future__ import annotations

import atexit
import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hotset.cache.learning import learnt
from hotset.cache.statistics import phase_tokens, residency_of
from hotset.cache.usage import HITS, MISSES, USES
from hotset.engine.engine import Engine
from hotset.errors import HotsetError, ProfileError
from hotset.profile import Fingerprint, Profile
from hotset.profile.fold import fold, now, raw_profile
from hotset.profile.folder import lock_of
from hotset.profile.matrices import collected
from hotset.profile.statistics import History


class ProfileWriter:
    """Adds what an engine saw since the last time to one profile file."""

    def __init__(self, engine: Engine, fingerprint: Fingerprint, path: Path, *, allow_foreign: bool = False) -> None:
        self.engine, self.fingerprint, self.path = engine, fingerprint, path
        self.allow_foreign = allow_foreign
        self._counts = engine.controller.usage.counts * 0
        self._tokens = phase_tokens(engine.controller) * 0
        self._spans = 0
        self._writing = threading.Lock()

    def save(self, *, anew: bool = False) -> bool:
        """Write the profile with all that is new, or that alone; false if nothing is."""
        with self._writing, locked(self.path):
            fresh = self._fresh()
            if not fresh.tokens.any():
                return False
            old = Profile.load(self.path) if self.path.exists() and not anew else None
            if old is not None:
                old.check(fresh.shape, self.fingerprint, allow_foreign=self.allow_foreign)
            fold(old, fresh).save(self.path)
            self._counts += self._new_counts
            self._tokens += fresh.tokens
            self._spans = self._new_spans
        return True

    def _fresh(self) -> Profile:
        """What happened since the last save, as plain counts."""
        controller, monitor = self.engine.controller, self.engine.monitor
        with self.engine.paused():
            if monitor is not None:
                monitor.poll()
            self._new_counts = controller.usage.counts - self._counts
            tokens = phase_tokens(controller) - self._tokens
            residency, policy, found = residency_of(controller), controller.policy.name, learnt(controller)
            matrices = collected(controller.state) if controller.policy.collects_requests else None
            history = History.empty() if monitor is None else monitor.history(self._spans)
            self._new_spans = 0 if monitor is None else monitor.spans_ever
        raw = raw_profile(self.engine.shape, self.fingerprint, self._new_counts[USES].astype(float), tokens)
        return replace(
            raw,
            policy=policy,
            learnt=found,
            hits=self._new_counts[HITS],
            misses=self._new_counts[MISSES],
            residency=residency,
            matrices=matrices,
            history=history,
            updated=now(),
        )


class ProfileAutosave:
    """Saves a profile every few minutes and at the end."""

    def __init__(self, writer: ProfileWriter, every_s: float, warn: Callable[[str], None]) -> None:
        self.writer, self.every_s = writer, every_s
        self._warn = warn
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotset-learner", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _run(self) -> None:
        while not self._end.wait(self.every_s):
            self._save()

    def _save(self) -> None:
        try:
            self.writer.save()
        except HotsetError as error:
            self._warn(f"the profile could not be updated: {error}")

    def stop(self) -> None:
        """Save for the last time; more than once does no harm, and a child process has nothing to save."""
        if self._end.is_set() or not self.writer.engine.guard.owner.is_here:
            return
        self._end.set()
        atexit.unregister(self.stop)
        self._thread.join()
        self._save()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time update a profile."""
    lock = lock_of(path)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        raise ProfileError(
            f"cannot write {path}: {error.strerror or error}; choose another place, or allow writing there"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
