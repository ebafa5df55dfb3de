"""What a run cost, in one line for people and as plain values for scripts."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from hotset.cli.log import log_step
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
        "sampling": answer.sampling.as_dict(),
        "tokens_per_s": answer.tokens_per_s,
        "prefill_s": answer.prefill_s,
    }


def log_answer(answer: Answer) -> None:
    """Log the figures of an answer, and not its text."""
    figures = {key: value for key, value in answer_document(answer).items() if key not in ("text", "new_token_ids")}
    log_step("answered", **figures | {"sampling": answer.sampling.words()})


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


def answer_line(answer: Answer, stats: dict[str, Any]) -> str:
    """What one answer cost."""
    return summary_line(
        len(answer.new_ids), answer.tokens_per_s, stats, answer.sampling.words(), first_s=answer.prefill_s
    )


def summary_line(
    new_tokens: int, tokens_per_s: float | None, stats: dict[str, Any], chosen: str, *, first_s: float | None = None
) -> str:
    """Speed, how tokens were chosen, memory and hits, in words that need no glossary; `detail_line` has the rest."""
    words = [f"{new_tokens:,} token{'' if new_tokens == 1 else 's'}"]
    if tokens_per_s is not None:
        words.append(f"{tokens_per_s:,.1f} tokens per second")
    if first_s is not None:
        words.append(f"the first after {first_s:,.1f} s")
    memory = f"{format_size(stats['resident_bytes'])} of experts in memory"
    hits = decode_hit_rate(stats)
    if hits is not None:
        memory += f", hit rate {100 * hits:.1f} % (so many were there when they were needed)"
    return "; ".join([", ".join(words), chosen, memory])


def detail_line(stats: dict[str, Any]) -> str:
    """What answers cost beside that: traffic, waiting, prefetch, and what drove a GPU; prompts are in the JSON."""
    words = []
    if (traffic := decode_bytes_per_token(stats)) is not None:
        words.append(f"{format_size(traffic)} read per token{_prefetched(stats)}")
    words.append(f"{100 * stats['stall_share']:.1f} % of the time stalled (waiting for experts)")
    if driver := stats.get("driven_by"):
        words.append(f"driven by the {driver}")
    return ", ".join(words)


def _prefetched(stats: dict[str, Any]) -> str:
    """What prefetch added to the hits, if anything."""
    decode = stats.get("decode", {})
    came, asked = decode.get("prefetch_hits", 0), decode.get("hits", 0) + decode.get("misses", 0)
    return f", {100 * came / asked:.1f} % of experts prefetched in time" if came and asked else ""


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
    stats = text_model.stats()
    return [detail_line(stats), phase_table(statistics), layer_table(statistics, 3), *learning_lines(stats)]


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
    if prefetch := stats.get("prefetch"):
        came = f"{prefetch['in_time']:,} experts in time, {prefetch['late']:,} late, {prefetch['wasted']:,} wasted"
        off = len(prefetch["layers_switched_off"])
        why = f"; {prefetch['decision']}: {prefetch['reason']}" if prefetch["auto"] else ""
        lines.append(f"prefetched by {prefetch['forecast']}: {came}{why}" + (f"; off in {off} layers" if off else ""))
    if pins := stats.get("pins"):
        lines.append(f"{pins} experts pinned")
    if warm := stats.get("warm_pin"):
        lines.append(f"warm-pin: {warm['state']}" + (f", {len(warm['experts'])} experts" if warm["experts"] else ""))
    return lines


def decode_hit_rate(stats: dict[str, Any]) -> float | None:
    """The hit rate of answers without their prompts; None before the second token."""
    rate: float | None = stats.get("decode", {}).get("hit_rate")
    return rate


def decode_bytes_per_token(stats: dict[str, Any]) -> float | None:
    """The bytes read for each token of an answer: its share of all misses."""
    decode = stats.get("decode", {})
    tokens, misses = decode.get("pass_tokens", 0), stats.get("misses", 0)
    if not tokens:
        return None
    return float(stats["loaded_bytes"] * decode["misses"] / misses / tokens) if misses else 0.0
