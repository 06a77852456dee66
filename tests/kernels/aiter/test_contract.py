"""What adapters pass to aiter, held against signatures parsed from its sources. aiter itself is never imported."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.kernels.aiter_library import FUNCTIONS, REFUSALS
from headrace.kernels.registry import OPS

ROOT = Path(__file__).resolve().parents[3]
TABLE = json.loads(Path(__file__).with_name("signatures.json").read_text())
ADAPTERS = sorted(ROOT.glob("kernels/*/aiter.py"))
ABSENT_IN_WHEEL = {"deepgemm_fp8_paged_mqa_logits": "asked for by `accepts` before it is called"}


def calls(path: Path) -> list[tuple[str, set[str], set[str], ast.Call]]:
    """(aiter function, keywords, optional keywords, node) of every `call(...)` of an adapter."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "call":
            name = ast.literal_eval(node.args[0])
            given = {keyword.arg for keyword in node.keywords if keyword.arg and keyword.arg != "optional"}
            optional: set[str] = set()
            for keyword in node.keywords:
                if keyword.arg == "optional":
                    assert isinstance(keyword.value, ast.Dict)
                    optional = {ast.literal_eval(key) for key in keyword.value.keys if key is not None}
                if keyword.arg is None:
                    given |= SPREAD[name]
            found.append((name, given, optional, node))
    return found


SPREAD = {
    "mla_decode_fwd": {
        "work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map",
    },
    "get_mla_metadata_v1": {"work_info_set"},
}  # fmt: skip
"""Keywords that arrive through `**`"""


def test_every_adapter_is_registered_and_the_other_way_round() -> None:
    assert [path.parent.name for path in ADAPTERS] == sorted(REFUSALS)
    assert set(REFUSALS) <= set(OPS)


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("profile", sorted(TABLE))
def test_keywords_exist_and_nothing_required_is_missing(path: Path, profile: str) -> None:
    assert calls(path)
    for name, given, optional, node in calls(path):
        assert len(node.args) == 1, f"{name}: positions differ between releases"
        if profile == "wheel" and name in ABSENT_IN_WHEEL:
            assert f'"{name}"' in path.read_text()
            continue
        facts = TABLE[profile]["functions"][name]
        if profile == "wheel":
            given = {"work_info" if (name, k) == ("get_mla_metadata_v1", "work_info_set") else k for k in given}
        known = set(facts["arguments"])
        assert given <= known, f"{name} takes no {sorted(given - known)} in {TABLE[profile]['source']}"
        missing = set(facts["required"]) - given - (optional & known)
        assert not missing, f"{name} needs {sorted(missing)} in {TABLE[profile]['source']}"


def test_optional_keywords_are_those_that_some_release_lacks() -> None:
    profiles = [TABLE[profile]["functions"] for profile in TABLE]
    for path in ADAPTERS:
        for name, _, optional, _ in calls(path):
            for keyword in optional:
                having = [keyword in functions[name]["arguments"] for functions in profiles]
                assert any(having), f"{name} has no {keyword} anywhere"
                assert not all(having), f"{name} has {keyword} everywhere: pass it plainly"


def test_what_has_moved_is_passed_by_name() -> None:
    """Positions and defaults that have cost others wrong results."""
    passed: dict[str, set[str]] = {}
    for path in ADAPTERS:
        for name, given, optional, _ in calls(path):
            passed.setdefault(name, set()).update(given | optional)
    assert {"num_kv_splits", "sm_scale", "kv_last_page_lens", "page_size"} <= passed["mla_decode_fwd"]
    assert "quant_dtype" in passed["per_group_quant_hip"]
    assert {"stable", "k", "stride0"} <= passed["top_k_per_row_prefill"]
    assert {"topk_weight", "topk_ids", "expert_mask"} <= passed["fused_moe"]


def test_no_adapter_imports_aiter() -> None:
    for path in (*ADAPTERS, ROOT / "kernels/aiter_library.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "aiter" for name in names), path


def test_the_table_covers_what_is_called() -> None:
    for profile in TABLE.values():
        assert set(profile["functions"]) == set(FUNCTIONS)


def test_signatures_are_read_from_sources(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("aiter_signatures", ROOT / "tools/aiter_signatures.py")
    assert spec
    assert spec.loader
    tool: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    (tmp_path / "aiter/ops/triton/attention").mkdir(parents=True)
    (tmp_path / "aiter/ops/topk.py").write_text("import nowhere\n@compile_ops('x')\ndef f(a, b: int, c=1, *, d): ...\n")
    (tmp_path / "aiter/ops/triton/attention/fp8_mqa_logits.py").write_text("def fp8_mqa_logits(Q, KV=None): ...\n")
    assert tool.signature(tmp_path, "aiter.ops.topk", "f") == {
        "module": "aiter.ops.topk", "arguments": ["a", "b", "c", "d"], "required": ["a", "b", "d"]
    }  # fmt: skip
    moved = tool.signature(tmp_path, "aiter.ops.triton.fp8_mqa_logits", "fp8_mqa_logits")
    assert moved["module"] == "aiter.ops.triton.attention.fp8_mqa_logits"
    with pytest.raises(SystemExit, match=r"has no aiter\.ops\.topk\.g"):
        tool.signature(tmp_path, "aiter.ops.topk", "g")
    done = subprocess.run(
        [sys.executable, ROOT / "tools/aiter_signatures.py", "--help"], capture_output=True, text=True
    )
    assert "pip download amd-aiter" in done.stdout
