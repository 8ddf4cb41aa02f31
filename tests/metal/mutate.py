#!/usr/bin/env python3
"""Write a copy of a source file with one mistake in it.

mutate.py IN OUT OLD NEW      OLD has to occur once; '\\n' in OLD and NEW is a line break
"""

import sys


def main():
    path_in, path_out, *texts = sys.argv[1:]
    old, new = (text.replace("\\n", "\n") for text in texts)
    with open(path_in) as f:
        text = f.read()
    if text.count(old) != 1:
        raise SystemExit(
            f"mutate.py: {text.count(old)} occurrences in {path_in} of {old!r}: update mutants.cmake"
        )
    line = text.count("\n", 0, text.index(old)) + 1
    print(f"{path_in}:{line}: {old!r} -> {new!r}")
    with open(path_out, "w") as f:
        f.write(text.replace(old, new))


if __name__ == "__main__":
    main()
