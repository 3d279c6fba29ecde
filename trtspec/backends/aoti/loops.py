"""Run parallel loops of Inductor's C++ on our own threads.

Inductor would run these loops on OpenMP's threads. OpenMP's threads wait for each other at every loop, and compete with
ours for the cores. Inductor marks the loops with OpenMP's pragmas. This module removes the pragmas and hands the marked
loops to the C++ kernels' library, plugins/cpu. That uses its threads where a loop is long enough to pay for them: for
the rows of a prefill, and for the widest loops of decode.
"""

from __future__ import annotations

import math
import re

MARKING = {"cpp.threads": 2, "cpp.min_chunk_size": 1}
"""Options that make Inductor mark all loops, however short. The plugin knows the real number of threads."""

_LEAST = 1 << 12
"""Least number of elements in a chunk. A chunk of this size takes some microseconds."""

_HELPER = f"""
extern "C" void trtspec_share_loop(int64_t, int64_t, void (*)(const void*, int64_t, int64_t), const void*);
template <class Body>
static inline void trtspec_loop(const int64_t end, const int64_t step, const int64_t elements, const Body& body) {{
    const int64_t count = (end + step - 1) / step, chunk = {_LEAST} / elements + 1;
    if (count < 2 * chunk) return body(0, end);
    const auto part = [&](int64_t first, int64_t last) {{ body(first * step, std::min(last * step, end)); }};
    trtspec_share_loop(count, chunk, [](const void* it, int64_t first, int64_t last) {{
        (*static_cast<decltype(part)*>(it))(first, last);
    }}, &part);
}}
"""
_INT = r"static_cast<int64_t>\(([^;]+?)\)"
_REGION = re.compile(r" *#pragma omp (?:parallel num_threads\(\d+\)|single)\n")
_FOR = re.compile(
    rf" *#pragma omp for(?: collapse\(\d+\))?\n *for\(int64_t (\w+)={_INT}; \1<{_INT}; \1\+={_INT}\)\s*(?={{)"
)
_BEFORE = re.compile(
    r"[{}]\s*(?:const int tid = 0;\s*)?((?: *std::unique_ptr<[^;]+;\n *[^;]+ (\w+) = buf_\2\.get\(\);\n)*)$"
)
"""What may stand between a shared loop and the nearest brace before it: buffers, of which each thread needs its own."""
_INNER = re.compile(rf"for\(int64_t (\w+)={_INT}; \1<static_cast<int64_t>\((\d+)L\);")


def share_loops(kernels: str) -> str:
    """Return the same kernels without OpenMP. The source of the kernels begins with an #include.

    A loop whose result depends on the number of threads runs in one thread. So does a loop that does not start at 0,
    and a loop directly before which anything is declared, other than buffers. Buffers are declared again in each chunk.
    """
    text = _REGION.sub("", kernels).replace("int tid = omp_get_thread_num();", "const int tid = 0;")
    include, text = text.split("\n", 1)
    done, at = [f"{include}\n{_HELPER}"], 0
    while found := _FOR.search(text, at):
        name, first, end, step = found.groups()
        close = _closing(text, found.end())
        body = text[found.end() : close]
        before = _BEFORE.search(text, at, found.start())
        if before is None or "[tid]" in body or first != "0L":
            done.append(text[at : found.start()])
            at = close
            done.append(f"for(int64_t {name}={first}; {name}<{end}; {name}+={step}) {body}")
            continue
        done.append(text[at : before.start(1)])
        at = close
        inner = {other: int(bound) for other, _, bound in _INNER.findall(body)}
        elements = max(math.prod(inner.values(), start=int(step.rstrip("L"))), 1)
        loop = f"for(int64_t {name}=trtspec_first; {name}<trtspec_end; {name}+={step}) {body}"
        part = f"[&](const int64_t trtspec_first, const int64_t trtspec_end) {{ {before[1]}{loop} }}"
        done.append(f"trtspec_loop({end}, {step}, {elements}, {part});")
    return "".join([*done, text[at:]])


def _closing(text: str, opening: int) -> int:
    """Index after the brace that closes the one at `opening`."""
    depth = 0
    for brace in re.finditer(r"[{}]", text[opening:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return opening + brace.end()
    raise ValueError(f"nothing closes the brace at {opening}")
