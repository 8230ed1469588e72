// moe_combine: checks the arguments, launches the CUDA kernel or exchanges on the CPU.
#include "fi/comm/moe_combine.h"

#include "fi/comm/contract.h"
#include "fi/generated/moe_combine.h"

#if !FI_CUDA
#include "fi/comm/moe_exchange_cpu.h"
#endif

namespace fi {
namespace {

MoeCombineRequest request_of(const MoeCombineArgs& a) { return {a.payload.dtype()}; }

void moe_combine(const Kernel& kernel, const MoeCombineArgs& a) {
  // 1 check
  Dim world{"world", a.peers.numel()}, max_tokens{"max_tokens"}, hidden{"hidden"}, tokens{"tokens"},
      bound{"kMaxWorld", kMaxWorld};
  a.payload.is({kF16, kBF16, kF32}).contiguous().shape(world, max_tokens, hidden);
  a.rows.is({kI32}).on(a.payload).contiguous().shape(tokens, bound);
  a.out.like(a.payload).contiguous().shape(tokens, hidden);
  const int64_t bytes = hidden * a.payload.dtype().bytes();
  FI_CHECK(bytes % 16 == 0 && a.payload.alignment(16, {}) == 16 && a.out.alignment(16, {}) == 16, ValueError,
           "payload and out must have rows that are 16-byte aligned; got addresses %p and %p, rows of %lld "
           "bytes",
           a.payload.data(), a.out.data(), static_cast<long long>(bytes));
  MoeCombineParams p{};
  p.offset = a.payload.data<char>() - a.workspace.data<char>();
  p.comm = comm_params(a, a.payload, call_of({3, bytes, max_tokens, a.payload.dtype().code, p.offset}));
  FI_CHECK(p.offset >= 0 && p.offset + a.payload.numel() * a.payload.dtype().bytes() <= a.workspace.numel(), ValueError,
           "payload must lie in workspace");
  FI_CHECK(a.control_offset >= kCommHeader && a.control_offset % 16 == 0 &&
               a.control_offset + static_cast<int64_t>(sizeof(MoeControl)) <= a.workspace.numel(),
           ValueError, "control_offset must be a multiple of 16 in workspace; got %lld",
           static_cast<long long>(a.control_offset));

  // 2 shape
  p.rows = a.rows.data<int32_t>();
  p.out = a.out.data();
  p.control_offset = a.control_offset;
  p.tokens = static_cast<int32_t>(tokens);
  p.max_tokens = static_cast<int32_t>(max_tokens);
  p.vectors = static_cast<int32_t>(bytes / 16);

  // 3 launch: at least one CTA, since a rank without tokens also returns results
#if FI_CUDA
  Launch launch{std::max<int64_t>(1, std::min<int64_t>(tokens, 4 * kernel.multiprocessors(a.payload.device())))};
  launch.pdl = kernel.pdl(a.enable_pdl);
  kernel.launch(kernel.entries.front(), launch, a.payload.device(), p);
#else
  (void)kernel;
  cpu::moe_combine(p, a.payload.dtype());
  check_status(a.status);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::moe_combine, fi::request_of)
