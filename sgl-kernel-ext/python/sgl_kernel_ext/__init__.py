"""C++ kernels for CPU, as plain functions over tensors.

Importing this module loads the op library, so `torch.ops.sgl_kernel_ext.*` exist as well. Every hot loop is
built for generic x86-64, AVX2 and AVX-512; the best level of the CPU is used, unless the environment
variable `SGL_KERNEL_EXT_CPU` or `force_cpu_capability` asks for a lower one. All levels give the same bits.
"""

from __future__ import annotations

from sgl_kernel_ext.attention import attend, join_keys
from sgl_kernel_ext.capability import cpu_capability, force_cpu_capability, supported_cpu_capabilities
from sgl_kernel_ext.engram import fuse, look_up, read_rows
from sgl_kernel_ext.indexer import candidate_groups, index_scores, index_scores_at, top_groups
from sgl_kernel_ext.linear import grouped_linear, linear_bfloat16, linear_e2m1, linear_e4m3, matmul
from sgl_kernel_ext.mhc import collapse, enter, expand, mixes
from sgl_kernel_ext.moe import Experts, expert_mlp, feed_forward, mixture, route
from sgl_kernel_ext.projection import attention_inputs, attention_output
from sgl_kernel_ext.quantize import fake_quant_e4m3, quantize_e4m3
from sgl_kernel_ext.records import RECORD_KINDS, exchange_records, read_records, round_index, write_records
from sgl_kernel_ext.rows import rms_norm, rotate

__version__ = "0.2.0"
__all__ = [
    "RECORD_KINDS",
    "Experts",
    "attend",
    "attention_inputs",
    "attention_output",
    "candidate_groups",
    "collapse",
    "cpu_capability",
    "enter",
    "exchange_records",
    "expand",
    "expert_mlp",
    "fake_quant_e4m3",
    "feed_forward",
    "force_cpu_capability",
    "fuse",
    "grouped_linear",
    "index_scores",
    "index_scores_at",
    "join_keys",
    "linear_bfloat16",
    "linear_e2m1",
    "linear_e4m3",
    "look_up",
    "matmul",
    "mixes",
    "mixture",
    "quantize_e4m3",
    "read_records",
    "read_rows",
    "rms_norm",
    "rotate",
    "round_index",
    "route",
    "supported_cpu_capabilities",
    "top_groups",
    "write_records",
]
