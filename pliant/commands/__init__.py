"""The commands of `pliant`. Each module has NAME, HELP, add_arguments and run.

`run(args)` gives the exit status: 0, or 1 if something failed. A wrong argument that
the parser cannot see is an OptionError.
"""
