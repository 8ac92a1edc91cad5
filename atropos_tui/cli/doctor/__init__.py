"""Is a machine fit to run a stack: `command.py` has the command and what is installed, `machine.py` this machine,
`nodes.py` the others and the network between them, where a `node_line.py` has `node_probe.py` look around.
"""
