"""A cache planned twice: by the host's compiled code and by the device's kernel, compared event for event."""

from __future__ import annotations

import numpy as np
import torch

from hotset.cache.controller import Controller
from hotset.cache.plan import SlotPlan
from hotset.engine.device.plan import Plan
from hotset.engine.device.table import DeviceTable
from hotset.policies import parse
from hotset.trace import Phase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCRATCH = ("scratch", "rows")  # of policies that look at what each token chose
ROUNDED = ("level",)  # powers and logarithms differ in the last bit between libraries


class Rows:
    """What lies in each row, by layer and expert: what an event computes with must be there, and stays until then."""

    def __init__(self, twins, num_rows):
        self.twins, self.num_rows = twins, num_rows
        self.lies_in = {self.row_of(slot): key for key, slot in self.residents().items()}
        self.exchanged = 0

    def row_of(self, slot):
        return int(self.twins.plan.row_of[slot])

    def residents(self):
        slot_of = self.twins.table.table.slot_of.cpu().numpy()
        return {tuple(key): int(slot_of[tuple(key)]) for key in np.argwhere(slot_of >= 0).tolist()}

    def serve(self, layer, asked):
        """After an event was planned: residents are computed with while its loads arrive, and then those."""
        out = self.twins.plan.out
        rows, late = out.pair_row.tolist(), out.pair_late.tolist()
        early = {row for row, is_late in zip(rows, late, strict=True) if row >= 0 and not is_late}
        for expert, row, is_late in zip(asked.tolist(), rows, late, strict=True):
            assert row < 0 or is_late or self.lies_in[row] == (layer, expert)
        count = out.missing.item()
        goes_to = out.job_row[:count].tolist()
        assert len(set(goes_to)) == count
        assert not early & set(goes_to)
        self.lies_in |= {row: (layer, e) for row, e in zip(goes_to, out.loads[:count, 0].tolist(), strict=True)}
        assert all(self.lies_in[row] == (layer, e) for row, e in zip(rows, asked.tolist(), strict=True) if row >= 0)
        assert all(self.lies_in[self.row_of(slot)] == key for key, slot in self.residents().items())
        staging = self.twins.plan.staging.tolist()
        assert sorted([*self.twins.plan.row_of.tolist(), *staging]) == list(range(self.num_rows))
        exchanged = early & set(staging)
        assert len(exchanged) <= self.twins.host.plan.swaps
        self.exchanged += len(exchanged)


class Twins:
    """Serves every event on both sides and asserts that they agree.

    With rows of staging, rows are exchanged, and it is looked at what lies in them.
    """

    def __init__(self, shape, slots, spec, pairs, *, prepare=None, ring=4, staging=0):
        self.host = Controller(SlotPlan(shape, slots, staging=staging), parse(spec))
        if prepare is not None:
            prepare(self.host)
        self.shape = shape
        rng = np.random.default_rng(slots)
        self.row_of = rng.permutation(2 * slots).astype(np.int32)[:slots]  # slots lie anywhere in the arena
        self.staging_row = 2 * slots
        self.table = DeviceTable.upload(self.host, DEVICE)
        row_of = torch.from_numpy(self.row_of).to(DEVICE)
        listed = None
        if staging:
            rows = torch.from_numpy(rng.permutation(slots + staging).astype(np.int32)).to(DEVICE)
            row_of, listed = rows[:slots], rows[slots:]
        self.plan = Plan(self.host, self.table, pairs, row_of, self.staging_row, ring=ring, staging=listed)
        self.rows = Rows(self, slots + staging) if staging else None
        self.loads = self.staged = self.evicted = 0

    def serve(self, layer, index, requests=None):
        """One event, given by the expert of each pair; whoever does not exist is no part of it.

        A policy that asks is told whose each token is, of those that are part of the event.
        """
        asked = np.asarray(index, np.int64)
        tokens, routed = len(asked), ()
        if requests is not None:
            self.plan.tell(requests)
            chosen = np.where((asked >= 0) & (asked < self.shape.experts), asked, -1).astype(np.int32)
            chosen = chosen.reshape(len(requests), -1)
            here = chosen.max(axis=1) >= 0
            tokens, routed = int(here.sum()), (0, np.ascontiguousarray(chosen[here]), requests[here])
        self.plan(layer, torch.from_numpy(asked).to(DEVICE))
        real = asked[(asked >= 0) & (asked < self.shape.experts)]
        experts, counts = np.unique(real, return_counts=True)
        missing = 0
        if len(experts):
            missing = self.host.route(
                layer, experts.astype(np.int32), counts.astype(np.int32), tokens, Phase.DECODE, *routed
            )
        rows = self.host.table.loads[:missing]
        found = self.plan.out.missing.item()
        np.testing.assert_array_equal(self.plan.out.loads[:found].cpu().numpy(), rows)
        if self.rows is None:
            self._check_rows(layer, asked, rows)
        else:
            self.rows.serve(layer, asked)
        self.loads += missing
        self.staged += int((rows[:, 1] < 0).sum())
        self.evicted += int((rows[:, 3] >= 0).sum())

    def _check_rows(self, layer, asked, rows):
        """Where pairs are computed and loads go, as the slots and the order of the staged say."""
        staged = iter(range(self.staging_row, self.staging_row + len(rows)))
        goes_to = [self.row_of[slot] if slot >= 0 else next(staged) for slot in rows[:, 1]]
        np.testing.assert_array_equal(self.plan.out.job_row[: len(rows)].cpu().numpy(), goes_to)
        late = dict(zip(rows[:, 0].tolist(), goes_to, strict=True))
        slot_of = self.host.table.slot_of[layer]
        real = (asked >= 0) & (asked < self.shape.experts)
        expected = [
            -1 if not is_real else late[e] if e in late else self.row_of[slot_of[e]]
            for e, is_real in zip(asked.tolist(), real, strict=True)
        ]
        np.testing.assert_array_equal(self.plan.out.pair_row.cpu().numpy(), expected)
        np.testing.assert_array_equal(self.plan.out.pair_late.cpu().numpy(), [e in late for e in asked.tolist()])
        logged = self.plan.out.log[self.plan.out.step.item() % len(self.plan.out.log), layer]
        np.testing.assert_array_equal(logged.cpu().numpy(), np.where(real, asked, -1))

    def run(self, events):
        """All events, each a layer and its index; a new pass begins where the layer does not rise."""
        before = -1
        for layer, *asked in events:
            if layer <= before:
                self.plan.out.step.add_(1)
            self.serve(layer, *asked)
            before = layer
        self.agree()

    def agree(self):
        """Assert that everything either side remembers is the same, bit for bit where arithmetic allows it."""
        for name, theirs in self.host.table._asdict().items():
            if name not in ("counters", "loads", "worth"):
                same_bits(name, getattr(self.table.table, name).cpu().numpy(), theirs)
        for name, theirs in self.host.state._asdict().items():
            mine = getattr(self.table.state, name).cpu().numpy()
            if name in SCRATCH and self.host.policy.needs_routes:
                continue
            if name in ROUNDED:
                np.testing.assert_allclose(mine, theirs, rtol=1e-12, err_msg=name)
            else:
                same_bits(name, mine, theirs)


def same_bits(name, mine, theirs):
    assert mine.dtype == theirs.dtype, name
    assert mine.shape == theirs.shape, name
    differ = np.ascontiguousarray(mine).view(np.uint8) != np.ascontiguousarray(theirs).view(np.uint8)
    assert not differ.any(), f"{name} differs in {np.argwhere(mine != theirs)[:4].tolist()}"
