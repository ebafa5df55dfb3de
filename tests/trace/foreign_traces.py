"""Writes traces in the formats that hotset imports, and knows where public ones lie."""

import base64
import io
import json
from pathlib import Path

import numpy as np

from hotset.trace import Trace

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


def tokens_of(trace, request):
    """Prompt and answer of a request, as [tokens, layers, top_k]."""
    own = trace.request == request
    return [trace.experts[own & (trace.phase == phase)] for phase in (0, 1)]


def vllm_responses(trace, *, encoded=False):
    """A response for each request: nested lists as vLLM 0.21 gives them, or base64 of a .npy file as later ones do."""
    for request in range(trace.requests):
        prompt, answer = tokens_of(trace, request)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer) + 1}
        choice = {"index": 0, "text": 'so "routed_experts": [[[1]]] it is', "token_ids": None}
        response = {"id": f"cmpl-{request}", "object": "text_completion", "model": "tiny/moe", "usage": usage}
        if encoded:
            file = io.BytesIO()
            np.save(file, np.concatenate((prompt, answer)).astype(np.uint8))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        else:
            choice["routed_experts"] = answer.tolist()
            response["prompt_routed_experts"] = prompt.tolist() if len(prompt) else None
        yield response | {"choices": [choice]}


def scheduled(trace, streams, pieces=1):
    """The trace as a server runs it: prompts by themselves, in so many pieces, else a token of each running request."""
    waiting, running, passes = list(range(trace.requests)), [], []
    left = {request: np.flatnonzero(trace.request == request).tolist() for request in waiting}

    def decode():
        if running:
            passes.append([left[request].pop(0) for request in running])
        running[:] = [request for request in running if left[request]]

    while waiting or running:
        if not waiting or len(running) == streams:
            decode()
            continue
        request = waiting.pop(0)
        prompt = [token for token in left[request] if trace.phase[token] == 0]
        left[request] = left[request][len(prompt) :]
        for piece in np.array_split(prompt, pieces):
            passes.append(piece.tolist())
            if len(passes) % 2 and piece[-1] != prompt[-1]:
                decode()
        running.append(request)
    order = np.concatenate(passes)
    arrays = {name: getattr(trace, name)[order] for name in ("experts", "request", "phase", "weights", "token_ids")}
    step = np.repeat(np.arange(len(passes), dtype=np.int32), [len(each) for each in passes])
    return Trace(shape=trace.shape, step=step, **arrays)


def sglang_records(trace):
    """The records of a recorder in mode per_token: one forward pass after the other, with one dense layer before."""
    import torch

    position = [int(np.count_nonzero(trace.request[:token] == trace.request[token])) for token in range(trace.tokens)]
    for step in range(trace.steps):
        own = np.flatnonzero(trace.step == step)
        prefill = trace.phase[own[0]] == 0
        ids = np.full((trace.shape.layers + 1, len(own), 8), -1, np.int32)
        ids[1:, :, : trace.shape.top_k] = trace.experts[own].transpose(1, 0, 2)
        lengths = np.bincount(trace.request[own]) if prefill else None
        yield {
            "forward_pass_id": 100 + step,
            "rank": 0,
            "gatherer_key": "primary",
            "input_ids": trace.token_ids[own].tolist(),
            "positions": [position[token] for token in own],
            "extend_seq_lens": [int(length) for length in lengths if length] if prefill else None,
            "forward_mode": 1 if prefill else 2,
            "topk_ids_of_layer": torch.from_numpy(ids),
            "misc_objects": [],
        }


def write_sglang(path, trace, **changes):
    import torch

    table = torch.arange(trace.shape.experts).expand(trace.shape.layers + 1, -1).contiguous()
    document = {"records": list(sglang_records(trace)), "last_physical_to_logical_map": table} | changes
    torch.save(document, path)
    return path


def llama_text(trace, *, last_layer_of_prompts=True):
    """The rows of llama-moe-trace: layer by layer, prompts at negative positions, whose last layer may be shortened."""
    lines, nth = [], dict.fromkeys(range(trace.requests), 0)
    for step in range(trace.steps):
        own = np.flatnonzero(trace.step == step)
        request, prefill = int(trace.request[own[0]]), trace.phase[own[0]] == 0
        for layer in range(trace.shape.layers):
            short = prefill and layer == trace.shape.layers - 1 and not last_layer_of_prompts
            for place, token in enumerate(own[-1:] if short else own):
                position = place - len(own[-1:] if short else own) if prefill else nth[request]
                lines.append(",".join(map(str, (position, layer + 1, *trace.experts[token, layer].tolist()))))
        nth[request] += 0 if prefill else 1
    return "\n".join(lines) + "\n"


def token_text(trace, columns=("request", "token", "layer", "expert"), requests=lambda number: number):
    """One row for each expert of each token and layer."""
    nth = dict.fromkeys(range(trace.requests), -1)
    lines = [",".join(columns)]
    for token in range(trace.tokens):
        request = int(trace.request[token])
        nth[request] += 1
        for layer, k in np.ndindex(trace.shape.layers, trace.shape.top_k):
            row = {
                "request": requests(request), "token": nth[request], "layer": layer,
                "expert": int(trace.experts[token, layer, k]), "weight": f"{trace.weights[token, layer, k]:.6g}",
                "phase": int(trace.phase[token]), "step": int(trace.step[token]),
                "token_id": int(trace.token_ids[token]),
            }  # fmt: skip
            lines.append(",".join(str(row[name]) for name in columns))
    return "\n".join(lines) + "\n"


def write_flame(folder, trace, *, samples=True, **changes):
    """A checkpoint of FLAME-MoE's traces; returns the file of its first layer."""
    import pyarrow as pa
    from pyarrow import parquet

    layers = folder / "actives" / "iter_0540"
    layers.mkdir(parents=True)
    for layer in range(trace.shape.layers):
        columns = {
            "scores": pa.array(list(trace.weights[:, layer]), pa.list_(pa.float16())),
            "indices": pa.array(trace.experts[:, layer].tolist(), pa.list_(pa.int16())),
        } | changes.get(f"layer{layer}", {})
        parquet.write_table(pa.table(columns), layers / f"layer_{layer + 2:02}.parquet")
    if samples:
        (folder / "samples").mkdir()
        for place, ids in enumerate(np.array_split(trace.token_ids, 2)):
            parquet.write_table(pa.table({"token_id": pa.array(ids)}), folder / "samples" / f"{place:03}.parquet")
    return layers / "layer_02.parquet"
