// Server-sent events read from a response, because EventSource can send no headers.

/**
 * The `data` of each event. Comments go to `onComment`.
 * @param {Response} answer
 * @param {(text: string) => void} [onComment]
 */
export async function* events(answer, onComment = () => {}) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
        else if (line.startsWith(":")) onComment(line.slice(1).trim());
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
