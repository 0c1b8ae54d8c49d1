"""Makes .venv: `make install` runs this with whatever Python there is.

This file only finds an interpreter that hvps can use and goes on in it. It is written so that
old ones can read it as well, and say so; the work is in the package `installer` next to it.
"""

import os
import subprocess
import sys

OLDEST = (3, 10)
NEWEST = (3, 12)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The one that .venv has comes first: it may have been named, and not be on PATH.
CANDIDATES = (ROOT + "/.venv/bin/python", "python3.12", "python3.11", "python3.10")
ASK_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def is_supported(version):
    return OLDEST <= tuple(version[:2]) <= NEWEST


def ask_version(program):
    """The (major, minor) of an interpreter; None if it is absent or does not run."""
    try:
        process = subprocess.Popen(
            [program, "-c", ASK_VERSION], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output = process.communicate()[0].decode()
        return tuple(int(part) for part in output.strip().split("."))
    except (OSError, ValueError):
        return None


def find_other():
    for program in CANDIDATES:
        version = ask_version(program)
        if version and is_supported(version):
            return program
    return None


def explain_wrong_version():
    version = ".".join(str(part) for part in sys.version_info[:3])
    lines = [
        "error: this Python cannot be used",
        "  rule:     Python %d.%d to %d.%d" % (OLDEST + NEWEST),
        "  received: Python %s at %s" % (version, sys.executable),
        "  do:       name another one: make install PYTHON=/path/to/python3.11",
    ]
    if not os.environ.get("PYTHON"):
        lines[-1] += " (none of %s was found on PATH)" % ", ".join(CANDIDATES[1:])
    return "\n".join(lines)


def main():
    if not is_supported(sys.version_info):
        # An interpreter that the user named is not exchanged for another one.
        other = None if os.environ.get("PYTHON") else find_other()
        if other is None:
            sys.stderr.write(explain_wrong_version() + "\n")
            return 1
        os.execvp(other, [other, os.path.abspath(__file__)])
    from installer.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
