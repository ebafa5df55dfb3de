"""Record what a model routes, then ask offline which policy would have served it best.

python examples/record_and_simulate.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from transformers import AutoTokenizer

import hotset
from hotset.sim import Sweep

POLICIES = ("lru", "blend")


def record(path: Path) -> None:
    """Generate from two prompts and keep the routing of both."""
    tokenizer = AutoTokenizer.from_pretrained(hotset.reference.path())
    model = hotset.load(hotset.reference.path(), memory="25%", policy="lru")
    with model.hotset, model.hotset.trace(path):
        for prompt in ("int main(void) {", "static const char *"):
            ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
            model.generate(ids, max_new_tokens=24, do_sample=False)


def main() -> None:
    """Print the decode hit rate of each policy, and the bound that no policy can pass."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        record(path)
        trace = hotset.Trace.load(path)
    result = hotset.simulate({"run": trace}, Sweep(policies=POLICIES, budgets=["12.5%", "25%"], fit=0))
    for row in result.rows:
        if row.phase == "decode":
            what = "the optimum, which knows the future" if row.policy == "belady" else row.policy
            print(f"{row.budget:>6}  {row.hit_rate:6.1%}  {what}")


if __name__ == "__main__":
    main()
