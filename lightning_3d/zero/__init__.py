# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO under our checkpoints: options, compiled operators, and where each rank's part of a parameter lives.

Nothing here imports `deepspeed` before a strategy asks for it. Its private names are in `internals` only.
"""
