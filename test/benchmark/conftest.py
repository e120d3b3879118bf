"""The benchmarks are run as modules from the repository's root; pytest's importlib mode leaves it out of the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
