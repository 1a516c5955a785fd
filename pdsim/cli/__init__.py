# SPDX-License-Identifier: Apache-2.0
"""The command line: parses, composes and checks a configuration, runs it and prints the result."""
