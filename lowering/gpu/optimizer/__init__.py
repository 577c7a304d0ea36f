"""The steps of optimizers on GPUs: their kernels, and the ways of torch and NCCL that these replace."""
