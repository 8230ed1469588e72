// moe_dispatch: checks the arguments, launches the CUDA kernel or exchanges on the CPU.
#include "fi/comm/moe_dispatch.h"

#include "fi/comm/contract.h"
#include "fi/generated/moe_dispatch.h"

#if !FI_CUDA
#include "fi/comm/moe_exchange_cpu.h"
#endif

namespace fi {
namespace {

void moe_dispatch(const Kernel& kernel, const MoeDispatchArgs& a) {
  // 1 check
  Dim tokens{"tokens"}, top_k{"top_k"}, bound{"kMaxWorld", kMaxWorld}, world{"world", a.peers.numel()};
  a.experts.is({kI32}).contiguous().shape(tokens, top_k);
  a.rows.is({kI32}).on(a.experts).contiguous().shape(tokens, bound);
  a.counts.is({kI32}).on(a.experts).contiguous().shape(world);
  FI_CHECK(a.num_experts > 0 && a.num_experts <= 0x7fffffff && a.num_experts % world == 0, ValueError,
           "num_experts must be a positive multiple of the number of ranks, %lld; got %lld",
           static_cast<long long>(world), static_cast<long long>(a.num_experts));
  FI_CHECK(tokens <= 0x7fffffff / std::max<int64_t>(top_k, 8), ValueError, "experts has too many rows; got %s",
           a.experts.shape_str().c_str());
  MoeDispatchParams p{};
  const Tensor pairs[][2] = {
      {a.payload0, a.received0}, {a.payload1, a.received1}, {a.payload2, a.received2}, {a.payload3, a.received3}};
  int64_t call = 0, max_tokens = a.received0.ndim() > 1 ? a.received0.size(1) : 0;
  const char* base = a.workspace.data<char>();
  for (const auto& [payload, received] : pairs) {
    if (!payload) break;
    FI_CHECK(received && received.ndim() >= 2 && received.size(0) == world && received.size(1) == max_tokens,
             ValueError, "%s must have shape [%lld, %lld, ...]; got %s", received.name(), static_cast<long long>(world),
             static_cast<long long>(max_tokens), received ? received.shape_str().c_str() : "None");
    payload.on(a.experts).contiguous();
    received.on(a.experts).contiguous();
    FI_CHECK(payload.ndim() >= 1 && payload.size(0) == tokens, ValueError, "%s must have %lld rows; got %s",
             payload.name(), static_cast<long long>(tokens), payload.shape_str().c_str());
    const int64_t slots = std::max<int64_t>(1, world * max_tokens);
    const int64_t bytes = received.numel() / slots * received.dtype().bytes();
    FI_CHECK(payload.numel() * payload.dtype().bytes() == tokens * bytes && bytes > 0 && bytes < 1 << 24, ValueError,
             "%s must have rows of %lld bytes, as %s; got %s", payload.name(), static_cast<long long>(bytes),
             received.name(), payload.shape_str().c_str());
    auto& found = p.payloads[p.num_payloads++];
    found.from = payload.data<char>();
    found.offset = received.data<char>() - base;
    found.bytes = static_cast<int32_t>(bytes);
    const int64_t low = static_cast<int64_t>(reinterpret_cast<uintptr_t>(found.from)) | found.offset | bytes;
    found.unit = low % 16 == 0 ? 16 : low % 4 == 0 ? 4 : 1;
    FI_CHECK(found.offset >= 0 && found.offset + slots * bytes <= a.workspace.numel(), ValueError,
             "%s must lie in workspace", received.name());
    call = call * 131 + bytes + found.offset;
  }
  FI_CHECK(p.num_payloads > 0, TypeError, "payload0 must be a tensor");
  p.comm = comm_params(a, a.experts, call_of({2, call, max_tokens, top_k, a.num_experts}));
  FI_CHECK(a.control_offset >= kCommHeader && a.control_offset % 16 == 0 &&
               a.control_offset + static_cast<int64_t>(sizeof(MoeControl)) <= a.workspace.numel(),
           ValueError, "control_offset must be a multiple of 16 in workspace; got %lld",
           static_cast<long long>(a.control_offset));

  // 2 shape
  p.experts = a.experts.data<int32_t>();
  p.rows = a.rows.data<int32_t>();
  p.counts = a.counts.data<int32_t>();
  p.control_offset = a.control_offset;
  p.tokens = static_cast<int32_t>(tokens);
  p.top_k = static_cast<int32_t>(top_k);
  p.num_experts = static_cast<int32_t>(a.num_experts);
  p.experts_per_rank = static_cast<int32_t>(a.num_experts / world);
  p.max_tokens = static_cast<int32_t>(max_tokens);

  // 3 launch: at least one CTA, since a rank without tokens also receives
#if FI_CUDA
  const int64_t ctas = std::max<int64_t>(1, std::min<int64_t>(tokens, 2 * kernel.multiprocessors(a.experts.device())));
  p.tokens_per_cta = static_cast<int32_t>((tokens + ctas - 1) / ctas);
  Launch launch{ctas};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(kernel.entries.front(), launch, a.experts.device(), p);
#else
  (void)kernel;
  cpu::moe_dispatch(p);
  check_status(a.status);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_dispatch)
