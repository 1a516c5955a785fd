# SPDX-License-Identifier: Apache-2.0
"""The prefill side of serving: scheduler and worker.

`scheduler` is the first rank of an instance, `worker` what every rank does; `pull` are both where decode reads what
prefill has computed.
"""
