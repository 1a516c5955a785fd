"""What goes over HTTP to both halves of a vLLM pair: read by a listener, for vLLM itself needs a GPU."""

import asyncio
import json

from aiohttp import web

from backends.live.formats import OpenAiCompletions
from backends.live.http import Http, LiveServer, session
from backends.live.routes import RequestRow, VllmPair
from pdsim.serving.workload import Request


async def exchange(count: int) -> list[tuple[str, dict, str]]:
    """Serve *count* requests; return role, body and name of all that arrived, in order."""
    seen = []

    async def listen(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        role = "prefill" if body["max_tokens"] == 1 else "decode"
        seen.append((role, body, request.headers.get("X-Request-Id", "")))
        if role == "prefill":
            return web.json_response({"kv_transfer_params": {"remote_request_id": f"cmpl-{seen[-1][2]}-0"}})
        chunk = {"choices": [{"text": "a", "token_ids": [1, 2], "finish_reason": "length"}]}
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/completions", listen)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (port,) = {address[1] for address in runner.addresses}
    servers = [LiveServer(name, f"http://127.0.0.1:{port}") for name in ("prefill0", "decode0")]
    form = OpenAiCompletions("m", ignore_eos=True, continuous=False, request={})
    pair = VllmPair(form, "round_robin", False, servers[:1], servers[1:])
    async with session(key="", connections=4, connect_timeout=10.0) as opened:
        for _ in range(count):
            await pair.serve(Http(opened), b"[1,2,3]", Request(0.0, 3, 2), RequestRow())
    await runner.cleanup()
    return seen


def test_both_halves_share_a_request_name_that_is_unique():
    # the push connector of vLLM 0.26 pairs decode's blocks and prefill's by it, less "-" and 8 digits at the end
    seen = asyncio.run(exchange(2))
    assert [role for role, _, _ in seen] == ["prefill", "decode"] * 2
    first, again, other, _ = [name for _, _, name in seen]
    assert first == again != other
    assert "-" not in first
    assert seen[1][1]["kv_transfer_params"] == {"remote_request_id": f"cmpl-{first}-0"}
