# SPDX-License-Identifier: Apache-2.0
"""What an LLM is: layers, heads, state and experts, and how they are divided among ranks."""
