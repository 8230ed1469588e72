"""Tables of floors, computed from the bytes and operations of cases and the rates of an H200; see `results.TABLES`."""

from __future__ import annotations

from typing import NamedTuple

from records import number, table

TENSOR_CORES = {"bf16": 787e6, "fp8": 1445e6}  # operations a microsecond, of cuBLAS
MEMORY = 4.3e6  # bytes a microsecond, of large products
MLA_MEMORY = 4.6e6  # of reads only
COPY = 4.24e6  # of as many bytes
LAUNCH = 4.2  # us of an empty kernel, as the tables are measured
BYTES = {"bf16": 2, "fp8": 1}


class Product(NamedTuple):
    """`count` products of m x n x k; results are bf16."""

    dtype: str
    m: int
    n: int
    k: int
    count: int = 1
    of: str = ""

    def __str__(self) -> str:
        shape = f"{self.m} x {self.n} x {self.k}"
        return f"{self.dtype} {f'{self.count} {self.of} ' if self.of else ''}{shape}"


PRODUCTS = (
    Product("bf16", 4096, 4096, 7168),
    Product("bf16", 4096, 7168, 16384),
    Product("bf16", 8192, 8192, 8192),
    Product("bf16", 128, 24576, 1536),
    Product("bf16", 1024, 4096, 7168, 8, "groups of"),
    Product("bf16", 64, 1536, 2048, 128, "groups of"),
    Product("fp8", 4096, 4096, 7168),
    Product("fp8", 4096, 7168, 16384),
    Product("fp8", 8192, 8192, 8192),
    Product("fp8", 4096, 24576, 1536),
    Product("fp8", 4096, 2112, 7168),
    Product("fp8", 128, 24576, 1536),
    Product("fp8", 128, 7168, 2048),
    Product("fp8", 1024, 4096, 7168, 8, "groups of"),
    Product("fp8", 128, 4096, 7168, 32, "groups of"),
    Product("fp8", 64, 512, 128, 128, "products"),
)


def gemm_table() -> str:
    """The larger of the time of the operations and that of the bytes."""
    lines = []
    for of in PRODUCTS:
        compute = of.count * 2 * of.m * of.n * of.k / TENSOR_CORES[of.dtype]
        memory = of.count * (BYTES[of.dtype] * of.k * (of.m + of.n) + 2 * of.m * of.n) / MEMORY
        least = max(compute, memory)
        by = "tensor cores" if compute > memory else "memory"
        lines.append((of, number(least), f"{by}, below the cost of a launch" if least < LAUNCH else by))
    return table(("case", "floor us", "set by"), lines)


class Latent(NamedTuple):
    """A decode of MLA: query heads, keys of all requests, bytes of a key."""

    name: str
    heads: int
    keys: int
    row: int = 1152


LATENT = (
    Latent("b128 kv4k h128", 128, 128 * 4096),
    Latent("b16 kv8k h128", 128, 16 * 8192),
    Latent("b64 kv8k h16", 16, 64 * 8192),
    Latent("b128 kv1k h128", 128, 128 * 1024),
    Latent("b1 kv32k h16", 16, 32768),
    Latent("b1 kv8k h128", 128, 8192),
    Latent("b8 kv1k h16", 16, 8 * 1024),
    Latent("b64 kv8k h16, e4m3 cache", 16, 64 * 8192, 576),
    Latent("sparse, b128 h128 top-k 2048, bf16 rows", 128, 128 * 2048),
)


def mla_table() -> str:
    """Time of the bytes of the cache, and of `2 heads (576 + 512)` operations for each key; the larger one is bold."""
    lines = []
    for of in LATENT:
        size, operations = of.keys * of.row, 2 * of.heads * (576 + 512) * of.keys
        times = size / MLA_MEMORY, operations / TENSOR_CORES["bf16"]
        shown = (f"**{number(us)}**" if us == max(times) else number(us) for us in times)
        lines.append((of.name, f"{size / 1e6:.1f}", f"{operations / 1e9:.1f}", *shown))
    return table(("case", "MB", "GFLOP", "memory us", "tensor cores us"), lines)


QUANTIZERS = {  # bytes an element: read, value, scale
    "`nvfp4_quantize`": (2, 1 / 2, 1 / 16),
    "`mxfp4_quantize`": (2, 1 / 2, 1 / 32),
    "`mxfp8_quantize`": (2, 1, 1 / 32),
    "`per_token_group_quant_8bit`, groups of 128": (2, 1, 1 / 32),
    "`silu_and_mul_nvfp4_quantize` (input 16384x16384)": (4, 1 / 2, 1 / 16),
}


def quantization_table() -> str:
    """Bytes over the rate of a copy."""
    lines = [(name, f"{sum(parts):g}", f"{16384 * 8192 * sum(parts) / COPY:.1f}") for name, parts in QUANTIZERS.items()]
    return table(("function, 16384x8192 bf16", "bytes an element", "floor us"), lines)
