"""Text logs: everyone in a file of their own, rank 0 also on the console."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

logger = logging.getLogger("hvps")


def start_logging(level: str, is_root: bool) -> None:
    """Let rank 0 speak on standard output, and others nowhere yet."""
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers.clear()
    if is_root:
        console = logging.StreamHandler(sys.stdout)
        console.setLevel(level.upper())
        console.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(console)


def log_to_file(path: Path) -> None:
    """Keep everything that this rank says in `path` too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(file)
