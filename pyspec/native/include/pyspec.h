// libpyspec: the native core of pyspec.
//
// One engine holds a target model with up to n_seq_max sequences, verifies a draft tree per sequence in
// one forward pass, commits the accepted path, and runs the model's own MTP block as a drafter.
//
// Conventions
//   - Functions return PYSPEC_OK (0) or a negative pyspec_status; pyspec_last_error() then holds one line
//     that names the offender and the rule (thread-local, valid until the next failing call of the thread).
//   - No C++ exception crosses this boundary. No function keeps a caller's pointer beyond the call.
//   - An engine is not thread-safe; different engines may be used from different threads.
//   - A sequence is a slot index in [0, n_seq_max). Its length is the number of tokens in the target's
//     memory; the last emitted token is never in it: it is the root of the next tree.
#ifndef PYSPEC_H
#define PYSPEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#    define PYSPEC_API __declspec(dllexport)
#else
#    define PYSPEC_API __attribute__((visibility("default")))
#endif

// What pyspec_abi() of a library built from this header returns: a checksum of the declarations below, without
// comments and white space. build_cffi.py refuses to build when it is out of date, and says what it must be.
#define PYSPEC_ABI 0x769d7cea

#ifdef __cplusplus
extern "C" {
#endif

// cffi:begin  (everything up to cffi:end is read by build_cffi.py as the cdef)

typedef enum {
    PYSPEC_OK            = 0,
    PYSPEC_ERR_ARGUMENT  = -1,  // a parameter breaks a stated rule
    PYSPEC_ERR_MODEL     = -2,  // the file cannot be loaded (missing, truncated, unknown architecture)
    PYSPEC_ERR_TREE      = -3,  // not a tree, or more nodes than the engine was opened for
    PYSPEC_ERR_CONTEXT   = -4,  // the sequence would outgrow its context
    PYSPEC_ERR_DRAFT     = -5,  // the draft source does not exist or does not fit the target
    PYSPEC_ERR_STATE     = -6,  // call out of order (commit without verify, accept of an unsampled node)
    PYSPEC_ERR_SAMPLER   = -7,  // grammar does not parse, sampler rejects every token
    PYSPEC_ERR_MEMORY    = -8,  // allocation failed
    PYSPEC_ERR_ABORTED   = -9,  // stopped by pyspec_engine_abort
    PYSPEC_ERR_COMPUTE   = -10, // llama.cpp reported a failure
} pyspec_status;

typedef struct pyspec_engine  pyspec_engine;
typedef struct pyspec_sampler pyspec_sampler;
typedef struct pyspec_ngram   pyspec_ngram;
typedef struct pyspec_calibration pyspec_calibration;

typedef struct {
    uint32_t n_ctx;           // tokens per sequence; 0 = the model's training context
    uint32_t n_seq_max;       // sequences (slots), >= 1
    uint32_t n_batch;         // prompt tokens a decode call; 0 = 512
    uint32_t n_ubatch;        // tokens a forward pass; 0 = 512
    uint32_t max_nodes;       // nodes a tree may have, root included: 1..64
    int32_t  n_threads;       // <= 0: number of physical cores
    int32_t  n_threads_batch; // <= 0: as n_threads
    int32_t  n_gpu_layers;    // < 0: all
    int32_t  split_mode;      // llama_split_mode: 0 one device, 1 by layers, 2 by rows
    int32_t  main_gpu;        // the device of split mode 0
    float    tensor_split[16]; // share of each device; all 0: by free memory
    int32_t  flash_attn;      // -1 auto, 0 off, 1 on
    bool     graph_argmax;    // passes of greedy requests choose their tokens on the graph
    int32_t  type_k;          // ggml_type of the K cache, -1 = F16
    int32_t  type_v;          // ggml_type of the V cache, -1 = F16
    int32_t  draft_type_k;    // of the K cache of a drafter (MTP block, DFlash), -1 = type_k
    int32_t  draft_type_v;    // of its V cache, -1 = type_v
    bool     use_mmap;
    bool     use_mlock;
    bool     offload_kqv;
    bool     mtp;             // open the MTP block as a drafter (PYSPEC_ERR_DRAFT if the file has none)
    bool     verbose;         // let llama.cpp log to stderr
} pyspec_engine_params;

typedef struct {
    char     arch[64];        // general.architecture
    char     desc[128];       // e.g. "qwen35 0.8B Q4_K - Medium"
    uint64_t n_params;
    uint64_t size_bytes;      // tensor bytes
    int32_t  n_vocab;
    int32_t  n_ctx_train;
    int32_t  n_ctx;           // tokens a sequence of this engine
    int32_t  n_embd;
    int32_t  n_layer;         // trunk layers, without MTP blocks
    int32_t  n_layer_recurrent;
    int32_t  n_layer_mtp;
    int32_t  token_bos;       // -1 = none
    int32_t  token_eos;
    int32_t  token_eot;
    bool     add_bos;
    bool     is_recurrent;    // no attention layer
    bool     is_hybrid;
    int32_t  n_threads;       // of verify passes
    bool     tree;            // this engine verifies trees in one pass (false: chains only)
    uint64_t bytes_kv;        // attention cache, all sequences
    uint64_t bytes_state;     // recurrent base state a sequence
    uint64_t bytes_rollback;  // what rollback adds a sequence (snapshots or tape)
    uint64_t bytes_mtp;       // the MTP block's own cache, all sequences
    uint64_t bytes_compute;
} pyspec_info;

// One draft tree. Node 0 is the root: the last emitted token, not yet in the target's state.
typedef struct {
    int32_t         seq;
    int32_t         n_nodes;  // 1..max_nodes
    const int32_t * tokens;   // [n_nodes]
    const int32_t * parents;  // [n_nodes], parents[0] == -1, 0 <= parents[i] < i
} pyspec_tree;

// How an n-gram index drafts on its own, in place of a controller.
typedef struct {
    pyspec_ngram *       index;
    pyspec_calibration * calibration; // values the nodes, and learns from what is drawn
    int32_t              slot;        // of the sequence, in the calibration
    int32_t              first_class; // of the nodes of the index
    int32_t              depth;       // of what is drafted
    int32_t              max_nodes;   // root included
    double               root_ms;     // of a plain step
    double               column_ms;   // of a column, at least
    int32_t              n_sizes;
    const int32_t *      sizes;       // [n_sizes] of trees, from 2 on, ascending
    const double *       costs_ms;    // [n_sizes] of their columns beyond the root's
    // Fading sums over steps: what a millisecond is worth in tokens is their ratio.
    double               fade;
    double               recent_tokens; // in/out
    double               recent_ms;     // in/out
    double               after_ms;      // in/out: by which plain steps behind trees take longer, which trees pay for
    // It gives way where the tree is worth less than a step of another drafter by this many tokens.
    double               margin;
    int32_t              n_others;
    const double *       other_tokens; // [n_others] of a step that asks this drafter
    const double *       other_ms;     // [n_others]
    double               least;        // gain in tokens below which it gives way in any case
} pyspec_pilot;

// The steps of a coast: their trees, and what was accepted of them.
typedef struct {
    int32_t   n_steps;   // out
    int64_t   sample_us; // out: of all steps
    int64_t   commit_us; // out
    int32_t * nodes;     // [max_steps] out: of a step's tree
    int32_t * accepted;  // [max_steps] out: of them on its path, as many as tokens were drawn
    int32_t * us;        // [max_steps] out: microseconds
    // Of all steps, one behind the other: [max_steps * max_nodes of the engine]
    int32_t * tokens;
    int32_t * parents;
    int32_t * depths;
    float *   log_probs;
    int32_t * path;      // accepted nodes
    int32_t * drawn;     // the token drawn behind each of them
} pyspec_coast_steps;

typedef struct {
    uint32_t seed;
    float    temp;            // <= 0: greedy
    int32_t  top_k;           // <= 0: off
    float    top_p;           // >= 1: off
    float    min_p;           // <= 0: off
    float    typical_p;       // >= 1: off
    int32_t  penalty_last_n;  // 0: off, -1: whole context
    float    penalty_repeat;  // 1: off
    float    penalty_freq;    // 0: off
    float    penalty_present; // 0: off
    const char    * grammar;       // GBNF with start symbol "root", or NULL
    int32_t         n_logit_bias;
    const int32_t * logit_bias_tokens; // [n_logit_bias]
    const float   * logit_bias_values; // [n_logit_bias]
} pyspec_sampler_params;

// Time spent in native code since the last reset, in microseconds.
typedef struct {
    int64_t prefill;
    int64_t draft;
    int64_t verify;
    int64_t sample;
    int64_t commit;
    int64_t n_prefill_tokens;
    int64_t n_verify;         // forward passes
    int64_t n_verify_nodes;
    int64_t n_draft_passes;
    int64_t n_graph_reused;
} pyspec_timings;

// ---- process ----
// Message and status of the last call of this thread that failed.
const char *  pyspec_last_error(void);
pyspec_status pyspec_last_status(void);
const char *  pyspec_version(void);                // libpyspec's version
int32_t       pyspec_abi(void);                    // changes whenever this header does

// ---- engine ----
pyspec_engine_params pyspec_engine_default_params(void);
// progress(fraction, user) returns false to give up loading; may be NULL.
pyspec_status pyspec_engine_open(const char * path, const pyspec_engine_params * params,
                                 bool (*progress)(float, void *), void * user, pyspec_engine ** out);
// Builds an engine on a model that is already loaded (llama_model *): that of a llama_cpp.Llama, which stays the
// caller's and must outlive the engine, or that of another engine, with which it is then shared.
pyspec_status pyspec_engine_attach(void * llama_model, const pyspec_engine_params * params, pyspec_engine ** out);
void          pyspec_engine_close(pyspec_engine * e);              // NULL is allowed
pyspec_status pyspec_engine_info(const pyspec_engine * e, pyspec_info * out);
void        * pyspec_engine_model(pyspec_engine * e);              // llama_model *
void        * pyspec_engine_context(pyspec_engine * e);            // llama_context *, the target's
// From any thread: true ends the running call, and every later one, with ABORTED until false is given.
void          pyspec_engine_abort(pyspec_engine * e, bool abort);
// Threads of verify passes from here on, 1 to those the engine was opened with; prompts are read with all. In a small
// model threads wait for each other more than they help. The text does not depend on it.
pyspec_status pyspec_engine_set_threads(pyspec_engine * e, int32_t n_threads);
void          pyspec_engine_timings(pyspec_engine * e, pyspec_timings * out, bool reset);

// ---- text ----
// Both return the number of tokens/bytes, or the negative of the number needed when max is too small
// (nothing usable written then). INT32_MIN: error, see pyspec_last_error().
int32_t pyspec_tokenize(pyspec_engine * e, const char * text, int32_t n_text, bool add_special, bool parse_special,
                        int32_t * tokens, int32_t max);
int32_t pyspec_token_to_piece(pyspec_engine * e, int32_t token, bool special, char * buf, int32_t max);
bool    pyspec_token_is_eog(pyspec_engine * e, int32_t token);
// The GGUF's chat template (Jinja source), or NULL; owned by the engine.
const char * pyspec_chat_template(pyspec_engine * e);

// ---- sequences ----
int32_t       pyspec_seq_length(pyspec_engine * e, int32_t seq);   // tokens in the target's memory, or negative status
pyspec_status pyspec_seq_reset (pyspec_engine * e, int32_t seq);   // forget everything; never fails on a valid seq
pyspec_status pyspec_seq_copy  (pyspec_engine * e, int32_t src, int32_t dst);
// State of one sequence (tokens, target, MTP cache, pending hidden state), for an engine on the same model with the
// same n_seq_max, cache types and mtp. Drops an uncommitted tree, as copy does of src. save returns the bytes
// written, or needed when buf is NULL.
int64_t       pyspec_seq_save   (pyspec_engine * e, int32_t seq, void * buf, size_t size);
pyspec_status pyspec_seq_restore(pyspec_engine * e, int32_t seq, const void * buf, size_t size);

// ---- decode ----
// Appends tokens to the sequence plainly (no tree); feeds the MTP cache too when it is open. No logits are kept.
// On ABORTED or CONTEXT the sequence keeps whatever whole batches were processed (see pyspec_seq_length).
pyspec_status pyspec_prefill(pyspec_engine * e, int32_t seq, const int32_t * tokens, int32_t n);
// One forward pass over all trees (distinct sequences). Afterwards logits of every node are available; the
// sequences themselves are unchanged until pyspec_commit. A second verify, prefill or reset drops an uncommitted tree.
// greedy: all draws to come are those of greedy samplers (pyspec_sampler_greedy). The pass may then choose their tokens
// itself; whatever is asked for afterwards has the same result either way.
pyspec_status pyspec_verify(pyspec_engine * e, const pyspec_tree * trees, int32_t n_trees, bool greedy);
// path: node indices from the root (path[0] == 0), each the parent of the next. The sequence grows by n tokens.
pyspec_status pyspec_commit(pyspec_engine * e, int32_t seq, const int32_t * path, int32_t n);
// Logits [n_vocab] / post-norm hidden state [n_embd, only with mtp] of a node of the last verified tree; NULL on
// error. Logits can be asked for until the next verify/prefill of any sequence, and the pointer is good until that,
// or a save, restore, copy or reset; hidden states until the tree is gone.
const float * pyspec_logits(pyspec_engine * e, int32_t seq, int32_t node);
const float * pyspec_hidden(pyspec_engine * e, int32_t seq, int32_t node);

// ---- sampling ----
pyspec_sampler_params pyspec_sampler_default_params(void);
pyspec_status pyspec_sampler_create(pyspec_engine * e, const pyspec_sampler_params * p, pyspec_sampler ** out);
pyspec_status pyspec_sampler_clone (const pyspec_sampler * s, pyspec_sampler ** out);
void          pyspec_sampler_close (pyspec_sampler * s);
// True when every token it draws is the one with the greatest logit, whatever came before.
bool          pyspec_sampler_greedy(const pyspec_sampler * s);
void          pyspec_sampler_reset (pyspec_sampler * s);           // also rewinds the random numbers to the seed
// Feeds tokens that are already fixed (prompt) to the penalties, not to the grammar.
pyspec_status pyspec_sampler_accept_prompt(pyspec_sampler * s, const int32_t * tokens, int32_t n);
// Draws the target's token at a node of the last verified tree and accepts it into the sampler
// (penalties, grammar, random numbers advance as in plain decoding).
pyspec_status pyspec_sample(pyspec_engine * e, pyspec_sampler * s, int32_t seq, int32_t node, int32_t * token);
// sample-and-match along the tree in one call: walks from the root, draws at each node, goes on at the child
// with the drawn token. path [max_nodes] receives the accepted nodes, *n_path their number, *bonus the last
// drawn token. Draws *n_path tokens in all, at most max_path: the one drawn at the max_path-th node is the bonus
// even where a child carries it.
// stop_eog: an end-of-generation token ends the walk as the bonus even where a child carries it.
pyspec_status pyspec_accept(pyspec_engine * e, pyspec_sampler * s, int32_t seq, int32_t max_path, bool stop_eog,
                            int32_t * path, int32_t * n_path, int32_t * bonus);

// Decodes one sequence for a while without asking anybody, step by step as verify, accept and commit would: with trees of
// the pilot, or plainly without one. Ends behind the step in which max_tokens are drawn, a token that ends generation is
// drawn (with stop_eog), max_us microseconds are over, or max_steps are done; and before one in which the pilot gives
// way, be it the first.
//   root:       the last emitted token
//   new_tokens: [n_new] what the pilot's index has not read of the text up to and with the root; it reads it, and what
//               is drawn
// A pass that fails or is aborted behind the first step ends it early, and the failure is left to the next call.
pyspec_status pyspec_coast(pyspec_engine * e, pyspec_sampler * s, int32_t seq, int32_t root, int32_t max_steps,
                           int32_t max_tokens, bool stop_eog, int64_t max_us, pyspec_pilot * pilot, int32_t n_new,
                           const int32_t * new_tokens, pyspec_coast_steps * steps);

// The top_k most probable tokens at a node of the last verified tree, best first, with the natural logarithms of
// their softmax. For drafters that are models themselves.
pyspec_status pyspec_top(pyspec_engine * e, int32_t seq, int32_t node, int32_t top_k, int32_t * tokens,
                         float * log_probs);

// ---- drafting with the model's own MTP block ----
// What is drafted for every sequence of a call, level by level from the root. At every level up to `width` nodes are
// expanded: each of them gets its top_k candidates in order of probability, and the most probable paths so far are
// expanded at the next level. width 1 is a chain along the best candidates.
typedef struct {
    int32_t   depth;      // levels, 1..64
    int32_t   width;      // expanded nodes a level, 1..8; 1 + depth * width is at most 64
    int32_t   top_k;      // candidates of an expanded node
    float     min_prob;   // nodes whose path is less probable are not expanded; 0: all are
    int32_t * levels;     // [n] out: levels that were drafted
    int32_t * parents;    // [n][depth][width] out: candidate of the level before (its node * top_k + rank) that the
                          // row expands; -1 the root, -2 unused
    int32_t * tokens;     // [n][depth][width][top_k] out
    float   * log_probs;  // [n][depth][width][top_k] out: natural logarithms of the block's softmax
} pyspec_mtp_drafts;

// Feeds the committed tokens that the block has not seen together with `root` (the last emitted token) of each
// sequence, then drafts. Leaves the block's cache at the committed length.
pyspec_status pyspec_mtp_draft(pyspec_engine * e, int32_t n, const int32_t * seqs, const int32_t * roots,
                               const pyspec_mtp_drafts * drafts);

// ---- drafting with a DFlash file (llama.cpp's architecture dflash: DFlash, DSpark, DFlash2) ----
typedef struct {
    int32_t block_size;   // tokens of a block, the root included
    int32_t max_depth;    // tokens a block drafts
    int32_t selector;     // DFlash2: candidates a position, with pairwise scores; 0: no lattice
    bool    markov;       // DSpark: log_probs are conditional on the best chain
    bool    confidence;   // DSpark: with a confidence head
    uint64_t bytes;       // its weights and its cache
} pyspec_dflash_info;

// Opens the drafter for this engine; features of the target's layers are kept from here on, so no sequence may hold
// tokens yet. Fails with PYSPEC_ERR_DRAFT for a file that is no drafter or is one of another target.
pyspec_status pyspec_dflash_open(pyspec_engine * e, const char * path, pyspec_dflash_info * info);

// Whether the drafter listens, as it does from the start. While it does not, no features are kept, which saves their
// time; tokens that are committed meanwhile are none of its text, which closes up over them.
pyspec_status pyspec_dflash_listen(pyspec_engine * e, bool on);

// Injects the features of the committed tokens that the drafter has not seen and predicts a block behind `root` of
// each sequence. For position i: its top_k candidates with the natural logarithms of their probability.
//   tokens, log_probs: [n][depth][top_k]
//   pairs:      [n][depth][top_k][top_k], only with a selector (top_k is `selector` then), else NULL allowed: score
//               of candidate c behind candidate p of the position before at [p][c]; at position 0 all p are the root
//   confidence: [n][depth] or NULL; 1 without a confidence head
pyspec_status pyspec_dflash_draft(pyspec_engine * e, int32_t n, const int32_t * seqs, const int32_t * roots,
                                  int32_t depth, int32_t top_k, int32_t * tokens, float * log_probs, float * pairs,
                                  float * confidence);

// ---- drafting what followed the same tokens before ----
pyspec_status pyspec_ngram_open(pyspec_ngram ** out);
void          pyspec_ngram_close(pyspec_ngram * g);
void          pyspec_ngram_clear(pyspec_ngram * g);
// Appends n_new tokens to the text, then drafts behind its last token, the root, at most max_nodes nodes (root
// included, 1..64) and depth levels. Constant time for every new token.
//   tokens, parents, depths, log_probs: [max_nodes]; parents[0] is -1; log_probs are given the parent
// Returns the number of nodes, or an error.
int32_t pyspec_ngram_draft(pyspec_ngram * g, int32_t n_new, const int32_t * new_tokens, int32_t depth,
                           int32_t max_nodes, int32_t * tokens, int32_t * parents, int32_t * depths,
                           float * log_probs);

// ---- what drafted nodes are worth ----
// Acceptance by class of node. Of drafters that are asked together the nodes have 60 classes from a multiple of 60 on,
// which the caller chooses; class -1 is none.
pyspec_status pyspec_calibration_open(pyspec_calibration ** out);
void          pyspec_calibration_close(pyspec_calibration * c);
// Probability of acceptance of every node of a tree, and its class. Arrays are [n], node 0 is the root.
//   log_probs: given the parent, as the drafter sees it
//   firsts:    the first class of the drafters that proposed the node
//   floor:     behind a node less probable than this, nodes are worth 0 and have no class
pyspec_status pyspec_calibration_values(pyspec_calibration * c, int32_t slot, int32_t n, const int32_t * parents,
                                        const int32_t * depths, const double * log_probs, const int32_t * firsts,
                                        double floor, double * values, int32_t * classes);
// Probability of a node of a class, given that its parent is right; below 0 for an error.
double        pyspec_calibration_probability(pyspec_calibration * c, int32_t slot, int32_t kind, double log_prob);
pyspec_status pyspec_calibration_observe(pyspec_calibration * c, int32_t slot, int32_t kind, bool hit);
// Counts the children of every node of a path, behind which drawn[] was drawn.
pyspec_status pyspec_calibration_learn(pyspec_calibration * c, int32_t slot, int32_t n, const int32_t * tokens,
                                       const int32_t * parents, const int32_t * classes, int32_t n_path,
                                       const int32_t * path, const int32_t * drawn);
void          pyspec_calibration_forget(pyspec_calibration * c, int32_t slot);

// Appends n_new tokens to the text of the pilot's index. gain: tokens that its tree behind the text is expected to give
// beyond the root's and what its columns cost, 0 where none gives any; nodes: of that tree.
pyspec_status pyspec_pilot_gain(pyspec_pilot * p, int32_t n_new, const int32_t * new_tokens, double * gain,
                                int32_t * nodes, bool * gives_way);

// ---- the drafter's output matrix, trimmed ----
// Gives the open drafter (DFlash if there is one, else MTP) room for n_rows rows of the output matrix; it then drafts
// only tokens that were added. Fails with PYSPEC_ERR_DRAFT where the matrix cannot be trimmed.
pyspec_status pyspec_draft_head_init(pyspec_engine * e, int32_t n_rows);
// Adds tokens with their rows of the model's output matrix, as they are in the file. Tokens must be new.
pyspec_status pyspec_draft_head_add(pyspec_engine * e, int32_t n, const int32_t * tokens, const void * rows,
                                    size_t size);

// cffi:end

#ifdef __cplusplus
}
#endif

#endif // PYSPEC_H
