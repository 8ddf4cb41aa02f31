// End to end: a hybrid model with all layers on the Metal backend verifies and commits draft trees and emits the tokens
// that the CPU backend decodes plainly. Each step is one graph on the device: nothing goes through the host in between.
//
// test_model MODEL.gguf [STEPS]      exits with 77 (skipped) when there is no such file

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

[[noreturn]] static void fail(const std::string & what) {
    printf("FAIL %s\n", what.c_str());
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

int main(int argc, char ** argv) {
    if (argc < 2 || !std::ifstream(argv[1])) {
        printf("SKIP: no model at '%s'\n", argc < 2 ? "" : argv[1]);
        return 77;
    }
    const int n_steps = argc > 2 ? atoi(argv[2]) : 6;
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) {
            fputs(text, stderr);
        }
    }, nullptr);

    const Tokens prompt = { 40, 41, 42, 43, 44, 45, 46 };
    const int n_tokens = 4*n_steps + 4;

    // the CPU, token by token
    Tokens truth;
    std::vector<float> gaps;
    {
        Engine cpu(argv[1], nullptr);
        cpu.decode(prompt, positions_from(0, prompt.size()));
        float gap;
        truth.push_back(cpu.best((int) prompt.size() - 1, &gap));
        gaps.push_back(gap);
        for (int i = 0; i < n_tokens; i++) {
            cpu.decode({ truth.back() }, { (llama_pos) prompt.size() + i });
            truth.push_back(cpu.best(0, &gap));
            gaps.push_back(gap);
        }
    }

    // Metal, by trees
    Engine metal(argv[1], "MTL0");
    const int rc = llama_tree_init(metal.ctx, MAX_NODES, GGML_GDN_TREE_ROW);
    if (rc != 0) {
        fail("llama_tree_init returned " + std::to_string(rc));
    }
    metal.decode(prompt, positions_from(0, prompt.size()));
    Tokens emitted = { metal.best((int) prompt.size() - 1) };
    int accepted = 0;
    for (int step = 0; step < n_steps; step++) {
        const size_t at = emitted.size() - 1;
        const DraftTree tree = draft(truth, at, 3, step % 4, metal.n_vocab);
        std::vector<llama_pos> positions;
        for (int d : tree.depths) {
            positions.push_back((llama_pos) (prompt.size() + at) + d);
        }

        fake_metal::log.clear();
        fake_metal::keep_log = true;
        const int graphs = fake_metal::graphs();
        metal.decode(tree.tokens, positions, tree.parents);
        fake_metal::keep_log = false;
        if (fake_metal::graphs() - graphs != 1) {
            fail("a step took " + std::to_string(fake_metal::graphs() - graphs) + " graphs on the device, expected 1");
        }
        int n_gdn = 0, n_conv = 0;
        for (auto & d : fake_metal::log) {
            n_gdn  += d.kernel.rfind("kernel_gated_delta_net_tree_f32", 0) == 0;
            n_conv += d.kernel == "kernel_ssm_conv_tree_f32";
        }
        if (n_gdn == 0 || n_gdn != n_conv) {
            fail("the tree ops did not run on the device: " + std::to_string(n_gdn) + " delta rules, " + std::to_string(n_conv) + " convolutions");
        }

        // walk down as far as the drafts are what the model says
        std::vector<int32_t> path = { 0 };
        for (bool found = true; found;) {
            emitted.push_back(metal.best(path.back()));
            found = false;
            for (int i = path.back() + 1; i < (int) tree.tokens.size(); i++) {
                if (tree.parents[i] == path.back() && tree.tokens[i] == emitted.back()) {
                    path.push_back(i);
                    found = true;
                    break;
                }
            }
        }
        if (!llama_memory_seq_accept(llama_get_memory(metal.ctx), 0, path.data(), (int32_t) path.size())) {
            fail("the path is refused");
        }
        accepted += (int) path.size() - 1;
        for (size_t i = at; i < emitted.size(); i++) {
            if (emitted[i] != truth[i]) {
                printf("token %zu is %d, the CPU backend says %d by a margin of %g\n", i, emitted[i], truth[i], gaps[i]);
                if (gaps[i] > TIE || step < 2) {
                    fail("tokens differ");
                }
                return 0;
            }
        }
        printf("step %d: %zu nodes, %zu accepted, %d gated delta nets, %zu dispatches\n", step, tree.tokens.size(), path.size() - 1, n_gdn, fake_metal::log.size());
    }
    if (accepted < n_steps) {
        fail("only " + std::to_string(accepted) + " drafts were accepted");
    }
    printf("metal_model: %zu tokens in %d steps, %d drafts accepted, equal to the CPU backend's\n", emitted.size(), n_steps, accepted);
    return fake_metal::violations() != 0;
}
