"""Measuring models: timing by turns, the other engines, memory, tables.

`timing` and `tables` are what every benchmark shares; `worker` measures one model with
one thread count in a process of its own, `run` starts the workers, `report` turns what
they found into tables. `pliant bench` and the scripts in bench/ stand on these.
"""
