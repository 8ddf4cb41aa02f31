"""An OpenAI-compatible server: `worker` decodes, `app` speaks HTTP, `schemas` is the vocabulary."""
