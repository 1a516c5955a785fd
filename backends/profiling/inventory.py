# SPDX-License-Identifier: Apache-2.0
"""The cases to measure: operators of a forward in the sizes that models have, most valuable first.

A case is a mapping of plain values, some of `COLUMNS`: with its times it is a row of the raw data. Cases are
measured in their order until the time is over, so the order is the plan: launches, then the first subject in all
sizes, the others in every second one, FP8, and at the end a few of the first cases again. One is left out if its
operands would take more than a share of the GPU's memory, since several copies are cycled through.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pdsim.compute.shapes import layer_shape, products
from pdsim.models.llm import Llm

COLUMNS = (
    *("operator", "kernel", "mode", "dtype", "model", "tp", "layers", "tokens", "n", "k", "batch", "context"),
    *("heads", "kv_heads", "head_dim", "value_dim", "experts", "hit", "per_token", "width", "gpus", "round"),
)
"""Columns of a row that say what was measured; those without a meaning for an operator are empty."""

TIMES = ("seconds", "low", "high", "repeats")
"""The others: median and quartiles in seconds, and the samples that they are of."""

Case = dict[str, Any]

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
STEPS = ((1, 1024), (16, 1024), (64, 1024), (64, 4096), (256, 1024), (4, 8192), (128, 2048), (32, 512), (8, 2048))
FORWARDS = ((0, 128), (0, 512), (0, 1024), (0, 2048), (0, 4096), (0, 8192), (2048, 2048), (8192, 2048), (0, 256))
TINY = {
    "rows": (1, 2, 4, 16, 64, 256),
    "prompts": (16, 32, 64, 128),
    "batches": (1, 2, 4),
    "contexts": (32, 64, 128),
}


class Subject(NamedTuple):
    """A *model*, divided among *tp* GPUs, of which *layers* are measured as a whole forward; 0: all of them.

    Only the shard of one rank is measured; all-reduces are measured by themselves (`allreduces`).
    """

    model: Llm
    tp: int = 1
    layers: int = 0


def plan(subjects: Sequence[Subject], memory: float, small: bool = False) -> list[Case]:
    """Return the cases of *subjects*, each once, those of the first subject first; *memory* is the bytes of the GPU.

    Two subjects that have an operator of the same size share its case. *small* takes the few sizes that a processor
    measures in a second: it is for trying the path, not for numbers.
    """
    cases: dict[tuple[Any, ...], Case] = {}
    for case in _all(subjects, memory, small):
        cases.setdefault(
            tuple(sorted((key, value) for key, value in case.items() if key not in ("model", "tp"))), case
        )
    return list(cases.values())


def _all(subjects: Sequence[Subject], memory: float, small: bool) -> Iterator[Case]:
    # The last ones have ``round=1``: they are the same as earlier ones, and show by how much the GPU
    # has drifted.
    yield from ({"operator": "launch", "mode": mode, "tokens": 1} for mode in ("graph", "eager"))
    for place, subject in enumerate(subjects):
        for part in (_linear, _attention, _pointwise, _mixture, _forwards):
            yield from (case for case in part(subject, memory, small) if small or not place or _kept(case))
    for subject in subjects if not small else ():
        for case in _linear(subject, memory, small) if subject.model.hidden >= 4096 else ():
            if case["n"] % 16 == 0 and case["k"] % 16 == 0 and case["tokens"] in ROWS[::3]:
                yield {**case, "dtype": "fp8"}
    for case in _linear(subjects[0], memory, small=False):
        if case["tokens"] in (1, 64, 1024):
            yield {**case, "round": 1}


def _kept(case: Mapping[str, Any]) -> bool:
    if case["operator"] == "gemm":
        return int(case["tokens"]) in ROWS[::2]
    if case["operator"] == "decode":
        return int(case["batch"]) in BATCHES[::2] and case["kernel"] != "paged"
    return bool(case["operator"] != "prefill" or case["kernel"] == "cudnn")


def _common(subject: Subject) -> Case:
    return {"model": subject.model.name, "tp": subject.tp, "dtype": "bf16", "mode": "graph"}


def _linear(subject: Subject, memory: float, small: bool) -> Iterator[Case]:  # noqa: ARG001
    for product in products(subject.model, subject.tp):
        for rows in TINY["rows"] if small else ROWS:
            if product.name != "head" or rows <= 512:  # of the last tokens only
                yield {**_common(subject), "operator": "gemm", "tokens": rows, "n": product.n, "k": product.k}


def _heads(model: Llm, tp: int) -> Case:
    heads = {"heads": max(1, model.heads // tp), "kv_heads": max(1, model.kv_heads // tp)}
    return {**heads, "head_dim": model.head_dim, "value_dim": model.head_dim}


def _attention(subject: Subject, memory: float, small: bool) -> Iterator[Case]:
    # Decode has a row for the kernel over dense memory, and for a few sizes the one over pages, to
    # see what pages cost.  Latent attention has cases of its own (`_latent`).
    if subject.model.attention == "mla":
        yield from _latent(subject, memory, small)
        return
    heads = {**_common(subject), **_heads(subject.model, subject.tp)}
    token = 4 * heads["kv_heads"] * heads["head_dim"]  # bytes of keys and values in bf16
    for context in TINY["contexts"] if small else CONTEXTS:
        for batch in TINY["batches"] if small else BATCHES:
            if batch * context * token < memory / 4:
                for kernel in ("reference",) if small else ("flash", "paged"):
                    if kernel != "paged" or (batch in BATCHES[::3] and context in CONTEXTS[::3]):
                        yield {**heads, "operator": "decode", "kernel": kernel, "batch": batch, "context": context}
    for tokens in TINY["prompts"] if small else PROMPTS:
        for kernel in ("reference",) if small else ("cudnn", "flash"):
            yield {**heads, "operator": "prefill", "kernel": kernel, "tokens": tokens, "context": 0}
    for tokens in (32,) if small else (256, 1024, 2048, 8192):
        for context in (32, 64) if small else (1024, 2048, 4096, 8192, 32768):
            for kernel in ("reference",) if small else ("cudnn", "flash"):
                yield {**heads, "operator": "prefill", "kernel": kernel, "tokens": tokens, "context": context}


def _latent(subject: Subject, memory: float, small: bool) -> Iterator[Case]:
    model = subject.model
    rank = model.latent_dim - model.rope_dim
    for heads in dict.fromkeys((max(1, model.heads // subject.tp), model.heads)):
        common = {**_common(subject), "heads": heads, "head_dim": model.head_dim}
        latent = {"kv_heads": 1, "k": model.latent_dim, "value_dim": rank}
        for context in TINY["contexts"] if small else CONTEXTS[1:]:
            for batch in TINY["batches"] if small else BATCHES[::2]:
                if batch * context * model.latent_dim * 2 < memory / 8 and batch * context * heads * 4 < memory / 16:
                    size = {"batch": batch, "context": context}
                    yield {**common, **latent, **size, "operator": "mla_decode", "kernel": "bmm"}
        for batch in TINY["batches"] if small else BATCHES[::2]:
            yield {**common, **latent, "operator": "mla_absorb", "kernel": "bmm", "batch": batch}
        expanded = {"kv_heads": heads, "k": model.head_dim + model.rope_dim, "value_dim": model.head_dim}
        for tokens in TINY["prompts"] if small else PROMPTS[2:-1]:
            for kernel in ("reference",) if small else ("cudnn", "flash"):
                size = {"tokens": tokens, "context": 0}
                yield {**common, **expanded, **size, "operator": "mla_prefill", "kernel": kernel}


def _pointwise(subject: Subject, memory: float, small: bool) -> Iterator[Case]:  # noqa: ARG001
    model, shape = subject.model, layer_shape(subject.model)
    wide = (shape.expert * model.experts_per_token if model.experts else shape.intermediate) // subject.tp
    heads = _heads(model, subject.tp)
    for rows in TINY["rows"] if small else ROWS[::2]:
        common = {**_common(subject), "tokens": rows}
        yield {**common, "operator": "norm", "n": model.hidden}
        if wide:
            yield {**common, "operator": "activation", "n": max(8, wide)}
        if model.attention == "gqa":
            yield {**common, **heads, "operator": "rotary"}


def _mixture(subject: Subject, memory: float, small: bool) -> Iterator[Case]:
    model, shape = subject.model, layer_shape(subject.model)
    if not model.experts:
        return
    width = max(16, shape.expert // subject.tp)
    sizes = {"n": model.hidden, "width": width, "experts": model.experts, "per_token": model.experts_per_token}
    if model.experts * width * model.hidden * 6 > memory / 3:
        return
    for rows in TINY["rows"] if small else (*ROWS[:4], *ROWS[4::2]):
        if rows * model.experts_per_token * (model.hidden + 3 * width) * 4 > memory / 4:
            continue
        common = {**_common(subject), **sizes, "tokens": rows}
        routed = rows * model.experts_per_token
        whole = round(_hit(model, rows))
        for hit in dict.fromkeys((whole, max(model.experts_per_token, whole // 4))):
            if hit <= min(model.experts, routed):
                yield {**common, "operator": "experts", "hit": hit}
        yield {**common, "operator": "routing", "hit": model.experts}


def _hit(model: Llm, tokens: int) -> float:
    # With E experts of which a token takes k, one expert is missed by all of n tokens with
    # probability (1 - k/E)^n.
    return model.experts * (1.0 - (1.0 - model.experts_per_token / model.experts) ** tokens)


def _forwards(subject: Subject, memory: float, small: bool) -> Iterator[Case]:
    model = subject.model
    if model.attention == "mla":
        return  # no kernel of PyTorch's does its decode as engines do: its parts are measured
    layers = subject.layers or model.layers
    shape = layer_shape(model)
    common = {**_common(subject), **_heads(model, subject.tp), "layers": layers}
    common |= {"n": shape.intermediate // subject.tp, "k": model.hidden, "experts": model.experts}
    common |= {"per_token": model.experts_per_token, "width": shape.expert // subject.tp if model.experts else 0}
    token = 4 * common["kv_heads"] * model.head_dim * layers
    head = {"gpus": 1, "hit": shape.vocabulary // subject.tp if layers == model.layers else 0}
    for batch, context in ((1, 64), (2, 64), (4, 128)) if small else STEPS:
        if batch * context * token < memory / 3:
            for mode in ("graph", "eager") if batch in (1, 64) else ("graph",):
                yield {**common, **head, "batch": batch, "context": context, "operator": "step", "mode": mode}
    for context, tokens in ((0, 32), (0, 128), (64, 32)) if small else FORWARDS:
        for mode in ("eager", "graph") if tokens <= 512 else ("eager",):
            yield {**common, **head, "context": context, "tokens": tokens, "operator": "forward", "mode": mode}


def allreduces(hidden: Iterable[int], gpus: int) -> list[Case]:
    """Return the all-reduces of activations of *hidden* elements a token, for each width, among *gpus* GPUs.

    Besides NCCL there are both kernels over symmetric memory, the one-shot one only up to 2**20 elements, beyond
    which no engine chooses it.
    """
    return [
        {"operator": "allreduce", "kernel": kernel, "mode": "graph", "dtype": "bf16", "tokens": rows, "n": width}
        | {"gpus": gpus}
        for width in sorted(set(hidden))
        for rows in ROWS[::2]
        for kernel in ("nccl", "one_shot", "two_shot")
        if kernel != "one_shot" or rows * width <= 1 << 20
    ]


def described(case: Mapping[str, Any]) -> str:
    """Return *case* in a few words, for a log."""
    return " ".join(f"{key}={value}" for key, value in case.items() if key not in ("model", "tp"))
