#include "log.h"

#include "llama.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

namespace pyspec {

namespace {

struct Callback {
    ggml_log_callback function  = nullptr;
    void *            user_data = nullptr;
};

std::atomic<int> n_verbose{0};
std::mutex       takeover;
Callback         other; // of someone else

struct Line {
    ggml_log_level level;
    std::string    text;
};

thread_local std::vector<Line> lines; // warnings and errors
thread_local ggml_log_level    level_now = GGML_LOG_LEVEL_NONE;
thread_local int               depth     = 0; // of scopes

void on_log(ggml_log_level level, const char * text, void *) {
    if (level != GGML_LOG_LEVEL_CONT) {
        level_now = level;
    }
    if (level_now == GGML_LOG_LEVEL_ERROR || level_now == GGML_LOG_LEVEL_WARN) {
        constexpr size_t most = 32;
        if (level == GGML_LOG_LEVEL_CONT && !lines.empty()) {
            lines.back().text += text;
        } else if (lines.size() < most) {
            lines.push_back({ level_now, text });
        }
    }
    if (depth == 0 && other.function) {
        other.function(level, text, other.user_data);
    } else if (n_verbose.load(std::memory_order_relaxed) > 0) {
        fputs(text, stderr);
    }
}

Callback current_callback() {
    Callback callback;
    llama_log_get(&callback.function, &callback.user_data);
    return callback;
}

void take_over() {
    if (current_callback().function == on_log) {
        return;
    }
    const std::lock_guard<std::mutex> lock(takeover);
    const Callback                    found = current_callback();
    if (found.function == on_log) {
        return;
    }
    // llama.cpp's own default prints to stderr and has no name: setting NULL shows what it is.
    llama_log_set(nullptr, nullptr);
    other = found.function == current_callback().function ? Callback() : found;
    llama_log_set(on_log, nullptr);
}

// Takes "function_name: " off the front.
void strip_function(std::string & s) {
    const size_t colon = s.find(": ");
    if (colon != std::string::npos && s.find(' ') > colon && s.find('_') < colon) {
        s.erase(0, colon + 2);
    }
}

// "llama_model_load: error loading model: invalid magic\n" -> "invalid magic"
std::string bare(const std::string & line) {
    std::string s = line.substr(0, line.find('\n'));
    strip_function(s);
    for (const char * prefix : { "error loading model: ", "error loading model architecture: ",
                                 "error loading model hyperparameters: ", "error loading model vocabulary: ",
                                 "failed to initialize the context: ", "error loading state: " }) {
        if (s.compare(0, strlen(prefix), prefix) == 0) {
            s.erase(0, strlen(prefix));
        }
    }
    strip_function(s);
    return s;
}

} // namespace

Verbose::Verbose(bool enabled) : on(enabled) {
    if (on) {
        n_verbose.fetch_add(1);
    }
}

Verbose::~Verbose() {
    if (on) {
        n_verbose.fetch_sub(1);
    }
}

LogScope::LogScope() {
    take_over();
    if (depth++ == 0) {
        lines.clear();
    }
    first = lines.size();
}

LogScope::~LogScope() {
    --depth;
}

std::string LogScope::cause(const char * fallback) const {
    for (ggml_log_level level : { GGML_LOG_LEVEL_ERROR, GGML_LOG_LEVEL_WARN }) {
        for (size_t i = first; i < lines.size(); ++i) {
            std::string s = bare(lines[i].text);
            if (lines[i].level == level && !s.empty()) {
                return s;
            }
        }
    }
    return fallback;
}

} // namespace pyspec
