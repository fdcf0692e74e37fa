# SPDX-License-Identifier: Apache-2.0
"""Measuring a run: memory, bytes on the wire, rates of links, time of steps."""
