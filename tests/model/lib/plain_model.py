"""The architecture written out plainly, to compare with: a checkpoint's tensors by name, fp64 products, one sequence,
no cache, no absorption, expert after expert, and nothing taken from Headrace or transformers."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def dequantised(weight: Tensor, scale: Tensor) -> Tensor:
    """fp64; the scale of element (o, i) is scale[o // 128, i // 128]."""
    rows = torch.arange(weight.shape[0]) // 128
    columns = torch.arange(weight.shape[1]) // 128
    return weight.to(torch.float32).double() * scale.double()[rows][:, columns]


def rounded(x: Tensor) -> Tensor:
    """What is left of activations in FP8: 128 channels of a row share the scale amax / 448."""
    found = []
    for part in x.float().split(128, -1):
        scale = part.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
        found.append((part / scale).to(torch.float8_e4m3fn).double() * scale.double())
    return torch.cat(found, -1)


class Plain:
    """`forward` gives the hidden states after the final norm, `mtp` those of the MTP layer after its own. Products with
    FP8 matrices round their inputs to FP8, but for kv_b_proj, which is folded into queries and values."""

    def __init__(self, directory: Path) -> None:
        self.raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self._t: dict[str, Tensor] = {}
        for file in directory.glob("*.safetensors"):
            self._t |= load_file(file)
        self.kept: dict[int, Tensor] = {}
        """Of the last call: bool [n, n] of each layer, which rows a row attended to."""

    def get(self, name: str) -> Tensor:
        scale = self._t.get(name + "_scale_inv")
        return self._t[name].double() if scale is None else dequantised(self._t[name], scale)

    def has(self, name: str) -> bool:
        return name in self._t

    def linear(self, x: Tensor, name: str) -> Tensor:
        return (rounded(x) if f"{name}.weight_scale_inv" in self._t else x) @ self.get(f"{name}.weight").T

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [n] -> fp64 [n, D]"""
        x = self.get("model.embed_tokens.weight")[tokens]
        kept = None
        for layer in range(self.raw["num_hidden_layers"]):
            x, kept = self._block(f"model.layers.{layer}.", x, kept)
            self.kept[layer] = kept
        return self._rms(x, "model.norm")

    def logits(self, hidden: Tensor) -> Tensor:
        head = "model.embed_tokens" if self.raw.get("tie_word_embeddings") else "lm_head"
        return self.linear(hidden, head)

    def mtp(self, next_tokens: Tensor, hidden: Tensor, last_sees: Tensor | None = None) -> Tensor:
        """Row p: the token at p + 1 and the main model's hidden state at p. `last_sees`: the rows the last one attends
        to instead of its own choice."""
        layer = self.raw["num_hidden_layers"]
        prefix = f"model.layers.{layer}."
        token = self._rms(self.get("model.embed_tokens.weight")[next_tokens], f"{prefix}enorm")
        before = self._rms(hidden.double(), f"{prefix}hnorm")
        x = self.linear(torch.cat((token, before), -1), f"{prefix}eh_proj")
        x, self.kept[layer] = self._block(prefix, x, None, last_sees)
        return self._rms(x, f"{prefix}shared_head.norm")

    def _block(
        self, prefix: str, x: Tensor, kept: Tensor | None, last_sees: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        normed = self._rms(x, f"{prefix}input_layernorm")
        attended, kept = self._attention(f"{prefix}self_attn.", normed, kept, last_sees)
        x = x + attended
        normed = self._rms(x, f"{prefix}post_attention_layernorm")
        moe = self.has(f"{prefix}mlp.gate.weight")
        return x + (self._moe if moe else self._mlp)(f"{prefix}mlp.", normed), kept

    def _attention(
        self, prefix: str, x: Tensor, kept: Tensor | None, last_sees: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        raw = self.raw
        heads, nope, v_dim = raw["num_attention_heads"], raw["qk_nope_head_dim"], raw["v_head_dim"]
        count = x.shape[0]
        latent_q = self._rms(self.linear(x, f"{prefix}q_a_proj"), f"{prefix}q_a_layernorm")
        q = (self.linear(latent_q, f"{prefix}q_b_proj")).view(count, heads, nope + 64)
        both = self.linear(x, f"{prefix}kv_a_proj_with_mqa")
        latent = self._rms(both[:, :512], f"{prefix}kv_a_layernorm")
        pairs = bool(raw.get("rope_interleave", True))
        k_pe = self._turn(both[:, 512:], pairs)
        per_head = (latent @ self.get(f"{prefix}kv_b_proj.weight").T).view(count, heads, nope + v_dim)
        if self.has(f"{prefix}indexer.wk.weight"):
            kept = self._select(f"{prefix}indexer.", x, latent_q)
        assert kept is not None, "a layer without indexer follows none that has one"
        if last_sees is not None:
            kept = kept.clone()
            kept[-1] = False
            kept[-1, last_sees] = True
        out = []
        for head in range(heads):
            k_nope, value = per_head[:, head, :nope], per_head[:, head, nope:]
            scores = q[:, head, :nope] @ k_nope.T + self._turn(q[:, head, nope:], pairs) @ k_pe.T
            weights = (scores * self._scale(nope)).masked_fill(~kept, -math.inf).softmax(-1)
            out.append(weights @ value)
        return self.linear(torch.cat(out, -1), f"{prefix}o_proj"), kept

    def _scale(self, nope: int) -> float:
        rope = self.raw["rope_parameters"]
        scale = (nope + 64) ** -0.5
        if rope["rope_type"] == "yarn" and rope.get("mscale_all_dim"):
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
        return scale

    def _select(self, prefix: str, x: Tensor, latent_q: Tensor) -> Tensor:
        """bool [n, n]: the index_topk best of the rows up to each one, the earlier one of equals."""
        raw, count = self.raw, x.shape[0]
        pairs = bool(raw.get("indexer_rope_interleave", raw["model_type"] == "glm_moe_dsa"))
        keys = self.linear(x, f"{prefix}wk")
        centred = keys - keys.mean(-1, keepdim=True)
        keys = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        keys = keys * self.get(f"{prefix}k_norm.weight") + self.get(f"{prefix}k_norm.bias")
        keys = torch.cat((self._turn(keys[:, :64], pairs), keys[:, 64:]), -1)
        q = (self.linear(latent_q, f"{prefix}wq_b")).view(count, -1, 128)
        weights = self.linear(x, f"{prefix}weights_proj") * raw["index_n_heads"] ** -0.5
        scores = torch.zeros(count, count, dtype=torch.float64)
        for head in range(raw["index_n_heads"]):
            one = torch.cat((self._turn(q[:, head, :64], pairs), q[:, head, 64:]), -1)
            scores += weights[:, head : head + 1] * (one @ keys.T * 128**-0.5).clamp_min(0)
        kept = torch.zeros(count, count, dtype=torch.bool)
        for row in range(count):
            # In fp32, as both sides score: what is equal there is a tie.
            best = sorted(range(row + 1), key=lambda key: (-scores[row, key].float().item(), key))
            kept[row, best[: raw["index_topk"]]] = True
        return kept

    def _turn(self, x: Tensor, pairs: bool) -> Tensor:
        """[n, 64], row r at position r."""
        angles = torch.arange(x.shape[0], dtype=torch.float32)[:, None] * self._frequencies()
        size = self._amplitude()
        cos, sin = angles.double().cos() * size, angles.double().sin() * size
        one, two = (x[:, 0::2], x[:, 1::2]) if pairs else (x[:, :32], x[:, 32:])
        turned = one * cos - two * sin, two * cos + one * sin
        return torch.stack(turned, -1).flatten(1) if pairs else torch.cat(turned, -1)

    def _frequencies(self) -> Tensor:
        rope = self.raw["rope_parameters"]
        theta = rope["rope_theta"]
        plain = [theta ** (-2 * j / 64) for j in range(32)]
        if rope["rope_type"] != "yarn":
            return torch.tensor(plain, dtype=torch.float32)
        length = rope["original_max_position_embeddings"]

        def place(turns: float) -> float:
            """The dimension whose angle turns that often over the original length."""
            return 64 * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(place(rope.get("beta_fast", 32))), 0)
        high = min(math.ceil(place(rope.get("beta_slow", 1))), 63)
        shares = [min(max((j - low) / max(high - low, 0.001), 0), 1) for j in range(32)]
        slow = [f * (1 - share) + f / rope["factor"] * share for f, share in zip(plain, shares)]
        return torch.tensor(slow, dtype=torch.float32)

    def _amplitude(self) -> float:
        rope = self.raw["rope_parameters"]
        if rope["rope_type"] != "yarn":
            return 1.0
        one, all_dims = (rope.get(key) for key in ("mscale", "mscale_all_dim"))
        if not one or not all_dims:
            return 0.1 * math.log(rope["factor"]) + 1
        return (0.1 * one * math.log(rope["factor"]) + 1) / (0.1 * all_dims * math.log(rope["factor"]) + 1)

    def _moe(self, prefix: str, x: Tensor) -> Tensor:
        raw = self.raw
        scores = (self.linear(x, f"{prefix}gate")).sigmoid()
        choice = scores + self.get(f"{prefix}gate.e_score_correction_bias")
        size = raw["n_routed_experts"] // raw["n_group"]
        out = torch.zeros_like(x)
        for row in range(x.shape[0]):
            groups = choice[row].split(size)
            worth = [sum(sorted(group.tolist())[-2:]) for group in groups]
            best = sorted(range(len(groups)), key=lambda g: -worth[g])[: raw["topk_group"]]
            allowed = [expert for expert in range(raw["n_routed_experts"]) if expert // size in best]
            chosen = sorted(allowed, key=lambda e: -choice[row, e].item())[: raw["num_experts_per_tok"]]
            total = sum(scores[row, e].item() for e in chosen) if raw.get("norm_topk_prob", True) else 1.0
            for expert in chosen:
                gain = scores[row, expert].item() / total * raw["routed_scaling_factor"]
                out[row] += gain * self._mlp(f"{prefix}experts.{expert}.", x[row : row + 1])[0]
        if self.has(f"{prefix}shared_experts.gate_proj.weight"):
            out += self._mlp(f"{prefix}shared_experts.", x)
        return out

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        opened = self.linear(x, f"{prefix}gate_proj")
        return self.linear(opened * opened.sigmoid() * self.linear(x, f"{prefix}up_proj"), f"{prefix}down_proj")

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.raw["rms_norm_eps"]).sqrt() * self.get(f"{name}.weight")
