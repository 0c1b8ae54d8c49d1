"""What a broken connection between tasks is called."""

from __future__ import annotations

import tensorflow as tf

from hvps.backends.ps.lost import lost_or_same
from hvps.errors import PeerLostError


def test_the_cause_is_said() -> None:
    text = "Graph execution error:\n\nDetected at node 'x' defined at (most recent call last):\n"
    text += "  File \"a.py\", line 1, in b\nNode: 'x'\nSocket closed\n\t [[{{node x}}]]"
    lost = lost_or_same(tf.errors.UnavailableError(None, None, text))
    assert isinstance(lost, PeerLostError)
    assert lost.received == "UnavailableError: Socket closed"


def test_other_errors_are_what_they_are() -> None:
    err = tf.errors.InvalidArgumentError(None, None, "Incompatible shapes")
    assert lost_or_same(err) is err
