"""`autofuse bench`: backend="autofuse" beside stock Inductor with gloo, in one run.

`cpu` is that benchmark. `gpu` has the subcommands, which measure single ops on the GPUs of torchrun: `dense`,
`embedding`, `experts`, and in `exchange` what the last two share.
"""
