"""Who can reach a TensorFlow server from another host."""

from __future__ import annotations

import pytest

from tests.netlab.conftest import Namespace
from tests.unit.test_listen import SERVES, refuses, servers

pytestmark = pytest.mark.netlab

REFUSED = "Connection refused"


def test_a_server_for_loopback_cannot_be_reached_from_outside(namespace: Namespace) -> None:
    with servers(("127.0.0.1", 0, "guarded")) as running:
        assert running.said == [SERVES]
        assert namespace.connect(namespace.here, running.ports[0]) == REFUSED


def test_a_server_for_an_address_is_reached_there_and_nowhere_else(namespace: Namespace) -> None:
    with servers((namespace.here, 0, "guarded")) as running:
        assert running.said == [SERVES]
        assert namespace.connect(namespace.here, running.ports[0]) == "connected"
        assert refuses("127.0.0.1", running.ports[0])


def test_without_the_guard_anybody_can_reach_it(namespace: Namespace) -> None:
    # Otherwise the first test could not fail.
    with servers(("127.0.0.1", 0, "unguarded")) as running:
        assert running.said[0]["answer"] == 42
        assert namespace.connect(namespace.here, running.ports[0]) == "connected"
