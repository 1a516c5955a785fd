# SPDX-License-Identifier: Apache-2.0
"""`target=live`: the workload of a serving run, sent to real vLLM, SGLang or other OpenAI-compatible servers.

Module by module: `prompts` makes tokens, `formats` knows the bodies and streamed chunks of each HTTP API, `routes`
which servers a request visits and in which order, `client` keeps time, `metrics` reads what servers report of
themselves, `launch` and `commands` start servers, and `deployment` is the target that joins them.

Knows requests and servers, and nothing of experiments: `experiments.serve` turns the rows into its columns.
"""
