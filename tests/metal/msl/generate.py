#!/usr/bin/env python3
"""Turn a preprocessed .metal file (c++ -E) into C++ that registers its kernels with the runtime.

  generate.py IN.i OUT.cpp NAME.metal
  generate.py IN.i OUT.clcpp NAME.metal --lint      for lint/check.py: keeps the address spaces, registers nothing

The text stays as it is except for what host C++ cannot parse or express:

  template [[host_name("x")]] kernel T f<..>;      removed, becomes an entry of the registry
  constant T NAME [[function_constant(N)]];        a mutable static and an entry
  threadgroup T name[N];      in a kernel          a reference into the memory of the threadgroup
  constant const, constexpr constant               one qualifier
  T name[N] = { [ 0 ... N - 1 ] = x };             T name[N]; and a loop
  [[attributes]]                                   removed

Line numbers are kept, so that diagnostics and violations name lines of the .metal file.
"""

import re
import sys

BUILTINS = {
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "thread_position_in_grid",
    "threads_per_grid",
    "thread_index_in_threadgroup",
    "simdgroup_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
}


class Misread(Exception):
    pass


def closing(text, start, pair):
    """Index just behind the bracket that closes text[start]."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i + 1
    raise Misread(f"unbalanced {pair} at {text[start : start + 80]!r}")


def opening(text, pair):
    """Index of the bracket that the last character of text closes."""
    depth = 0
    for i in range(len(text) - 1, -1, -1):
        depth += (text[i] == pair[1]) - (text[i] == pair[0])
        if depth == 0:
            return i
    raise Misread(f"unbalanced {pair} before {text[-80:]!r}")


def split_parameters(text):
    parameters, depth, current = [], 0, ""
    for c in text:
        depth += (c in "(<[{") - (c in ")>]}")
        if c == "," and depth == 0:
            parameters.append(current)
            current = ""
        else:
            current += c
    return [*parameters, current] if current.strip() else parameters


def one_line(text):
    """Without line markers, white space collapsed."""
    return " ".join(re.sub(r"^#.*$", "", text, flags=re.M).split())


def only_lines(text):
    """Nothing but line breaks and line markers."""
    return "\n".join(line if line.startswith("#") else "" for line in text.split("\n"))


def parameter_kinds(kernel, parameters):
    """How each parameter is bound, and a mask of the buffers."""
    kinds, next_buffer, buffers = [], 0, 0
    for parameter in map(one_line, split_parameters(parameters)):
        match = re.search(r"\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*\]\]", parameter)
        attribute, argument = match.groups() if match else (None, None)
        if attribute in BUILTINS:
            kinds.append(f"msl::{attribute}")
        elif attribute == "threadgroup":
            kinds.append(f"msl::threadgroup_buffer<{argument}>")
        elif attribute in (None, "buffer"):
            if not re.search(r"\b(device|constant)\b", parameter):
                raise Misread(
                    f"{kernel}: a parameter without address space or attribute: {parameter}"
                )
            n = int(argument) if argument else next_buffer
            next_buffer = n + 1
            buffers |= 1 << n
            kinds.append(f"msl::buffer<{n}>")
        else:
            raise Misread(f"{kernel}: unknown attribute [[{attribute}]]")
    return f"msl::parameters<{', '.join(kinds)}>", buffers


def find_kernels(text):
    """{name: parameter kinds} of all definitions, and the names of those that are not templates."""
    kernels, plain = {}, []
    for match in re.finditer(r"\bkernel\s+void\s+(\w+)\s*\(", text):
        end = closing(text, match.end() - 1, "()")
        if not text[end:].lstrip().startswith("{"):
            continue
        name = match.group(1)
        kernels[name] = parameter_kinds(name, text[match.end() : end - 1])
        if not text[: match.start()].rstrip().endswith(">"):
            plain.append(name)
    return kernels, plain


def take_instantiations(text, kernels):
    """The text without explicit instantiations, and [(host name, expression, kernel)]."""
    entries, kept, position = [], [], 0
    for match in re.finditer(r'template\s*\[\[\s*host_name\s*\(\s*"([^"]+)"\s*\)\s*\]\]', text):
        end = text.index(";", match.end()) + 1
        declaration = one_line(text[match.end() : end - 1])
        if declaration.endswith(")"):
            declaration = declaration[: opening(declaration, "()")].rstrip()
        for name in re.finditer(r"\b(\w+)\s*(?=<)", declaration):
            if name.group(1) in kernels and closing(declaration, name.end(), "<>") == len(
                declaration
            ):
                entries.append((match.group(1), declaration[name.start() :], name.group(1)))
                break
        else:
            raise Misread(f"{match.group(1)}: no kernel template in {declaration!r}")
        kept += [text[position : match.start()], only_lines(text[match.start() : end])]
        position = end
    return "".join(kept) + text[position:], entries


def lint(text):
    text, _ = take_instantiations(text, find_kernels(text)[0])
    text = re.sub(
        r"\bconstant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\s*\([^][]*\)\s*\]\]\s*;",
        r"constant \1 \2 = 1;",
        text,
    )
    text = re.sub(
        r"\bthreadgroup\s+([\w:]+)\s+(\w+)\s*\[[^;\]]*\]\s*;",
        r"threadgroup \1 * \2 = (threadgroup \1 *) 0;",
        text,
    )
    text = re.sub(r"\bconstexpr\s+constant\s+static\b", "constant", text)
    text = re.sub(r"\bstatic\s+const\s+constant\b", "constant", text)
    text = re.sub(r"\[\[[^][]*\]\]", "", text)
    text = re.sub(r"^\s*#pragma .*$", "", text, flags=re.M)
    return "#include <metal_stdlib>\n" + text


def generate(text, source):
    kernels, plain = find_kernels(text)
    text, entries = take_instantiations(text, kernels)
    entries += [(name, name, name) for name in plain]

    constants = []

    def constant(match):
        constants.append((match.group(2), match.group(3)))
        return f"static {match.group(1)} {match.group(2)};"

    text = re.sub(
        r"\bconstant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\s*\(([^][]*)\)\s*\]\]\s*;",
        constant,
        text,
    )
    text = re.sub(
        r"\bthreadgroup\s+([\w:]+)\s+(\w+)\s*\[([^;\]]*)\]\s*;",
        r'using msl_array_\2 = \1[\3]; msl_array_\2 & \2 = *(msl_array_\2 *) msl::threadgroup_array("\2", sizeof(msl_array_\2));',
        text,
    )
    text = re.sub(r"\bconstant\s+const\b|\bconst\s+constant\b", "constant", text)
    text = re.sub(r"\bconstexpr\s+constant\b", "constexpr", text)
    text = re.sub(
        r"(\w+)(\s*\[[^][]*\])\s*=\s*\{\s*\[\s*0\s*\.\.\.[^]]*\]\s*=\s*([^{}]*?)\s*\}\s*;",
        r"\1\2; for (auto & msl_element : \1) msl_element = \3;",
        text,
    )
    text = re.sub(r"\[\[[^][]*\]\]", "", text)
    text = re.sub(r"^\s*#pragma .*$", "", text, flags=re.M)  # unroll hints

    quoted = f'"{source}"'
    lines = ["#include <metal_stdlib>", text, f'# 1 "{source}.registry"', "namespace {"]
    lines += [
        f"msl::register_constant constant_{name}({quoted}, {index}, [](int64_t v) {{ {name} = (decltype({name})) v; }});"
        for name, index in constants
    ]
    lines += [
        f'msl::register_kernel kernel_{i}("{name}", msl::call_kernel<&{expression}, {kernels[kernel][0]}>, '
        f"{quoted}, {kernels[kernel][1]:#x});"
        for i, (name, expression, kernel) in enumerate(entries)
    ]
    return "\n".join([*lines, "}", ""])


def main():
    path_in, path_out, source, *mode = sys.argv[1:]
    with open(path_in) as f:
        text = f.read()
    try:
        text = lint(text) if mode == ["--lint"] else generate(text, source)
    except Misread as error:
        raise SystemExit(f"generate.py: {source}: {error}") from None
    with open(path_out, "w") as f:
        f.write(text)


if __name__ == "__main__":
    main()
