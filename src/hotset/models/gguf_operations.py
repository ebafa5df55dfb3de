"""Conversions of a GGUF file's tensors that transformers has no operation for: gpt-oss's gates beside their ups."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import ConversionOps


class Interleave(ConversionOps):
    """Rows of gates and ups in turns, from two tensors of them; matrices are transposed, as gpt-oss has them."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **_: Any,
    ) -> dict[str, Any]:
        """Both of one layer, for all experts or for one."""
        given = (input_dict[pattern] for pattern in source_patterns)
        gates, ups = (each[0] if isinstance(each, list) else each for each in given)
        both = torch.stack((gates, ups), dim=2).flatten(1, 2)
        return {target_patterns[0]: both.transpose(1, 2).contiguous() if both.dim() == 3 else both}
