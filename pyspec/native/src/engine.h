// The engine: a target context with its sequences, their uncommitted trees, and the MTP drafter.
#pragma once

#include "model.h"
#include "mtp.h"
#include "dflash.h"
#include "pilot.h"
#include "rollback.h"
#include "sampler.h"
#include "sequence.h"
#include "threads.h"
#include "tree.h"

#include "llama.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

namespace pyspec {

struct ContextDeleter {
    void operator()(llama_context * ctx) const { llama_free(ctx); }
};
struct BatchDeleter {
    void operator()(llama_batch_ext * batch) const { llama_batch_ext_free(batch); }
};
using ContextPtr = std::unique_ptr<llama_context, ContextDeleter>;
using BatchPtr   = std::unique_ptr<llama_batch_ext, BatchDeleter>;

// Adds the time from construction to destruction to a counter of microseconds.
class Stopwatch {
public:
    explicit Stopwatch(int64_t & counter) : total(counter), start(Clock::now()) {}
    ~Stopwatch() { total += std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count(); }
    Stopwatch(const Stopwatch &)             = delete;
    Stopwatch & operator=(const Stopwatch &) = delete;

private:
    using Clock = std::chrono::steady_clock;
    int64_t &               total;
    const Clock::time_point start;
};

class Engine {
public:
    Engine(std::shared_ptr<Model> model, const pyspec_engine_params & params);

    const std::shared_ptr<Model> model;

    // ---- sequences ----
    int32_t length(int32_t seq) const { return checked(seq).length(); }
    void    reset(int32_t seq);
    void    copy(int32_t src, int32_t dst);
    size_t  save(int32_t seq, void * buf, size_t size); // buf NULL: the size needed
    void    restore(int32_t seq, const void * buf, size_t size);

    // ---- decode ----
    void prefill(int32_t seq, const int32_t * tokens, int32_t n);
    void verify(const pyspec_tree * trees, int32_t n_trees, bool greedy);
    void commit(int32_t seq, const int32_t * path, int32_t n);
    // Sample-and-match along the verified tree; returns the nodes walked, behind each of which a token was drawn.
    int32_t walk(Sampler & sampler, int32_t seq, int32_t max_path, bool stop_eog, int32_t * path, int32_t * drawn);
    void coast(Sampler & sampler, int32_t seq, int32_t root, int32_t max_steps, int32_t max_tokens, bool stop_eog,
               int64_t max_us, Pilot * pilot, pyspec_coast_steps & steps);
    void top(int32_t seq, int32_t node, int32_t top_k, int32_t * tokens, float * log_probs);

    // ---- drafting ----
    void               mtp_draft(int32_t n, const int32_t * seqs, const int32_t * roots, const pyspec_mtp_drafts & out);
    pyspec_dflash_info dflash_open(const char * path);
    void               dflash_listen(bool on);
    void               dflash_draft(int32_t n, const int32_t * seqs, const int32_t * roots, int32_t depth, int32_t top_k,
                                    int32_t * tokens, float * log_probs, float * pairs, float * confidence);
    DraftHead &        draft_head(); // of the open drafter

    // Of the last verified tree of a sequence; they fail once a later pass has overwritten the outputs.
    const Tree &  tree(int32_t seq) const;
    const float * logits(int32_t seq, int32_t node);
    int32_t       draw(Sampler & sampler, int32_t seq, int32_t node); // the target's token, into the sampler's state
    const float * hidden(int32_t seq, int32_t node);

    void            fill(pyspec_info & info) const;
    llama_context * context() const { return target.get(); }
    uint32_t        context_size() const { return n_ctx; }
    void            abort(bool on) { aborting.store(on); }
    pyspec_timings  take_timings(bool reset);
    void            set_threads(int32_t n); // of verify passes

    pyspec_timings timings{};

private:
    const Sequence & checked(int32_t seq) const;
    Sequence &       checked(int32_t seq);

    void check_room(int32_t seq, int32_t n) const;
    void check_node(int32_t seq, int32_t node) const;
    int32_t output(int32_t seq, int32_t node) const; // index of the node's output in the target
    void check_abort() const;
    void open_target(const pyspec_engine_params & params);
    void check_draft(int32_t n, const int32_t * seqs, const int32_t * roots, int32_t depth, int32_t top_k) const;

    // A sequence to be decoded on: no uncommitted tree, memory that matches its tokens.
    Sequence & ready(int32_t seq);
    void       drop_tree(int32_t seq);
    void       lose(int32_t seq); // target memory is unusable; rebuilt by ready()
    void       rebuild(int32_t seq);
    void       feed(int32_t seq, const int32_t * tokens, int32_t n, int32_t position); // no outputs
    void       process(); // the batch; throws after a failure, which may have damaged the memory of its sequences

    const pyspec_engine_params params;

    const uint32_t n_ctx;      // tokens a sequence
    const uint32_t n_batch;    // prompt tokens a call
    const uint32_t max_nodes;
    const int32_t  n_threads;
    const int32_t  n_threads_batch;
    int32_t        n_threads_verify;
    ContextThreads target_threads;

    std::atomic<bool>     aborting{ false };
    ThreadPool            threads;
    Rollback              rollback;
    ContextPtr            target;
    BatchPtr              batch;
    std::unique_ptr<Mtp>    mtp;    // NULL: not open
    std::unique_ptr<Dflash> dflash; // NULL: not open
    TopK                    best;
    std::vector<Sequence> sequences;
    uint64_t              pass = 0; // forward passes of the target; outputs belong to the last
    int64_t               reused_before = 0;
};

// The context parameters of the target.
llama_context_params context_params(const pyspec_engine_params & params, uint32_t n_ctx, int32_t n_threads,
                                    int32_t n_threads_batch);

// The same for the context of a drafter, whose cache may have types of its own.
llama_context_params drafter_context_params(pyspec_engine_params params, uint32_t n_ctx, int32_t n_threads,
                                            int32_t n_threads_batch);

// Fails unless rc, the result of llama_process, is a success.
void check_process(int32_t rc, const char * what, const std::string & cause);

} // namespace pyspec
