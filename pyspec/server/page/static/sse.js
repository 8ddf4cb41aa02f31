// Server-sent events over fetch, which unlike EventSource can POST and send a key.

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value.replaceAll("\r", "");
      let end;
      while ((end = held.indexOf("\n\n")) >= 0) {
        const block = held.slice(0, end);
        held = held.slice(end + 2);
        const data = block.split("\n").filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart()).join("\n");
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
