# SPDX-License-Identifier: Apache-2.0
"""The report of `explain --html`: one page with charts by Vega, which loads nothing from elsewhere.

charts.py    the roofline and the memory of a step as Vega-Lite specifications
page.py      the page: what the template, the style and the script beside it are filled with
"""
