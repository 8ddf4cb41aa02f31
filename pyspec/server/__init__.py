"""The server: `pyspec.scheduler` decodes, `service` stands between it and one module per API, `app`
assembles.

app             health, models, and the routers of:
openai_chat     chat completions and completions
responses       responses
anthropic       messages
embeddings      a refusal with its reason
tokens          tokenize, detokenize
service         requests to jobs, events to pieces
tools, output   the prompt's side and the answer's side of tool calls; reasoning
schemas         what the APIs' requests share
errors, sse     answers that are errors, answers that are streams
outbox          events from the scheduler's thread to the event loop
shutdown        a uvicorn server that lets answers end
"""
