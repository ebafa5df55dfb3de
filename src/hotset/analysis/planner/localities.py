"""How local the routing of the reference model's workloads is, as parameters of the synthetic router.

Each row is what `hotset trace synth --fit reference:NAME --save-config FILE` found; "mix" is the fit to the traces of
all 14 domains laid end to end by `hotset trace merge`. They give a model of any shape the habits of a workload.
"""

from __future__ import annotations

GENERIC = "mix"
PARAMETERS = ("skew", "topic_strength", "noise", "locality", "slow", "slow_tokens", "drift", "topic_stay")
LOCALITIES: dict[str, tuple[float, ...]] = {
    "en_prose": (1.383, 0.1282, 1.355, 0.06, 0.001735, 5.11, 0.0724, 0.5),
    "en_tech": (1.056, 0.4938, 1.372, 0.0619, 0.001033, 33, 0.0395, 0.5),
    "it": (1.096, 0.04754, 1.436, 0.0891, 0.0005314, 2.71, 0.0557, 0.5),
    "de": (1.153, 0.151, 1.51, 0.101, 0.002898, 11.6, 0.053, 0.5),
    "fr": (1.093, 0.1485, 1.485, 0.0545, 0.0008567, 8.46, 0.0381, 0.5),
    "es": (1.163, 0.05369, 1.471, 0.0737, 0.0007163, 2.19, 0.0486, 0.5),
    "ru": (1.091, 0.05051, 1.526, 0.148, 0.004364, 7.32, 0.0574, 0.5),
    "ja": (1.252, 0.2072, 1.48, 0.134, 0.00259, 5.94, 0.0421, 0.5),
    "zh": (1.178, 0.2285, 1.329, 0.148, 0.0009168, 5.25, 0.022, 0.5),
    "python": (0.8702, 0.5961, 1.364, 0.0698, 0.006738, 20.7, 0.000206, 0.5),
    "c": (0.925, 0.4405, 1.421, 0.175, 0.3396, 49.2, 0.00222, 0.5),
    "json": (0.9867, 0.1991, 1.453, 0.00259, 0.00962, 31.9, 0.0985, 0.5),
    "metamath": (0.9785, 0.3684, 1.266, 0.151, 0.838, 10.3, 0.0102, 0.5),
    "latex": (0.8323, 0.6833, 1.342, 0.113, 0.2309, 81.9, 0.00381, 0.5),
    "chat_it": (1.148, 0.0469, 1.413, 0.0239, 0.001082, 32.8, 0.0891, 0.5),
    "switch": (1.135, 0.1623, 1.376, 0.17, 0.003756, 2.65, 0.582, 0.5),
    "users": (0.3717, 0.06258, 1.337, 0.122, 1.224, 112, 0.000438, 0.5),
    "mix": (1.165, 0.1536, 1.409, 0.109, 0.1691, 65.2, 0.306, 0.242),
}
"""By workload: one number for each of `PARAMETERS`."""
