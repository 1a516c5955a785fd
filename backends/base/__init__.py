# SPDX-License-Identifier: Apache-2.0
"""The parts of real endpoints that every engine shares.

The states of a transfer, control messages beside the engine, memory and who may write to it, and
whether peers live.
"""
