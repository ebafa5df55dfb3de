"""A cache as tensors of a device: what captured steps read and change."""

from __future__ import annotations

import numpy as np
import torch

from hotset.engine.device.prefetch_state import PrefetchState
from hotset.engine.device.table import DeviceTable
from hotset.engine.slots import SlotCache
from hotset.policies import Admit
from hotset.prefetch import PrefetchPlan

Tensor = torch.Tensor


class DeviceCacheState:
    """The table, the policy's state, and the rows: of slots, staging and prefetch, and of all experts in the RAM tier.

    Steps of all sizes share it; without a plan nothing is prefetched. Its tensors stay where they are: graphs know
    them by their addresses.
    """

    def __init__(self, cache: SlotCache, host_rows: Tensor, plan: PrefetchPlan | None) -> None:
        shape, device = cache.controller.plan.shape, host_rows.device
        self.policy = cache.controller.policy  # whose kernels are for this state
        self.table = DeviceTable.upload(cache.controller, device)
        self.row_of = torch.from_numpy(cache.rows).to(device, copy=True)  # int32 [slots]
        self.staging = torch.tensor(cache.staging, dtype=torch.int32, device=device)
        # Kernels are made for rows of staging one after the other, or for such as a list names.
        self.lists_staging = self.policy.admission is Admit.LATE or not cache.staging_in_order
        self.host_row_of = host_rows  # int32 [layers, experts]
        rows = cache.prefetch_rows
        self.prefetch = None if plan is None else PrefetchState.of(rows, shape.layers, shape.experts, plan, device)

    def upload(self, cache: SlotCache) -> None:
        """Go on from where the host is; nothing may be on its way to a slot or to a row for prefetch."""
        self.table.refresh(cache.controller)
        self.row_of.copy_(torch.from_numpy(cache.rows))
        self.staging.copy_(torch.tensor(cache.staging, dtype=torch.int32))
        if self.prefetch is not None:
            rows = cache.prefetch_rows[: self.prefetch.prefetch_row.numel()]
            self.prefetch.prefetch_row.view(-1).copy_(torch.tensor(rows, dtype=torch.int32))

    def download(self, cache: SlotCache) -> None:
        """Let the host go on from where the device is, to the last bit.

        The log alone does not tell: a replay of it may differ in the last bit of a score, and rows were exchanged for
        prefetched ones as time had it, or for those of staging.
        """
        self.table.download(cache.controller)
        ahead = [] if self.prefetch is None else self.prefetch.prefetch_row.flatten().tolist()
        if ahead or self.lists_staging:
            cache.restore_rows(self.row_of.cpu().numpy(), ahead, self.staging.tolist())

    def differences(self, cache: SlotCache) -> int:
        """How many experts have other slots than the host believes; for tests."""
        mine = self.table.table.slot_of.cpu().numpy()
        return int(np.count_nonzero(mine != cache.controller.table.slot_of))
