"""`autofuse bench`: backend="autofuse" beside stock Inductor with gloo, in one run.

`cases` holds the models, `measure` what every rank does, `run` starts the ranks, `table` is what is printed.
"""
