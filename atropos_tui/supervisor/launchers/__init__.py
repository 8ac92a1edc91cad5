"""How a process is started, and by whom: directly, by a keeper that outlives the supervisor, or on another machine.

`launcher.py` has the seam and the direct way; `keeper_launcher.py` speaks to `keeper.py`, `remote_launcher.py` to
`far_end.py`, both over a `line.py`.
"""
