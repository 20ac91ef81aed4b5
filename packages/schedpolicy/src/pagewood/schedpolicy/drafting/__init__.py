"""Speculative decoding: how many tokens are drafted for each request in each step.

`control` decides, from four things: which drafts the target accepts (`acceptance`), what steps and drafts take
(`step_cost`), and, at each load, what periods with drafts yield beside periods without (`comparison`).
"""
