#include "mtp.h"

#include "engine.h"
#include "error.h"
#include "log.h"
#include "threads.h"

#include "ggml.h"
#include "llama-ext.h"

#include <algorithm>
#include <cmath>

namespace pyspec {

namespace {

// With this many tokens a pass, products round the same however the tokens are batched (docs/exactness.md), as attention
// does on a context that takes trees (ggml_flash_attn_ext_set_ordered): the drafts do not depend on when the block was fed.
constexpr uint32_t exact_ubatch = GGML_TREE_MAX_NODES;

// A drafting pass that reads less than this is done by one thread: with more, it would mostly wait for the others.
constexpr uint64_t one_thread_bytes = 4 << 20;

// What a pass reads, about: a layer's share of the weights, and the output matrix.
uint64_t pass_bytes(const Model & model) {
    return llama_model_size(model.get()) / (model.n_layer + 1) + (uint64_t) model.n_embd * model.n_vocab;
}

// Rows of the hidden state that the graph of a pass of 2 tokens with 1 output yields; 0: the graph has none.
int64_t hidden_rows(llama_context * ctx) {
    ggml_cgraph * graph = llama_graph_reserve(ctx, 2, 1, 1);
    ggml_tensor * h     = graph ? ggml_graph_get_tensor(graph, "h_nextn") : nullptr;
    return h ? h->ne[1] : 0;
}

} // namespace

Mtp::Mtp(const Model & model, const pyspec_engine_params & params, llama_context * target, uint32_t n_ctx,
         int32_t n_threads, int32_t n_threads_batch, const ThreadPool & threads, ggml_abort_callback abort,
         void * abort_data)
    : n_embd(model.n_embd), n_vocab(model.n_vocab), one_thread(pass_bytes(model) < one_thread_bytes),
      n_threads_feed(one_thread ? 1 : n_threads_batch), n_threads_draft(one_thread ? 1 : n_threads),
      zeros(model.n_embd, 0.0f) {
    llama_context_params ctx_params = drafter_context_params(params, n_ctx, n_threads, n_threads_batch);
    ctx_params.ctx_type      = LLAMA_CONTEXT_TYPE_MTP;
    ctx_params.ctx_other     = target;
    ctx_params.n_rs_seq      = 0;
    ctx_params.n_ubatch      = exact_ubatch;
    ctx_params.n_outputs_max = params.n_seq_max * max_width;
    ctx_params.kv_unified    = true; // sequences with unequal numbers of tokens share a pass

    LogScope log;
    ctx = llama_init_from_model(model.get(), ctx_params);
    if (!ctx) {
        fail(PYSPEC_ERR_DRAFT, "cannot open the MTP block of %s: %s", model.name.c_str(),
             log.cause("llama.cpp gives no reason").c_str());
    }
    trees = llama_tree_init(ctx, exact_ubatch, GGML_GDN_TREE_ROW) == 0; // a context that takes none still drafts
    head.bind(ctx, n_vocab);
    try {
        llama_set_embeddings_nextn(ctx, true, /*masked*/ false);
        const int64_t rows = hidden_rows(ctx);
        if (rows == 0) {
            fail(PYSPEC_ERR_DRAFT, "llama.cpp has no MTP graph for architecture %s", model.arch.c_str());
        }
        mixed_outputs = rows == 2;
        if (!mixed_outputs) {
            llama_set_embeddings_nextn(ctx, true, /*masked*/ true);
        }
        threads.attach(ctx);
        llama_set_abort_callback(ctx, abort, abort_data);
        n_batch = llama_n_batch(ctx);
        batch   = llama_batch_ext_init(ctx);
    } catch (...) {
        llama_free(ctx);
        throw;
    }
}

Mtp::~Mtp() {
    llama_batch_ext_free(batch);
    llama_free(ctx);
}

void Mtp::append(Sequence & s, const float * hidden, int32_t n) const {
    s.hidden.insert(s.hidden.end(), hidden, hidden + (size_t) n * n_embd);
}

uint32_t Mtp::unseen(const Sequence & s) const {
    return (uint32_t) std::max(0, s.length() - s.mtp_fed);
}

int32_t Mtp::add(int32_t seq, int32_t token, int32_t position, const float * hidden, bool output) {
    const int32_t   index = llama_batch_ext_add_token(batch, seq, token);
    const llama_pos pos   = position;
    if (index < 0 || !llama_batch_ext_set_pos(batch, index, &pos) ||
        !llama_batch_ext_set_embd_token(batch, index, { hidden, 1, (size_t) n_embd }) ||
        !llama_batch_ext_set_output_logits(batch, index, output)) {
        fail(PYSPEC_ERR_COMPUTE, "token at position %d of sequence %d does not fit the MTP batch", position, seq);
    }
    return index;
}

int32_t Mtp::add_unseen(int32_t seq, const Sequence & s, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
        const int32_t position = s.mtp_fed + i;
        add(seq, s.tokens[position], position, s.hidden.data() + (size_t) i * n_embd, false);
    }
    return n;
}

void Mtp::mark_fed(Sequence & s, int32_t n) const {
    s.mtp_fed += n;
    s.hidden.erase(s.hidden.begin(), s.hidden.begin() + (size_t) n * n_embd);
}

void Mtp::process() {
    LogScope log;
    ++n_passes;
    const int32_t rc = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
    llama_synchronize(ctx);
    check_process(rc, "a pass of the MTP block", log.cause("no reason logged"));
}

void Mtp::catch_up(int32_t seq, Sequence & s) {
    const int32_t n_threads = unseen(s) >= many_unseen ? n_threads_feed : n_threads_draft;
    context_threads.use(ctx, n_threads, n_threads);
    while (unseen(s) > 0) {
        const int32_t n = (int32_t) std::min(unseen(s), n_batch);
        llama_batch_ext_clear(batch);
        add_unseen(seq, s, n);
        try {
            process();
        } catch (...) {
            llama_memory_seq_rm(llama_get_memory(ctx), seq, s.mtp_fed, -1);
            throw;
        }
        mark_fed(s, n);
    }
}

void Mtp::catch_up_if_many(int32_t seq, Sequence & s) {
    if (unseen(s) >= many_unseen) {
        catch_up(seq, s);
    }
}

// A sequence whose draft is growing.
struct Mtp::Growth {
    struct Row {            // an expanded node
        int32_t token;
        int32_t parent;     // row of its parent; -1: it is the root
        int32_t level;
        int32_t batch;      // its index in the pass that gave its outputs
        double  log_prob;   // of its path
    };
    std::vector<Row>   rows;   // the root first, then level by level
    std::vector<float> hidden; // [rows][n_embd]: what each row reads
    size_t             level = 0; // first row of the newest level
    bool               growing = true;
};

void Mtp::draft(const std::vector<Request> & requests, const pyspec_mtp_drafts & out) {
    if (out.width > 1 && !trees) {
        fail(PYSPEC_ERR_DRAFT, "the MTP context takes no trees; width must be 1");
    }
    uint32_t total = (uint32_t) requests.size();
    for (const Request & r : requests) {
        total += unseen(*r.sequence);
    }
    if (!mixed_outputs || total > n_batch) {
        for (const Request & r : requests) {
            catch_up(r.seq, *r.sequence);
        }
    }
    context_threads.use(ctx, n_threads_draft, n_threads_draft);
    std::vector<Growth> growths(requests.size());
    try {
        add_roots(requests, growths);
        for (int32_t level = 0; level < out.depth; ++level) {
            process();
            bool growing = false;
            for (size_t i = 0; i < requests.size(); ++i) {
                if (level == 0) {
                    mark_fed(*requests[i].sequence, (int32_t) unseen(*requests[i].sequence));
                }
                if (growths[i].growing) {
                    read_level(growths[i], i, level, out);
                    growing = growing || growths[i].growing;
                }
            }
            if (!growing) {
                break;
            }
            llama_batch_ext_clear(batch);
            for (size_t i = 0; i < requests.size(); ++i) {
                if (growths[i].growing) {
                    add_level(requests[i], growths[i], out.width > 1);
                }
            }
        }
    } catch (...) {
        forget_draft(requests);
        // Of a first pass that failed, the unseen tokens may be half written.
        for (const Request & r : requests) {
            llama_memory_seq_rm(llama_get_memory(ctx), r.seq, r.sequence->mtp_fed, -1);
        }
        throw;
    }
    forget_draft(requests);
}

void Mtp::forget_draft(const std::vector<Request> & requests) {
    for (const Request & r : requests) {
        llama_memory_seq_rm(llama_get_memory(ctx), r.seq, r.sequence->length(), -1);
    }
}

void Mtp::add_roots(const std::vector<Request> & requests, std::vector<Growth> & growths) {
    llama_batch_ext_clear(batch);
    for (size_t i = 0; i < requests.size(); ++i) {
        const Request &  r = requests[i];
        const Sequence & s = *r.sequence;
        add_unseen(r.seq, s, (int32_t) unseen(s));
        const float * pending = s.hidden.empty() ? zeros.data() : s.hidden.data() + s.hidden.size() - n_embd;
        growths[i].hidden.assign(pending, pending + n_embd);
        const int32_t index = add(r.seq, r.root, s.length(), pending, true);
        growths[i].rows.push_back({ r.root, -1, 0, index, 0.0 });
    }
}

// Writes the candidates of the newest level, and appends the rows that are worth expanding.
void Mtp::read_level(Growth & growth, size_t request, int32_t level, const pyspec_mtp_drafts & out) {
    struct Candidate {
        double  log_prob;
        size_t  row;
        int32_t token;
        int32_t index; // of its row within the level, times top_k, plus its rank
    };
    std::vector<Candidate> candidates;
    const size_t first = growth.level, n_rows = growth.rows.size() - growth.level;
    const size_t place = (request * out.depth + level) * out.width;
    for (size_t k = 0; k < n_rows; ++k) {
        const Growth::Row row    = growth.rows[first + k];
        const float *     logits = llama_get_logits_ith(ctx, row.batch);
        if (!logits) {
            fail(PYSPEC_ERR_COMPUTE, "the MTP block returned no logits");
        }
        int32_t * tokens    = out.tokens + (place + k) * out.top_k;
        float *   log_probs = out.log_probs + (place + k) * out.top_k;
        const int32_t top_k = std::min(out.top_k, head.n_logits());
        top(logits, head.n_logits(), top_k, tokens, log_probs);
        head.to_tokens(tokens, top_k);
        for (int32_t rank = top_k; rank < out.top_k; ++rank) { // a head with fewer rows than candidates
            tokens[rank]    = tokens[0];
            log_probs[rank] = -INFINITY;
        }
        for (int32_t rank = 0; rank < std::min(top_k, out.width); ++rank) {
            candidates.push_back({ row.log_prob + log_probs[rank], first + k, tokens[rank], (int32_t) k * out.top_k + rank });
        }
    }
    out.levels[request] = level + 1;
    growth.level        = growth.rows.size();
    growth.growing      = level + 1 < out.depth;
    if (!growth.growing) {
        return;
    }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate & a, const Candidate & b) { return a.log_prob > b.log_prob; });
    const double  least = out.min_prob > 0.0f ? std::log((double) out.min_prob) : -INFINITY;
    const int32_t keep  = std::min<int32_t>(out.width, (int32_t) candidates.size());
    int32_t       kept  = 0;
    for (; kept < keep && candidates[kept].log_prob >= least; ++kept) {
        const Candidate & c      = candidates[kept];
        const float *     hidden = llama_get_embeddings_nextn_ith(ctx, growth.rows[c.row].batch);
        if (!hidden) {
            fail(PYSPEC_ERR_COMPUTE, "the MTP block returned no hidden state");
        }
        growth.hidden.insert(growth.hidden.end(), hidden, hidden + n_embd);
        growth.rows.push_back({ c.token, (int32_t) c.row, level + 1, -1, c.log_prob });
        out.parents[place + out.width + kept] = c.index;
    }
    growth.growing = kept > 0;
}

// Puts the newest level into the batch: a chain goes on from the cache, a tree is read anew from its root.
void Mtp::add_level(const Request & request, Growth & growth, bool tree) {
    const int32_t length = request.sequence->length();
    if (tree) {
        llama_memory_seq_rm(llama_get_memory(ctx), request.seq, length, -1);
    }
    int32_t first = -1;
    for (size_t k = tree ? 0 : growth.level; k < growth.rows.size(); ++k) {
        Growth::Row & row = growth.rows[k];
        row.batch = add(request.seq, row.token, length + row.level, growth.hidden.data() + k * n_embd, k >= growth.level);
        first     = first < 0 ? row.batch : first;
        if (tree && !llama_batch_ext_set_parent(batch, row.batch, row.parent < 0 ? -1 : first + row.parent)) {
            fail(PYSPEC_ERR_COMPUTE, "node %zu of the draft of sequence %d does not fit the MTP batch", k, request.seq);
        }
    }
}

void Mtp::forget(int32_t seq) {
    llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1);
}

} // namespace pyspec
