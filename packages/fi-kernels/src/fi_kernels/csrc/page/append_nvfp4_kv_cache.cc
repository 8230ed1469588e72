// append_nvfp4_kv_cache: checks the arguments, and quantizes rows to NVFP4 into pages.
#include "fi/page/append_nvfp4_kv_cache.h"

#include "fi/generated/append_nvfp4_kv_cache.h"
#include "fi/host/contents.h"

#if FI_CUDA
#include "fi/host/tile.h"
#else
#include "fi/quantization/block_quantize_cpu.h"
#endif

namespace fi {
namespace {

constexpr int64_t kBlock = 16;  // elements that share a scale

#if FI_CUDA
bool aligned(const Tensor& rows, const Tensor& cache, const Tensor& scales) {
  const int64_t bytes = scales ? 8 : 16;  // of a block
  return rows.row_alignment(16) == 16 && cache.row_alignment(bytes) == bytes;
}

const Entry& tile(const Kernel& kernel, bool is_aligned) {
  return kernel.first_entry([&](const Entry& e) { return is_aligned || !AppendNvfp4KvCacheConfig::of(e).aligned; });
}

void launch_append(const Kernel& kernel, Nvfp4AppendParams& p, bool is_aligned, DLDevice device) {
  const Entry& entry = tile(kernel, is_aligned);
  const RowTile tile(int64_t{p.heads} * (p.k.blocks + p.v.blocks), entry.threads);
  p.threads_per_row = static_cast<int32_t>(tile.lanes);
  Launch launch{(p.rows + tile.rows - 1) / tile.rows, tile.parts};
  launch.threads = tile.threads;
  launch.pdl = kernel.pdl(-1);
  kernel.launch(entry, launch, device, p);
}
#else
void run_cpu(const Nvfp4AppendParams& p, DType dtype) {
  const cpu::LoadRow load = cpu::row_loader(dtype);
  const cpu::StoreRow store_e4m3 = cpu::row_storer(kE4M3);
  const int64_t work = std::max<int64_t>(1, kBlock * p.heads * (p.k.blocks + p.v.blocks));
  cpu::for_rows(p.rows, 4 * work, 2 * kBlock, [&](int64_t row, float* x) {
    const auto to = p.place(row);
    if (to.page < 0) return;
    for (const Nvfp4AppendOperand* s : {&p.k, &p.v}) {
      const float factor = s->device_factor ? s->factor * *s->device_factor : s->factor;
      for (int32_t head = 0; head < p.heads; ++head)
        for (int32_t block = 0; block < s->blocks; ++block) {
          load(s->src + (row * s->src_row + head * s->src_head + block * kBlock) * dtype.bytes(), x, kBlock);
          uint8_t* dst = s->dst + to.page * s->dst_page + to.slot * s->dst_slot + head * s->dst_head;
          if (!s->scales) {
            for (int64_t i = 0; i < kBlock; ++i) x[i] *= 1.f / factor;
            store_e4m3(x, dst + block * kBlock, kBlock);
            continue;
          }
          const uint32_t scale =
              cpu::detail::scale_block(x, x + kBlock, kBlock, kE4m3Scale, kE2m1Limit, 1.f / factor, 0.f);
          cpu::detail::store_e2m1(x, x + kBlock, dst + block * kBlock / 2, kBlock);
          s->scales[to.page * s->scale_page + to.slot * s->scale_slot + head * s->scale_head + block] =
              static_cast<uint8_t>(scale);
        }
    }
  });
}
#endif

Nvfp4AppendOperand make_operand(const Tensor& rows, const Tensor& cache, const Tensor& scales, bool head_major,
                                double factor, const OptionalTensor& device_factor) {
  const int slot = head_major ? 2 : 1, head = head_major ? 1 : 2;
  Nvfp4AppendOperand s{};
  s.src = rows.data<const char>();
  s.dst = cache.data<uint8_t>();
  if (device_factor) {
    FI_CHECK(device_factor.is({kF32}).on(rows).numel() == 1, ValueError, "%s must have one element; got %s",
             device_factor.name(), device_factor.shape_str().c_str());
    s.device_factor = device_factor.data<const float>();
  }
  s.src_row = rows.stride(0), s.src_head = rows.stride(1);
  s.dst_page = cache.stride(0), s.dst_slot = cache.stride(slot), s.dst_head = cache.stride(head);
  if (scales) {
    s.scales = scales.data<uint8_t>();
    s.scale_page = scales.stride(0), s.scale_slot = scales.stride(slot), s.scale_head = scales.stride(head);
  }
  s.factor = static_cast<float>(factor);
  s.blocks = static_cast<int32_t>(rows.size(-1) / kBlock);
  return s;
}

AppendNvfp4KvCacheRequest request_of(const AppendNvfp4KvCacheArgs& a) { return {a.append_key.dtype()}; }

void append_nvfp4_kv_cache(const Kernel& kernel, const AppendNvfp4KvCacheArgs& given) {
  // 1 check
  AppendNvfp4KvCacheArgs a = given;
  if (!a.v_scales) {  // the checks below name tensors as the caller of the form for MLA does
    a.append_key = a.append_key.as("append_ckv"), a.append_value = a.append_value.as("append_kpe");
    a.k_cache = a.k_cache.as("ckv_cache"), a.v_cache = a.v_cache.as("kpe_cache");
    a.k_scales = a.k_scales.as("ckv_sf_cache");
  }
  Dim nnz{"nnz"}, heads{"num_heads"}, k_dim{"head_dim"}, v_dim{"v_head_dim"};
  a.append_key.is({kF16, kBF16}).inner_contiguous().shape(nnz, heads, k_dim);
  a.append_value.like(a.append_key).inner_contiguous().shape(nnz, heads, v_dim);
  for (const Tensor& t : {a.append_key, a.append_value})
    FI_CHECK(t.size(-1) % kBlock == 0 && t.size(-1) <= 1 << 20, ValueError,
             "%s must have a last dimension that is a multiple of 16; got %s", t.name(), t.shape_str().c_str());
  Dim pages{"num_pages"}, page_size{"page_size"};
  Dim &second = a.head_major ? heads : page_size, &third = a.head_major ? page_size : heads;
  Dim k_bytes{"head_dim / 2", k_dim / 2};
  Dim v_bytes{a.v_scales ? "v_head_dim / 2" : "v_head_dim", a.v_scales ? v_dim / 2 : v_dim};
  Dim k_blocks{"head_dim / 16", k_dim / kBlock}, v_blocks{"v_head_dim / 16", v_dim / kBlock};
  a.k_cache.is({kU8}).on(a.append_key).inner_contiguous().shape(pages, second, third, k_bytes);
  a.v_cache.is({a.v_scales ? kU8 : kE4M3}).on(a.append_key).inner_contiguous().shape(pages, second, third, v_bytes);
  a.k_scales.is({kE4M3, kU8}).on(a.append_key).inner_contiguous().shape(pages, second, third, k_blocks);
  if (a.v_scales) a.v_scales.is({kE4M3, kU8}).on(a.append_key).inner_contiguous().shape(pages, second, third, v_blocks);
  FI_CHECK(page_size > 0 && page_size < 0x7fffffff && heads < 0x7fffffff, ValueError,
           "%s must have page_size > 0 and less than 2^31 tokens; got %s", a.k_cache.name(),
           a.k_cache.shape_str().c_str());
  FI_CHECK(heads * (k_blocks + v_blocks) <= 0x7fffffff, ValueError, "%s is too wide: %s", a.append_key.name(),
           a.append_key.shape_str().c_str());
  Nvfp4AppendParams p{};
  if (a.slot_mapping) {
    a.slot_mapping.is({kI32, kI64}).on(a.append_key).contiguous().shape(nnz);
    p.slots = a.slot_mapping.data();
    p.wide_slots = a.slot_mapping.dtype() == kI64;
  } else {
    Dim batch{"batch_size"}, indices{"num_indices"};
    FI_CHECK(a.batch_indices && a.positions && a.kv_indices && a.kv_indptr && a.kv_last_page_len, TypeError,
             "batch_indices, positions, kv_indices, kv_indptr and kv_last_page_len must be tensors");
    a.kv_last_page_len.shape(batch);
    Dim bounds{"batch_size + 1", batch + 1};
    a.kv_indptr.shape(bounds);
    a.batch_indices.shape(nnz);
    a.positions.shape(nnz);
    a.kv_indices.shape(indices);
    for (const Tensor& t : {Tensor(a.batch_indices), Tensor(a.positions), Tensor(a.kv_indices), Tensor(a.kv_indptr),
                            Tensor(a.kv_last_page_len)})
      t.is({kI32}).on(a.append_key).contiguous();
    p.batch_indices = a.batch_indices.data<const int32_t>();
    p.positions = a.positions.data<const int32_t>();
    p.kv_indices = a.kv_indices.data<const int32_t>();
    p.kv_indptr = a.kv_indptr.data<const int32_t>();
  }

  // 2 shape
  p.k = make_operand(a.append_key, a.k_cache, a.k_scales, a.head_major, a.k_scale, a.k_device_scale);
  p.v = make_operand(a.append_value, a.v_cache, a.v_scales, a.head_major, a.v_scale, a.v_device_scale);
  p.rows = nnz;
  p.last_page = last_page(a.k_cache);
  p.heads = static_cast<int32_t>(heads);
  p.page_size = divisor(static_cast<uint32_t>(page_size));
  if (p.rows == 0 || p.heads * (p.k.blocks + p.v.blocks) == 0 || pages == 0) return;
  if (kernel.checks_contents(a.k_cache.device())) {
    if (a.slot_mapping) {
      const Integers slots(kernel, a.slot_mapping);
      for (int64_t i = 0; i < slots.size(); ++i)
        FI_CHECK(slots[i] < pages * page_size, ValueError,
                 "slot_mapping must name slots of the cache, below %lld, or be negative; got %lld at %lld",
                 static_cast<long long>(pages * page_size), static_cast<long long>(slots[i]),
                 static_cast<long long>(i));
    } else {
      check_append(kernel, a.batch_indices, a.positions, a.kv_indices, a.kv_indptr, pages, page_size);
    }
  }

  // 3 launch
#if FI_CUDA
  const bool is_aligned =
      aligned(a.append_key, a.k_cache, a.k_scales) && aligned(a.append_value, a.v_cache, a.v_scales);
  launch_append(kernel, p, is_aligned, a.append_key.device());
#else
  run_cpu(p, a.append_key.dtype());
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::append_nvfp4_kv_cache, fi::request_of)
