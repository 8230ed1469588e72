"""What MLA wrappers refuse: each error names the argument, and tables that lie are found on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from families.test_mla import FP8, Wrapper, batch, workspace
from fi_core.mla import MLAPlanMetadata
from fi_core.runtime.errors import UnsupportedError


def test_bad_plans_name_the_argument(device: str) -> None:
    b = batch((65, 3), device=device)
    wrapper, good = Wrapper(workspace(device)), list(b.plan_arguments())
    for at, value, error, words in (
        (1, b.kv_indptr[:-1], ValueError, "kv_indptr: length 3"),
        (3, b.kv_len.float(), ValueError, "kv_len_arr: int32"),
        (4, 0, ValueError, "num_heads"),
        (5, 256, ValueError, "head_dim_ckv: 512"),
        (6, -1, ValueError, "head_dim_kpe: 64"),
        (7, 0, ValueError, "page_size"),
        (9, "x", TypeError, "sm_scale"),
        (10, torch.float32, ValueError, "q_data_type"),
        (11, torch.float8_e5m2, ValueError, "kv_data_type"),
        (11, torch.float16, ValueError, "kv_data_type"),
    ):
        with pytest.raises(error, match=words):
            wrapper.plan(*good[:at], value, *good[at + 1 :])
        with pytest.raises(RuntimeError, match="plan"):
            wrapper.run(*b.run_arguments())
    with pytest.raises(NotImplementedError, match="use_profiler"):
        wrapper.plan(*good, True)
    for options, error, words in (
        ({"lse_mode": "base10"}, ValueError, "lse_mode: one of 'none'"),
        ({"query_layout": "flat"}, ValueError, "query_layout"),
        ({"output_scale": "per-tensor"}, NotImplementedError, "output_scale: not supported"),
        ({"scale_mode": "bmm-scalar"}, NotImplementedError, "scale_mode: not supported"),
        ({"output_dtype": torch.float32}, NotImplementedError, "output_dtype: not supported"),
        ({"metadata": MLAPlanMetadata.csr(*good[:4])}, ValueError, "metadata: no other table"),
        ({"block_tables": b.kv_indices}, ValueError, "block_tables: tables of one form"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            wrapper.plan(*good, **options)
    with pytest.raises(TypeError, match=r"plan\(\) missing required arguments: sm_scale, kv_data_type"):
        wrapper.plan(*good[:9], q_data_type=good[10])
    with pytest.raises(TypeError, match=r"plan\(\) missing required arguments: metadata"):
        wrapper.plan(num_heads=16)
    with pytest.raises(ValueError, match=r"float_workspace_buffer: .* bytes are required"):
        Wrapper(torch.empty(16, device=device)).plan(*good)
    for backend, error in (("cutlass", NotImplementedError), ("fa4", ValueError)):
        with pytest.raises(error, match="backend"):
            Wrapper(workspace(device), backend=backend)


def test_fa3_is_not_the_cpu() -> None:
    b = batch((65, 3), device="cpu")
    wrapper = Wrapper(workspace("cpu"), backend="fa3")
    wrapper.plan(*b.plan_arguments())
    with pytest.raises(UnsupportedError, match=r"batch_mla\(.*is not supported"):
        wrapper.run(*b.run_arguments())


def test_bad_runs_name_the_argument(device: str) -> None:
    b = batch((65, 3), device=device)
    wrapper = Wrapper(workspace(device))
    wrapper.plan(*b.plan_arguments())
    good = list(b.run_arguments())
    for at, value, words in (
        (0, good[0].half(), "q_nope: torch.bfloat16 was planned"),
        (1, good[1].half(), "q_pe: torch.bfloat16"),
        (2, good[2].half(), "ckv_cache: torch.bfloat16"),
        (3, good[3].half(), "kpe_cache: torch.bfloat16"),
        (0, good[0][:, :8], "q_nope: shape"),
        (1, good[1][..., :32], "q_pe: shape"),
        (2, good[2][:, :32], "ckv_cache: shape"),
        (3, good[3][..., :32], "kpe_cache: shape"),
    ):
        with pytest.raises(ValueError, match=words):
            wrapper.run(*good[:at], value, *good[at + 1 :])
    for name in ("ckv_scale", "kpe_scale", "ckv_scale_arr"):
        with pytest.raises(ValueError, match=f"{name}: must be None"):
            wrapper.run(*good, **{name: 1.0})
    with pytest.raises(NotImplementedError, match="kv_len: not supported"):
        wrapper.run(*good, kv_len=b.kv_len)
    with pytest.raises(TypeError, match=r"run.. missing kpe_cache"):
        wrapper.run(*good[:3])
    with pytest.raises(TypeError, match="query: q_nope and q_pe may not be given with it"):
        wrapper.run(*good, query=b.q)
    with pytest.raises(ValueError, match="out"):
        wrapper.run(*good, out=torch.empty(1, device=device))


def test_bad_scales_name_the_argument(device: str) -> None:
    b = batch((65, 3), kv_dtype=FP8, device=device)
    wrapper = Wrapper(workspace(device))
    wrapper.plan(*b.plan_arguments())
    array = torch.ones(*b.cache.shape[:2], 4, device=device)
    for options, words in (
        ({"kpe_scale": 1.0}, "Exactly one of ckv_scale or ckv_scale_arr is required .*; got neither"),
        ({"kpe_scale": 1.0, "ckv_scale": 1.0, "ckv_scale_arr": array}, "got both"),
        ({"kpe_scale": 1.0, "ckv_scale": -1.0}, "ckv_scale: a finite positive"),
        ({"ckv_scale": 1.0}, "kpe_scale: a finite positive"),
        ({"kpe_scale": math.inf, "ckv_scale": 1.0}, "kpe_scale: a finite positive"),
        ({"kpe_scale": 1.0, "ckv_scale_arr": array[..., :2]}, "ckv_scale_arr must"),
    ):
        with pytest.raises(ValueError, match=words):
            wrapper.run(*b.run_arguments(), **options)


def test_lying_tables_are_found_on_the_cpu() -> None:
    b = batch((65, 3))
    wrapper = Wrapper(workspace("cpu"))
    b.kv_indices[1] = 1000
    wrapper.plan(*b.plan_arguments())
    with pytest.raises(ValueError, match="must name pages of the cache"):
        wrapper.run(*b.run_arguments())
    good = batch((65, 3))
    wrapper.plan(*good.plan_arguments())
    with pytest.raises(ValueError, match="rows of q_nope"):
        wrapper.run(good.q[:1, :, :512], good.q[:1, :, 512:], *good.run_arguments()[2:])
