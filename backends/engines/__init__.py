# SPDX-License-Identifier: Apache-2.0
"""The transfer engines, one module each: Mooncake, NIXL, MORI and CUDA copies over NVLink."""
