# SPDX-License-Identifier: Apache-2.0
"""How to reach, or to start, the servers that `target=live` measures, as plain frozen data: the group `live`.

Servers are spoken to by `backends.live`, with the workload and into the columns of every other target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdsim.core.guards import not_negative, one_of, positive
from pdsim.core.units import Seconds

__all__ = ["Live"]


@dataclass(frozen=True, kw_only=True)
class Live:
    """A real serving deployment and how the client speaks to it.

    Name the servers in one of three ways: *url* for any OpenAI-compatible deployment (a router, or colocated
    servers), *prefill* and *decode* for a disaggregated pair of vLLM or SGLang, or *launch* to start servers on
    this machine with dummy weights in the shape of ``model``.

    Of a pair the client is the proxy, too: a request goes to a prefill server first and then to a decode server,
    or to both at once, as the engine's own proxy does it.  Fields from *launch* on say how servers are started;
    they mean nothing for servers that run already.

    Raises:
        ValueError: an unknown choice, a number out of range, an address without http, token ids for a chat API, or a
            wrong number of bootstrap ports; the message names the key.
    """

    engine: str = ""  # "vllm" or "sglang"; "" is any server with OpenAI's API
    url: tuple[str, ...] = ()  # requests go to the one with the fewest tokens outstanding
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    bootstrap_port: tuple[int, ...] = (8998,)  # of each SGLang prefill server; one stands for all
    model: str = ""  # as the servers call it; "" asks them
    api: str = "completions"  # or "chat", for servers that have nothing else
    prompts: str = "ids"  # token ids, of exact length; or "text", whose length the server decides
    vocabulary: int = 32000  # token ids are drawn from its upper 15/16, away from special tokens
    ignore_eos: bool = True  # generate exactly as many tokens as the workload says
    request: Mapping[str, Any] = field(default_factory=dict)  # further fields of each request's JSON body
    key_variable: str = "OPENAI_API_KEY"  # the environment variable that has the API key; unset sends none
    connections: int = 1024  # at most, to all servers together
    timeout: Seconds = 600.0  # from sending a request to its last token
    connect_timeout: Seconds = 10.0
    warmup: int = 1  # times that the workload's shortest and longest prompts are sent before anything is measured
    sample_every: Seconds = 0.5  # how often the servers' metrics are read

    launch: bool = False
    layout: str = "pair"  # of launched servers: prefill and decode, or "colocated"
    connector: str = ""  # vLLM's KV connector or SGLang's transfer backend; "" takes what suits `backend`
    python: str = ""  # the interpreter that has the engine; "" is this one
    port: int = 30100  # of the first server; the others and their side channels follow
    ready: Seconds = 900.0  # until all servers answer
    prefix_cache: bool = False
    prefill_gpus: tuple[int, ...] = ()  # () takes the first GPUs for prefill and the next for decode
    decode_gpus: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()  # added to the command line of every server
    prefill_arguments: tuple[str, ...] = ()
    decode_arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # added to that of every server

    def __post_init__(self) -> None:
        one_of("live", ("", "vllm", "sglang"), engine=self.engine)
        one_of("live", ("completions", "chat"), api=self.api)
        one_of("live", ("ids", "text"), prompts=self.prompts)
        one_of("live", ("pair", "colocated"), layout=self.layout)
        positive(
            "live",
            vocabulary=self.vocabulary - 15,
            connections=self.connections,
            timeout=self.timeout,
            connect_timeout=self.connect_timeout,
            sample_every=self.sample_every,
            ready=self.ready,
        )
        not_negative("live", warmup=self.warmup)
        if not 1024 <= self.port <= 65000:
            raise ValueError(f"live.port must be >= 1024 and <= 65000, got {self.port}")
        for name in ("url", "prefill", "decode"):
            for address in getattr(self, name):
                if not address.startswith(("http://", "https://")):
                    raise ValueError(f"live.{name} must begin with http:// or https://, got {address!r}")
        if len(self.bootstrap_port) not in (1, max(1, len(self.prefill))):
            raise ValueError(
                f"live.bootstrap_port must be one port or one for each of {len(self.prefill)} prefill servers, "
                f"got {list(self.bootstrap_port)}"
            )
        if self.api == "chat" and self.prompts == "ids":
            raise ValueError("live.prompts must be text for live.api=chat, got 'ids'")
