"""Without a GPU, kernels are tested in Triton's interpreter: it has to be asked for before anybody imports Triton."""

from __future__ import annotations

import os
from contextlib import suppress

with suppress(ImportError):  # then whatever needs torch is left out
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
