"""transformers' own implementation as an oracle for tests (a development dependency: nothing else imports this).

`neutral()` removes the listed differences and nothing else: q_a/kv_a norms use eps 1e-6 there (config's eps here),
top-k tie order, expert outputs are not rounded to bf16 there (so our combine keeps fp32), and cached rows are fp32
there, so ours are too under the name `fp32`. cos/sin are fp32 there as well because the model runs in fp32.
"""

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
import transformers.modeling_layers as hf_layers
import transformers.models.deepseek_v32.modeling_deepseek_v32 as deepseek
import transformers.models.glm_moe_dsa.modeling_glm_moe_dsa as glm
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING as MASKS

from headrace.kernels.experts.reference import ReferenceExperts
from headrace.kernels.formats import FORMATS, RowFormat
from headrace.kernels.index_keys.reference import ReferenceIndexKeys
from headrace.kernels.latent_rows.reference import ReferenceLatentRows
from headrace.kvstore.pool import DevicePool
from headrace.model.base import StepRows
from headrace.model.load import load_model
from headrace.model.placement import WHOLE
from headrace.model.spec import ModelSpec
from headrace.model.transformer import Transformer

FP32_ROWS = RowFormat("fp32", 576 * 4, 64 * 128 * 4, fp8=False, tiled=False)

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 64,
    "v_head_dim": 40,
    "index_n_heads": 3,
    "index_head_dim": 128,
    "index_topk": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_nextn_predict_layers": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(ReferenceExperts, "combine_dtype", torch.float32))
        for cls in (
            glm.GlmMoeDsaIndexer,
            glm.GlmMoeDsaTopkRouter,
            deepseek.DeepseekV32Indexer,
            deepseek.DeepseekV32TopkRouter,
        ):
            enter(mock.patch.object(cls, "forward", _with_stable_topk(cls.forward)))
        enter(mock.patch.dict(FORMATS, {FP32_ROWS.name: FP32_ROWS}))
        for kernel, name, function in (
            (ReferenceLatentRows, "quantise", lambda self, c, r, fmt: _row_bytes(torch.cat((c, r), -1), fmt)),
            (ReferenceIndexKeys, "quantise", lambda self, k, fmt: _row_bytes(k, fmt)),
            (ReferenceLatentRows, "exact_dtype", torch.float32),
            (ReferenceLatentRows, "_decode", _decode),
            (ReferenceIndexKeys, "_decode", _decode_keys),
            (ReferenceIndexKeys, "write", _write_keys),
        ):
            enter(mock.patch.object(kernel, name, function))
        yield


def _row_bytes(values: Tensor, fmt: RowFormat) -> Tensor:
    return values.to(_dtype(fmt)).contiguous().view(torch.uint8)


def _dtype(fmt: RowFormat) -> torch.dtype:
    return torch.float32 if fmt is FP32_ROWS else torch.bfloat16


def _decode(self: Any, rows: Tensor, fmt: RowFormat, out: Tensor) -> None:
    out.copy_(rows.view(_dtype(fmt)))


def _decode_keys(self: Any, blocks: Tensor, fmt: RowFormat, out: Tensor) -> None:
    out.copy_(blocks.view(_dtype(fmt)).view(-1, 128))


def _write_keys(self: Any, plane: Tensor, rows: Tensor, data: Tensor, fmt: RowFormat) -> None:
    plane.view(-1, data.shape[1])[rows[rows >= 0]] = data[rows >= 0]


def _with_stable_topk(forward: Any) -> Any:
    def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))  # type: ignore[call-arg]

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(Tensor, "topk", topk), mock.patch.object(torch, "topk", topk):
            return forward(self, *args, **kwargs)

    return patched


FAMILIES = {
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM, glm),
    "deepseek_v32": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM, deepseek),
}
SHARING_RULES = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def make_reference(directory: Path, changes: dict[str, Any], seed: int = 0, family: str = "glm_moe_dsa") -> Any:
    """A random transformers model whose weights are exact in bf16, saved to `directory` in the published layout.

    `changes` to `SMALL` are keys of config.json. A sharing rule among them is what the saved config holds instead of
    `indexer_types`; `rope_interleave` and `indexer_rope_interleave`, which transformers does not read, are obeyed."""
    torch.manual_seed(seed)
    make_config, make_model, module = FAMILIES[family]
    config = make_config(**(SMALL | changes))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # no shared experts
        model = make_model(config).eval()
    randomise(model)
    model.save_pretrained(directory)
    _as_published(directory, changes)
    _turn_as_told(
        model, module, changes.get("rope_interleave", True), changes.get("indexer_rope_interleave", module is glm)
    )
    return same_eps(model, config.rms_norm_eps)


def _as_published(directory: Path, changes: dict[str, Any]) -> None:
    """Without what transformers adds: the resolved list of indexers, and matrices of experts that are not there."""
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    if any(rule in changes for rule in SHARING_RULES):
        del raw["indexer_types"]
    file.write_text(json.dumps(raw | changes, indent=1))
    tensors = load_file(directory / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if t.numel()}, directory / "model.safetensors")


def _turn_as_told(model: Any, module: Any, main: bool, indexer: bool) -> None:
    """RoPE in pairs (True) or halves, for the attention and for its indexer."""
    for part in model.modules():
        kind = type(part).__name__
        if kind.endswith(("Attention", "Indexer")):
            part.forward = _with_rope(part.forward, module, indexer if kind.endswith("Indexer") else main)


def _with_rope(forward: Any, module: Any, interleaved: bool) -> Any:
    turn = deepseek.apply_rotary_pos_emb_interleave if interleaved else deepseek.apply_rotary_pos_emb
    names = [name for name in ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb") if hasattr(module, name)]

    def patched(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(mock.patch.object(module, name, turn))
            return forward(*args, **kwargs)

    return patched


def same_eps(model: Any, eps: float) -> Any:
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = eps
    return model


def randomise(model: torch.nn.Module) -> None:
    """Weights large enough to matter and exact in bf16."""
    state = list(model.named_parameters()) + [b for b in model.named_buffers() if "correction_bias" in b[0]]
    for name, parameter in state:
        values = torch.randn_like(parameter)
        if parameter.dim() == 1:
            values = 0.1 * values + (1 if name.endswith("norm.weight") else 0)
        elif "embed_tokens" not in name and values.numel():
            values = values * parameter.shape[-1] ** -0.5
        parameter.data.copy_(values.bfloat16())


def make_mtp(main: Any, directory: Path) -> Any:
    """transformers' generic MTP model on top of `main`, random, its tensors added to the checkpoint in `directory`.

    transformers does not wire MTP for these architectures: GLM's decoder layer returns a tuple, the mask has another
    name, and every MTP layer owns an indexer.
    """
    decoder_layer = type(main.model.layers[-1])
    module = FAMILIES[main.config.model_type][2]

    class Block(decoder_layer):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            return out[0] if isinstance(out, tuple) else out

    def masks(self: Any, layer: int, embeds: Tensor, cache: Any, positions: Tensor) -> dict[str, Any]:
        return {
            "attention_mask": MASKS["indexed_attention"](
                config=self.config, inputs_embeds=embeds, attention_mask=None, cache=cache,
                position_ids=positions, layer_idx=layer, allow_is_causal_skip=False,
            )
        }  # fmt: skip

    config = main.config
    config.num_mtp_layers, config.mtp_layer_types = 1, ["indexed_attention"]
    config.mtp_mlp_layer_types = ["sparse"]
    own_config = type(config).get_mtp_config

    def mtp_config(self: Any) -> Any:
        made = own_config(self)
        if hasattr(made, "indexer_types"):
            made.indexer_types = ["full"] * made.num_hidden_layers
        return made

    init = hf_layers.MtpLayer.__init__
    with (
        warnings.catch_warnings(action="ignore"),  # no shared experts
        mock.patch.object(type(config), "get_mtp_config", mtp_config),
        mock.patch.object(
            hf_layers.MtpLayer, "__init__",
            lambda self, c, layer, norm, index, post=True: init(self, c, Block, norm, index, post),
        ),
    ):  # fmt: skip
        model = hf_layers.MtpModel(main, 1).eval()
    model.create_masks_for_mtp_layer = masks.__get__(model)
    randomise(model.layers)
    same_eps(model, config.rms_norm_eps)
    raw = json.loads((directory / "config.json").read_text())
    _turn_as_told(
        model.layers, module, raw.get("rope_interleave", True), raw.get("indexer_rope_interleave", module is glm)
    )
    _add_mtp_tensors(model.layers[0], config.num_hidden_layers, directory)
    return model


def _add_mtp_tensors(layer: Any, number: int, directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    prefix = f"model.layers.{number}."
    for name, value in layer.state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if name == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(value):
                for part, matrix in zip(("gate", "up"), both.chunk(2)):
                    tensors[f"{prefix}mlp.experts.{expert}.{part}_proj.weight"] = matrix.contiguous().clone()
        elif name == "mlp.experts.down_proj":
            for expert, matrix in enumerate(value):
                tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = matrix.contiguous().clone()
        elif value.numel():
            tensors[prefix + name] = value.clone()
    save_file(tensors, file)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}, indent=1))


def load_ours(directory: Path, row_format: str = FP32_ROWS.name) -> Transformer:
    spec = ModelSpec.from_dir(directory)
    return load_model(spec, directory, "safetensors", "cpu", WHOLE, row_format, True)


def pool_for(model: Transformer, tokens: int) -> DevicePool:
    return DevicePool(model.spec.slab_layout(model.fmt.name), tokens // 64 + 2, "cpu")


def rows_of(tokens: list[int], start: int, pool: DevicePool) -> StepRows:
    """Rows start.. of one sequence whose block b lies in slot b."""
    every = torch.arange(len(tokens))
    return StepRows(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=every + start,
        seq=torch.zeros_like(every),
        write=torch.ones_like(every, dtype=torch.bool),
        block_tables=torch.arange(pool.slots).unsqueeze(0),
        local=every,
    )
