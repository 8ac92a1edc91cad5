"""Checks of a machine's fitness for a stack.

`command.py` has the command and checks of installed packages, `machine.py` checks this machine, and
`nodes.py` checks other machines and the network between them: its `node_connection.py` runs
`node_probe.py` there.
"""
