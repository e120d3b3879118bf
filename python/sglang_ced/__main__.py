"""`python -m sglang_ced` is `ced`."""

import sys

from sglang_ced.cli.main import main

sys.exit(main())
