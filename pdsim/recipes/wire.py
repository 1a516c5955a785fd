# SPDX-License-Identifier: Apache-2.0
"""The wire that variables of UCX and Mooncake leave to a transfer engine, as keys.

UCX takes the best transport that ``UCX_TLS`` allows: ``cuda_ipc`` within a node, verbs before TCP between nodes
(UCX's FAQ; ``src/ucp/core/ucp_context.c`` has the aliases).
"""

from __future__ import annotations

from collections.abc import Mapping

_FAST = {"all", "ib", "rc", "dc", "ud", "srd"}  # and rc_x, rc_verbs, ud_mlx5 ...
_NO = ("0", "n", "no", "off", "false", "")


def chosen(environment: Mapping[str, str], backend: str) -> dict[str, dict[str, str]]:
    """Return the keys that the variables of *environment* decide, by variable, for *backend*.

    What is the default of UCX, ``UCX_TLS=all`` or ``UCX_IB_GPU_DIRECT_RDMA=try``, decides nothing.

    >>> chosen({"UCX_TLS": "tcp,cuda_copy", "UCX_MAX_RNDV_RAILS": "2"}, "nixl_vllm")
    {'UCX_TLS=tcp,cuda_copy': {'backend': 'nixl_tcp'}, 'UCX_MAX_RNDV_RAILS=2': {'hw.nic.rails': '2'}}
    >>> chosen({"UCX_TLS": "^ib,cuda_ipc"}, "nixl"), chosen({"UCX_TLS": "rc_x,cuda_copy"}, "nixl")
    ({'UCX_TLS=^ib,cuda_ipc': {'backend': 'nixl_tcp'}}, {})
    >>> chosen({"MC_FORCE_TCP": "1", "UCX_TLS": "tcp"}, "mooncake")
    {'MC_FORCE_TCP=1': {'backend': 'mooncake_tcp'}}
    """
    engine, keys = backend.partition("_")[0], dict[str, dict[str, str]]()
    for name, text in environment.items():
        word = text.strip().lower()
        match engine, name:
            case "nixl", "UCX_TLS" if not _allows(word):
                keys[f"{name}={text}"] = {"backend": "nixl_tcp"}
            case "nixl", "UCX_MAX_RNDV_RAILS" if word.isdecimal() and int(word):
                keys[f"{name}={text}"] = {"hw.nic.rails": word}
            case "nixl", "UCX_IB_GPU_DIRECT_RDMA" if word in _NO:
                keys[f"{name}={text}"] = {"hw.nic.gpudirect": "false"}
            case "mooncake", "MC_FORCE_TCP" if word not in _NO:
                keys[f"{name}={text}"] = {"backend": "mooncake_tcp"}
    return keys


def _allows(text: str) -> bool:
    # whether the list *text*, "^" for all but these, leaves verbs or cuda_ipc
    named = {word.strip().lstrip("\\") for word in text.removeprefix("^").split(",")}
    if text.startswith("^"):
        return "all" not in named and not ("ib" in named and named & {"cuda", "cuda_ipc"})
    verbs = {word.partition("_")[0] for word in named} & _FAST
    return bool(verbs or named & {"", "cuda", "cuda_ipc"})
