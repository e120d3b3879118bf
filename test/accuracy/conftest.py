"""Tests of the gates themselves; the gates are scripts (`make test-accuracy`)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside this one
