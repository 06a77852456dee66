"""`headrace store` against a real node daemon, through the command line."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace import cli
from headrace.deploy.rundir import ENDPOINTS_FILE, RunDir, living_runs
from headrace.kvstore.client import NodeClient
from headrace.kvstore.names import chain, namespace
from headrace.kvstore.testing import FINGERPRINT, DaemonFixture, blocks_of, put
from headrace.router.http.tenants import tenant_salt

ROOT = namespace(FINGERPRINT, tenant_salt("alice"))
NAMES = chain(ROOT, range(64 * 20))
Store = Callable[..., tuple[int, str]]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonFixture]:
    made = DaemonFixture(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(daemon: DaemonFixture) -> NodeClient:
    return daemon.client()


@pytest.fixture
def store(daemon: DaemonFixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Store:
    """Run one command against the run; (exit code, what it printed)."""
    endpoints = {"node-0": f"unix:{daemon.socket}", "router": "http://127.0.0.1:1"}
    (tmp_path / ENDPOINTS_FILE).write_text(json.dumps(endpoints))

    def run(*args: str) -> tuple[int, str]:
        code = cli.main(["store", *args, "--run-dir", str(tmp_path)])
        return code, "".join(capsys.readouterr())

    return run


def test_stats_and_ls(client: NodeClient, store: Store) -> None:
    put(client, NAMES, 0, 3, keep_lease=True)
    client.announce(NAMES[:2], [])
    code, text = store("stats")
    assert code == 0
    assert "host_ready" in text
    values = json.loads(store("stats", "--json")[1])["node-0"]
    assert (values["host_ready"], values["host_slots"]) == (3, 8)
    code, text = store("ls", "--limit", "2")
    assert "node-0  host: 3 blocks, 2 shown" in text
    assert NAMES[0].hex()[:16] in text
    rows = json.loads(store("ls", "--json")[1])["node-0"]
    assert [row["name"] for row in rows] == [name.hex() for name in NAMES[:3]]
    assert [row["leases"] for row in rows] == [1, 1, 1]
    assert "decode-0.0: 2 blocks" in store("ls", "--place", "decode-0.0")[1]
    code, text = store("ls", "--place", "moon")
    assert code == 2
    assert "it has decode-0.0, host" in text


def test_verify_says_what_is_wrong(client: NodeClient, store: Store) -> None:
    put(client, NAMES, 0, 3)
    assert store("verify")[0] == 0
    (lease,) = client.lease(NAMES[2:3])
    client.slot_view(lease.slot)[5] ^= 255
    code, text = store("verify")
    assert code == 1
    assert NAMES[2].hex() in text
    client.release(NAMES[2:3])
    assert json.loads(store("verify", "--json")[1])["node-0"]["corrupt"] == []


def test_pin_flush_unpin(client: NodeClient, store: Store) -> None:
    put(client, NAMES, 0, 3)
    first = NAMES[0].hex()[:12]
    assert "1 blocks pinned for 60 s" in store("pin", first, "--seconds", "60")[1]
    assert "2 blocks dropped" in store("flush")[1]
    assert "1 pins ended" in store("unpin", first)[1]
    assert "1 blocks dropped" in store("flush")[1]
    code, text = store("pin", first)
    assert code == 2
    assert "fits 0 blocks" in text
    assert store("pin")[0] == 2


def test_a_tenants_quota_by_name_and_by_id(client: NodeClient, store: Store) -> None:
    from headrace.kvstore.names import tenant_id

    mine = tenant_id(ROOT)
    slots = client.begin_put(blocks_of(NAMES, 0, 4), mine)
    client.commit_put([(n, s, b"d" * 16) for n, s in zip(NAMES, slots)], keep_lease=False)  # type: ignore[arg-type]
    assert "2 blocks held, quota 2" in store("quota", "--tenant", "alice", "--quota", "2")[1]
    assert client.match(NAMES) == 2
    assert f'"tenant": "{mine.hex()}"' in store("ls", "--json")[1]
    assert store("quota", "--tenant-id", mine.hex(), "--quota", "default")[0] == 0
    for wrong in ("--quota 2", "--tenant a", "--tenant a --quota -1", "--tenant-id x --quota 1"):
        assert store("quota", *wrong.split())[0] == 2


def test_top_shows_rates_and_states(client: NodeClient, store: Store) -> None:
    put(client, NAMES, 0, 3)
    code, text = store("top", "--every", "0.05", "--count", "2")
    assert code == 0
    assert text.count("hit share") == 2
    assert "ready 3" in text
    shown = json.loads(store("top", "--every", "0.05", "--count", "1", "--json")[1])["node-0"]
    assert (shown["ready"], shown["puts_per_s"]) == (3, 0)


def test_a_run_is_found_or_its_absence_explained(
    daemon: DaemonFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Beside all other runs, and under a short path: sockets live in a run's directory.
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        runs = Path(parent)
        monkeypatch.setattr("headrace.deploy.rundir._runs_parent", lambda: runs)
        _find_runs(daemon, runs, tmp_path, capsys)


def _find_runs(daemon: DaemonFixture, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "stats"]) == 2
    assert "running services of this user: none" in capsys.readouterr().err
    run = RunDir("", str(tmp_path))
    run.write_endpoints({"node-0": f"unix:{daemon.socket}"})
    (runs / "headrace-dead").mkdir()
    (runs / "headrace-dead" / "lock").touch()
    assert living_runs() == [run.path]
    assert cli.main(["store", "stats"]) == 0
    run.write_endpoints({"router": "http://127.0.0.1:1"})
    assert cli.main(["store", "stats"]) == 2
    run.close()
    assert cli.main(["store", "stats", "--run-dir", str(tmp_path / "none")]) == 2
    assert cli.main(["store", "stats", "--socket", str(daemon.socket)]) == 0
