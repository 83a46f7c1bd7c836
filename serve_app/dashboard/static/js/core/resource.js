// Data of a page: loaded, kept while it is loaded again, asked for again every so often while somebody looks.
import { useCallback, useEffect, useRef, useState } from "./lib.js";

/**
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load
 * @param {any[]} inputs  when these change, it is loaded anew
 * @param {{every?: number, skip?: boolean}} [options]  `every` in seconds
 * @returns {{data: T|undefined, error: Error|null, loading: boolean, reload: () => Promise<void>}}
 */
export function useResource(load, inputs, { every = 0, skip = false } = {}) {
  const [state, setState] = useState({ data: undefined, error: null, loading: !skip });
  const latest = useRef(load);
  latest.current = load;
  const controller = useRef(null);

  const reload = useCallback(async () => {
    controller.current?.abort();
    const mine = new AbortController();
    controller.current = mine;
    try {
      const data = await latest.current(mine.signal);
      if (!mine.signal.aborted) setState({ data, error: null, loading: false });
    } catch (error) {
      if (!mine.signal.aborted) setState((old) => ({ data: old.data, error, loading: false }));
    }
  }, []);

  useEffect(() => {
    if (skip) return undefined;
    setState((old) => ({ ...old, loading: true }));
    let timer = 0;
    let ended = false;
    const round = async () => {
      if (!document.hidden) await reload();
      if (!ended && every) timer = setTimeout(round, every * 1000);
    };
    reload().then(() => { if (!ended && every) timer = setTimeout(round, every * 1000); });
    return () => {
      ended = true;
      clearTimeout(timer);
      controller.current?.abort();
    };
  }, [...inputs, every, skip]);

  return { ...state, reload };
}
