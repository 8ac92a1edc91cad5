"""Launchers: start a process directly, by a keeper that outlives the supervisor, or on another
machine.

`launcher.py` has the interface and the direct launcher. `keeper_launcher.py` talks to `keeper.py`,
`remote_launcher.py` to the node agent in `node_agent.py`, both by the frames of `frames.py`.
"""
