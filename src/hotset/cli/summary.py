"""What a run cost, in one line for people and as plain values for scripts."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from hotset.generation import Answer, TextModel
from hotset.shape import format_size


def run_document(text_model: TextModel, answer: Answer) -> dict[str, Any]:
    """All there is to say of one answer."""
    return answer_document(answer) | cost_document(text_model)


def answer_document(answer: Answer) -> dict[str, Any]:
    """The text and the times of one answer."""
    return {
        "text": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": len(answer.new_ids),
        "new_token_ids": answer.new_ids,
        "finish": answer.finish.value,
        "tokens_per_s": answer.tokens_per_s,
        "prefill_s": answer.prefill_s,
    }


def cost_document(text_model: TextModel) -> dict[str, Any]:
    """What the cache did, over prompts and answers together, and for the answers alone."""
    stats = text_model.stats()
    return {
        "model": text_model.options.name,
        "engine": stats["engine"],
        "driven_by": stats.get("driven_by"),
        "policy": text_model.options.policy,
        "memory": text_model.options.memory,
        "resident_bytes": stats["resident_bytes"],
        "hit_rate": stats["hit_rate"],
        "decode_hit_rate": decode_hit_rate(stats),
        "bytes_per_token": stats["bytes_per_token"],
        "decode_bytes_per_token": decode_bytes_per_token(stats),
        "stall_share": stats["stall_share"],
        "stats": stats,
    }


def summary_line(new_tokens: int, tokens_per_s: float | None, stats: dict[str, Any]) -> str:
    """Speed, hits, traffic and memory of the answers; what prompts cost is in the JSON document."""
    speed = "" if tokens_per_s is None else f" at {tokens_per_s:,.1f} tokens/s"
    hits, traffic = decode_hit_rate(stats), decode_bytes_per_token(stats)
    words = [f"{new_tokens:,} new token{'' if new_tokens == 1 else 's'}{speed}"]
    if hits is not None:
        words.append(f"hit rate {100 * hits:.1f} %{_prefetched(stats)}")
    if traffic is not None:
        words.append(f"{format_size(traffic)} read per token")
    words.append(f"{format_size(stats['resident_bytes'])} of experts in memory")
    words.append(f"{100 * stats['stall_share']:.1f} % of the time stalled")
    if driver := stats.get("driven_by"):
        words.append(f"driven by the {driver}")
    return ", ".join(words)


def _prefetched(stats: dict[str, Any]) -> str:
    """What prefetch added to the hits, if anything."""
    decode = stats.get("decode", {})
    came, asked = decode.get("prefetch_hits", 0), decode.get("hits", 0) + decode.get("misses", 0)
    return f" and {100 * came / asked:.1f} % prefetched in time" if came and asked else ""


def experts_document(text_model: TextModel) -> dict[str, Any]:
    """How every layer's experts were used, for scripts."""
    from hotset.report.usage import layer_figures, totals

    statistics = text_model.handle.statistics()
    layers = layer_figures(statistics, range(statistics.shape.layers), statistics.shape.experts)
    requests = [request.as_dict() for request in text_model.handle.requests()]
    return {"experts": totals(statistics) | {"layers": layers}, "requests": requests}


def experts_views(text_model: TextModel) -> list[RenderableType]:
    """How every layer's experts were used, what the policy gained, and what is pinned, for people."""
    from hotset.report.usage import layer_table, phase_table

    handle = text_model.handle
    statistics = handle.statistics()
    return [phase_table(statistics), layer_table(statistics, 3), *learning_lines(text_model.stats())]


def learning_lines(stats: dict[str, Any]) -> list[str]:
    """What the cache found out about itself, a line each."""
    lines = []
    if (gain := stats.get("gain")) and gain["tokens"]:
        rates = f"{100 * gain['hit_rate']:.1f} and {100 * gain['against_hit_rate']:.1f} %"
        saved = f"{format_size(abs(gain['saved_bytes']))} {'less' if gain['saved_bytes'] >= 0 else 'more'} read"
        against = f"{gain['points']:+.1f} points against {gain['against']} in its shadow"
        lines.append(f"{gain['policy']} hit {against} ({rates} over {gain['tokens']:,} tokens): {saved}")
    if stats.get("background_bytes"):
        lines.append(f"{format_size(stats['background_bytes'])} read in the background")
    if ahead := stats.get("prefetch"):
        came = f"{ahead['in_time']:,} experts in time, {ahead['late']:,} late, {ahead['wasted']:,} wasted"
        off = len(ahead["layers_switched_off"])
        why = f"; {ahead['decision']}: {ahead['reason']}" if ahead["auto"] else ""
        lines.append(f"prefetched by {ahead['forecast']}: {came}{why}" + (f"; off in {off} layers" if off else ""))
    if pins := stats.get("pins"):
        lines.append(f"{pins} experts pinned")
    if warm := stats.get("warm_pin"):
        lines.append(f"warm-pin: {warm['state']}" + (f", {len(warm['experts'])} experts" if warm["experts"] else ""))
    return lines


def decode_hit_rate(stats: dict[str, Any]) -> float | None:
    """The hit rate of answers without their prompts; None before the second token."""
    if stats["engine"] == "stock":  # nothing is asked for: everything is there
        return 1.0
    decode = stats.get("decode", {})
    return decode.get("hit_rate") if decode.get("hits", 0) + decode.get("misses", 0) else None


def decode_bytes_per_token(stats: dict[str, Any]) -> float | None:
    """The bytes read for each token of an answer: its share of all misses."""
    decode = stats.get("decode", {})
    tokens, misses = decode.get("pass_tokens", 0), stats.get("misses", 0)
    if not tokens:
        return None
    return float(stats["loaded_bytes"] * decode["misses"] / misses / tokens) if misses else 0.0
