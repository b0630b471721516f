// Verification on a GPU: one block a request, except for the independent rows of chains, which have a block each.
//
// Legend: B requests, N nodes (padded), Vd draft vocabulary.

#include "block_team.h"

namespace rs {
namespace {

// column_of[token] = column; where two columns name one token one of them wins, which `check_columns` sees.
__global__ void index_columns(Verification v) {
  const int64_t c = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  if (c < v.draft_vocab && v.draft_token_ids[c] >= 0 && v.draft_token_ids[c] < v.vocab) v.column_of[v.draft_token_ids[c]] = (int32_t)c;
}

__global__ void check_columns(Verification v) {
  const int64_t c = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  if (c >= v.draft_vocab) return;
  const int64_t token = v.draft_token_ids[c];
  if (token < 0 || token >= v.vocab || v.column_of[token] != c)
    for (int64_t b = 0; b < v.batch; ++b) v.wanted[b] = kDeclined;
}

template <int64_t kScheme>
__global__ void __launch_bounds__(kThreads, 1) advance(Verification v) {
  __shared__ BlockMemory memory;
  BlockTeam team(memory);
  const int64_t b = blockIdx.x;
  if (v.wanted[b] != kNotBegun) return;
  Walker<BlockTeam> walker(v, team, b);
  if (!team.all(walker.is_sound(threadIdx.x, kThreads))) {
    if (team.leads()) v.wanted[b] = kDeclined;
    return;
  }
  walker.begin();
  const int64_t outcome = walker.template advance<kScheme>();
  if (team.leads()) v.wanted[b] = outcome;
}

__global__ void __launch_bounds__(kThreads, 1) look_at(Verification v) {
  __shared__ BlockMemory memory;
  BlockTeam team(memory);
  const int64_t b = blockIdx.y, i = blockIdx.x;
  if (!team.all(v.wanted[b] == kFinished)) return;  // as one: another row's block may be declining the request
  Walker<BlockTeam> walker(v, team, b);
  if (i < walker.num_looked_at() && !walker.look_at(i) && team.leads()) v.wanted[b] = kDeclined;
}

__global__ void __launch_bounds__(kThreads, 1) finish_chain(Verification v) {
  __shared__ BlockMemory memory;
  BlockTeam team(memory);
  const int64_t b = blockIdx.x;
  if (v.wanted[b] != kFinished) return;
  Walker<BlockTeam> walker(v, team, b);
  if (v.scheme == kBlock) walker.choose();
  if (!walker.emit() && team.leads()) v.wanted[b] = kDeclined;
}

}  // namespace
}  // namespace rs

extern "C" __attribute__((visibility("default"))) int64_t rs_verify_state_bytes(int64_t max_nodes) { return rs::state_bytes(max_nodes); }

// Queues the verification of a batch whose rows have all been computed; pointers are the device's. Afterwards wanted[b] is kFinished, or
// kDeclined where the readable verifiers refuse something. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int rs_verify_on_stream(const void* verification, void* on_stream) {
  const rs::Verification v = *(const rs::Verification*)verification;
  const cudaStream_t stream = (cudaStream_t)on_stream;
  if (v.batch == 0) return (int)cudaSuccess;
  if (v.draft_token_ids) {
    const dim3 columns((unsigned)((v.draft_vocab + rs::kThreads - 1) / rs::kThreads));
    RS_LAUNCH(rs::index_columns, columns, rs::kThreads, stream, v);
    RS_LAUNCH(rs::check_columns, columns, rs::kThreads, stream, v);
  }
  const bool known = rs::with_scheme(v.scheme, [&]<int64_t kScheme>() {
    RS_LAUNCH(rs::advance<kScheme>, dim3((unsigned)v.batch), rs::kThreads, stream, v);
  });
  if (!known) return (int)cudaErrorInvalidValue;
  if ((v.scheme == rs::kRejection || v.scheme == rs::kBlock) && v.max_nodes > 0) {
    RS_LAUNCH(rs::look_at, dim3((unsigned)v.max_nodes, (unsigned)v.batch), rs::kThreads, stream, v);
    RS_LAUNCH(rs::finish_chain, dim3((unsigned)v.batch), rs::kThreads, stream, v);
  }
  return (int)cudaGetLastError();
}
