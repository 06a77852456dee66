import dataclasses
from pathlib import Path

import pytest

from headrace.config import Config, from_dict, load_config, to_dict
from headrace.errors import ConfigError


def test_every_setting_is_documented() -> None:
    for section in dataclasses.fields(Config):
        assert section.metadata["doc"]
        for field in dataclasses.fields(getattr(Config(), section.name)):
            assert field.metadata["doc"], f"{section.name}.{field.name}"
            bytes_or_seconds = field.name.endswith(("_bytes", "_s", "_tokens"))
            if bytes_or_seconds and field.name != "max_tokens":
                assert field.metadata["unit"] or "token" in field.metadata["doc"], f"{section.name}.{field.name}"


def test_every_default_is_an_allowed_value() -> None:
    assert from_dict(to_dict(Config())) == Config()


def test_the_tree_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config().decode.dp = 3  # type: ignore[misc]


def test_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("decode: {dp: 4, draft_tokens: 2}\nrouter: {port: 9000}\n")
    config = load_config(file, ["decode.dp=1", "deploy.launcher=process"])
    assert (config.decode.dp, config.decode.draft_tokens, config.router.port) == (1, 2, 9000)
    assert config.deploy.launcher == "process"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("decode.draft_token=1", "decode.draft_token: no such setting; did you mean 'draft_tokens'"),
        ("nothing.at=1", "nothing: no such setting"),
        ("decode.dp=two", "decode.dp: expected int, got 'two'"),
        ("decode.dp=0", "decode.dp: 0 is outside 1 .. inf"),
        ("decode.dp=true", "decode.dp: expected int, got True"),
        ("model.device=tpu", "model.device: 'tpu' is not one of auto, cpu, cuda"),
        ("prefill.chunk_tokens=100", "prefill.chunk_tokens: 100 is not a multiple of 64"),
        ("decode=3", "decode: expected a section"),
        ("decode.dp.x=3", "decode.dp: expected int"),
        ("decode.dp", "expected section.field=value"),
        ("router.port=[", "not YAML"),
        ("store.verify_share=.nan", "store.verify_share: expected float, got nan"),
        ("deploy.grace_s=.inf", "deploy.grace_s: expected float, got inf"),
        ("router.api_keys=a", "router.api_keys: expected a list like [a], got 'a'"),
        ("directory.url=http://x", "directory.url: 'http://x' does not start with one of redis://"),
        ("store.verify_share=2", "store.verify_share: 2.0 is outside 0.0 .. 1.0"),
    ],
)
def test_a_wrong_setting_names_the_field_and_what_it_allows(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert expected in str(caught.value)


def test_yaml_booleans_are_fine_for_text(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {deterministic: on}\n")
    assert load_config(file).model.deterministic == "on"


@pytest.mark.parametrize(("text", "expected"), [("[1]", "expected sections"), ("a: [", "is not YAML")])
def test_a_broken_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml"):
        load_config(tmp_path / "none.yaml")
