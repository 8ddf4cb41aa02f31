// Just enough of a test framework for the native core's unit tests.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace check {

inline std::vector<std::pair<std::string, std::function<void()>>> & tests() {
    static std::vector<std::pair<std::string, std::function<void()>>> all;
    return all;
}

inline int & failures() {
    static int n = 0;
    return n;
}

struct Registration {
    Registration(const char * name, std::function<void()> body) { tests().emplace_back(name, std::move(body)); }
};

inline void report(bool ok, const char * what, const std::string & detail, const char * file, int line) {
    if (!ok) {
        ++failures();
        printf("  %s:%d: %s %s\n", file, line, what, detail.c_str());
    }
}

// Runs all tests, or those whose name contains `only`.
inline int run(const char * only = nullptr) {
    int n_failed = 0;
    for (const auto & [name, body] : tests()) {
        if (only && name.find(only) == std::string::npos) {
            continue;
        }
        const int before = failures();
        body();
        const bool ok = failures() == before;
        printf("%s %s\n", ok ? "ok  " : "FAIL", name.c_str());
        n_failed += !ok;
    }
    return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

} // namespace check

#define TEST(name)                                                   \
    static void                test_##name();                        \
    static check::Registration registration_##name(#name, test_##name); \
    static void                test_##name()

#define CHECK(condition) check::report((condition), #condition, "", __FILE__, __LINE__)

// The message must contain `part`.
#define CHECK_MESSAGE(message, part)                                                                           \
    check::report(std::strstr((message), (part)) != nullptr, "message lacks \"" part "\":", (message), __FILE__, \
                  __LINE__)
