"""The optimizer's step on GPUs: its kernel, beside plain torch with NCCL."""
