"""The grid of architectures that is compared with transformers: every dimension and how its values look in config.json.

`pairs` is a small part of the grid in which every two values of different dimensions meet; `everything` is all of it.
"""

import itertools
from collections.abc import Iterator
from typing import Any

Case = tuple[str, ...]
LAYERS = 5

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
DIMENSIONS: dict[str, dict[str, dict[str, Any]]] = {
    "family": {"glm": {"model_type": "glm_moe_dsa"}, "deepseek": {"model_type": "deepseek_v32"}},
    "sharing": {
        "none": {},
        "types": {"indexer_types": ["full", "shared", "full", "shared", "shared"]},
        "pattern": {"index_topk_pattern": "FFSFS"},
        "rule": {"index_topk_freq": 3, "index_skip_topk_offset": 1},
    },
    "routing": {
        "free": {},
        "groups": {"n_group": 4, "topk_group": 2},
        "raw-weights": {"num_experts_per_tok": 3, "norm_topk_prob": False},
    },
    "rope": {
        "pairs-pairs": {"rope_interleave": True, "indexer_rope_interleave": True},
        "pairs-halves": {"rope_interleave": True, "indexer_rope_interleave": False},
        "halves-pairs": {"rope_interleave": False, "indexer_rope_interleave": True},
        "halves-halves": {"rope_interleave": False, "indexer_rope_interleave": False},
    },
    "scaling": {
        "plain": {},
        "yarn": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "yarn-amplitude": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
        "yarn-bare": {"rope_parameters": YARN},
    },
    "head": {"untied": {}, "tied": {"tie_word_embeddings": True}},
    "shared": {"0": {"n_shared_experts": 0}, "1": {"n_shared_experts": 1}, "2": {"n_shared_experts": 2}},
    "dense": {
        "first": {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)]},
        "all": {"mlp_layer_types": ["dense"] * LAYERS},
        "replace": {"mlp_layer_types": None, "first_k_dense_replace": 2},
    },
    "topk": {"16": {"index_topk": 16}, "64": {"index_topk": 64}},
}


def config_of(case: Case) -> dict[str, Any]:
    """Keys of config.json that make the case."""
    found: dict[str, Any] = {"num_hidden_layers": LAYERS}
    for values, value in zip(DIMENSIONS.values(), case, strict=True):
        found |= values[value]
    return found


def everything() -> Iterator[Case]:
    """transformers' DeepSeek has no index sharing, so it is compared without."""
    return (case for case in itertools.product(*DIMENSIONS.values()) if case[0] == "glm" or case[1] == "none")


def pairs() -> list[Case]:
    """Greedy: the case that covers most pairs not yet met, until none is left."""
    cases = list(everything())
    covers = [frozenset(itertools.combinations(enumerate(case), 2)) for case in cases]
    left = set().union(*covers)
    found = []
    while left:
        best = max(range(len(cases)), key=lambda i: len(covers[i] & left))
        left -= covers[best]
        found.append(cases[best])
    return found
