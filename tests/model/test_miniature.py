"""Miniatures of all three families: the real names and layers, loaded from shards, and an answer from each."""

import json
import re
from pathlib import Path

import pytest
import torch

from headrace.errors import CheckpointError
from headrace.messages import SamplingParams
from headrace.model.load import load_model
from headrace.model.miniature import write_miniature
from headrace.model.mono import MonoEngine
from headrace.model.placement import WHOLE, Placement
from headrace.model.source import INDEX_FILE, SafetensorsSource
from headrace.model.spec import ModelSpec
from headrace.model.stream import LoadReport
from headrace.model.tensors import stored_tensors

FAMILIES = ["GLM-5.2-FP8", "GLM-5.2", "GLM-5.1-FP8", "GLM-5.1", "DeepSeek-V3.2"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, ModelSpec]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("miniature")
    spec = write_miniature(request.param, directory, experts=16, shards=5)
    return request.param, directory, spec


def pattern(name: str) -> str:
    return re.sub(r"experts\.\d+\.", "experts.N.", name)


def test_names_and_dtypes_are_the_real_ones(family: tuple[str, Path, ModelSpec]) -> None:
    model, directory, spec = family
    real = {(pattern(tensor.name), tensor.dtype) for tensor in stored_tensors(ModelSpec.from_dir(model))}
    source = SafetensorsSource(directory)
    found = {(pattern(name), source.dtype(name)) for name in source.names()}
    source.close()
    copies = {pair for pair in found - real if "layers.61.embed_tokens" in pair[0] or "shared_head.head" in pair[0]}
    assert found - copies == real
    assert len(copies) == (2 if model == "DeepSeek-V3.2" else 0)
    index = json.loads((directory / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(source.nbytes(name) for name in source.names())
    assert len(set(index["weight_map"].values())) == 5
    assert ModelSpec.from_dir(directory) == spec


def test_shapes_are_as_awkward_as_the_real_ones(family: tuple[str, Path, ModelSpec]) -> None:
    _, directory, spec = family
    assert spec.num_hidden_layers in (61, 78)
    rows = spec.qk_nope_head_dim + spec.v_head_dim
    assert any(head * rows // 128 != ((head + 1) * rows - 1) // 128 for head in range(spec.num_attention_heads))
    assert rows % 128 != 0
    if not spec.quantised:
        return
    where = json.loads((directory / INDEX_FILE).read_text())["weight_map"]
    scaled = [name for name in where if name + "_scale_inv" in where]
    assert any(where[name] != where[name + "_scale_inv"] for name in scaled)
    partial = [t for t in stored_tensors(spec) if t.dtype == "F8_E4M3" and (t.shape[0] % 128 or t.shape[1] % 128)]
    assert len(partial) > len(scaled) // 2


def test_it_loads_byte_exactly_and_generates(family: tuple[str, Path, ModelSpec]) -> None:
    _, directory, spec = family
    reports: list[LoadReport] = []
    model = load_model(spec, directory, "safetensors", "cpu", WHOLE, "tile656", True, progress=reports.append)
    last = reports[-1]
    assert last.read_tensors == last.rank_tensors == len(reports)
    assert last.read_bytes == last.rank_bytes == last.file_bytes - last.copies_bytes
    assert last.other_ranks_bytes == 0
    assert (last.copies_bytes > 0) == (spec.model_type == "deepseek_v32")
    dummy = load_model(spec, directory, "dummy", "cpu", WHOLE, "tile656", True)
    prompt = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(max_tokens=4, temperature=0.0)
    answers = [MonoEngine(m).generate(prompt, params, drafts).tokens for m, drafts in ((model, 2), (dummy, 0))]
    assert answers[0] == answers[1], "the files hold the dummy weights of the same seed"
    assert len(set(answers[0])) > 1


def test_a_rank_reads_its_experts_and_nothing_of_the_others(family: tuple[str, Path, ModelSpec]) -> None:
    _, directory, spec = family
    lasts = []
    for rank in (0, 2):
        reports: list[LoadReport] = []
        load_model(
            spec,
            directory,
            "safetensors",
            "cpu",
            Placement.expert_split(rank, 3),
            "tile656",
            True,
            progress=reports.append,
        )
        lasts.append(reports[-1])
    for report in lasts:
        assert report.read_bytes == report.rank_bytes
        assert report.rank_bytes + report.other_ranks_bytes + report.copies_bytes == report.file_bytes
    shares = (5, 6)  # of 16 experts over 3 ranks
    one = (lasts[1].rank_bytes - lasts[0].rank_bytes) / (shares[1] - shares[0])
    assert lasts[0].other_ranks_bytes == 11 * one


def test_all_that_is_wrong_with_a_sharded_checkpoint_is_one_error(tmp_path: Path) -> None:
    spec = write_miniature("glm-5.1-fp8", tmp_path, experts=3, shards=4)
    files = sorted(tmp_path.glob("*.safetensors"))
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[3].unlink()
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["model.norm.weight_typo"] = files[0].name
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        load_model(spec, tmp_path, "safetensors", "cpu", WHOLE, "tile656", True)
    text = str(caught.value)
    for part in (
        f"cannot read {files[3]}: No such file",
        "the file is cut off",
        "index: model.norm.weight_typo is not in model-00001",
        "missing: model.layers.78.eh_proj.weight [160, 320]",
    ):
        assert part in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_118629_tensors(tmp_path: Path) -> None:
    """256 experts in 76 layers: the published tensor count on disk, checked and read, one rank of eight."""
    spec = write_miniature("glm-5.2-fp8", tmp_path, experts=256, shards=141)
    source = SafetensorsSource(tmp_path)
    assert len(list(source.names())) == 118_629
    source.close()
    reports: list[LoadReport] = []
    load_model(
        spec, tmp_path, "safetensors", "cpu", Placement.expert_split(3, 8), "tile656", True, progress=reports.append
    )
    assert reports[-1].rank_tensors == 118_629 - 76 * 224 * 6
    assert reports[-1].read_bytes == reports[-1].rank_bytes
