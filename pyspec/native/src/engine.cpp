#include "engine.h"

#include "error.h"
#include "log.h"

#include "llama-ext.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

namespace pyspec {

namespace {

constexpr uint32_t max_nodes_limit = 64;
constexpr int32_t  max_threads     = 512; // GGML_MAX_N_THREADS

uint32_t at_least_one(uint32_t value, const char * name) {
    if (value < 1) {
        fail(PYSPEC_ERR_ARGUMENT, "%s is 0; it must be at least 1", name);
    }
    return value;
}

uint32_t checked_max_nodes(uint32_t n) {
    if (n < 1 || n > max_nodes_limit) {
        fail(PYSPEC_ERR_ARGUMENT, "max_nodes is %u; it must be 1 to %u", n, max_nodes_limit);
    }
    return n;
}

int32_t checked_threads(int32_t n, int32_t fallback, const char * name) {
    if (n > max_threads) {
        fail(PYSPEC_ERR_ARGUMENT, "%s is %d; it must be at most %d", name, n, max_threads);
    }
    return n > 0 ? n : std::min(fallback, max_threads);
}

ggml_type checked_type(int32_t type, const char * name) {
    if (type < 0) {
        return GGML_TYPE_F16;
    }
    if (type >= GGML_TYPE_COUNT || !ggml_type_name((ggml_type) type) || ggml_type_size((ggml_type) type) == 0) {
        fail(PYSPEC_ERR_ARGUMENT, "%s is %d, which is no ggml_type", name, type);
    }
    return (ggml_type) type;
}

uint32_t pad(uint32_t n, uint32_t to) {
    return (n + to - 1) / to * to;
}

} // namespace

llama_context_params context_params(const pyspec_engine_params & params, uint32_t n_ctx, int32_t n_threads,
                                    int32_t n_threads_batch) {
    llama_context_params result = llama_context_default_params();
    const uint32_t nodes = params.n_seq_max * params.max_nodes;
    const uint32_t prompt = params.n_batch ? params.n_batch : 512;
    result.n_ctx           = pad(n_ctx, 256) * params.n_seq_max;
    result.n_seq_max       = params.n_seq_max;
    result.n_batch         = std::min(std::max({ prompt, nodes, params.max_nodes + 1 }), result.n_ctx);
    // All trees should share one pass, and a whole tree must.
    result.n_ubatch        = std::min(std::max(params.n_ubatch ? params.n_ubatch : 512, params.max_nodes + 1),
                                      result.n_batch);
    result.n_outputs_max   = std::min(std::max(nodes, 1u), result.n_batch);
    result.n_threads       = n_threads;
    result.n_threads_batch = n_threads_batch;
    result.flash_attn_type = params.flash_attn < 0  ? LLAMA_FLASH_ATTN_TYPE_AUTO
                             : params.flash_attn > 0 ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                                                     : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    result.type_k          = checked_type(params.type_k, "type_k");
    result.type_v          = checked_type(params.type_v, "type_v");
    result.offload_kqv     = params.offload_kqv;
    result.swa_full        = true; // a sliding window must still be whole after a rollback
    result.kv_unified      = false; // a sequence computes the same whatever the others hold
    return result;
}

llama_context_params drafter_context_params(pyspec_engine_params params, uint32_t n_ctx, int32_t n_threads,
                                            int32_t n_threads_batch) {
    if (params.draft_type_k >= 0) {
        params.type_k = checked_type(params.draft_type_k, "draft_type_k");
    }
    if (params.draft_type_v >= 0) {
        params.type_v = checked_type(params.draft_type_v, "draft_type_v");
    }
    return context_params(params, n_ctx, n_threads, n_threads_batch);
}

void check_process(int32_t rc, const char * what, const std::string & cause) {
    switch (rc) {
        case 0:
            return;
        case 1:
            fail(PYSPEC_ERR_CONTEXT, "%s found no room in the context: %s", what, cause.c_str());
        case 2:
            fail(PYSPEC_ERR_ABORTED, "%s was aborted", what);
        default:
            fail(PYSPEC_ERR_COMPUTE, "%s failed in llama.cpp (%d): %s", what, rc, cause.c_str());
    }
}

Engine::Engine(std::shared_ptr<Model> the_model, const pyspec_engine_params & given)
    : model(std::move(the_model)),
      params(given),
      n_ctx(params.n_ctx ? params.n_ctx : (uint32_t) std::max(model->n_ctx_train, 1)),
      n_batch(params.n_batch ? params.n_batch : 512),
      max_nodes(checked_max_nodes(params.max_nodes)),
      n_threads(checked_threads(params.n_threads, physical_cores(), "n_threads")),
      n_threads_batch(checked_threads(params.n_threads_batch, n_threads, "n_threads_batch")),
      n_threads_verify(n_threads),
      threads(std::max(n_threads, n_threads_batch)),
      rollback(*model, params.max_nodes) {
    at_least_one(params.n_seq_max, "n_seq_max");
    const uint32_t most = (uint32_t) llama_max_parallel_sequences();
    if (params.n_seq_max > most) {
        fail(PYSPEC_ERR_ARGUMENT, "n_seq_max is %u; llama.cpp allows %u", params.n_seq_max, most);
    }
    if ((uint64_t) pad(n_ctx, 256) * params.n_seq_max > INT32_MAX) {
        fail(PYSPEC_ERR_ARGUMENT, "n_ctx %u for %u sequences is more than llama.cpp can address", n_ctx,
             params.n_seq_max);
    }
    if (n_ctx > INT32_MAX - 256 || n_batch > INT32_MAX / 2 || params.n_ubatch > INT32_MAX / 2) {
        fail(PYSPEC_ERR_ARGUMENT, "n_ctx, n_batch or n_ubatch is out of range");
    }
    if (params.mtp && model->n_layer_mtp == 0) {
        fail(PYSPEC_ERR_DRAFT, "%s has no MTP block%s", model->name.c_str(),
             llama_model_n_layer_nextn(model->get()) > 0 ? " loaded" : "");
    }
    if (params.mtp && model->n_layer_mtp > 1) {
        fail(PYSPEC_ERR_DRAFT, "%s has %d MTP blocks; this build drives one", model->name.c_str(), model->n_layer_mtp);
    }
    sequences.resize(params.n_seq_max);
    open_target(params);
    batch.reset(llama_batch_ext_init(target.get()));
    if (params.mtp) {
        LogScope log; // switching outputs on is logged
        mtp = std::make_unique<Mtp>(
            *model, params, target.get(), n_ctx, n_threads, n_threads_batch, threads,
            [](void * flag) { return ((std::atomic<bool> *) flag)->load(std::memory_order_relaxed); }, &aborting);
        llama_set_embeddings_nextn(target.get(), true, /*masked*/ false);
    }
}

void Engine::open_target(const pyspec_engine_params & params) {
    const llama_context_params ctx_params = context_params(params, n_ctx, n_threads, n_threads_batch);
    LogScope log;
    target.reset(llama_init_from_model(model->get(), ctx_params));
    if (!target) {
        fail(PYSPEC_ERR_MEMORY, "cannot open a context of %u tokens for %u sequences: %s", n_ctx, params.n_seq_max,
             log.cause("llama.cpp gives no reason").c_str());
    }
    if (!llama_get_memory(target.get())) {
        fail(PYSPEC_ERR_MODEL, "%s (%s): it is no generating model", model->name.c_str(), model->arch.c_str());
    }
    rollback.bind(target.get(), params.n_seq_max);
    threads.attach(target.get());
    llama_set_abort_callback(
        target.get(), [](void * flag) { return ((std::atomic<bool> *) flag)->load(std::memory_order_relaxed); },
        &aborting);
}

// ---- checks -------------------------------------------------------------------------------------

const Sequence & Engine::checked(int32_t seq) const {
    if (seq < 0 || seq >= (int32_t) sequences.size()) {
        fail(PYSPEC_ERR_ARGUMENT, "there is no sequence %d; the engine was opened for %zu", seq, sequences.size());
    }
    return sequences[seq];
}

Sequence & Engine::checked(int32_t seq) {
    return const_cast<Sequence &>(static_cast<const Engine *>(this)->checked(seq));
}

void Engine::check_room(int32_t seq, int32_t n) const {
    const int32_t held = sequences[seq].length();
    if ((int64_t) held + n > n_ctx) {
        fail(PYSPEC_ERR_CONTEXT, "sequence %d holds %d tokens; %d more exceed its context of %u", seq, held, n, n_ctx);
    }
}

void Engine::check_abort() const {
    if (aborting.load(std::memory_order_relaxed)) {
        fail(PYSPEC_ERR_ABORTED, "the engine is being aborted");
    }
}

const Tree & Engine::tree(int32_t seq) const {
    const Sequence & s = checked(seq);
    if (s.tree.size() == 0) {
        fail(PYSPEC_ERR_STATE, "sequence %d has no uncommitted tree; verify one first", seq);
    }
    return s.tree;
}

void Engine::check_node(int32_t seq, int32_t node) const {
    const Tree & t = tree(seq);
    if (node < 0 || node >= t.size()) {
        fail(PYSPEC_ERR_ARGUMENT, "sequence %d: there is no node %d in its tree of %d", seq, node, t.size());
    }
}

int32_t Engine::output(int32_t seq, int32_t node) const {
    check_node(seq, node);
    const Sequence & s = sequences[seq];
    if (s.tree_pass != pass) {
        fail(PYSPEC_ERR_STATE, "the logits of sequence %d were overwritten by a later verify or prefill", seq);
    }
    return s.tree_index + node;
}

const float * Engine::logits(int32_t seq, int32_t node) {
    const float * row = llama_get_logits_ith(target.get(), output(seq, node));
    if (!row) {
        fail(PYSPEC_ERR_COMPUTE, "llama.cpp returned no logits for node %d of sequence %d", node, seq);
    }
    return row;
}

int32_t Engine::draw(Sampler & sampler, int32_t seq, int32_t node) {
    if (sampler.greedy()) {
        float         logit = 0.0f;
        const int32_t token = llama_get_output_argmax_ith(target.get(), output(seq, node), &logit);
        if (token >= 0 && token < model->n_vocab) { // else the pass chose none
            return sampler.draw_best(token, logit);
        }
    }
    return sampler.draw(logits(seq, node));
}

const float * Engine::hidden(int32_t seq, int32_t node) {
    check_node(seq, node);
    if (!mtp) {
        fail(PYSPEC_ERR_STATE, "hidden states are kept only when the engine is opened with mtp");
    }
    return sequences[seq].tree_hidden.data() + (size_t) node * model->n_embd;
}

// ---- memory of a sequence -----------------------------------------------------------------------

void Engine::lose(int32_t seq) {
    llama_memory_seq_rm(llama_get_memory(target.get()), seq, -1, -1);
    sequences[seq].stale = sequences[seq].length() > 0;
}

void Engine::drop_tree(int32_t seq) {
    Sequence & s = sequences[seq];
    if (s.tree.size() == 0) {
        return;
    }
    s.clear_tree();
    if (!rollback.drop(seq, s.length())) {
        lose(seq);
    }
}

void Engine::rebuild(int32_t seq) {
    Sequence & s = sequences[seq];
    Stopwatch  watch(timings.prefill);
    for (int32_t done = 0; done < s.length();) {
        const int32_t n = std::min<int32_t>(s.length() - done, n_batch);
        feed(seq, s.tokens.data() + done, n, done);
        done += n;
    }
    s.stale = false;
}

Sequence & Engine::ready(int32_t seq) {
    drop_tree(seq);
    if (sequences[seq].stale) {
        rebuild(seq);
    }
    if (mtp) {
        mtp->catch_up_if_many(seq, sequences[seq]);
    }
    if (dflash) {
        dflash->catch_up_if_many(seq, sequences[seq]);
    }
    return sequences[seq];
}

void Engine::reset(int32_t seq) {
    Sequence & s = checked(seq);
    llama_memory_seq_rm(llama_get_memory(target.get()), seq, -1, -1);
    if (mtp) {
        mtp->forget(seq);
    }
    if (dflash) {
        dflash->forget(seq);
    }
    s = Sequence();
}

// ---- decode -------------------------------------------------------------------------------------

void Engine::process() {
    LogScope log;
    ++pass;
    const int32_t rc = llama_process(target.get(), LLAMA_PROCESS_TYPE_DECODE, batch.get());
    llama_synchronize(target.get());
    check_process(rc, "a forward pass", log.cause("no reason logged"));
}

void Engine::set_threads(int32_t n) {
    if (n < 1 || n > std::max(n_threads, n_threads_batch)) {
        fail(PYSPEC_ERR_ARGUMENT, "%d threads; it must be 1 to %d", n, std::max(n_threads, n_threads_batch));
    }
    n_threads_verify = n;
    if (mtp) {
        mtp->set_threads(n);
    }
    if (dflash) {
        dflash->set_threads(n);
    }
}

void Engine::feed(int32_t seq, const int32_t * tokens, int32_t n, int32_t position) {
    check_abort();
    target_threads.use(target.get(), n_threads, n_threads_batch);
    llama_batch_ext_clear(batch.get());
    for (int32_t i = 0; i < n; ++i) {
        const int32_t   index = llama_batch_ext_add_token(batch.get(), seq, tokens[i]);
        const llama_pos pos   = position + i;
        if (index < 0 || !llama_batch_ext_set_pos(batch.get(), index, &pos)) {
            fail(PYSPEC_ERR_COMPUTE, "token %d of sequence %d does not fit the batch", i, seq);
        }
    }
    try {
        process();
    } catch (...) {
        // A recurrent state that was being written is lost with everything before it.
        if (model->n_layer_recurrent > 0 ||
            !llama_memory_seq_rm(llama_get_memory(target.get()), seq, position, -1)) {
            lose(seq);
        }
        throw;
    }
}

void Engine::prefill(int32_t seq, const int32_t * tokens, int32_t n) {
    checked(seq);
    if (n < 0 || (n > 0 && !tokens)) {
        fail(PYSPEC_ERR_ARGUMENT, "prefill of sequence %d: %s", seq, n < 0 ? "a negative number of tokens" : "tokens is NULL");
    }
    for (int32_t i = 0; i < n; ++i) {
        if (tokens[i] < 0 || tokens[i] >= model->n_vocab) {
            fail(PYSPEC_ERR_ARGUMENT, "prefill of sequence %d: token %d at index %d; the vocabulary has %d", seq,
                 tokens[i], i, model->n_vocab);
        }
    }
    check_room(seq, n);
    Sequence & s = ready(seq);

    Stopwatch watch(timings.prefill);
    for (int32_t done = 0; done < n;) {
        const int32_t m = std::min<int32_t>(n - done, n_batch);
        feed(seq, tokens + done, m, s.length());
        s.tokens.insert(s.tokens.end(), tokens + done, tokens + done + m);
        done += m;
        timings.n_prefill_tokens += m;
        if (mtp) {
            mtp->append(s, llama_get_embeddings_nextn(target.get()), m);
            mtp->catch_up(seq, s);
        }
        if (dflash && dflash->listens()) {
            dflash->gather(s.features, 0, m);
            dflash->catch_up(seq, s);
        } else if (dflash) {
            dflash->pass_by(s);
        }
    }
}

void Engine::verify(const pyspec_tree * trees, int32_t n_trees, bool greedy) {
    if (n_trees < 1 || n_trees > (int32_t) sequences.size()) {
        fail(PYSPEC_ERR_ARGUMENT, "verify of %d trees; the engine was opened for 1 to %zu", n_trees, sequences.size());
    }
    if (!trees) {
        fail(PYSPEC_ERR_ARGUMENT, "trees is NULL");
    }
    struct Entry {
        int32_t seq;
        Tree    tree;
    };
    std::vector<Entry> entries;
    for (int32_t i = 0; i < n_trees; ++i) {
        checked(trees[i].seq);
        entries.push_back({ trees[i].seq, checked_tree(trees[i], (int32_t) max_nodes, model->n_vocab) });
        rollback.check(entries.back().tree, trees[i].seq);
        check_room(trees[i].seq, trees[i].n_nodes);
    }
    // llama.cpp puts neighbouring sequences into one pass.
    std::sort(entries.begin(), entries.end(), [](const Entry & a, const Entry & b) { return a.seq < b.seq; });
    for (size_t i = 1; i < entries.size(); ++i) {
        if (entries[i].seq == entries[i - 1].seq) {
            fail(PYSPEC_ERR_ARGUMENT, "sequence %d has two trees in one verify", entries[i].seq);
        }
    }
    check_abort();
    for (const Entry & entry : entries) {
        ready(entry.seq);
    }

    Stopwatch watch(timings.verify);
    target_threads.use(target.get(), n_threads_verify, n_threads_verify);
    llama_set_output_argmax(target.get(), greedy && params.graph_argmax);
    llama_batch_ext_clear(batch.get());
    int32_t width = 0;
    for (const Entry & entry : entries) {
        width = std::max(width, entry.tree.size());
    }
    for (Entry & entry : entries) {
        Sequence & s = sequences[entry.seq];
        // A context that is nearly full has no room for more than the tree.
        const bool room = s.length() + width <= (int32_t) n_ctx;
        s.tree_index = rollback.add(batch.get(), entry.tree, entry.seq, s.length(), room ? width : 0);
    }
    try {
        process();
    } catch (...) {
        for (const Entry & entry : entries) {
            const int32_t length = sequences[entry.seq].length();
            if (length == 0 || !rollback.drop(entry.seq, length)) {
                lose(entry.seq);
            }
        }
        throw;
    }
    timings.n_verify += 1;
    for (Entry & entry : entries) {
        Sequence & s = sequences[entry.seq];
        s.tree       = std::move(entry.tree);
        s.tree_pass  = pass;
        timings.n_verify_nodes += s.tree.size();
        if (mtp) {
            const size_t  width = model->n_embd;
            const float * rows  = llama_get_embeddings_nextn(target.get()) + s.tree_index * width;
            s.tree_hidden.assign(rows, rows + s.tree.size() * width);
        }
        if (dflash) {
            s.tree_features.clear();
            if (dflash->listens()) {
                dflash->gather(s.tree_features, s.tree_index, s.tree.size());
            }
        }
    }
}

int32_t Engine::walk(Sampler & sampler, int32_t seq, int32_t max_path, bool stop_eog, int32_t * path, int32_t * drawn) {
    const Tree & t = tree(seq);
    Stopwatch    watch(timings.sample);
    int32_t      n = 0;
    for (int32_t node = 0; node >= 0;) {
        path[n]               = node;
        const int32_t token   = drawn[n] = draw(sampler, seq, node);
        const bool    is_last = ++n == max_path || (stop_eog && llama_vocab_is_eog(model->vocab(), token));
        node                  = is_last ? -1 : child_with_token(t, node, token);
    }
    return n;
}

void Engine::coast(Sampler & sampler, int32_t seq, int32_t root, int32_t max_steps, int32_t max_tokens, bool stop_eog,
                   int64_t max_us, Pilot * pilot, pyspec_coast_steps & steps) {
    const auto now = [] { return std::chrono::steady_clock::now(); };
    const auto us  = [](auto span) { return (int64_t) std::chrono::duration_cast<std::chrono::microseconds>(span).count(); };
    const auto    start     = now();
    const int32_t no_parent = -1;
    int32_t       n_nodes = 0, n_drawn = 0; // so far
    for (auto began = start; steps.n_steps < max_steps && n_drawn < max_tokens && us(began - start) <= max_us;) {
        const int32_t   k         = steps.n_steps;
        const int32_t   depth     = 0;
        const float     log_prob  = 0.0f;
        pyspec_tree     next      = { seq, 1, &root, &no_parent };
        const int32_t * depths    = &depth;
        const float *   log_probs = &log_prob;
        if (pilot) {
            const int32_t       room = std::min<int32_t>(max_nodes, (int32_t) n_ctx - length(seq));
            const Pilot::Tree & tree = pilot->draft(max_tokens - n_drawn - 1, std::max(room, 1));
            if (pilot->gives_way()) {
                return;
            }
            next      = { seq, tree.size(), tree.tokens.data(), tree.parents.data() };
            depths    = tree.depths.data();
            log_probs = tree.log_probs.data();
        }
        try {
            verify(&next, 1, sampler.greedy());
        } catch (...) {
            if (k == 0) {
                throw;
            }
            return; // nothing was drawn: the next call does the same again
        }
        int32_t *     path  = steps.path + n_drawn;
        int32_t *     drawn = steps.drawn + n_drawn;
        const int32_t n     = walk(sampler, seq, max_tokens - n_drawn, stop_eog, path, drawn);
        commit(seq, path, n);
        std::copy_n(next.tokens, next.n_nodes, steps.tokens + n_nodes);
        std::copy_n(next.parents, next.n_nodes, steps.parents + n_nodes);
        std::copy_n(depths, next.n_nodes, steps.depths + n_nodes);
        std::copy_n(log_probs, next.n_nodes, steps.log_probs + n_nodes);
        const auto ended = now();
        if (pilot) {
            pilot->accept(path, drawn, n, std::chrono::duration<double, std::milli>(ended - began).count());
        }
        steps.nodes[k]    = next.n_nodes;
        steps.accepted[k] = n;
        steps.us[k]       = (int32_t) std::min<int64_t>(us(ended - began), INT32_MAX);
        steps.n_steps     = k + 1;
        n_nodes += next.n_nodes;
        n_drawn += n;
        root  = drawn[n - 1];
        began = ended;
        if (stop_eog && llama_vocab_is_eog(model->vocab(), root)) {
            return;
        }
    }
}

void Engine::commit(int32_t seq, const int32_t * path, int32_t n) {
    const Tree & t = tree(seq);
    check_path(t, seq, path, n);

    Stopwatch  watch(timings.commit);
    Sequence & s    = sequences[seq];
    const bool kept = rollback.commit(t, seq, s.length(), path, n);
    const size_t width = model->n_embd;
    for (int32_t i = 0; i < n; ++i) {
        s.tokens.push_back(t.tokens[path[i]]);
        if (mtp) {
            mtp->append(s, s.tree_hidden.data() + path[i] * width, 1);
        }
        if (dflash && !s.tree_features.empty()) {
            dflash->append(s, path[i]);
        }
    }
    if (dflash && s.tree_features.empty()) {
        dflash->pass_by(s);
    }
    s.clear_tree();
    if (!kept) {
        lose(seq);
    }
}

void Engine::top(int32_t seq, int32_t node, int32_t top_k, int32_t * tokens, float * log_probs) {
    if (top_k < 1 || top_k > model->n_vocab || !tokens || !log_probs) {
        fail(PYSPEC_ERR_ARGUMENT, "top_k is %d; it must be 1 to the vocabulary's %d", top_k, model->n_vocab);
    }
    best(logits(seq, node), model->n_vocab, top_k, tokens, log_probs);
}

// ---- drafting -----------------------------------------------------------------------------------

void Engine::check_draft(int32_t n, const int32_t * seqs, const int32_t * roots, int32_t depth, int32_t top_k) const {
    if (n < 1 || n > (int32_t) sequences.size()) {
        fail(PYSPEC_ERR_ARGUMENT, "draft for %d sequences; the engine was opened for 1 to %zu", n, sequences.size());
    }
    if (!seqs || !roots) {
        fail(PYSPEC_ERR_ARGUMENT, "a pointer given to the draft is NULL");
    }
    if (depth < 1 || depth > (int32_t) max_nodes_limit) {
        fail(PYSPEC_ERR_ARGUMENT, "depth is %d; it must be 1 to %u", depth, max_nodes_limit);
    }
    if (top_k < 1 || top_k > model->n_vocab) {
        fail(PYSPEC_ERR_ARGUMENT, "top_k is %d; it must be 1 to the vocabulary's %d", top_k, model->n_vocab);
    }
    for (int32_t i = 0; i < n; ++i) {
        checked(seqs[i]);
        model->check_token(roots[i], "root of the draft");
        check_room(seqs[i], depth);
        if (std::find(seqs, seqs + i, seqs[i]) != seqs + i) {
            fail(PYSPEC_ERR_ARGUMENT, "sequence %d is named twice in one draft", seqs[i]);
        }
    }
    check_abort();
}

void Engine::mtp_draft(int32_t n, const int32_t * seqs, const int32_t * roots, const pyspec_mtp_drafts & out) {
    if (!mtp) {
        fail(PYSPEC_ERR_DRAFT, "the engine was opened without mtp");
    }
    check_draft(n, seqs, roots, out.depth, out.top_k);
    if (!out.levels || !out.parents || !out.tokens || !out.log_probs) {
        fail(PYSPEC_ERR_ARGUMENT, "a pointer given to the draft is NULL");
    }
    if (out.width < 1 || out.width > Mtp::max_width || 1 + out.depth * out.width > (int32_t) max_nodes_limit) {
        if (out.width != 1) {
            fail(PYSPEC_ERR_ARGUMENT, "width is %d at depth %d; it must be 1 to %d, and make at most %u nodes", out.width,
                 out.depth, Mtp::max_width, max_nodes_limit);
        }
    }
    Stopwatch                 watch(timings.draft);
    std::vector<Mtp::Request> requests;
    for (int32_t i = 0; i < n; ++i) {
        requests.push_back({ seqs[i], roots[i], &sequences[seqs[i]] });
        int32_t * parents = out.parents + (size_t) i * out.depth * out.width;
        std::fill(parents, parents + (size_t) out.depth * out.width, -2);
        parents[0]    = -1;
        out.levels[i] = 0;
    }
    mtp->draft(requests, out);
}

pyspec_dflash_info Engine::dflash_open(const char * path) {
    if (dflash) {
        fail(PYSPEC_ERR_STATE, "a DFlash drafter is open already");
    }
    for (size_t i = 0; i < sequences.size(); ++i) {
        if (sequences[i].length() > 0) {
            fail(PYSPEC_ERR_STATE, "sequence %zu holds tokens; open the drafter before", i);
        }
    }
    dflash = std::make_unique<Dflash>(
        path, *model, params, target.get(), n_ctx, n_threads, n_threads_batch, threads,
        [](void * flag) { return ((std::atomic<bool> *) flag)->load(std::memory_order_relaxed); }, &aborting);
    dflash->set_threads(n_threads_verify);
    return dflash->info();
}

void Engine::dflash_listen(bool on) {
    if (!dflash) {
        fail(PYSPEC_ERR_DRAFT, "no DFlash drafter is open");
    }
    dflash->listen(on);
    for (size_t i = 0; i < sequences.size() && !on; ++i) {
        dflash->pass_by(sequences[i]);
    }
}

void Engine::dflash_draft(int32_t n, const int32_t * seqs, const int32_t * roots, int32_t depth, int32_t top_k,
                          int32_t * tokens, float * log_probs, float * pairs, float * confidence) {
    if (!dflash) {
        fail(PYSPEC_ERR_DRAFT, "no DFlash drafter is open");
    }
    check_draft(n, seqs, roots, depth, top_k);
    const pyspec_dflash_info info = dflash->info();
    if (!tokens || !log_probs || (info.selector > 0 && !pairs)) {
        fail(PYSPEC_ERR_ARGUMENT, "a pointer given to the draft is NULL");
    }
    if (depth > info.max_depth || (info.selector > 0 && top_k != info.selector)) {
        fail(PYSPEC_ERR_ARGUMENT, "draft of depth %d with %d candidates; the drafter has at most %d%s", depth, top_k,
             info.max_depth, info.selector > 0 ? " and a fixed number of candidates" : "");
    }
    Stopwatch                    watch(timings.draft);
    std::vector<Dflash::Request> requests;
    for (int32_t i = 0; i < n; ++i) {
        requests.push_back({ seqs[i], roots[i], &sequences[seqs[i]] });
    }
    dflash->draft(requests, depth, top_k, tokens, log_probs, pairs, confidence);
}

DraftHead & Engine::draft_head() {
    if (!dflash && !mtp) {
        fail(PYSPEC_ERR_STATE, "no drafter is open whose head could be trimmed");
    }
    if (!dflash && has_tensor(model->get(), ("blk." + std::to_string(model->n_layer) + ".nextn.shared_head_head.weight").c_str())) {
        fail(PYSPEC_ERR_DRAFT, "the head of this drafter cannot be trimmed: the MTP block has one of its own");
    }
    if (dflash && (dflash->info().selector > 0 || dflash->info().markov)) {
        fail(PYSPEC_ERR_DRAFT, "the head of this drafter cannot be trimmed: it works on the whole vocabulary");
    }
    return dflash ? dflash->head : mtp->head;
}

// ---- facts --------------------------------------------------------------------------------------

void Engine::fill(pyspec_info & info) const {
    info = pyspec_info{};
    model->fill(info);
    info.n_ctx          = (int32_t) n_ctx;
    info.n_threads      = n_threads_verify;
    info.tree           = rollback.trees();
    info.bytes_rollback = rollback.bytes();

    uint64_t context = 0;
    for (const auto & [type, bytes] : llama_get_memory_breakdown(target.get())) {
        context += bytes.context;
        info.bytes_compute += bytes.compute;
    }
    const uint64_t recurrent = (info.bytes_state + info.bytes_rollback) * sequences.size();
    info.bytes_kv            = context > recurrent ? context - recurrent : 0;
    if (mtp) {
        for (const auto & [type, bytes] : llama_get_memory_breakdown(mtp->context())) {
            info.bytes_mtp += bytes.context;
            info.bytes_compute += bytes.compute;
        }
    }
}

pyspec_timings Engine::take_timings(bool reset) {
    const int64_t  reused = llama_perf_context(target.get()).n_reused;
    pyspec_timings result = timings;
    result.n_graph_reused = reused - reused_before;
    result.n_draft_passes = (mtp ? mtp->n_passes : 0) + (dflash ? dflash->n_passes : 0);
    if (reset) {
        timings       = pyspec_timings{};
        reused_before = reused;
        if (mtp) {
            mtp->n_passes = 0;
        }
        if (dflash) {
            dflash->n_passes = 0;
        }
    }
    return result;
}

} // namespace pyspec
