// all_to_all and all-gather: checks the arguments, divides the rows, launches the CUDA kernel or exchanges on the CPU.
#include "fi/comm/all_to_all.h"

#include "fi/comm/contract.h"
#include "fi/generated/all_to_all.h"

#if !FI_CUDA
#include "fi/comm/exchange_cpu.h"
#endif

namespace fi {
namespace {

void all_to_all(const Kernel& kernel, const AllToAllArgs& a) {
  // 1 check
  a.input.contiguous();
  a.out.like(a.input).contiguous();
  const int64_t world = a.peers.numel();
  FI_CHECK(a.out.ndim() >= 1 && a.out.size(0) == world, ValueError,
           "out must have a first dimension of the number of ranks, %lld; got %s", static_cast<long long>(world),
           a.out.shape_str().c_str());
  FI_CHECK(a.gather ? a.input.numel() * world == a.out.numel() : a.out.shape_str() == a.input.shape_str(), ValueError,
           "input must have the shape of %s, %s; got %s", a.gather ? "a row of out" : "out", a.out.shape_str().c_str(),
           a.input.shape_str().c_str());
  AllToAllParams p{};
  p.bytes = a.out.numel() / world * a.out.dtype().bytes();
  p.input_stride = a.gather ? 0 : p.bytes;
  FI_CHECK(p.bytes % 16 == 0 && a.input.alignment(16, {}) == 16 && a.out.alignment(16, {}) == 16, ValueError,
           "input and out must be 16-byte aligned, with rows of a multiple of 16 bytes; got addresses %p "
           "and %p, %lld bytes",
           a.input.data(), a.out.data(), static_cast<long long>(p.bytes));
  p.comm = comm_params(a, a.input, call_of({1, p.bytes, a.gather}));
  if (p.bytes == 0) return;

  // 2 shape
  p.input = a.input.data<char>();
  p.out = a.out.data<char>();
  const int64_t inboxes = p.comm.world - 1;

  // 3 launch
#if FI_CUDA
  p.bulk = bulk_memory(a);
  // A chunk for each SM, up to 16 KB: smaller ones are slower for large messages
  // (docs/notes/comm-all-to-all-chunks.md).
  const int64_t sms = kernel.multiprocessors(a.input.device()), even = (p.bytes * p.comm.world + sms - 1) / sms;
  const int64_t chunk = std::min<int64_t>(16384, std::max<int64_t>(1024, (even + 127) / 128 * 128));
  p.chunk_bytes = static_cast<int32_t>(chunk);
  int64_t at_once = p.bytes;
  if (inboxes > 0) at_once = std::min({p.bytes, a.max_flags * chunk, p.bulk.data_bytes / inboxes / chunk * chunk});
  FI_CHECK(at_once > 0, ValueError, "workspace is too small for a chunk of %lld bytes; got %s",
           static_cast<long long>(chunk), a.workspace.shape_str().c_str());
  const Entry& entry = kernel.entries.front();
  for (p.first = 0; p.first < p.bytes; p.first += at_once) {
    p.now = std::min(at_once, p.bytes - p.first);
    p.chunks = static_cast<int32_t>((p.now + p.chunk_bytes - 1) / p.chunk_bytes);
    Launch launch{std::min(int64_t{p.comm.world} * p.chunks, sms)};
    launch.shared_bytes = AllToAllConfig::of(entry).stages * p.chunk_bytes;
    launch.pdl = kernel.pdl(a.enable_pdl);
    kernel.launch(entry, launch, a.input.device(), p);
  }
#else
  (void)kernel;
  for (int64_t first = 0; first < p.bytes;) {
    // A rank publishes a part of each of its rows, one behind another.
    const int64_t rows = a.gather ? 1 : world, now = std::min(p.bytes - first, p.comm.rotation_bytes / rows / 16 * 16);
    FI_CHECK(now > 0, ValueError, "workspace is too small; got %s", a.workspace.shape_str().c_str());
    if (!cpu::publish(p.comm, p.input + first, now, rows, p.input_stride)) break;
    for (int32_t rank = 0; rank < p.comm.world; ++rank)
      memcpy(p.out + rank * p.bytes + first, cpu::published_data(p.comm, rank) + (a.gather ? 0 : p.comm.rank * now),
             static_cast<size_t>(now));
    first += now;
  }
  (void)inboxes;
  check_status(a.status);
#endif
}

}  // namespace
}  // namespace fi

FI_OP(fi::all_to_all)
