// End to end: a hybrid model with all layers on the Metal backend verifies and commits draft trees, in row and in chunk
// form, and emits the tokens that the CPU backend decodes plainly. Each step is one graph on the device: nothing goes
// through the host in between. A device without the tree ops takes no trees, and a line says why.
//
// test_model MODEL.gguf      exits with 77 (skipped) when there is no such file

#include "fake_metal.h"
#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

using Tokens = std::vector<llama_token>;

static constexpr int   MAX_NODES = 8;
static constexpr float TIE       = 1e-3f;  // logits closer than this may swap places between backends

static std::string warnings;

[[noreturn]] static void fail(const std::string & what) {
    printf("%sFAIL %s\n", warnings.c_str(), what.c_str());
    exit(1);
}

// ---------------------------------------------------------------- a model on a device

struct Engine {
    llama_model *     model = nullptr;
    llama_context *   ctx   = nullptr;
    llama_batch_ext * batch = nullptr;
    int               n_vocab = 0;

    Engine(const char * path, const char * device) {
        ggml_backend_dev_t devices[] = { device ? ggml_backend_dev_by_name(device) : nullptr, nullptr };
        llama_model_params mp = llama_model_default_params();
        mp.devices      = devices;
        mp.n_gpu_layers = device ? 999 : 0;
        model = llama_model_load_from_file(path, mp);
        if (!model) {
            fail(std::string(path) + " does not load");
        }
        llama_context_params cp = llama_context_default_params();
        cp.n_ctx = 256;
        cp.n_batch = cp.n_ubatch = 32;
        cp.n_threads = cp.n_threads_batch = 1;
        ctx     = llama_init_from_model(model, cp);
        batch   = llama_batch_ext_init(ctx);
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    }
    ~Engine() {
        llama_batch_ext_free(batch);
        llama_free(ctx);
        llama_model_free(model);
    }

    // parents: of the nodes of a tree; none for plain tokens
    void decode(const Tokens & tokens, const std::vector<llama_pos> & positions, const std::vector<int> & parents = {}) {
        llama_batch_ext_clear(batch);
        for (size_t i = 0; i < tokens.size(); i++) {
            const int index = llama_batch_ext_add_token(batch, 0, tokens[i]);
            if (index < 0 || !llama_batch_ext_set_pos(batch, index, &positions[i]) || !llama_batch_ext_set_output_logits(batch, index, true) ||
                (!parents.empty() && !llama_batch_ext_set_parent(batch, index, parents[i]))) {
                fail("the batch is refused");
            }
        }
        const int rc = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
        if (rc != 0) {
            fail("llama_process returned " + std::to_string(rc));
        }
    }

    llama_token best(int i, float * gap = nullptr) {
        const float * logits = llama_get_logits_ith(ctx, i);
        llama_token first = 0, second = 1;
        if (logits[1] > logits[0]) {
            std::swap(first, second);
        }
        for (llama_token t = 2; t < n_vocab; t++) {
            if (logits[t] > logits[first]) {
                second = first;
                first  = t;
            } else if (logits[t] > logits[second]) {
                second = t;
            }
        }
        if (gap) {
            *gap = logits[first] - logits[second];
        }
        return first;
    }
};

static std::vector<llama_pos> positions_from(int first, size_t n) {
    std::vector<llama_pos> p;
    for (size_t i = 0; i < n; i++) {
        p.push_back(first + (int) i);
    }
    return p;
}

// ---------------------------------------------------------------- drafts

struct DraftTree {
    Tokens           tokens;
    std::vector<int> parents, depths;
};

// the true continuation down to depth `right`, with a wrong sibling before each node
static DraftTree draft(const Tokens & truth, size_t at, int depth, int right, int n_vocab) {
    DraftTree t { { truth[at] }, { -1 }, { 0 } };
    int parent = 0;
    for (int d = 1; d <= depth && at + d < truth.size(); d++) {
        const llama_token token = truth[at + d], wrong = (token + 1) % n_vocab;
        t.tokens.push_back(wrong);
        t.parents.push_back(parent);
        t.depths.push_back(d);
        t.tokens.push_back(d <= right ? token : (token + 2) % n_vocab);
        t.parents.push_back(parent);
        t.depths.push_back(d);
        parent = (int) t.tokens.size() - 1;
    }
    return t;
}

// ---------------------------------------------------------------- tests

struct Truth {  // what the CPU decodes token by token, and by which margin
    Tokens             prompt, tokens;
    std::vector<float> gaps;
};

static Truth decode_plainly(const char * path, const Tokens & prompt, int n_tokens) {
    Engine cpu(path, nullptr);
    cpu.decode(prompt, positions_from(0, prompt.size()));
    Truth truth { prompt, Tokens(n_tokens + 1), std::vector<float>(n_tokens + 1) };
    truth.tokens[0] = cpu.best((int) prompt.size() - 1, &truth.gaps[0]);
    for (int i = 0; i < n_tokens; i++) {
        cpu.decode({ truth.tokens[i] }, { (llama_pos) prompt.size() + i });
        truth.tokens[i + 1] = cpu.best(0, &truth.gaps[i + 1]);
    }
    return truth;
}

// one graph on the device, with the tree ops of all recurrent layers
static void check_dispatches(const std::string & gdn_kernel, int n_graphs) {
    if (n_graphs != 1) {
        fail("a step took " + std::to_string(n_graphs) + " graphs on the device, expected 1");
    }
    int n_gdn = 0, n_conv = 0;
    for (auto & d : fake_metal::log) {
        n_gdn  += d.kernel.rfind(gdn_kernel, 0) == 0;
        n_conv += d.kernel == "kernel_ssm_conv_tree_f32";
    }
    if (n_gdn == 0 || n_gdn != n_conv) {
        fail("the tree ops did not run on the device: " + std::to_string(n_gdn) + " delta rules, " + std::to_string(n_conv) + " convolutions");
    }
}

static void test_trees(const char * path, ggml_gdn_tree_form form, int n_steps, const Truth & truth) {
    const bool chunk = form == GGML_GDN_TREE_CHUNK;
    const std::string kernel = chunk ? "kernel_gated_delta_net_tree_chunk_f32" : "kernel_gated_delta_net_tree_f32";
    Engine metal(path, "MTL0");
    const int rc = llama_tree_init(metal.ctx, MAX_NODES, form);
    if (rc != 0) {
        fail("llama_tree_init returned " + std::to_string(rc));
    }
    const size_t n_prompt = truth.prompt.size();
    metal.decode(truth.prompt, positions_from(0, n_prompt));
    Tokens emitted = { metal.best((int) n_prompt - 1) };
    int accepted = 0;
    for (int step = 0; step < n_steps; step++) {
        const size_t at = emitted.size() - 1;
        const DraftTree tree = draft(truth.tokens, at, 3, 3 - step % 4, metal.n_vocab);
        std::vector<llama_pos> positions;
        for (int d : tree.depths) {
            positions.push_back((llama_pos) (n_prompt + at) + d);
        }

        fake_metal::log.clear();
        fake_metal::keep_log = true;
        const int graphs = fake_metal::graphs();
        metal.decode(tree.tokens, positions, tree.parents);
        fake_metal::keep_log = false;
        check_dispatches(kernel, fake_metal::graphs() - graphs);

        // walk down as far as the drafts are what the model says
        std::vector<int32_t> walked = { 0 };
        for (bool found = true; found;) {
            emitted.push_back(metal.best(walked.back()));
            found = false;
            for (int i = walked.back() + 1; i < (int) tree.tokens.size(); i++) {
                if (tree.parents[i] == walked.back() && tree.tokens[i] == emitted.back()) {
                    walked.push_back(i);
                    found = true;
                    break;
                }
            }
        }
        if (!llama_memory_seq_accept(llama_get_memory(metal.ctx), 0, walked.data(), (int32_t) walked.size())) {
            fail("the path is refused");
        }
        accepted += (int) walked.size() - 1;
        for (size_t i = at; i < emitted.size(); i++) {
            if (emitted[i] != truth.tokens[i]) {
                printf("token %zu is %d, the CPU backend says %d by a margin of %g\n", i, emitted[i], truth.tokens[i], truth.gaps[i]);
                if (truth.gaps[i] > TIE || step < 2) {
                    fail("tokens differ");
                }
                return;
            }
        }
        printf("%s form, step %d: %zu nodes, %zu accepted, %zu dispatches\n", chunk ? "chunk" : "row", step, tree.tokens.size(), walked.size() - 1, fake_metal::log.size());
    }
    if (accepted < n_steps) {
        fail("only " + std::to_string(accepted) + " drafts were accepted");
    }
}

static void test_refusal(const char * path) {
    Engine metal(path, "MTL0");
    fake_metal::props().has_simdgroup_reduction = false;
    warnings.clear();
    const int rc = llama_tree_init(metal.ctx, MAX_NODES, GGML_GDN_TREE_ROW);
    if (rc != -2 || warnings.find("device MTL0 of layer 0 has no GATED_DELTA_NET_TREE") == std::string::npos) {
        fail("a device without the ops: llama_tree_init returned " + std::to_string(rc) + " and said '" + warnings + "'");
    }
    fake_metal::props().has_simdgroup_reduction = true;
}

int main(int argc, char ** argv) {
    if (argc < 2 || !std::ifstream(argv[1])) {
        printf("SKIP: no model at '%s'\n", argc < 2 ? "" : argv[1]);
        return 77;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) {
            warnings += text;
        }
    }, nullptr);

    const Truth truth = decode_plainly(argv[1], { 40, 41, 42, 43, 44, 45, 46 }, 16);
    test_trees(argv[1], GGML_GDN_TREE_ROW,   4, truth);
    test_trees(argv[1], GGML_GDN_TREE_CHUNK, 2, truth);
    test_refusal(argv[1]);
    printf("metal_model: the tokens equal the CPU backend's\n");
    return fake_metal::violations() != 0;
}
