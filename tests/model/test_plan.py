"""The memory plan against the budget known of GLM-5.2-FP8, and the words of the command that prints it."""

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.errors import ConfigError
from headrace.model.load import load_model
from headrace.model.placement import WHOLE
from headrace.model.plan import parse_size, plan_model
from headrace.model.spec import ModelSpec
from headrace.model.testing import tiny_spec, write_checkpoint, write_config

GB = 1e9
MTP = ("MTP routed experts", "MTP rest")
ENDS = ("embedding", "head")


def test_glm_52_fp8_agrees_with_the_known_budget() -> None:
    plan = plan_model("GLM-5.2-FP8", 8, 8, "288GB", "10%")
    stored = plan.stored_parts
    rest = sum(v for part, v in stored.items() if part not in ("routed experts", *MTP, *ENDS))
    for measured, known in (
        (stored["routed experts"], 724.8 * GB),
        (rest, 16.8 * GB),
        (stored["embedding"] + stored["head"], 3.8 * GB),
        (sum(stored[part] for part in MTP), 10.0 * GB),
        (plan.stored_bytes, 755.63 * GB),
    ):
        assert measured == pytest.approx(known, rel=0.01)
    for group in plan.groups:
        assert group.parts["routed experts"] == pytest.approx(90.6 * GB, rel=0.01)
        assert group.parts["MTP routed experts"] == pytest.approx(1.2 * GB, rel=0.01)
        assert group.weight_bytes + group.left_bytes == plan.hbm_bytes - plan.reserve_bytes


@pytest.mark.parametrize(
    ("model", "tile656", "bf16"),
    [("GLM-5.2-FP8", 54_728, 78 * 1152 + 21 * 256 + 1408), ("GLM-5.1-FP8", 62_252, 79 * (1152 + 256))],
)
def test_bytes_of_a_cached_token(model: str, tile656: int, bf16: int) -> None:
    rooms = {room.row_format: room for room in plan_model(model, 8, 8, "288GB", "10%").groups[0].kv}
    assert rooms["tile656"].bytes_per_token == tile656
    assert rooms["bf16"].bytes_per_token == bf16


def test_a_prefill_group_replicates_its_cache_and_decode_ranks_do_not() -> None:
    prefill, decode = plan_model("glm-5.2-fp8", 4, 8, "288GB", "20GB").groups
    assert prefill.parts["routed experts"] == 2 * decode.parts["routed experts"]
    for room in prefill.kv:
        assert room.group_tokens == room.rank_tokens
    for room in decode.kv:
        assert room.group_tokens == 8 * room.rank_tokens
        assert room.rank_tokens % 64 == 0
        assert 0 <= decode.left_bytes - room.rank_tokens * room.bytes_per_token < 64 * room.bytes_per_token


def test_a_head_split_rank_has_its_share_of_the_layers() -> None:
    """Nothing is lost or doubled but what is whole everywhere; eight ranks hold what one does."""
    whole = plan_model("GLM-5.2-FP8", 1, 1, "1TB", "0").groups[0].parts
    split, decode = plan_model("GLM-5.2-FP8", 8, 8, "288GB", "10%", prefill_tp=8).groups
    assert (split.head_split, decode.head_split) == (True, False)
    for part in ("routed experts", "MTP routed experts", "dense MLPs", "shared experts"):
        assert split.parts[part] * 8 == whole[part]
    for part in ("indexers", "routers", "norms", "embedding", "head"):
        assert split.parts[part] == whole[part]
    # Down-projections to latents are whole: (2048 + 576) x 6144 FP8 values and their scales, in 78 layers.
    latents = 78 * ((2048 + 576) * 6144 + (16 + 5) * 48 * 4)
    assert 8 * (split.parts["attention"] - latents) == whole["attention"] - latents
    for room in split.kv:
        assert room.group_tokens == room.rank_tokens


def test_the_rank_with_the_largest_share_is_planned() -> None:
    one, three = (plan_model("nano", 1, ranks, "1GB", "0").groups[1].parts["routed experts"] for ranks in (1, 3))
    assert three * 16 == one * 6  # 16 experts over 3 ranks: 5, 5 and 6


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_directory_is_planned_from_its_tensors(tmp_path: Path, quantised: bool, shards: int) -> None:
    """Whatever config.json announces: here it says the opposite of what the files hold."""
    spec = tiny_spec(quantised=quantised)
    write_checkpoint(spec, tmp_path, shards=shards)
    write_config(tiny_spec(quantised=not quantised), tmp_path)
    plan = plan_model(tmp_path, 1, 1, "1GB", "0B")
    files = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert plan.stored_bytes == pytest.approx(files, rel=0.12)  # the rest is headers
    assert plan.stored_bytes < files
    load_model(ModelSpec.from_dir(tmp_path), tmp_path, "safetensors", "cpu", WHOLE, "tile656", True)


def test_sizes() -> None:
    assert parse_size("--hbm", "288GB") == 288 * 10**9
    assert parse_size("--hbm", "1.5 GiB") == 3 << 29
    assert parse_size("--reserve", "10%", whole=1000) == 100
    for text in ("288 parsecs", "-1GB", "1.2.3GB", "10%", ""):
        with pytest.raises(ConfigError, match="--hbm"):
            parse_size("--hbm", text)
    with pytest.raises(ConfigError, match=r"--decode-ep is 512; glm-5\.2-fp8 can be split over 1 to 256 ranks"):
        plan_model("glm-5.2-fp8", 8, 512, "288GB", "10%")
    with pytest.raises(ConfigError, match=r"--prefill-tp is 65; glm-5\.2-fp8 can be split over 1 to 64 ranks"):
        plan_model("glm-5.2-fp8", 8, 8, "288GB", "10%", prefill_tp=65)


def test_the_documented_plans_are_the_computed_ones() -> None:
    text = (Path(__file__).parents[2] / "docs" / "model.md").read_text()
    for hbm in ("288GB", "141GB"):
        plan = plan_model("GLM-5.2-FP8", 8, 8, hbm, "10%")
        group = plan.groups[1]
        numbers = [
            f"{group.left_bytes / GB:.2f} GB",
            f"{plan.reserve_bytes / GB:.2f} GB",
            f"{group.weight_bytes / GB:.2f}",
        ]
        numbers += [f"{room.rank_tokens:,}" for room in group.kv] + [f"{room.bytes_per_token:,}" for room in group.kv]
        assert [number for number in numbers if number not in text] == []


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model", "plan", "--model", "glm-5.2-fp8", "--prefill-cp", "8", "--decode-ep", "8", "--hbm"]
    assert main([*words, "288GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    assert plan["groups"][1]["kv"][0]["rank_tokens"] == 2_606_592
    assert main([*words, "288GB"]) == 0
    text = capsys.readouterr().out
    assert "8 x 2,606,592" in text
    assert "118,629 tensors" in text
    assert main([*words, "100GB"]) == 1
    assert "DOES NOT FIT: a prefill rank is 26.54 GB short" in capsys.readouterr().out
    assert main([*words, "288GB", "--prefill-tp", "8"]) == 0
    assert "prefill rank (TP 8)" in capsys.readouterr().out
    assert main(["model", "plan", "--model", "glm-6", "--hbm", "1GB"]) == 2
    assert "not one of nano" in capsys.readouterr().err
    assert main(["model", "--set", "model.path=nano", "plan", "--hbm", "1GB"]) == 0
    assert "nano: 763 tensors" in capsys.readouterr().out
