"""Why collectives are kept: the codes of reports."""

from dataclasses import dataclass
from enum import Enum


class Reason(str, Enum):
    """Why a site is kept. `value` is the code in reports; `advice` says what the user can do."""

    advice: str

    def __new__(cls, code: str, advice: str) -> "Reason":
        self = str.__new__(cls, code)
        self._value_ = code
        self.advice = advice
        return self

    NO_NATIVE_KERNELS = (
        "no_native_kernels",
        "reinstall where a C++17 compiler is found: `pip install --force-reinstall --no-deps autofuse`",
    )
    NO_KERNEL_FOR_DEVICE = (
        "no_kernel_for_device",
        "there is no kernel for this op on this device yet; the collective runs as before",
    )
    GROUP_SPANS_HOSTS = (
        "group_spans_hosts",
        "fused ops need shared memory between all ranks: make the group of ranks of one host",
    )
    GROUP_UNKNOWN = (
        "group_unknown",
        "initialise torch.distributed and create the group before compiling, and keep it alive",
    )
    SINGLE_RANK = ("single_rank", "a group of one rank has nothing to exchange; drop the collective")
    REDUCE_OP = ("reduce_op", "only sum and avg can be fused with the compute before them")
    DTYPE = ("dtype", "use float32, bfloat16 or float16 (int32 or int64 for indices), equal on both sides")
    MIXED_DEVICES = ("mixed_devices", "put all tensors of the compute and the collective on one device")
    NO_COMPUTE = (
        "no_compute",
        "no matmul, embedding bag or expert matmul feeds or consumes this collective within the graph",
    )
    LAYOUT = (
        "layout",
        "the views between compute and collective are no scatter or gather along one dim; simplify them",
    )
    EXTRA_USERS = (
        "extra_users",
        "something else reads a value between compute and collective; read it before or after both",
    )
    UNEVEN = ("uneven", "make the scattered (gathered) dim a multiple of the size of the group")
    UNSUPPORTED_VARIANT = (
        "unsupported_variant",
        "the compute uses an option that no fused op has, such as trained max pooling",
    )
    POLICY_NEVER = ("policy_never", "policy is `never`: set it to `auto` or `always` to fuse")
    PATTERN_DISABLED = ("pattern_disabled", "add the pattern to `patterns` to fuse")
    NOT_PROFITABLE = (
        "not_profitable",
        "no gain is predicted for all of these sizes; narrow the range of a dynamic dim with "
        "`torch._dynamo.mark_dynamic(x, dim, min=, max=)`, or fuse nevertheless with policy `always`",
    )
    PASS_FAILED = ("pass_failed", "a fault in autofuse: please report it, with the traceback that was logged")


@dataclass(frozen=True)
class Reject:
    """A reason and its particulars. `taken`: the compute is there, but another fused op has it."""

    reason: Reason
    detail: str
    taken: bool = False

    @property
    def telling(self) -> bool:
        """Whether there is compute that was not fused."""
        return self.taken or self.reason is not Reason.NO_COMPUTE
