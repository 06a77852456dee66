import importlib.util
import json
import subprocess
import sys

import pytest
import yaml

from headrace.cli import COMMANDS, build_parser, main, module_of
from headrace.config import load_config, to_dict

PRESENT = [name for name in COMMANDS if importlib.util.find_spec(module_of(name))]


@pytest.mark.parametrize("command", PRESENT)
def test_help_has_an_example_that_parses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "example:\n  headrace " + command in text
    assert "--json" in text
    assert "--set" in text
    module = importlib.import_module(module_of(command))
    import shlex

    words = shlex.split(module.EXAMPLE.split(">")[0].split("|")[0])
    assert words[:2] == ["headrace", command]
    build_parser(command, module).parse_args(words[2:])


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in COMMANDS)
    assert "example:" in text


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; from headrace.cli import main; main([])\n"
        "bad = [m for m in ('torch', 'ray', 'grpc', 'fastapi', 'yaml') if m in sys.modules]; assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_command_suggests_a_known_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert "did you mean 'serve'" in capsys.readouterr().err


def test_a_wrong_key_names_the_field_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "decode.draft_token=3"]) == 2
    error = capsys.readouterr().err
    assert "decode.draft_token" in error
    assert "did you mean 'draft_tokens'" in error
    assert error.count("\n") == 1


def test_errors_are_json_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json", "--set", "deploy.launcher=slurm"]) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["kind"] == "ConfigError"
    assert "deploy.launcher" in error["message"]
    assert "ray, process" in error["message"]


def test_config_as_yaml_reads_back_to_the_same_tree(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    assert main(["config", "--set", "router.api_keys=[a, b=t]", "--set", "decode.dp=4"]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert load_config(file) == load_config(None, ["router.api_keys=[a, b=t]", "decode.dp=4"])
    assert all(line.strip().startswith("#") or ":" in line or "- " in line or not line for line in text.splitlines())
    assert yaml.safe_load(text)["decode"]["dp"] == 4


def test_config_json_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(to_dict(load_config())))
    assert main(["config", "--choices", "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)
    assert choices["deploy.launcher"] == ["ray", "process"]
    assert "gdsf" in choices["store.host_policy"]


def test_doctor_names_a_policy_that_would_stop_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--set", "store.device_policy=best"]) == 1
    assert "STOP policies: eviction policy 'best' is not known; known: arc" in capsys.readouterr().out


def test_version_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"][0].isdigit()
    assert found["headrace"]


def test_status_without_a_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "http://127.0.0.1:9", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["error"]["kind"] == "RankLost"
