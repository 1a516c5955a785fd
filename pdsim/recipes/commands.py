# SPDX-License-Identifier: Apache-2.0
"""Servers in a text: a command line, a shell script, the YAML of Kubernetes, LeaderWorkerSet, Dynamo or llm-d.

An entry of InferenceX's matrix is such a YAML, too.  `servers` returns each with its flags, without dashes and
other spellings.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Any

from pdsim.core.errors import ConfigError
from pdsim.core.files import bounded_yaml

STARTS = (
    ("vllm", re.compile(r"vllm serve|-m vllm\.entrypoints\.\S+|-m dynamo\.vllm")),
    ("sglang", re.compile(r"sglang serve|-m sglang\.launch_server|-m dynamo\.sglang")),
)
"""How a command line begins that starts a server of each engine."""

ALIASES = {
    "vllm": {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size",
             "ep": "enable-expert-parallel", "q": "quantization", "cc": "compilation-config",
             "O": "optimization-level"},
    "sglang": {"tp": "tensor-parallel-size", "tp-size": "tensor-parallel-size", "dp": "data-parallel-size",
               "dp-size": "data-parallel-size", "pp": "pipeline-parallel-size", "pp-size": "pipeline-parallel-size",
               "ep": "expert-parallel-size", "ep-size": "expert-parallel-size",
               "attn-cp-size": "attention-context-parallel-size", "model": "model-path"},
}  # fmt: skip
"""Other spellings of flags."""

_CONNECTOR = '"kv_connector": "NixlConnector", "kv_role": "kv_both"'


@dataclass(frozen=True)
class Server:
    """The servers that one command starts."""

    engine: str  # vllm or sglang
    flags: Mapping[str, str]  # without dashes and aliases; a switch has ""
    instances: int = 1  # replicas
    role: str = ""  # prefill or decode, where the text around the command says it
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def side(self) -> str:
        """``prefill``, ``decode``, or ``server`` for one that does both."""
        if "disaggregation-mode" in self.flags:
            mode = self.flags["disaggregation-mode"]
            return mode if mode in ("prefill", "decode") else "server"
        for name in ("prefill", "decode"):
            if f"is-{name}-worker" in self.flags:
                return name
        kinds = {"kv_producer": "prefill", "kv_consumer": "decode"}
        return kinds.get(str(self.transfer.get("kv_role")), self.role or "server")

    @property
    def joins(self) -> bool:
        """Whether the command starts further ranks, on another node, of a server that another command starts."""
        rank = self.flags.get("node-rank") or self.flags.get("data-parallel-start-rank") or "0"
        return "headless" in self.flags or rank not in ("0", "")

    @property
    def connectors(self) -> Sequence[Mapping[str, Any]]:
        """The connectors of ``--kv-transfer-config``: each of a MultiConnector, or the only one."""
        try:
            made = json.loads(self.flags.get("kv-transfer-config") or "{}")
        except ValueError as error:
            raise ConfigError(f"--kv-transfer-config is not JSON: {error}; quote it as in a shell") from None
        try:
            inner = (made.get("kv_connector_extra_config") or {}).get("connectors") or [made]
            return [{**made, **each} for each in inner]
        except (AttributeError, TypeError):
            text = self.flags["kv-transfer-config"]
            raise ConfigError(f"--kv-transfer-config {text} is no connector; write {{{_CONNECTOR}}}") from None

    @property
    def transfer(self) -> Mapping[str, Any]:
        """The first of `connectors`, which moves KV between servers."""
        return self.connectors[0]


def servers(text: str) -> list[Server]:
    """Return the servers that *text* starts: a command line, a script, or YAML documents.

    Raise a `ConfigError` if there are none.
    """
    deployed = list(_of_yaml(text)) or list(_of_script(text, {}))
    if not deployed:
        raise ConfigError(
            "no server is started here; give a command line such as 'vllm serve MODEL ...' or 'python -m "
            "sglang.launch_server --model-path MODEL ...', or a script or YAML file that has one"
        )
    return deployed


def _of_script(text: str, environment: Mapping[str, str]) -> Iterator[Server]:
    # Which branch of an ``if`` runs is not known: what was assigned before it stays, and the first that starts
    # servers counts.  A loop over words starts as many of each.
    known = dict(environment)
    loops: list[int] = []
    branches: list[int] = []  # of each ``if`` around: 0, servers started in it, or -1 in a branch after those
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        line = line.strip()
        if re.match(r"if\b(?!.*\bfi$)", line):
            branches.append(0)
        elif re.match(r"fi\b", line) and branches:
            branches.pop()
        elif re.match(r"(else|elif)\b", line) and branches and branches[-1]:
            branches[-1] = -1
        if looped := re.match(r"for\s+\w+\s+in\s+([^;#]*)", line):
            loops.append(1 if "$" in looped[1] else len(looped[1].split()))
        elif re.match(r"done\b", line) and loops:
            loops.pop()
        if -1 in branches:
            continue
        if assigned := re.fullmatch(r"(?:export\s+)?([A-Za-z_]\w*)=(\S+|'.*'|\".*\")", line):
            if not (branches and assigned[1] in known):
                known[assigned[1]] = assigned[2].strip("\"'")
            continue
        for engine, start in STARTS:
            if not line.startswith("#") and (match := start.search(line)):
                before, rest = line[: match.start()], line[match.end() :]
                own = dict(re.findall(r"\b([A-Z_]+)=(\S+)", before))
                flags = _flags(engine, _split(rest, known))
                yield Server(engine, flags, math.prod(loops), environment={**known, **own})
                branches = [1] * len(branches)


def _split(text: str, known: Mapping[str, str]) -> list[str]:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return known.get(name) or (default[2:] if default else "" if name in known else match[0])

    variable = r"\$\{(\w+)(:-[^}]*)?\}|\$(\w+)"
    # what stands alone in quotes stays one word, such as JSON
    text = re.sub(f'"(?:{variable})"', lambda at: at[0] if value(at) == at[0] else shlex.quote(value(at)), text)
    text = re.sub(variable, value, text)
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{text.strip()[:60]}...: {error}; quote values as in a shell") from None
    ends = [
        at for at, word in enumerate(words) if word in ("&", "&&", ";", "|", "2>&1") or word.startswith((">", "2>"))
    ]
    return words[: ends[0]] if ends else words


def _of_yaml(text: str) -> Iterator[Server]:
    import yaml  # type: ignore[import-untyped]  # comes with omegaconf, its stubs do not

    try:
        documents = list(yaml.safe_load_all(bounded_yaml(text, "the recipe")))
    except yaml.YAMLError:
        return  # a script or a command line
    for document in documents:
        yield from _of_matrix(document) or _below(document, Server("", {}))


def _of_matrix(document: Any) -> list[Server]:
    # an entry of InferenceX's configs/*-master.yaml: the first point of its first lengths; [] of other YAML
    if not isinstance(document, dict):
        return []
    inner = (each for each in document.values() if isinstance(each, dict) and "framework" in each)
    entries = [document] if "framework" in document else list(inner)
    if not entries:
        return []
    if len(entries) > 1:
        raise ConfigError(f"the matrix has {len(entries)} entries; give the text of one")
    (entry,) = entries
    engine = str(entry["framework"]).removeprefix("dynamo-")
    if engine not in ALIASES:
        raise ConfigError(f"framework: {entry['framework']} is not read; give an entry of vllm or sglang")
    try:
        lengths = entry["scenarios"]["fixed-seq-len"][0]
        point = lengths["search-space"][0]
        users = point["conc-list"][0] if "conc-list" in point else point["conc-start"]
        load = {"isl": str(lengths["isl"]), "osl": str(lengths["osl"]), "conc": str(users)}
        more = {"spec-decoding": str(point["spec-decoding"])} if point.get("spec-decoding", "none") != "none" else {}
        sides = {role: point[role] for role in ("prefill", "decode") if role in point} or {"": point}
        made = []
        for role, side in sides.items():
            model = {"model" if engine == "vllm" else "model-path": str(entry["model"])}
            flags = model | _point(engine, side) | load | more
            if role and engine == "vllm" and entry.get("kv-p2p-transfer", "nixl") == "nixl":
                flags["kv-transfer-config"] = '{"kv_connector": "NixlConnector"}'
            elif role and "kv-p2p-transfer" in entry:
                flags["disaggregation-transfer-backend"] = str(entry["kv-p2p-transfer"])
            made.append(Server(engine, flags, int(side.get("num-worker", 1)), role))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"the entry of the matrix is not whole: {error!r}; give it as InferenceX has it") from None
    return [one for one in made if one.instances]


def _point(engine: str, side: Mapping[str, Any]) -> dict[str, str]:
    tp, ep = int(side["tp"]), int(side.get("ep", 1))
    if engine == "sglang":
        flags = {"tensor-parallel-size": str(tp)} | ({"expert-parallel-size": str(ep)} if ep > 1 else {})
        return flags | ({"data-parallel-size": str(tp), "enable-dp-attention": ""} if side.get("dp-attn") else {})
    flags = {"tensor-parallel-size": "1", "data-parallel-size": str(tp)} if side.get("dp-attn") else {}
    return (flags or {"tensor-parallel-size": str(tp)}) | ({"enable-expert-parallel": ""} if ep > 1 else {})


def _below(node: Any, around: Server) -> Iterator[Server]:
    # *around* has what the keys above say: replicas, the role, environment variables
    if isinstance(node, list):
        for each in node:
            yield from _below(each, around)
    if not isinstance(node, dict):
        return
    kind = str(node.get("subComponentType") or node.get("name") or "").lower()
    role = next((name for name in ("prefill", "decode") if name in kind), around.role)
    factor = math.prod(_replicas(key, node[key]) for key in ("replicas", "slices") if node.get(key) is not None)
    pairs = [each for key in ("env", "envs") if isinstance(node.get(key), list) for each in node[key]]
    own = {
        str(each["name"]): str(each.get("value", "")) for each in pairs if isinstance(each, dict) and "name" in each
    }
    around = replace(
        around, role=role, instances=around.instances * factor, environment={**around.environment, **own}
    )
    start = node.get("command")  # a line, in Docker Compose's YAML
    command = [*(_split(start, {}) if isinstance(start, str) else _words(start)), *_words(node.get("args"))]
    if command:
        shell = command[0].endswith("sh")  # bash -lc 'SCRIPT'
        joined = " ".join(dropwhile(lambda word: word[0] == "-", command[1:])) if shell else shlex.join(command)
        for one in _of_script(joined, around.environment):
            yield replace(one, role=around.role, instances=around.instances * one.instances)
    for key, each in node.items():
        if isinstance(each, dict | list):
            named = next((name for name in ("prefill", "decode") if name in str(key).lower()), around.role)
            yield from _below(each, replace(around, role=named))


def _replicas(key: str, value: Any) -> int:
    if not re.fullmatch(r"\d+", str(value)):
        raise ConfigError(f"{key}: {value} is not a whole number; write one, or render the chart with helm template")
    return int(value)


def _words(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)] if value else []


def _flags(engine: str, words: Sequence[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    name = "model" if engine == "vllm" else "model-path"
    if words and not words[0].startswith("-"):
        flags[name], words = words[0], words[1:]
    at = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            raw, _, value = word.lstrip("-").partition("=")
            raw, _, inner = raw.partition(".")  # --compilation-config.mode=0
            if re.fullmatch(r"O\d", raw):  # -O0
                raw, value = raw[0], raw[1]
            at = raw if len(raw) == 1 else raw.replace("_", "-")
            at = ALIASES[engine].get(at, at)
            flags[at] = f"{flags.get(at, '')} {inner}={value}".strip() if inner else value
        elif at:
            flags[at] = f"{flags[at]} {word}".strip()
    return flags
