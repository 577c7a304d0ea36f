"""`python -m autofuse.bench --device cpu`: backend="autofuse" beside stock Inductor with gloo, in one run.

`cases` holds the models, `measure` what every rank does, `table` what is printed.
"""
