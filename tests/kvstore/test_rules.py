"""Rule 7 of the store: bookkeeping has no collective. One place decides for a group, all ranks execute the same plan.

That followers ask the store for nothing is checked where they run: `prefill.fake.FollowerStore` refuses every decision,
and all suites of real groups (`tests/prefill/test_group.py`) give it to their followers."""

import ast
from pathlib import Path

import pytest

from headrace.prefill.fake import FollowerStore

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVES = {"all_reduce", "all_gather", "broadcast", "barrier", "reduce_scatter", "init_process_group"}
DECISIONS = {
    "match",
    "lease",
    "lease_leading",
    "promote",
    "begin_put",
    "commit_put",
    "abort_put",
    "release",
    "announce",
}
FOLLOWERS = ("executor.py", "slabs.py", "link.py", "exchange.py")
"""Files of prefill that run on every rank of a group."""


def test_the_store_knows_no_collective():
    for path in sorted((ROOT / "kvstore").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not any("distributed" in name for name in [*names, module]), path
            assert not (isinstance(node, ast.Attribute) and node.attr in COLLECTIVES), path


@pytest.mark.parametrize("name", FOLLOWERS)
def test_what_runs_on_every_rank_decides_nothing_about_blocks(name):
    for node in ast.walk(ast.parse((ROOT / "prefill" / name).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DECISIONS:
            owner = ast.unparse(node.func.value)
            assert "client" not in owner, f"prefill/{name} line {node.lineno}: {owner}.{node.func.attr}"


def test_the_store_of_a_follower_refuses_decisions(names):
    store = FollowerStore(4)
    assert len(store.slot_view(0)) == 64
    for decide in (store.match, store.lease, store.promote, store.release, store.drop):
        with pytest.raises(AssertionError, match="only the leader"):
            decide(names[:1])
    with pytest.raises(AssertionError, match="only the leader"):
        store.begin_put([(names[0], None, 0)])
