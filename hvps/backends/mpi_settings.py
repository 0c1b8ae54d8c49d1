"""Settings that an MPI library reads when it starts. What the user set wins."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hvps.cluster import Cluster

_RULES = Path(__file__).with_name("open_mpi_rules.conf")


def set_mpi_defaults(cluster: Cluster) -> None:
    """Make waiting ranks give their core away. Must be called before MPI is initialised.

    Open MPI waits by spinning. As soon as the ranks' own threads and their MPI threads are more
    than the cores, or somebody else uses them, the spinning takes time from those who compute: 8
    ranks on 2 cores then need 229 ms for 4 KB, and 24 ms when they yield. Where a core is free,
    yielding costs a system call for each look.

    Open MPI takes halving and doubling for most large sums, where each byte crosses a host's link
    about twice as often as in a ring: 16 MB over 4 hosts at 400 Mbit/s took 920 ms, and 530 ms by
    a ring, whose bound is 502 ms.

    Also let an Open MPI that was installed by pip find its own files when there is no mpirun to
    tell it where they are: a wheel has no fixed place.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if not any(name.startswith("OMPI_MCA_coll_tuned") for name in os.environ):
        os.environ |= {
            "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
            "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(_RULES),
        }
    prefix = Path(sys.prefix)
    if (prefix / "bin" / "orted").exists() and (prefix / "lib" / "libmpi.so.40").exists():
        os.environ.setdefault("OPAL_PREFIX", str(prefix))
    if cluster.size == 1:
        os.environ.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
