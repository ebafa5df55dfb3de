"""How far a pack is from its original, in a line."""

from __future__ import annotations

from typing import Any


def quality_line(found: dict[str, Any]) -> str:
    """The figures, and what they were measured on."""
    text = found["text"]
    figures = (
        f"KL divergence {found['kl_mean']:.2g} in the mean and {found['kl_p99']:.2g} at the 99th percentile, "
        f"same most likely token {100 * found['same_top']:.1f} %, "
        f"perplexity {found['packed_perplexity']:.2f} (original {found['perplexity']:.2f})"
    )
    return f"{figures}; {found['tokens']:,} tokens of {text['name']} (SHA-256 {text['sha256'][:12]})"
