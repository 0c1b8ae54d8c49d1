"""Runs a command for a launcher on another host, and ends it with the launcher.

    python -m hvps.guard COMMAND...

ssh passes on neither signals nor its own end. What comes on standard input does: a line with the
number of a signal is sent to the command, and when the input ends, because the launcher or the
connection has, all that the command has started is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from hvps.errors import EXIT_CONFIG
from hvps.processes import end_with, kill_all_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Its exit code; 128 + the signal's number if one killed it, as ssh does.
    """
    command = list(sys.argv[1:] if argv is None else argv)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with(os.getpid()),
        )
    except OSError as err:
        print(f"hvps: error: {err}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    threading.Thread(target=_obey, args=(process,), daemon=True).start()
    code = process.wait()
    kill_all_of(process.pid)
    return 128 - code if code < 0 else code


def _obey(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError, ValueError):
        for line in sys.stdin:
            process.send_signal(int(line))
    kill_all_of(process.pid)


if __name__ == "__main__":
    sys.exit(main())
