"""A Ray cluster of three nodes on this host: `with RayNodes() as ray:`, then `address` for
`ray.init`.

Each is a raylet of its own at an address of its own, by Ray's own `cluster_utils`; nothing runs
after it.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster.processes import HOSTS, free_port, listens, wait_until

PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
PATIENCE = {
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_gcs_server_request_timeout_seconds": "120",
    "RAY_gcs_rpc_server_connect_timeout_s": "120",
    "RAY_health_check_initial_delay_ms": "120000",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "240",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
"""Ray's own settings: on a busy machine each of its many processes may take a minute to be up, and
no worker is started that nobody needs."""
RAYLET = '#!/bin/sh\nexec "{program}" "$@" --dashboard_agent_listen_port="$DASHBOARD_AGENT_PORT"\n'
"""Ray does not hand this port on to its raylet, which then ends itself if the agent has not told it
within 15 s."""


class RayNodes:
    """The cluster; its nodes are called n1, n2, n3."""

    def __init__(self) -> None:
        self.cluster: Any = None
        self.nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def __enter__(self) -> RayNodes:
        os.environ |= PATIENCE  # before Ray is imported, and for all that it starts
        from ray._private import services
        from ray.cluster_utils import Cluster

        self.folder = tempfile.TemporaryDirectory(prefix="raylet-")
        raylet = Path(self.folder.name) / "raylet"
        raylet.write_text(RAYLET.format(program=services.RAYLET_EXECUTABLE))
        raylet.chmod(0o755)
        services.RAYLET_EXECUTABLE = str(raylet)
        self.cluster = Cluster()
        for name, address in HOSTS.items():
            ports = {port: free_port(address) for port in PORTS}
            os.environ["DASHBOARD_AGENT_PORT"] = str(ports["dashboard_agent_listen_port"])
            options = {
                "node_name": name,
                "node_ip_address": address,
                "num_cpus": 1,
                "object_store_memory": 100 << 20,
            }
            self.nodes[name] = self.cluster.add_node(**options, **ports, include_dashboard=False)
        self.cluster.wait_for_nodes()
        for node in self.nodes.values():  # a worker is only started when this one is up
            ready = partial(listens, node.node_ip_address, node.runtime_env_agent_port)
            wait_until(ready, f"the agent of {node.node_ip_address}", 240)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cluster.shutdown()
