"""Kernels by name: which part of a decode step each belongs to."""

from __future__ import annotations

import re

ATTENTION = "attention"
GEMM = "GEMM"
ELEMENTWISE = "elementwise, norms"
SAMPLING = "sampling"
OTHER = "other"
KINDS = (ATTENTION, GEMM, ELEMENTWISE, SAMPLING, OTHER)

# The engine's own Triton kernels, named as their functions.
_OWN = {
    **dict.fromkeys(("attend", "combine", "store_prompt"), ATTENTION),
    **dict.fromkeys(("block_sums", "bounds", "draw"), SAMPLING),
    "partial_product": GEMM,
    **dict.fromkeys(("residual_norm", "head_norm", "rotate", "gated_silu"), ELEMENTWISE),
}
# Others on CUDA: the first pattern found in the lower-case name decides. ATen's
# hold the operation, those of GEMM libraries "gemm", "gemv" or their own prefix.
_CUDA = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        # Keys and values, written and read.
        (ATTENTION, r"attention|attend|flash|fmha|sdpa|split_?kv|decode_kernel|cache|index_put"),
        # Softmax over logits is here: attention's own is inside its kernels.
        (SAMPLING, r"sampl|draw|uniform|record|pick|argmax|cumsum|kernel_scan|searchsorted"),
        (SAMPLING, r"sort|top_?k|top_?p|softmax|bisect|vocab|multinomial|inverse_cdf|logits"),
        (GEMM, r"gemm|gemv|cublas|cutlass|matmul|nvjet|xmma|splitk|addmm|dot_kernel"),
        (ELEMENTWISE, r"elementwise|norm|rotate|rotary|rope|silu|gelu|relu|activation|residual"),
        (ELEMENTWISE, r"reduce_kernel|copy|catarray|fill|embedding|index|gather|scatter"),
        (ELEMENTWISE, r"memcpy|memset|triton_(poi|per|red)_|bias"),
    )
)

# CPU: operations as ATen names them.
_CPU: dict[str, str] = {
    **dict.fromkeys(
        ("addmm", "mm", "mv", "addmv", "linear", "_mkl_linear", "_linear_pointwise", "bmm",
         "baddbmm", "matmul"),
        GEMM,
    ),
    **dict.fromkeys(
        ("_softmax", "softmax", "cumsum", "searchsorted", "sort", "topk", "argmax", "log",
         "_log_softmax", "clamp_", "multinomial"),
        SAMPLING,
    ),
    **dict.fromkeys(
        ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
         "index_put_", "_index_put_impl_"),
        ATTENTION,
    ),
    **dict.fromkeys(
        ("add", "add_", "mul", "mul_", "sub", "sub_", "rsub", "div", "div_", "neg", "pow", "rsqrt",
         "sqrt", "mean", "sum", "silu", "gelu", "relu", "relu_", "tanh", "native_layer_norm",
         "layer_norm", "rms_norm", "_fused_rms_norm", "embedding", "index_select", "cat", "copy_",
         "clone", "fill_", "zero_", "where", "eq", "ne", "lt", "le", "gt", "ge", "cos", "sin",
         "logical_and", "logical_or", "bitwise_and", "bitwise_or", "gather", "scatter_", "index",
         "masked_fill", "masked_fill_", "maximum", "minimum", "exp", "sigmoid", "amax", "all",
         "any", "isin"),
        ELEMENTWISE,
    ),
}  # fmt: skip
# What PyTorch's compiler writes for the CPU.
_CPU_FUSED = re.compile(r"^(graph_\d+_)?cpp_fused")


def cuda_kernel_kind(name: str) -> str:
    """The part of a decode step that a CUDA kernel belongs to, one of `KINDS`."""
    lower = name.lower()
    if lower in _OWN:
        return _OWN[lower]
    for kind, pattern in _CUDA:
        if pattern.search(lower):
            return kind
    return OTHER


def cpu_operation_kind(name: str, dimensions: int | None = None) -> str:
    """The part of a decode step that an operation on the CPU belongs to.

    Args:
        name: as torch.profiler gives it, such as `aten::addmm`.
        dimensions: most dimensions of an input, where that is known. Among the matrix products
            and softmaxes only attention's have three or more.

    Returns:
        One of `KINDS`. Views and allocations are `OTHER`: their time is the host's.
    """
    if _CPU_FUSED.search(name):
        return ELEMENTWISE
    kind = _CPU.get(name.rpartition("::")[2], OTHER)
    batched = dimensions is not None and dimensions >= 3
    if batched and re.search(r"softmax|bmm|matmul", name):
        return ATTENTION
    return kind
