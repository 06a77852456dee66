"""Makes the modules of tests/model/lib importable: what several of these tests compare with."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "lib"))
