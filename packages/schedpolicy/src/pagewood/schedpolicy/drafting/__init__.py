"""Speculative decoding: how many tokens are drafted for each request in each step.

`control` decides, from three things: which drafts the target accepts (`acceptance`), how long steps and drafts take
(`step_cost`), and whether periods with drafts yield more than periods without (`comparison`).
"""
