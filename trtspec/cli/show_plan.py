"""A build's plan on the console: a line per tensor, and the memory at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from trtspec.backends.describe import Calls, GraphPlan, TensorPlan
from trtspec.build.plan import BuildPlan, ExecutablePlan


def show_plan(plan: BuildPlan, console: Console) -> None:
    """Print the plan; KV caches of layers of one shape are shown together."""
    for line in _lines(plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(_memory(plan))
    for role, made in plan.executables.items():
        console.print(f"a step of {role} reads {_mb(made.weights_per_step)} MB of weights", highlight=False)


def _lines(plan: BuildPlan) -> Iterator[str]:
    limits = plan.limits
    speculation = f"{plan.mode}, K = {plan.draft_len}" if plan.mode != "NONE" else "no speculation"
    yield f"{plan.backend} engine in {plan.dtype}, {speculation}"
    prompts = "" if limits["max_input_len"] is None else f" with prompts of up to {limits['max_input_len']}"
    yield (
        f"at most {limits['max_batch_size']} requests of {limits['max_seq_len']} tokens{prompts}, "
        f"{limits['max_num_tokens']} rows a step"
    )
    yield from (f"not there yet: {line}; counted by config.json" for line in plan.missing)
    if plan.options is not None:
        set_ = [f"{name} = {value}" for name, value in plan.options.items() if value]
        yield f"built with {', '.join(set_)}"
    for role, made in plan.executables.items():
        yield ""
        yield from _profiled(role, made) if made.profiles else _graphs(role, made)
        yield from _calls("plugins", made.plugins) if made.profiles else _calls("ops", made.calls)


def _graphs(role: str, made: ExecutablePlan) -> Iterator[str]:
    """Yield the lines of a step's graphs, with one list of inputs: a uniform graph takes some of them."""
    first = made.graphs[0]
    for kind in dict.fromkeys(graph.kind for graph in made.graphs):
        graphs = [graph for graph in made.graphs if graph.kind == kind]
        K = ", ".join(str(graph.draft_len) for graph in graphs)
        if kind == first.kind:
            yield f"{role}: {kind} graphs for K = {K}; each takes"
            yield from _tensors(first.inputs)
            yield f"    {_caches(made)}"
        else:
            taken = {tensor.name for tensor in graphs[0].inputs}
            less = ", ".join(tensor.name for tensor in first.inputs if tensor.name not in taken)
            yield f"{role}: {kind} graphs for K = {K}; each takes these but {less}"
    yield from _outputs(first)


def _profiled(role: str, made: ExecutablePlan) -> Iterator[str]:
    graph = made.graphs[-1]
    both = made.profiles[graph.draft_len]
    K = ", ".join(str(one.draft_len) for one in made.graphs)
    names = " and ".join(profile.name for profile in both)
    yield f"{role}: a network for K = {K}; profiles {names}, least, usual, largest for K = {graph.draft_len}; it takes"
    rows = [
        [*_words(tensor), *(" ".join(map(_shape, profile.shapes[tensor.name])) for profile in both)]
        for tensor in graph.inputs
    ]
    yield from _aligned(rows)
    yield f"    {_caches(made)}, {made.kv.blocks} blocks"
    yield from _outputs(graph)


def _outputs(graph: GraphPlan) -> Iterator[str]:
    yield "  and gives"
    yield from _tensors(graph.outputs)


def _calls(kind: str, calls: Sequence[Calls]) -> Iterator[str]:
    yield f"  {kind} that it calls"
    yield from _aligned([[f"{call.count} x", call.name, f"({', '.join(call.inputs)})"] for call in calls])


def _caches(made: ExecutablePlan) -> str:
    """Return the KV caches as one line, by runs of layers of one shape."""
    layers, runs = made.kv.layers, []
    start = 0
    for layer in range(1, len(layers) + 1):
        if layer == len(layers) or layers[layer] != layers[start]:
            heads, width = layers[start]
            runs.append(f"{start}..{layer - 1} [blocks, {made.kv.block_size}, {heads}, {width}]")
            start = layer
    how = "given back as new_k_cache_, new_v_cache_" if made.kv.outputs else "changed in place"
    return f"k_cache_, v_cache_ of layers {', '.join(runs)} {made.kv.dtype}, {how}"


def _tensors(tensors: Sequence[TensorPlan]) -> Iterator[str]:
    yield from _aligned([_words(tensor) for tensor in tensors])


def _words(tensor: TensorPlan) -> list[str]:
    return [tensor.name, tensor.dtype, _shape(tensor.shape)]


def _shape(sizes: Sequence[str | int]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "    " + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()


def _memory(plan: BuildPlan) -> Table:
    table = Table("memory")
    table.add_column("MB", justify="right")
    table.add_column("")
    for role, made in plan.executables.items():
        for name, size in made.weights.items():
            table.add_row(
                f"weights of {name}", _mb(size), "" if name == role else f"read {plan.draft_len} times a step"
            )
        table.add_row(f"tables of {role}", _mb(made.tables), "rotary positions, ids of drafts")
        per = f"{made.kv.bytes_per_token} bytes a token, {made.kv.blocks} blocks"
        table.add_row(f"KV of {role}", _mb(made.kv.bytes), per)
        for part in made.activations:
            table.add_row(f"{part.name} of {role}", _mb(part.bytes), f"{_shape(part.shape)} {part.dtype}")
    table.add_section()
    table.add_row("together", _mb(plan.memory["total"]), "and the runtime's own")
    return table


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
