"""How a rank fails: it says so under its name and takes the whole job with it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from hvps.cluster import Cluster
from hvps.errors import EXIT_FAILURE, EXIT_INTERRUPTED, HvpsError, PeerLostError
from hvps.restart import begin_anew_after

# A rank that only noticed that a peer is gone lets that peer's own message come first.
_SECONDARY_DELAY_S = 2.0


@contextmanager
def ends_the_job_on_error(cluster: Cluster) -> Iterator[None]:
    """Report an exception as "rank N failed" and leave at once with its exit code.

    The process is left without the interpreter's usual farewell: MPI_Finalize and Horovod's
    shutdown would wait for peers that are waiting for this rank. The launcher sees the exit code
    and ends the others.
    """
    try:
        yield
    except HvpsError as err:
        begin_anew_after(err, cluster.name)
        if isinstance(err, PeerLostError):
            time.sleep(_SECONDARY_DELAY_S)
        _leave(cluster, str(err), err.exit_code)
    except KeyboardInterrupt:
        _leave(cluster, "interrupted", EXIT_INTERRUPTED)
    except Exception as err:
        trace = traceback.format_exc()
        _leave(cluster, f"{type(err).__name__}: {err}", EXIT_FAILURE, trace)


def _leave(cluster: Cluster, message: str, code: int, trace: str = "") -> None:
    from hvps.log import logger

    alone = cluster.size == 1 and cluster.tasks is None
    who = "" if alone else f"{cluster.name} of {cluster.size} failed: "
    text = f"{trace}hvps: error: {who}{message}"
    for handler in logger.handlers:
        if hasattr(handler, "baseFilename"):  # the rank's own log, not the console
            handler.handle(logger.makeRecord("hvps", 40, "", 0, text, (), None))
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


def leave_at_once(code: int) -> NoReturn:
    """End this process with its exit code, without the interpreter's farewell.

    A TensorFlow server cannot be stopped, and would be waited for.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
