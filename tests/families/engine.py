"""A wrapper as vLLM and SGLang see it: the private attributes that they read, and those that they assign."""

from __future__ import annotations

from typing import Any

# FlashInfer's wrappers have them by these names.
ENGINE_ATTRIBUTES = frozenset(
    """
    _backend _batch_size _block_tables _cached_kv_data_type _cached_module _cached_o_data_type _cached_q_data_type
    _causal _custom_mask_buf _fixed_batch_size _float_workspace_buffer _int_workspace_buffer _is_causal
    _kv_indices_buf _kv_indptr_buf _kv_layout _kv_len_arr_buf _kv_lens_buffer _logits_soft_cap _mask_indptr_buf
    _max_kv_len _max_q_len _max_total_num_rows _num_kv_heads _num_qo_heads _paged_kv_indices_buf _paged_kv_indptr_buf
    _paged_kv_last_page_len_buf _pin_memory_int_workspace_buffer _plan_info _pos_encoding_mode _prefix_len_ptr
    _q_len_per_req _qo_indptr_buf _qo_indptr_last _rope_scale _rope_theta _sinks _sm_scale _use_cuda_graph
    _use_tensor_cores _window_left
    """.split()  # noqa: SIM905
)


class engine:
    """`engine(w).plan_info` is `w._plan_info`, to read or assign, for a name in ENGINE_ATTRIBUTES."""

    def __init__(self, wrapper: Any) -> None:
        self.__dict__["wrapper"] = wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapper, _listed(name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapper, _listed(name), value)

    @property
    def workspaces(self) -> tuple[Any, ...]:
        """As planners of engines pass them."""
        return self.float_workspace_buffer, self.int_workspace_buffer, self.pin_memory_int_workspace_buffer

    @property
    def tables(self) -> tuple[Any, ...]:
        return self.paged_kv_indptr_buf, self.paged_kv_indices_buf, self.paged_kv_last_page_len_buf

    @property
    def dtypes(self) -> tuple[Any, ...]:
        return self.cached_q_data_type, self.cached_kv_data_type, self.cached_o_data_type

    @property
    def scores(self) -> tuple[Any, ...]:
        """What vLLM compares before run."""
        return self.window_left, self.logits_soft_cap, self.sm_scale


def _listed(name: str) -> str:
    assert f"_{name}" in ENGINE_ATTRIBUTES, f"no engine reads _{name}"
    return f"_{name}"
