"""Plans, their executors and the fused ops. Importing any of it defines the ops, `torch.ops.autofuse.*`."""

import autofuse.lowering.direct
import autofuse.lowering.ops  # noqa: F401
