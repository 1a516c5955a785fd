# SPDX-License-Identifier: Apache-2.0
"""`target=live`: the workload of a serving run, sent to real vLLM, SGLang or other OpenAI-compatible servers."""
