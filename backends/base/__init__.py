# SPDX-License-Identifier: Apache-2.0
"""What every real endpoint shares, whatever its engine.

The states of a transfer, control messages beside the engine, memory and who may write to it, and
whether peers live.
"""
