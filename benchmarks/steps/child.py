"""A process that starts an engine as an application would. Its argument is the folder, its stdin the prompt as JSON.

stdin has the prompt's ids. The process prints the fields of start.Start that it knows, as JSON. Only the standard
library is imported before the clock starts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def peak_rss() -> int:
    """Peak resident memory in bytes. Linux only."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM")


def main() -> None:
    prompt = json.load(sys.stdin)
    begin = time.perf_counter()
    from trtspec import LLM, SamplingParams

    imported, import_rss = time.perf_counter(), peak_rss()
    llm = LLM(sys.argv[1])
    constructed = time.perf_counter()
    next(iter(llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))))
    first = time.perf_counter()
    result = {
        "import_s": imported - begin,
        "constructor_s": constructed - imported,
        "first_token_s": first - imported,
        "import_rss": import_rss,
        "peak_rss": peak_rss(),
        "kv_bytes": sum(executable.kv_bytes for executable in llm.engine.executables),
    }
    llm.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
