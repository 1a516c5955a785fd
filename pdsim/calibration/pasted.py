# SPDX-License-Identifier: Apache-2.0
"""What users paste beside slow transfers, and which cause of `pdsim.calibration.diagnosis` each speaks for.

It reads ``nvidia-smi topo -m``, ``ibstat``, ``ibv_devinfo -v``, ``show_gids``, lines of UCX (``UCX_LOG_LEVEL=info``,
``UCX_PROTO_INFO=y``) and of Mooncake, ``lsmod``, and variables, wherever they are in a text.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pdsim.hardware.machine import Machine

NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""How far a card is from a GPU, by ``nvidia-smi topo -m``, from one PCIe switch to another socket."""
_SPEEDS = (10, 25, 40, 50, 56, 100, 200, 400, 800, 1600)  # Gb/s
_VARIABLE = re.compile(r"\b((?:UCX|MC|NIXL|NCCL)_[A-Z0-9_]+)=['\"]?([^\s'\";]*)")
_CHOICE = re.compile(r"(?:UCX_NET_DEVICES=|MC_MS_FILTERS=|ib-device[= ]|device_name[= ])['\"]?([\w:,]+)")
SIGN = re.compile(
    r"(?m)^\s*GPU0\s+(?:GPU1|NIC|mlx)|^\s*CA '|hca_id:|^DEV\s+PORT\s+INDEX\s+GID|\.\.inf\s*\||ep_cfg\[|"
    r"\b(?:UCX|MC)_[A-Z_]+=|^I\d{4} |lsmod"
)
"""What shows that a text is of one of these tools."""


class Fact(NamedTuple):
    """*what* a tool said, for a *cause*, and by which *factor* it slows transfers; 0 where that is not said."""

    cause: str
    what: str
    factor: float = 0.0


def variables(text: str) -> dict[str, str]:
    """Return the variables of UCX, Mooncake, NIXL and NCCL that *text* sets, the last of each."""
    return dict(_VARIABLE.findall(text))


def facts(text: str, hw: Machine, local: bool) -> list[Fact]:
    """Return what *text* says about the wire that transfers took, within a node if they are *local*."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    named = {card.partition(":")[0] for cards in _CHOICE.findall(text) for card in cards.split(",")} - {"all", ""}
    said = [*_topology(text, named, local), *_transports(text, hw, local), *_lines(text)]
    said += (
        [Fact("not over NVLink", f"UCX_TLS={tls}")] if not _maps(tls := variables(text).get("UCX_TLS", "")) else []
    )
    if not local:
        said += [*_ports(text, named, hw), *_gids(text, named)]
    elsewhere = "slow GPU memory" if local else "not over NVLink"
    return [fact for fact in dict.fromkeys(said) if fact.cause != elsewhere]


def _topology(text: str, named: set[str], local: bool) -> Iterator[Fact]:
    # The matrix may be cut at its right, and its columns may be NIC0 with a legend, or the devices themselves.
    legend = dict(re.findall(r"(NIC\d+): (\w+)", text))
    heads: list[str] = []
    pairs, cards = dict[str, str](), dict[str, dict[str, str]]()
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["GPU0"] and "X" not in words:
            heads = [word for word in words if re.fullmatch(r"GPU\d+|NIC\d+|[a-z]\w*\d", word)]
        elif heads and re.match(r"GPU\d+", line.strip()) and len(words) > len(heads):
            cells = dict(zip(heads, words[1:], strict=False))
            pairs |= {f"{words[0]} and {head}": cell for head, cell in cells.items() if head.startswith("GPU")}
            far = {legend.get(head, head): cell for head, cell in cells.items() if cell in NEAR}
            cards[words[0]] = {card: cell for card, cell in far.items() if not card.startswith("GPU")}
    joined = {cell for cell in pairs.values() if cell != "X"}
    if local and joined and not any(cell.startswith("NV") for cell in joined):
        yield Fact("not over NVLink", f"GPUs are joined by {', '.join(sorted(joined))}")
    for gpu, near in {} if local else cards.items():
        best = min(near, key=lambda card: NEAR.index(near[card]), default="")
        own = [card for card in near if card in named] or [best] * bool(best)
        used = min(own, key=lambda card: NEAR.index(near[card]), default="")
        if used and NEAR.index(near[used]) > NEAR.index(near[best]):
            yield Fact("slow wire", f"{gpu} and {used} are {near[used]}, {best} is {near[best]}")
        if used and near[used] in NEAR[-2:]:
            yield Fact("slow GPU memory", f"{gpu} reaches {used} across {near[used]}")


def _ports(text: str, named: set[str], hw: Machine) -> Iterator[Fact]:
    # ibstat: CA, State, Rate.  ibv_devinfo: hca_id, state, active_width and active_speed, of a lane or of all
    starts = [*re.finditer(r"(?m)^\s*(?:CA '(\w+)'|hca_id:\s*(\w+))", text)]
    up, down, cards = dict[str, float](), [], Counter[str]()
    for start, end in zip(starts, [*(one.start() for one in starts[1:]), len(text)], strict=False):
        port, name = text[start.end() : end], start[1] or start[2]
        if named and name not in named:
            continue
        if not re.search(r"(?i)\bstate:\s*(?:PORT_)?ACTIVE", port):
            down.append(name)
        elif rate := re.search(r"Rate:\s*(\d+)", port):
            up[name] = float(rate[1])
        elif lane := re.search(r"active_speed:\s*([\d.]+) Gbps", port):
            width = re.search(r"active_width:\s*(\d+)X", port)
            up[name] = float(lane[1]) * (int(width[1]) if width else 1)
        if name in up and (card := re.search(r"(?i)sys(?:tem)?[_ ]image[_ ]guid:\s*(\S+)", port)):
            cards[card[1]] += 1
        mtu = [int(number) for number in re.findall(r"(?:active|max)_mtu:\s*(\d+)", port)]
        if len(mtu) > 1 and min(mtu) < 2048 <= max(mtu):
            yield Fact("slow wire", f"{name} sends packets of {min(mtu)} bytes, it could of {max(mtu)}")
    if hw.nic.rails > 1 and cards and (ports := max(cards.values())) > 1:
        yield Fact("slow wire", f"of {len(up)} devices up to {ports} are ports of one card", float(ports))
    if down and (named or len(up) < hw.nic.count):
        yield Fact("slow wire", f"{', '.join(down)}: not active", (len(up) + len(down)) / len(up) if up else 0.0)
    fastest = max(up.values(), default=0.0)
    # what software reaches of a card of hw.nic.rate, up to the next speed that there is
    wanted = next((speed for speed in _SPEEDS if speed >= hw.nic.rate * 7.9e-9), 0)
    if 0 < fastest < wanted:
        slow = ", ".join(name for name, rate in up.items() if rate == fastest)
        yield Fact("slow wire", f"{slow} at {fastest:g} Gb/s, hw.nic.rate is of {wanted}", wanted / fastest)


_SHOWN = re.compile(
    r"(?m)^(\w+)[ \t]+\d+[ \t]+(\d+)[ \t]+([\da-f:]{3,})[ \t]+(?:(?:\d+\.){3}\d+[ \t]+)?[vV]([12])\b"
)
_LISTED = re.compile(r"hca_id:\s*(\w+)|GID\[\s*(\d+)\]:\s*([\da-f:.]+),\s*RoCE v([12])")


def _gids(text: str, named: set[str]) -> Iterator[Fact]:
    # By themselves UCX and Mooncake take a RoCE v2 address of IPv4, if there is one.  v1 is not routed, and switches
    # cannot mark its packets (ECN); a link-local address reaches no other subnet.
    tables, device = dict[str, dict[int, tuple[str, str]]](), ""
    rows = [match.groups() for match in _SHOWN.finditer(text)]
    for name, *row in (match.groups() for match in _LISTED.finditer(text)):
        device = name or device
        rows += [(device, *row)] if row[0] else []
    for name, index, address, version in rows:
        if not named or name in named:
            tables.setdefault(name, {})[int(index)] = address, version
    chosen = [(key, value) for key, value in variables(text).items() if key in ("UCX_IB_GID_INDEX", "MC_GID_INDEX")]
    for name, table in tables.items():
        routed = [index for index, (address, version) in table.items() if version == "2" and "ffff:" in address]
        better = f"; {routed[0]} is v2 of IPv4" if routed else ""
        if not chosen and all(version == "1" for _, version in table.values()):
            yield Fact("slow wire", f"{name} has GIDs of RoCE v1 alone, not routed or marked (ECN)")
        for variable, index in chosen:
            address, version = table.get(int(index), ("", "")) if index.isdecimal() else ("", "2")
            if not version:
                yield Fact("slow wire", f"{variable}={index}, which {name} does not have{better}")
            elif version == "1":
                yield Fact("slow wire", f"{variable}={index} of {name} is RoCE v1, not routed or marked{better}")
            elif address.startswith("fe80") and routed:
                yield Fact("slow wire", f"{variable}={index} of {name} is link-local{better}")


def _maps(transports: str) -> bool:
    # whether UCX may map the memory of another process's GPU; NIXL's and Dynamo's images set ^cuda_ipc
    named = {word.strip("^ ") for word in transports.lower().split(",")}
    return (
        not named & {"cuda_ipc", "cuda"}
        if transports.startswith("^")
        else bool(named & {"", "all", "cuda", "cuda_ipc"})
    )


_TITLE = re.compile(r"\|.*\bby ucp_(\w+)")
_ROW = re.compile(r"\|\s*[\w.]+\.\.inf\s*\|\s*([^|]*?)\s*\|\s*([^|]*?)\s*\|")
_LANES = re.compile(r"(?:ep_cfg\[\d+\]:|(?:inter|intra)-node cfg#\d+) (.*\(.*)")
_VERBS = re.compile(r"\b(?:rc|dc|ud|rc_\w+|dc_\w+|ud_\w+|srd)/")


def _rows(text: str) -> list[tuple[str, str]]:
    # how UCX moves the largest messages, and by what: those of remote memory, as NIXL's, and of GPUs before others
    tables, title = dict[tuple[bool, bool], list[tuple[str, str]]](), (False, False)
    for line in text.splitlines():
        if named := _TITLE.search(line):
            title = named[1] in ("put", "get"), "cuda" in line
        elif (row := _ROW.search(line)) and row[2]:
            tables.setdefault(title, []).append((row[1], row[2]))
    return tables[max(tables)] if tables else []


def _transports(text: str, hw: Machine, local: bool) -> Iterator[Fact]:
    rows = _rows(text)
    lanes = [dict(re.findall(r"(\w+)\(([^)]*)\)", line)) for line in _LANES.findall(text)]
    moving = [group for line in lanes for kind, group in line.items() if kind not in ("ka", "amo", "amo_am", "cm")]
    taken = " ".join([by for _, by in rows] or moving)
    by = set(re.findall(r"\b([a-z]\w*)/", taken))
    if by and by <= {"tcp", "self"}:
        yield Fact("over TCP", "UCX chose tcp for the bytes")
    elif by and local and "cuda_ipc" not in by:
        yield Fact("not over NVLink", f"UCX chose {', '.join(sorted(by))} for the bytes, not cuda_ipc")
    rails = {
        len(set(line[kind].split()))
        for line in lanes
        for kind in ("rma", "rma_bw")
        if _VERBS.search(line.get(kind, ""))
    }
    if not local and rails and max(rails) < hw.nic.rails:
        yield Fact("slow wire", f"bytes go over {max(rails)} of {hw.nic.rails} rails", hw.nic.rails / max(rails))
    for how, what in dict.fromkeys(rows):
        if "emulation" in how or "cuda_copy" in what or "cuda_copy" in how:
            yield Fact("not over NVLink" if local else "slow GPU memory", f"UCX chose {how}, {what}")


_SIGNS: Mapping[str, tuple[str, str]] = {
    r"TcpTransport: listen|[Ff]alling back to TCP|MC_FORCE_TCP=[1t]": ("over TCP", "Mooncake chose TCP"),
    r"(?:Found|found) 0 HCAs|No RDMA devices? found": ("over TCP", "no RDMA device was found"),
    r"(?i)CPU affinity is not set": ("slow host", "processes are not pinned (CPU affinity is not set)"),
    r"Relaxed ordering disabled|MC_IB_PCI_RELAXED_ORDERING=0": ("slow GPU memory", "relaxed ordering is off"),
    r"(?i)peer-direct is loaded: NO|nv_peer_mem.{0,20}not found|UCX_IB_GPU_DIRECT_RDMA=(?:n|0|no)\b": (
        "slow GPU memory",
        "GPUDirect is off",
    ),
    r"(?i)(?:unable|failed|not able) to (?:register|create) (?:an? )?rcache|UCX_RCACHE_ENABLE=n": (
        "late completions",
        "memory is registered anew for each transfer (no registration cache)",
    ),
}


def _lines(text: str) -> Iterator[Fact]:
    for sign, (cause, what) in _SIGNS.items():
        if re.search(sign, text):
            yield Fact(cause, what)
