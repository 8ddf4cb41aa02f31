"""The demo model: a thin, deep Qwen3.5-style hybrid, small enough to train on a laptop CPU."""
