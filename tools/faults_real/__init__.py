# SPDX-License-Identifier: Apache-2.0
"""Faults injected into real serving jobs: Mooncake and NIXL over TCP, at random moments that follow from a seed.

    python -m tools.faults_real run --seeds 0:40 [--to data/benchmarks/faults_real.csv]
    python -m tools.faults_real table [FILE ...]

Each seed is one job of `experiment=serve`: what is served, what is injected and when (`plan`).  After it `trial`
checks how each request and each rank ended, pages, and what is left on the machine; a row of a CSV file says what
was found. Seeds that a file has are not run again, and the rows of several files add up.  A link takes root.
"""
