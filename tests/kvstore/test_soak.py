"""Twenty minutes of everything at once: writers that abort and are killed, a daemon that is killed, flushes, pins,
quotas and digest checks. Every slot stays in one state, and every byte that is read is what was written."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.kvstore.names import chain, namespace, tenant_id
from headrace.kvstore.testing import FINGERPRINT, DaemonFixture
from headrace.kvstore.tool import StoreTool

MINUTES = 20
SLOTS = 12
CHURN = Path(__file__).parent / "workers" / "churn.py"
ROOTS = [namespace(FINGERPRINT, f"tenant {i}") for i in range(4)]
NAMES = [name for root in ROOTS for name in chain(root, range(64 * 6))]


class Soak:
    def __init__(self, directory):
        self.daemon = DaemonFixture(directory, slots=SLOTS)
        self.dice = random.Random(20)
        self.seed = 0
        self.workers = [self.worker() for _ in range(3)]
        self.done = dict.fromkeys(("killed clients", "killed daemons", "ended clients", "flushed", "checked"), 0)
        self.tally = dict.fromkeys(("puts", "reads", "expired", "lost", "refused"), 0)

    def worker(self):
        self.seed += 1
        command = [
            sys.executable,
            str(CHURN),
            f"unix:{self.daemon.socket}",
            f"decode-0.{self.seed % 3}",
            str(self.seed),
        ]
        made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert made.stdout.readline() == "ready\n"
        return made

    def end(self, worker):
        """In order: it has seen no wrong byte, or says which."""
        worker.send_signal(signal.SIGTERM)
        out, _ = worker.communicate(timeout=60)
        assert worker.returncode == 0, out
        for key, value in json.loads(out.splitlines()[-1]).items():
            self.tally[key] += value

    def step(self):
        what = self.dice.choices(
            ["kill client", "kill daemon", "end client", "flush", "pin", "quota", "verify"], [4, 1, 2, 2, 3, 2, 4]
        )[0]
        at = self.dice.randrange(len(self.workers))
        if what == "kill client":
            self.workers[at].kill()
            self.workers[at].wait()
            self.workers[at] = self.worker()
            self.done["killed clients"] += 1
        elif what == "kill daemon":
            self.daemon.kill()
            self.daemon.start()
            assert len(self.daemon.files()) == 1
            self.done["killed daemons"] += 1
        elif what == "end client":
            self.end(self.workers[at])
            self.workers[at] = self.worker()
            self.done["ended clients"] += 1
        else:
            self.use_tool(what)
        assert all(worker.poll() is None for worker in self.workers), "a worker met a wrong byte"

    def use_tool(self, what):
        tool = StoreTool(f"unix:{self.daemon.socket}")
        if what == "flush":
            self.done["flushed"] += tool.flush()
        elif what == "pin":
            tool.pin(self.dice.sample(NAMES, 1), self.dice.uniform(0.1, 3.0))
        elif what == "quota":
            tool.set_quota(tenant_id(self.dice.choice(ROOTS)), self.dice.choice([None, 2, 5]))
        else:
            verdict = tool.verify()
            assert verdict.corrupt == []
            self.done["checked"] += verdict.checked
        self.balanced(tool.values())
        tool.close()

    @staticmethod
    def balanced(values):
        states = ("free", "writing", "ready", "doomed", "quarantined")
        assert sum(values[f"host_{state}"] for state in states) == SLOTS, values

    def finish(self):
        for worker in self.workers:
            self.end(worker)
        tool = StoreTool(f"unix:{self.daemon.socket}")
        idle = ("host_leased", "host_writing", "host_quarantined", "host_pinned", "host_clients")
        self.daemon.settle(lambda: all(tool.values()[key] == 0 for key in idle), 10.0)
        values = tool.values()
        assert values["host_free"] + values["host_ready"] == SLOTS
        assert tool.verify().corrupt == []
        tool.close()
        self.daemon.close()


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_twenty_minutes_of_everything(tmp_path):
    soak = Soak(tmp_path)
    end = time.monotonic() + MINUTES * 60
    while time.monotonic() < end:
        time.sleep(soak.dice.uniform(0.1, 0.8))
        try:
            soak.step()
        except StoreError as error:
            raise AssertionError(f"after {soak.done}: {error}") from error
    soak.finish()
    print({**soak.done, **soak.tally})
    assert all(soak.done.values()), soak.done
    assert min(soak.tally["puts"], soak.tally["reads"], soak.tally["lost"]) > 0
