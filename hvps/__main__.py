"""python -m hvps: the same as the program hvps."""

from __future__ import annotations

import sys

from hvps.cli import main

if __name__ == "__main__":
    sys.exit(main())
