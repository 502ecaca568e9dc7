"""Kernels by name, as profilers of real runs show them."""

import re

import pytest

from rlhf_app.bench.kernel_kinds import (
    ATTENTION,
    ELEMENTWISE,
    GEMM,
    OTHER,
    SAMPLING,
    cpu_operation_kind,
    cuda_kernel_kind,
)

CUDA = [
    ("attend", ATTENTION),
    ("combine", ATTENTION),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", ATTENTION),
    ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>)",
     ATTENTION),
    ("void at::native::index_put_with_sort_kernel<float>(...)", ATTENTION),
    ("nvjet_tst_128x64_64x10_1x2_h_bz_coopA_TNT", GEMM),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", GEMM),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64", GEMM),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16>", GEMM),
    ("void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float, 128>", GEMM),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", GEMM),
    ("partial_product", GEMM),
    ("draw", SAMPLING),
    ("block_sums", SAMPLING),
    ("bounds", SAMPLING),
    ("void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>", SAMPLING),
    ("void at::native::tensor_kernel_scan_innermost_dim<double, std::plus<double>>", SAMPLING),
    ("void at::native::(anonymous namespace)::searchsorted_cuda_kernel<double, long>", SAMPLING),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps<float>>>",
     SAMPLING),
    ("void cub::DeviceRadixSortOnesweepKernel<cub::Policy900, float>", SAMPLING),
    ("residual_norm", ELEMENTWISE),
    ("gated_silu", ELEMENTWISE),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>",
     ELEMENTWISE),
    ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<>>",
     ELEMENTWISE),
    ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", ELEMENTWISE),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>>", ELEMENTWISE),
    ("Memcpy DtoD (Device -> Device)", ELEMENTWISE),
    ("triton_poi_fused_add_mul_3", ELEMENTWISE),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", OTHER),
    ("a_kernel_that_nobody_knows", OTHER),
]  # fmt: skip
CPU = [
    ("aten::addmm", 2, GEMM),
    ("aten::mm", 2, GEMM),
    ("aten::bmm", 3, ATTENTION),
    ("aten::_softmax", 4, ATTENTION),
    ("aten::_softmax", 2, SAMPLING),
    ("aten::cumsum", 2, SAMPLING),
    ("aten::searchsorted", 2, SAMPLING),
    ("aten::scaled_dot_product_attention", 4, ATTENTION),
    ("aten::add", 3, ELEMENTWISE),
    ("aten::native_layer_norm", 3, ELEMENTWISE),
    ("aten::mul", None, ELEMENTWISE),
    ("graph_0_cpp_fused_add_mul_0", None, ELEMENTWISE),
    ("mkl::_mkl_linear", 2, GEMM),
    ("aten::as_strided", 3, OTHER),
    ("aten::empty", None, OTHER),
]


@pytest.mark.parametrize(("name", "kind"), CUDA, ids=[name[:40] for name, _ in CUDA])
def test_cuda(name, kind):
    assert cuda_kernel_kind(name) == kind


@pytest.mark.parametrize(("name", "dimensions", "kind"), CPU)
def test_cpu(name, dimensions, kind):
    assert cpu_operation_kind(name, dimensions) == kind


def test_every_kernel_of_the_engine_is_known(repo_root):
    """Launched kernels are public functions, as Triton names them."""
    launched = re.compile(r"@triton\.jit\ndef ([a-z]\w+)\(")
    files = (repo_root / "rlhf_app" / "hybrid_engine").rglob("*.py")
    names = [name for file in files for name in launched.findall(file.read_text("utf-8"))]
    assert "attend" in names
    assert [name for name in names if cuda_kernel_kind(name) == OTHER] == []
