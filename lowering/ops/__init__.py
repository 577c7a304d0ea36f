"""The fused ops, `torch.ops.autofuse.*`. Importing this package defines them."""

from autofuse.lowering.ops import (
    all_gather_matmul,
    all_to_all_embedding_bag_backward,
    all_to_all_embedding_bag_update,
    all_to_all_expert_matmul,
    embedding_bag_all_to_all,
    expert_matmul_all_to_all,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

__all__ = [
    "all_gather_matmul",
    "all_to_all_embedding_bag_backward",
    "all_to_all_embedding_bag_update",
    "all_to_all_expert_matmul",
    "embedding_bag_all_to_all",
    "expert_matmul_all_to_all",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]
