"""What `pliant bench` stands on: models timed by turns with other engines.

`worker` measures one model with one thread count in a process of its own, `run` starts
the workers, `report` turns what they found into tables. The scripts in bench/ take the
same `timing`, `accuracy`, `tables` and `results`.
"""
