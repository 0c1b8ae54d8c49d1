"""What a broken connection is called."""

from __future__ import annotations

import tensorflow as tf

from hvps.errors import PeerLostError

_GONE = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.DeadlineExceededError,
)


def lost_or_same(err: tf.errors.OpError) -> Exception:
    """The error of a session in our words if it says that another task is gone."""
    if not isinstance(err, _GONE):
        return err
    return PeerLostError(
        "lost contact with another task",
        rule="training needs every parameter server",
        received=f"{type(err).__name__}: {_cause(err)[:300]}",
        do="look for the first error in the output of the other tasks",
    )


def _cause(err: tf.errors.OpError) -> str:
    """The line that says why, of a text that begins with where in the graph it was."""
    heads = ("Graph execution error", "Detected at node", "Node: ", "File ", "[[")
    lines = [line.strip() for line in err.message.splitlines()]
    return next((line for line in lines if line and not line.startswith(heads)), err.message)
