// The words of a search, before Material's worker gets them. The worker takes each word as the beginning of words, so
// "a" finds thousands, and titles that begin so come first. Words that say nothing are left out, and a whole word counts
// more than a beginning: "all_reduce" finds all_reduce before all_reduce_multigpu.
(() => {
  const QUERY = 2;
  const SAY_NOTHING = new Set(
    "a an and are at can do does for from how i in is it its my of on or the there to what when where which why with".split(" "),
  );
  const post = Worker.prototype.postMessage;

  function rewritten(text) {
    if (/["+^~*]/.test(text)) return text; // the user writes the search's own syntax
    const words = text.replace(/\bMPI_/g, "").split(/[\s/?!,;]+/).filter(Boolean); // pages have mpi4py's names
    const telling = words.filter((word) => !SAY_NOTHING.has(word.toLowerCase()));
    return (telling.length ? telling : words).flatMap((word) => [`${word}^4`, word]).join(" ");
  }

  Worker.prototype.postMessage = function (message, ...rest) {
    const isQuery = message?.type === QUERY && typeof message.data === "string";
    return post.call(this, isQuery ? { ...message, data: rewritten(message.data) } : message, ...rest);
  };
})();
