"""`python -m autofuse.bench --device cpu`: backend="autofuse" beside stock Inductor with gloo, in one run.

`cases` holds the models, `launch` starts the ranks, `measure` is what each does, `table` what is printed.
"""
