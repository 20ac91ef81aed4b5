"""Speculative decoding: how many tokens are drafted for each request in each step.

`control` has the calls of an engine, and `decisions` decides. Every other module knows one thing that decisions need.

What a decision is made of:

- `acceptance`, `request_estimates`: how many drafts of a request the target will accept.
- `step_cost`, `decode_pace`: what steps, drafts and plain decoding take on this machine.
- `chains`, `trees`, `shape`: which drafts have the most expected tokens per second.

What limits decisions:

- `account`, `wake_debt`: the time that drafts have earned and may lose.
- `trial`: whether drafting gains, by what whole periods with and without it have yielded.
- `rest_clock`, `plain_samples`: which steps rest, probe, or measure plain decoding.
- `host_time`, `allowance`, `kept_lengths`: how often the host can afford to decide and to learn.
"""
