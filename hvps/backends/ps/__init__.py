"""Parameter servers: variables on ps tasks, gradients from workers, over TensorFlow's servers.

member.py        this task: its server (listen.py says where), its line to the coordinator
coordinator.py   in ps 0: who is there, and run_state.py: whose step is next, how far ahead
placement.py     which ps holds what
graph.py         the session's graph: parameters.py (weights down, gradients up), shards.py (the
                 optimizer on the ps), towers.py and replica.py (the model's step)
rules.py         from gradients to updates
drivers.py       a step of one client, for each way of replicating and updating
backend.py       the seam to the trainer; served_model.py: the whole model and its parts
serve.py         the tasks that only serve
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvps.backends.ps.backend import PsBackend
    from hvps.cluster import Cluster
    from hvps.config import Config


def make_ps_backend(config: Config, cluster: Cluster) -> PsBackend:
    """Join the cluster as a task that trains."""
    from hvps.backends.ps.backend import PsBackend
    from hvps.backends.ps.member import Member

    return PsBackend(Member.start(config, cluster), config)


def serve_cluster(config: Config, cluster: Cluster) -> int:
    """Join the cluster as a task that serves, and serve until the chief has finished.

    Returns:
        The exit code.
    """
    from hvps.backends.ps.member import Member
    from hvps.backends.ps.serve import serve

    return serve(Member.start(config, cluster))
