"""Writes traces in the formats that hotset imports, and knows where public ones lie."""

import json
from pathlib import Path

import numpy as np

PUBLIC = Path(__file__).parents[2].parent / "shared/traces"


def write_npz(path, trace, **changes):
    arrays = {
        "experts": trace.experts.astype(np.uint8),
        "req_len": np.bincount(trace.request),
        "phase": trace.phase,
        "tok": trace.token_ids,
        "weights": trace.weights,
    }
    arrays |= changes
    np.savez_compressed(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def csv_text(trace, layer_of=lambda layer: layer):
    shape = trace.shape
    lines = [
        "# route_trace v1",
        f"# model=/models/tiny model.gguf arch=tiny n_layer={shape.layers} "
        f"n_expert={shape.experts} n_expert_used={shape.top_k}",
        *(f"# layer={layer} expert_bytes={1000 - layer} dense_bytes=5" for layer in range(shape.layers)),
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped",
    ]
    first = {int(r): int(np.argmax(trace.request == r)) for r in np.unique(trace.request)}
    for token, layer, slot in np.ndindex(trace.experts.shape):
        expert, turn = trace.experts[token, layer, slot], int(trace.request[token])
        if expert >= 0:
            weight = trace.weights[token, layer, slot]
            place = f"{turn},{trace.phase[token]},{token - first[turn]},{layer_of(layer)},{slot}"
            lines.append(f"{place},{expert},{weight:.6g},0,1000,0")
    return "\n".join(lines) + "\n"


def json_rows(trace):
    before, nth = None, 0
    for token in range(trace.tokens):
        key = (int(trace.request[token]), int(trace.step[token]))
        nth = nth + 1 if key == before else 0
        before = key
        for layer in range(trace.shape.layers):
            yield {
                "request": key[0],
                "step": key[1],
                "token": nth,
                "layer": layer,
                "experts": trace.experts[token, layer].tolist(),
                "weights": trace.weights[token, layer].astype(float).tolist(),
                "phase": int(trace.phase[token]),
                "token_id": int(trace.token_ids[token]),
            }


def json_text(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)
