"""The implementation of `pliant bench`: times models in turns with other engines.

`worker` measures one model with one thread count in a process of its own, `run` starts
the workers, `report` turns their results into tables. The scripts in bench/ use the
same `timing`, `accuracy`, `tables` and `results`.
"""
