# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured: parameters, memory, step time and choice of layout, on rows of published runs.

`python -m lightning_3d.estimator.validate runs.csv` reports on any file with the columns of `published_runs.csv`.
"""
