"""HTTP, sockets and ports: request bodies, connection limits, peers, authentication headers."""
