// llama.cpp reports the cause of a failure only through its log. This keeps the lines of the calling thread,
// so that they can be part of our error messages, and keeps them off stderr unless asked for.
#pragma once

#include <cstddef>
#include <string>

namespace pyspec {

// While the number of verbose holders is above zero, lines also go to stderr.
class Verbose {
public:
    explicit Verbose(bool on);
    ~Verbose();
    Verbose(const Verbose &)             = delete;
    Verbose & operator=(const Verbose &) = delete;

private:
    bool on;
};

// Collects the calling thread's warnings and errors while it lives. Around every call that may fail.
//
// The first scope takes over llama.cpp's log, and so does a later one if someone else has taken it since. A callback
// of someone else (llama_cpp's) keeps receiving what is logged outside of scopes.
class LogScope {
public:
    LogScope();
    ~LogScope();
    LogScope(const LogScope &)             = delete;
    LogScope & operator=(const LogScope &) = delete;

    // The most specific error line, without llama.cpp's function names; `fallback` when nothing was logged.
    std::string cause(const char * fallback) const;

private:
    size_t first; // its first line
};

} // namespace pyspec
