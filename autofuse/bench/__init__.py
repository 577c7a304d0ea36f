"""`autofuse bench`: backend="autofuse" beside stock Inductor with gloo, in one run.

`cases` holds the models, `measure` what every rank does, `run` starts the ranks, `table` is what is printed.

Its subcommands measure single ops on the GPUs of torchrun: `dense*` those of matmuls; `exchange*` what
`embedding*` and `expert*` have in common; `gpu_*`, `measured` and `timings` what all of these share.
"""
