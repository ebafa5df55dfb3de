"""Makes the public gpt-oss-20b trace of the tables from the repository that published it.

    git clone https://github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting
    git -C GPT-OSS-MoE-ExpertFingerprinting checkout 72b368f
    python benchmarks/public_traces.py GPT-OSS-MoE-ExpertFingerprinting -o gpt-oss-20b.npz
    hotset trace import gpt-oss-20b.npz --experts 32 -o gpt-oss-20b.safetensors

300 of its 703 recordings are used: `gpt_oss_20b_requests.txt` names them. Each is one answer of at most 512 tokens; of
the prompts no routing was recorded. Token ids number the texts of all recordings in the order of their first use. It
takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LAYERS, TOP_K = 24, 4
NAMES = Path(__file__).with_name("gpt_oss_20b_requests.txt")


def read_request(path: Path) -> tuple[dict[str, Any], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """One recording: its document, experts and router weights x 255, both [tokens, layers, top_k]."""
    document = json.loads(path.read_text(encoding="utf-8"))
    tokens = [token for each in document["router_data"] for token in each.values()]
    layers = [[token[f"layer_{layer}"] for layer in range(LAYERS)] for token in tokens]
    experts = np.array([[each["selected_experts"] for each in token] for token in layers], np.uint8)
    weights = np.array([[each["selected_probs"] for each in token] for token in layers])
    return document, experts, np.round(255 * weights).astype(np.uint8)


def main() -> None:
    """Write the archive, and the labels of its requests beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the clone")
    parser.add_argument("-o", "--out", type=Path, default=Path("gpt-oss-20b.npz"))
    chosen = parser.parse_args()
    numbers: dict[str, int] = {}
    experts, weights, ids, labels = [], [], [], []
    names = set(NAMES.read_text(encoding="utf-8").splitlines())
    every = {str(path.relative_to(chosen.checkout)): path for path in chosen.checkout.glob("data/*/*/*_examples.json")}
    if not names <= every.keys():
        parser.error(f"{chosen.checkout} lacks {min(names - every.keys())}: check out 72b368f")
    for name, path in sorted(every.items()):
        document, used, shares = read_request(path)
        own = [numbers.setdefault(text, len(numbers)) for text in document["generated_only"][: len(used)]]
        if name not in names:
            continue
        experts.append(used)
        weights.append(shares)
        ids += own
        labels.append({"dataset": document["dataset"], "category": document["category"], "path": name})
    np.savez_compressed(
        chosen.out,
        experts=np.concatenate(experts),
        weights_u8=np.concatenate(weights),
        req_len=np.array([len(each) for each in experts], np.int32),
        tok=np.array(ids, np.int32),
    )
    chosen.out.with_suffix(".requests.json").write_text(json.dumps(labels, indent=0), encoding="utf-8")
    print(f"{chosen.out}: {sum(map(len, experts)):,} tokens of {len(experts)} requests")


if __name__ == "__main__":
    main()
