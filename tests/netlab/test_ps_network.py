"""What an asynchronous step moves, counted on the interfaces of shaped hosts.

How long it takes is measured by `python -m benchmarks.ps_network`: a shared machine cannot promise
times.
"""

from __future__ import annotations

import argparse

import pytest

from benchmarks.ps_network import WEIGHT_BYTES, describe, measure
from benchmarks.shaped_hosts import ShapedHosts, unavailable

pytestmark = pytest.mark.netlab


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize("variables", [1, 16])
def test_weights_go_down_once_and_gradients_up_once(variables: int) -> None:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    options = argparse.Namespace(seconds=12.0, overrides=["backend.pipeline=2"])
    with ShapedHosts(4, "400mbit") as hosts:
        found = measure(hosts, 1, 3, variables, options)
    print(describe(found))
    # Steps that are under way at either end of the measurement are worth some percent.
    assert found["bytes"] < 1.1 * 2 * WEIGHT_BYTES
