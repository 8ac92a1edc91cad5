"""A Ray cluster of three nodes on this host: `with RayNodes() as ray:`, then `address` for `ray.init`.

Each is a raylet of its own at an address of its own, by Ray's own `cluster_utils`; nothing runs after it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from tests.cluster.processes import HOSTS, free_port

AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


class RayNodes:
    """The cluster; its nodes are called n1, n2, n3."""

    def __init__(self) -> None:
        self.cluster: Any = None
        self.nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def __enter__(self) -> RayNodes:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        for name, address in HOSTS.items():
            # A raylet gives up on ports that its agent has not told it within 15 s: on a busy machine it takes longer.
            ports = {port: free_port(address) for port in AGENT_PORTS}
            options = {"node_name": name, "node_ip_address": address, "num_cpus": 4, "object_store_memory": 100 << 20}
            self.nodes[name] = self.cluster.add_node(**options, **ports, include_dashboard=False)
        self.cluster.wait_for_nodes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.shutdown()
