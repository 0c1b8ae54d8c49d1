"""What a rank sets for the MPI library before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvps.backends.mpi_settings import set_mpi_defaults
from hvps.cluster import Cluster

PREFIX = "OMPI_MCA_coll_tuned"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_MCA")}
    monkeypatch.setattr(os, "environ", found)
    return found


def test_large_sums_go_round_a_ring(settings: dict[str, str]) -> None:
    set_mpi_defaults(Cluster(0, 2, 0, 2, "test"))
    assert settings[f"{PREFIX}_use_dynamic_rules"] == "1"
    rules = Path(settings[f"{PREFIX}_dynamic_rules_filename"]).read_text()
    numbers = [line.partition("#")[0].split() for line in rules.splitlines()]
    assert numbers[-1] == ["262144", "4", "0", "0"]  # 4 is Open MPI's ring


def test_what_the_user_set_wins(settings: dict[str, str]) -> None:
    settings |= {f"{PREFIX}_allreduce_algorithm": "3", "OMPI_MCA_mpi_yield_when_idle": "0"}
    set_mpi_defaults(Cluster(0, 2, 0, 2, "test"))
    assert f"{PREFIX}_use_dynamic_rules" not in settings
    assert settings["OMPI_MCA_mpi_yield_when_idle"] == "0"
